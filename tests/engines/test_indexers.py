"""Indexers of sparse attention learn by a loss of their own, and nothing else gets a gradient of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.data.packing import select
from hone.engines.settings import LoraConfig, MoeConfig, OptimizerConfig
from hone.models.errors import ModelError
from hone.types import LossOutput
from tests.families.checks import likelihood, make_batch, make_engine
from tests.families.types import save_tiny
from tests.ranks import run_ranks

KINDS = ["deepseek_v32", "glm_moe_dsa", "hy_v4"]
COEF = 0.5
LEARNING = MoeConfig(indexer_loss_coef=COEF)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_tiny(kind, tmp_path_factory.mktemp(kind)) for kind in (*KINDS, "qwen3_moe", "qwen3")}


def nothing(output, batch):
    return LossOutput(output.logprobs * 0)


def gradients(engine, batch, loss=nothing):
    """Gradient of each weight that has one, and the metrics."""
    with engine.train_mode():
        metrics = engine.forward_backward(batch, loss)
    return {name: one.grad.clone() for name, one in engine.weights.masters.items() if one.grad is not None}, metrics


def of_indexers(names):
    return {name for name in names if ".indexer." in name}


class Watched:
    """transformers' own attention: each layer's weights of attention, and the call of its indexer."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.layers = [one for one in self.model.modules() if getattr(one, "indexer", None) is not None]
        self.weights, self.calls = {}, {}
        for layer in self.layers:
            layer.register_forward_hook(lambda one, args, output: self.weights.__setitem__(one, output[1]))
            layer.indexer.register_forward_pre_hook(
                lambda one, args, named: self.calls.__setitem__(one, (args, named)), with_kwargs=True
            )

    def scores(self, indexer):
        """The indexer's scores of all keys [L, K], with gradient: what its `topk` gets."""
        args, named = self.calls[indexer]
        seen = []

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if function is torch.Tensor.topk:
                    seen.append(args[0])
                return function(*args, **(kwargs or {}))

        plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        with Watch():
            type(indexer).forward.__wrapped__(indexer, *plain, **named)
        return seen[0][0]

    def losses(self, tokens):
        """Mean over layers of the divergence of each token [L], written out with loops over tokens."""
        self.model(tokens[None], use_cache=False)
        found = []
        for layer in self.layers:
            shares = self.weights[layer][0].detach().sum(0)  # [L, K]
            shares = shares / shares.sum(-1, keepdim=True)
            scores = self.scores(layer.indexer)
            kept = [(row > 0).nonzero()[:, 0] for row in shares]
            pairs = [(p[k].log(), s[k].log_softmax(-1)) for p, s, k in zip(shares, scores, kept, strict=True)]
            found.append(
                torch.stack([torch.nn.functional.kl_div(s, p, reduction="sum", log_target=True) for p, s in pairs])
            )
        return torch.stack(found).mean(0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradients_are_those_of_each_sequence_alone(kind, folders):
    batch = make_batch(0)
    found, metrics = gradients(make_engine(folders[kind], moe=LEARNING), batch)
    plain = Watched(folders[kind])
    each = [
        plain.losses(one.token_ids)[one.loss_mask] for one in (select(batch, [i]) for i in range(batch.num_sequences))
    ]
    mean = torch.cat(each).mean()
    (COEF * mean).backward()
    assert metrics["train/indexer_loss"].value == pytest.approx(float(mean.detach()), rel=1e-4)
    expected = {name: one.grad for name, one in plain.model.named_parameters() if ".indexer." in name}
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-6)
    assert expected.keys() == of_indexers(found) != set()
    assert max(float(grad.abs().max()) for name, grad in found.items() if name not in expected) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_the_loss_and_its_direction_are_those_of_float32(kind, folders):
    batch = make_batch(0)
    exact, first = gradients(make_engine(folders[kind], moe=LEARNING), batch)
    rounded, second = gradients(make_engine(folders[kind], moe=LEARNING, compute_dtype="bfloat16"), batch)
    assert second["train/indexer_loss"].value == pytest.approx(first["train/indexer_loss"].value, rel=0.05)
    one, other = (
        torch.cat([found[name].flatten() for name in sorted(of_indexers(found))]) for found in (exact, rounded)
    )
    assert torch.nn.functional.cosine_similarity(one, other, 0) > 0.8  # keys of nearly equal scores change places


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_learn_as_without_the_loss_and_by_default_indexers_stay(kind, folders):
    batch = make_batch(1)
    found, _ = gradients(make_engine(folders[kind], moe=LEARNING), batch, likelihood)
    plain, metrics = gradients(make_engine(folders[kind]), batch, likelihood)
    assert of_indexers(plain) == set()
    assert "train/indexer_loss" not in metrics
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{"max_tokens_per_microbatch": 24}, {"activation_checkpointing": True}])
def test_the_cut_and_recomputation_change_nothing(changes, folders):
    batch = make_batch(0)
    for kind in ("deepseek_v32", "glm_moe_dsa"):
        whole, first = gradients(make_engine(folders[kind], moe=LEARNING), batch, likelihood)
        other = select(batch, [5, 3, 1, 4, 0, 2]) if "max_tokens_per_microbatch" in changes else batch
        found, second = gradients(make_engine(folders[kind], moe=LEARNING, **changes), other, likelihood)
        assert first["train/indexer_loss"].value == pytest.approx(second["train/indexer_loss"].value, rel=1e-5)
        assert found.keys() == whole.keys()
        for name, grad in whole.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def learnt(folder, parts):
    """The weights after two steps, the rank's sequences each."""
    engine = make_engine(
        folder, moe=LEARNING, optimizer=OptimizerConfig(name="SGD", lr=0.1), max_tokens_per_microbatch=24
    )
    with engine.train_mode():
        for seed in (0, 1):
            engine.train_batch(select(make_batch(seed), parts[engine.ranks.data_parallel_rank]), likelihood)
    return dict(engine.get_per_tensor_param()[0])


@pytest.mark.slow
def test_ranks_of_which_one_has_less_learn_as_one_process(folders):
    folder = folders["glm_moe_dsa"]
    alone = learnt(folder, [[0, 1, 2, 3, 4, 5]])
    for found in run_ranks(2, learnt, folder, [[0, 1, 2, 4, 5], [3]]):
        for name, weight in alone.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)


def test_an_indexer_learns_to_score_as_attention_looks(folders):
    steady = OptimizerConfig(name="Adam", lr=1e-2)
    engine = make_engine(folders["deepseek_v32"], moe=LEARNING, optimizer=steady)
    before = {name: one.clone() for name, one in engine.get_per_tensor_param()[0]}
    losses = []
    for _ in range(30):
        with engine.train_mode():
            losses.append(engine.train_batch(make_batch(0), nothing)["train/indexer_loss"].value)
    assert losses[-1] < 0.7 * losses[0]
    changed = {name for name, one in engine.get_per_tensor_param()[0] if not torch.equal(one, before[name])}
    assert changed == of_indexers(before)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("qwen3", {}, "it has no indexer; remove the key"),
        ("qwen3_moe", {}, "it has no indexer; remove the key"),
        ("deepseek_v32", {"lora": LoraConfig(rank=2)}, "their weights are frozen"),
    ],
)
def test_what_cannot_learn_is_refused_by_name(kind, changes, said, folders):
    with pytest.raises(ModelError, match=rf"moe\.indexer_loss_coef: the indexers of .* cannot learn: .*{said}"):
        make_engine(folders[kind], moe=LEARNING, **changes)
