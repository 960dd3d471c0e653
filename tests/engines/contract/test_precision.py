"""In bfloat16 every engine is about as close to float32 as `fsdp2` is, whose error is the measure.

    W    fsdp2 in one process, float32
    B    fsdp2 in one process, bfloat16 with float32 masters       B - W: the errors of bfloat16 in this very model
    E    an engine on a mesh, bfloat16 with float32 masters

    |E - W| <= WORSE x |B - W|     an engine may round in other places than fsdp2, but not in more of them
    |E - B| <= APART x |B - W|     independent errors of the same size are 1.4 apart, opposite ones 2
    |E - W| >= LEAST x |B - W|     it does compute in bfloat16

All are lengths of vectors: the log-probs of many tokens, the gradient of all weights, the gradient of each kind of
weight (all k_proj), the change of all weights by three steps of AdamW; of a value model, values are in the place of
log-probs, and of LoRA, A and B in that of weights. Measured over all cases here: 0.84 to 1.2 times fsdp2's error, 1.8
for a kind of weight, 2.6 for one of few numbers (1.0 to 1.7 with seven other sets of batches). Two bounds follow
without a constant of their own: norms of two vectors differ by at most the length of their difference, and losses by at
most the length of the difference of log-probs times that of the derivative (Cauchy and Schwarz).

A near tie between experts may fall otherwise after any rounding, and then the errors of a token are no rounding any
more. So the mixtures here take all of their experts, and only the weights of the experts can differ. For a mixture that
chooses, the median error of a token is compared, because most tokens keep their experts.
"""

import math

import pytest
import torch
from safetensors.torch import save_file

from hone.data.packing import Sample, pack_samples, select
from hone.engines.fsdp2.sharding import wildcard
from hone.models.value_head import SCORE, VALUE_HEAD_FILE
from hone.types import LossOutput
from tests.engines.contract.cases import SIZES, Mesh, make_batch, make_engine, own_part, save_model, scores, train
from tests.ranks import run_ranks

WORSE = 1.25
WORSE_EACH = 2.0  # of a kind of weight: the length of fewer errors is less certain
APART = 1.75
LEAST = 0.5
LONG = 512  # tokens of a text, and of a micro-batch
SEEDS = range(6)  # of batches that are scored, and whose gradients are added up
GRADIENT = {"name": "SGD", "lr": 1.0, "options": {}, "weight_decay": 0.0}  # a step is then the gradient
SHARED = {"tensor": 2, "sequence": True}
ALL_EXPERTS = {
    "qwen3_moe": {"num_experts_per_tok": 4},
    "mixtral": {"num_experts_per_tok": 4},
    "qwen2_moe": {"num_experts_per_tok": 4},
    "glm4_moe": {"num_experts_per_tok": 8, "topk_group": 2},
    "deepseek_v3": {"num_experts_per_tok": 8, "topk_group": 4},
    "gpt_oss": {"num_experts_per_tok": 4, "swiglu_limit": 7.0},  # clamps nothing, for a clamp's derivative jumps
}
DENSE, CHOOSING, VALUE = "qwen3", "qwen3_moe that chooses", "value model"
ADAPTER, ON_EXPERTS = "adapter", "adapter on experts"
LORA = {"rank": 4, "alpha": 8}
ADAPTERS = {  # of a trained adapter, whose B is not 0, the model and the settings
    ADAPTER: ("qwen3", LORA),
    ON_EXPERTS: ("qwen3_moe", {**LORA, "targets": ("q_proj", "experts.gate_up_proj", "experts.down_proj")}),
}
MESHES = [
    (Mesh("fsdp2", 2, {"tensor": 2}), [DENSE, VALUE, ADAPTER]),
    (Mesh("fsdp2", 2, {"sequence": 2}), [DENSE, VALUE, ADAPTER, "qwen3_moe"]),
    (Mesh("fsdp2", 2, {"expert": 2}), ["qwen3_moe", CHOOSING]),
    (Mesh("fsdp2", 2), [ON_EXPERTS]),
    (Mesh("fsdp2", 4, {"sequence": 2, "tensor": 2}), [DENSE, VALUE, ADAPTER]),
    (Mesh("megatron", 2, {"tensor": 2}), [DENSE, "llama"]),
    (Mesh("megatron", 2, {"context": 2}), [DENSE, VALUE, ADAPTER, "qwen3_moe", "deepseek_v3"]),
    (Mesh("megatron", 2, {"pipeline": 2}), [DENSE, *ALL_EXPERTS, CHOOSING]),
    (Mesh("megatron", 2, {"expert_tensor": 2}), ["qwen3_moe", "gpt_oss", ON_EXPERTS]),
    (Mesh("megatron", 2, {**SHARED, "expert": 2}), ["qwen3_moe", "deepseek_v3", "gpt_oss", CHOOSING, ON_EXPERTS]),
    (Mesh("megatron", 4, {**SHARED, "pipeline": 2}), [DENSE, VALUE, ADAPTER]),
    (Mesh("megatron", 4, {**SHARED, "context": 2}), [DENSE, VALUE, ADAPTER]),
    (Mesh("megatron", 4, {"expert": 2, "expert_tensor": 2}), ["qwen3_moe", ON_EXPERTS]),
    (Mesh("veomni", 2), [DENSE, "llama", "qwen3_moe", CHOOSING]),
    (Mesh("veomni", 2, {"sequence": 2}), [DENSE, VALUE, "qwen3_moe"]),
    (Mesh("automodel", 2), [DENSE, "llama", "qwen3_moe", CHOOSING]),
    (Mesh("automodel", 2, {"tensor": 2}), [DENSE, VALUE]),
    (Mesh("automodel", 2, {"sequence": 2}), [DENSE, VALUE]),
    (Mesh("automodel", 2, {}, {"models": "automodel"}), [DENSE]),
    (Mesh("torchtitan", 2), [DENSE, "llama", VALUE]),
    (Mesh("torchtitan", 2, SHARED), [DENSE, VALUE]),
    (Mesh("torchtitan", 4, {"tensor": 2}), [DENSE]),
]


def reinforce(output, batch):
    """The derivative of the loss by a score is minus the advantage times the loss weight."""
    return LossOutput(-batch.advantages * score_of(output))


def score_of(output):
    """Log-probs, or a value model's values."""
    return output.values if output.logprobs is None else output.logprobs


def learning(engine):
    """What the engine trains: all weights, or an adapter."""
    return dict(engine.get_per_tensor_param(adapter_only=engine.adapter is not None)[0])


def long_scores(engine):
    """Scores far into two texts, where an angle of a rotary position that is rounded is another angle."""
    tokens = torch.randint(3, 104, (2, LONG), generator=torch.Generator().manual_seed(5)).tolist()
    batch = pack_samples([Sample(tuple(row), (0,) + (1,) * (LONG - 1)) for row in tokens])
    mine = own_part(engine, batch)
    found = score_of(engine.infer_batch(select(batch, mine)))
    if not mine or not engine.ranks.is_output_rank:
        return {}
    return {f"long {i}": one for i, one in zip(mine, found.split(LONG), strict=True)}


def narrow_steps(mesh, folder, more, dtype="bfloat16"):
    """Scores, the losses, norm and gradient of one step, and the change of weights by three others."""
    settings = {"compute_dtype": dtype, "max_tokens_per_microbatch": LONG, **more}
    engine = make_engine(mesh, folder, optimizer=GRADIENT, max_grad_norm=None, **settings)
    found = {f"score {seed} {key}": one for seed in SEEDS for key, one in scores(engine, seed).items()}
    found |= long_scores(engine)
    before, losses = learning(engine), []
    with engine.train_mode():
        for seed in SEEDS:
            batch = make_batch(seed)
            metrics = engine.forward_backward(select(batch, own_part(engine, batch)), reinforce)
            losses.append(metrics["train/loss"].value if engine.ranks.is_output_rank else 0.0)
        norm = engine.optimizer_step()["train/grad_norm"].value
    found |= {f"gradient {key}": before[key] - one for key, one in learning(engine).items()}
    engine = make_engine(mesh, folder, **settings)
    for seed in range(3):
        batch = make_batch(seed)
        engine.train_batch(select(batch, own_part(engine, batch)), reinforce)
    found |= {f"moved {key}": one - before[key] for key, one in learning(engine).items()}
    return {**found, "losses": losses, "norm": norm}


def on_ranks(mesh, models):
    """What this rank finds of each of `models`: by name, a folder and other settings."""
    steps = {name: narrow_steps(mesh, *model) for name, model in models.items()}
    return {f"{name}/{key}": value for name, found in steps.items() for key, value in found.items()}


@pytest.fixture(scope="module")
def models(folders, tmp_path_factory):
    """Name -> the folder of a model, and settings; mixtures take all of their experts, but for one."""
    full = {
        name: save_model(name, tmp_path_factory.mktemp("narrow") / name, **more) for name, more in ALL_EXPERTS.items()
    }
    found = {name: (folder, {}) for name, folder in (folders | full | {CHOOSING: folders["qwen3_moe"]}).items()}
    for name, (model, lora) in ADAPTERS.items():
        engine = make_engine(Mesh("fsdp2", 1), found[model][0], lora=lora)
        train(engine)
        adapter = tmp_path_factory.mktemp("adapters") / name
        engine.export_adapter(adapter)
        found[name] = (found[model][0], {"lora": {"path": str(adapter)}})
    judge = save_model("llama", tmp_path_factory.mktemp("narrow") / "value")
    head = torch.randn(1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    save_file({SCORE: head}, judge / VALUE_HEAD_FILE)  # a new head is 0, and gives values without errors
    return found | {VALUE: (judge, {"model_type": "value_model"})}


@pytest.fixture(scope="module")
def references(models):
    """references(name) -> what fsdp2 in one process makes of a model in float32, and in bfloat16."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = [narrow_steps(Mesh("fsdp2", 1), *models[name], dtype) for dtype in ("float32", "bfloat16")]
        return found[name]

    return of


def joined(found, kind):
    """One vector of all tensors of a kind: a word of the names here, or the name of a weight in all layers."""
    return torch.cat([found[key].flatten() for key in sorted(found) if kind in (key.split()[0], wildcard(key))])


def length(vector):
    return float(torch.linalg.vector_norm(vector))


def distances(found, wide, narrow, kind, of=length):
    """The engine's error, that of fsdp2 in bfloat16, and how far the two are apart."""
    mine, exact, other = (joined(one, kind) for one in (found, wide, narrow))
    return of(mine - exact), of(other - exact), of(mine - other)


def median(errors):
    return float(errors[errors != 0].abs().median()) if errors.any() else 0.0


def worse_each(errors):
    """Largest error of a kind of weight, in errors of fsdp2. The ratio's logarithm spreads by 1/sqrt(n) for n numbers.

    gpt_oss has only 16 sinks here; n is the number of those that make up the length, which are one layer's.
    """
    if errors.numel() > 16:
        return WORSE_EACH
    squares = errors.double() ** 2
    return math.exp(3 / math.sqrt(float(squares.sum() ** 2 / (squares**2).sum())))


def assert_close(kind, error, usual, apart):
    assert usual > 0, f"{kind}: fsdp2 in bfloat16 has no error, so nothing is compared"
    assert LEAST * usual <= error <= WORSE * usual, f"{kind}: {error:.3g} from float32, fsdp2 is {usual:.3g}"
    assert apart <= APART * usual, f"{kind}: {apart:.3g} from fsdp2 in bfloat16, which is {usual:.3g} from float32"


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "names"), MESHES, ids=lambda one: str(one) if isinstance(one, Mesh) else "")
def test_bfloat16_is_as_close_to_float32_as_in_fsdp2(mesh, names, models, references, needs_backend):
    needs_backend(mesh.backend)
    ranks = run_ranks(mesh.world, on_ranks, mesh, {name: models[name] for name in names})
    for name in names:
        wide, narrow = references(name)
        mine = [
            {key.removeprefix(f"{name}/"): one for key, one in rank.items() if key.startswith(f"{name}/")}
            for rank in ranks
        ]
        found = {key: one for rank in reversed(mine) for key, one in rank.items()}  # scores are on some ranks only
        assert found.keys() == wide.keys()
        if name == CHOOSING:
            assert_close(name, *distances(found, wide, narrow, "score", median))
            continue
        for kind in ("score", "long", "gradient", "moved"):
            assert_close(f"{name} {kind}", *distances(found, wide, narrow, kind))
        for kind in sorted({wildcard(key) for key in wide if key.startswith("gradient")}):
            error, usual, _ = distances(found, wide, narrow, kind)
            assert error <= worse_each(joined(found, kind) - joined(wide, kind)) * usual, (
                f"{name} {kind}: {error:.3g} from float32, fsdp2 is {usual:.3g}"
            )
        assert {rank["norm"] for rank in mine} == {found["norm"]}
        assert abs(found["norm"] - wide["norm"]) <= distances(found, wide, narrow, "gradient")[0]
        _assert_losses(name, mine, wide, distances(found, wide, narrow, "score")[0])


def _assert_losses(name, ranks, wide, error):
    derivative = sum(
        length((batch.advantages * batch.loss_weights)[batch.loss_mask]) ** 2 for batch in map(make_batch, SEEDS)
    )
    gaps = [sum(rank["losses"][i] for rank in ranks) - wide["losses"][i] for i in range(len(SEEDS))]
    assert abs(sum(gaps)) <= error * derivative**0.5, f"{name}: losses differ by {gaps}"
