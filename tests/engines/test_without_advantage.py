"""Answers without advantage: no backward where the gradient is exactly 0, and the same weights and metrics."""

import pytest
import torch

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.config import build
from hone.models.settings import BuildConfig, ModelConfig

LENGTHS, GROUPS = (9, 5, 12, 5, 20), [0, 0, 1, 1, 2]
STILL = [0, 1, 3]
SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}


class Watched(PolicyObjective):
    """A policy's objective that notes the tokens of micro-batches with a backward, and of those without."""

    def __init__(self, whole=False, **settings):
        super().__init__(build(AlgorithmConfig, settings, "test"))
        self.zero_without_advantage &= not whole
        self.tokens = {True: [], False: []}

    def __call__(self, output, batch):
        self.tokens[output.logprobs.requires_grad].append(batch.num_tokens)
        return super().__call__(output, batch)

    @property
    def total(self):
        return sum(self.tokens[True]), sum(self.tokens[False])


@pytest.fixture
def batch(make_batch):
    """batch(rows) -> a batch whose sequences `rows` have no advantage."""

    def make(rows, **fields):
        whole = make_batch(LENGTHS, groups=GROUPS)
        zero = torch.isin(torch.repeat_interleave(whole.lengths), torch.tensor(rows, dtype=torch.int64))
        old = torch.full((whole.num_tokens,), -4.0)
        advantages = torch.where(zero, 0.0, whole.advantages)
        return whole.with_(advantages=advantages, old_logprobs=old, ref_logprobs=old, **fields)

    return make


def weights(engine):
    return torch.cat([one.detach().flatten().double() for _, one in engine.get_per_tensor_param()[0]])


def stepped(make_engine, loss, *batches, **engine):
    made = make_engine(max_tokens_per_microbatch=24, **engine)
    return made, [made.train_batch(one, loss) for one in batches]


@pytest.mark.parametrize("name", ["ppo", "gspo", "top_entropy"])
def test_neither_a_weight_nor_a_metric_changes(make_engine, batch, name):
    settings = {"loss": name}
    split, whole = Watched(**settings), Watched(whole=True, **settings)
    filled = {"extras": {"selected": torch.ones(sum(LENGTHS), dtype=torch.bool)}}
    ours, found = stepped(make_engine, split, batch(STILL, **filled))
    theirs, wanted = stepped(make_engine, whole, batch(STILL, **filled))
    assert (split.total, whole.total) == ((12 + 20, 9 + 5 + 5), (sum(LENGTHS), 0))
    assert found[0].keys() == wanted[0].keys() >= {"train/entropy", "train/ratio", "train/loss", "train/grad_norm"}
    for key, metric in wanted[0].items():
        assert found[0][key].value == pytest.approx(metric.value, rel=1e-5, abs=1e-7), key
        assert found[0][key].count == metric.count, key
    assert (weights(ours) - weights(theirs)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_without_any_advantage_is_still_a_step(make_engine, batch, dtype):
    split, whole = Watched(), Watched(whole=True)
    before, _ = stepped(make_engine, Watched(), batch([0]), compute_dtype=dtype)
    ours, found = stepped(make_engine, split, batch([0]), batch(range(5)), compute_dtype=dtype)
    theirs, wanted = stepped(make_engine, whole, batch([0]), batch(range(5)), compute_dtype=dtype)
    assert wanted[1]["train/grad_norm"].value == 0.0  # what is left out is nothing at all
    assert found[1]["train/grad_norm"].value == 0.0
    assert split.tokens[True][-1] == LENGTHS[0]  # one answer, so that the optimizer takes its step
    if dtype == "float32":  # in bfloat16 the first step is cut otherwise, and AdamW makes its rounding large
        assert (weights(ours) - weights(theirs)).abs().max() < 1e-6
    assert (weights(ours) - weights(before)).abs().max() > 1e-5  # AdamW moves on


@pytest.mark.parametrize(
    "settings", [{"kl": {"coef": 0.1}}, {"entropy_coef": 0.1}, {"loss": "dro"}, {"loss": "sft"}], ids=str
)
def test_answers_with_another_gradient_have_a_backward(make_engine, batch, settings):
    loss = Watched(**settings)
    stepped(make_engine, loss, batch(STILL))
    assert loss.total == (sum(LENGTHS), 0)


def test_so_have_all_answers_where_experts_count_tokens_or_dropout_is_drawn(make_engine, batch):
    mixture = BuildConfig(**SIZES, architecture="qwen3_moe", options={"num_experts": 4, "num_experts_per_tok": 2})
    for settings in ({"model": ModelConfig(build=mixture)}, {"lora": {"rank": 2, "dropout": 0.1}}):
        loss = Watched()
        stepped(make_engine, loss, batch(STILL), **settings)
        assert loss.total == (sum(LENGTHS), 0)
