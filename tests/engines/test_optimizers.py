"""Any optimizer of torch by name: it trains, or says in one sentence why it cannot."""

import sys

import pytest
import torch

from hone.engines.base import OneProcess
from hone.engines.fsdp2.weights import ProcessWeights
from hone.engines.optimizers import EIGHT_BIT, Update, build_optimizer
from hone.engines.settings import EngineConfig, OptimizerConfig

NAMES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
)
NAMES += EIGHT_BIT
REFUSED = {"LBFGS": "evaluates the loss several times", "SparseAdam": "needs sparse gradients", "Muon": "refuses"}


@pytest.fixture
def weights():
    return {"matrix": torch.nn.Parameter(torch.ones(3, 2)), "bias": torch.nn.Parameter(torch.ones(3))}


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_torch_steps_or_says_why_not(name, weights):
    config = OptimizerConfig(name=name, lr=0.1)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            build_optimizer(config, weights)
        return
    optimizer = build_optimizer(config, weights)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    for _ in range(2):
        optimizer.step()
    assert all((weight < 1).all() for weight in weights.values())


def test_eight_bit_state_takes_a_quarter_of_the_memory():
    sizes = {"large": (64, 64), "small": (63, 65)}  # 4096 and 4095 values: the small weight keeps float32
    held = {}
    for name in ("AdamW", "AdamW8bit"):
        weights = {key: torch.nn.Parameter(torch.zeros(size)) for key, size in sizes.items()}
        optimizer = build_optimizer(OptimizerConfig(name=name), weights)
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        for key, weight in weights.items():
            state = {n: one for n, one in optimizer.state[weight].items() if torch.is_tensor(one) and one.dim()}
            codebooks = {n for n in state if n.startswith("qmap")}  # one for all weights
            held[name, key] = sum(one.nbytes for n, one in state.items() if n not in codebooks)
    assert held["AdamW", "large"] == 2 * 4 * 4096
    assert held["AdamW8bit", "large"] == 2 * (4096 + 4 * 4096 // 256)  # codes, and a float32 scale per 256 of them
    assert held["AdamW8bit", "small"] == held["AdamW", "small"] == 2 * 4 * 4095


def test_eight_bit_steps_follow_those_of_adamw():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(64, 64, generator=generator) for _ in range(20)]
    found = []
    for name in ("AdamW", "AdamW8bit"):
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.01, weight_decay=0.1), {"weight": weight})
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        found.append(weight.detach())
    gap = (found[0] - found[1]).norm() / found[0].norm()
    assert 0 < gap < 0.05


def test_an_eight_bit_optimizer_names_the_missing_package(monkeypatch, weights):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # importing it raises ImportError
    with pytest.raises(ValueError, match=r"AdamW8bit needs the package bitsandbytes: pip install 'bitsandbytes>=0.50'"):
        build_optimizer(OptimizerConfig(name="AdamW8bit"), weights)


def test_only_matrices_decay(weights):
    optimizer = build_optimizer(OptimizerConfig(lr=0.5, weight_decay=0.1), weights)
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.allclose(weights["matrix"], torch.full((3, 2), 0.95))  # 1 - 0.5 * 0.1
    assert torch.equal(weights["bias"], torch.ones(3))


DECAYED = {
    "model.embed_tokens.weight": (9, 4),
    "layers.0.self_attn.q_proj.weight": (4, 4),
    "layers.0.mlp.experts.gate_up_proj": (2, 4, 8),
    "layers.0.mlp.experts.3.down_proj.weight": (4, 4),
    "layers.0.mamba.conv1d.weight": (4, 1, 3),
    "layers.0.q_proj.lora_A.trained.weight": (2, 4),
    "layers.0.norm.linear.weight": (4, 4),
    "0 model.layers.0.mlp.down_proj.weight": (4, 4),
}
UNDECAYED = {
    "layers.0.mlp.experts.gate_up_proj_bias": (2, 8),
    "layers.0.mlp.experts.down_proj_bias": (2, 4),
    "layers.0.mlp.router.bias": (2,),
    "layers.0.self_attn.sinks": (2,),
    "layers.0.self_attn.q_norm.weight": (2, 4),
    "layers.0.input_layernorm.weight": (4,),
    "layers.0.self_attn.relative_attention_bias.weight": (8, 2),
    "layers.0.mamba.A_log": (4, 2),
    "layers.0.mamba.D": (2, 4),
    "blocks.0.attention.time_mix_key": (1, 1, 4),
    "blocks.0.attention.time_mix_value": (1, 1, 4),
    "blocks.0.feed_forward.time_mix_receptance": (1, 1, 4),
    "layers.0.mlp.experts.lora_magnitude_vector.trained.weight": (2, 4),
    "layers.0.mlp.experts.trained.lora_magnitude_vector": (2, 4),
    "0 model.layers.0.self_attn.k_norm.weight": (2, 4),
}


@pytest.mark.parametrize("name", ["lr", "weight_decay", "betas"])
def test_an_option_that_has_a_key_of_its_own_is_refused(name):
    """It would be overwritten by the key's default."""
    with pytest.raises(ValueError, match=rf"options has {name}, which has a key of its own; set {name} instead"):
        OptimizerConfig(options={name: 0.5})


def test_decay_goes_by_what_a_weight_is_and_not_by_its_dimensions():
    """One step of lr 0.5 with decay 0.1 and no gradient shrinks a weight of 1 to 0.95, or leaves it."""
    weights = {name: torch.nn.Parameter(torch.ones(size)) for name, size in (DECAYED | UNDECAYED).items()}
    optimizer = build_optimizer(OptimizerConfig(lr=0.5, weight_decay=0.1), weights)
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    shrunk = {name for name, weight in weights.items() if torch.allclose(weight, torch.full_like(weight, 0.95))}
    kept = {name for name, weight in weights.items() if torch.equal(weight, torch.ones_like(weight))}
    assert (shrunk, kept) == (set(DECAYED), set(UNDECAYED))


def test_settings_reach_the_optimizer(weights):
    optimizer = build_optimizer(OptimizerConfig(betas=(0.5, 0.6), options={"eps": 1e-3}), weights)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[1]["eps"] == 1e-3
    assert optimizer.param_groups[0]["fused"]
    assert not build_optimizer(OptimizerConfig(options={"foreach": True}), weights).param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "AdamW8bits"}, "unknown optimizer 'AdamW8bits'; did you mean 'AdamW8bit"),
        ({"name": "AdamV"}, "unknown optimizer 'AdamV'; did you mean 'Adam"),
        ({"options": {"epsilon": 1}}, "unknown argument of AdamW 'epsilon'; did you mean 'eps'"),
        ({"name": "SGD", "betas": (0.9, 0.99)}, "unknown argument of SGD 'betas'"),
        ({"name": "Rprop", "weight_decay": 0.1}, "Rprop has no weight decay"),
        ({"options": {"eps": -1.0}}, "AdamW refuses its arguments: Invalid epsilon value: -1.0"),
    ],
)
def test_what_an_optimizer_does_not_take_is_named(settings, message, weights):
    with pytest.raises(ValueError, match=message):
        build_optimizer(OptimizerConfig(**settings), weights)


def update_of(weights, **config):
    """An update of plain SGD at learning rate 1, and the weights as an engine holds them."""
    held = ProcessWeights(torch.nn.ParameterDict(weights), torch.float32, trained=True)
    update = Update(EngineConfig(optimizer=OptimizerConfig(name="SGD", lr=1.0), **config), 10, in_parts=False)
    update.start(held)
    return update, held


def test_gradients_are_scaled_to_the_largest_norm_over_all_of_them(weights):
    update, held = update_of(weights, max_grad_norm=2.5)
    assert held.gradient_norm() == 0.0
    weights["matrix"].grad = torch.tensor([[3.0, 0], [0, 0], [0, 0]])
    weights["bias"].grad = torch.tensor([0, 4.0, 0])
    assert update.step(held, OneProcess())["train/grad_norm"].value == 5.0
    assert weights["matrix"][0].tolist() == [1 - 1.5, 1.0]
    assert weights["bias"].tolist() == [1.0, 1 - 2.0, 1.0]
    assert weights["bias"].grad is None


def test_a_gradient_that_is_not_finite_changes_nothing(weights):
    update, held = update_of(weights)
    weights["bias"].grad = torch.tensor([0, float("nan"), 0])
    metrics = update.step(held, OneProcess())
    assert metrics["train/skipped_steps"].value == 1
    assert "train/grad_norm" not in metrics
    assert weights["bias"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("fused", [False, True])
def test_the_counters_of_a_fused_optimizer_go_where_it_computes(fused):
    """A checkpoint that is read while the weights are offloaded leaves all state in CPU memory; `meta` is a device."""
    config = EngineConfig(optimizer=OptimizerConfig(lr=0.1, options={"fused": fused}))
    update = Update(config, 10, in_parts=False)
    weight = torch.nn.Parameter(torch.ones(2))
    update.optimizer = torch.optim.AdamW([weight], fused=fused)
    weight.grad = torch.ones(2)
    update.optimizer.step()
    update.move("cpu")
    update.move("meta")
    state = update.optimizer.state[weight]
    assert state["exp_avg"].device.type == "meta"
    assert state["step"].device.type == ("meta" if fused else "cpu")


def test_wrong_settings_are_refused_before_a_model_is_loaded():
    for name in EIGHT_BIT:
        with pytest.raises(ValueError, match=rf"{name} needs weights that are tensors of their own, .* choose AdamW"):
            Update(EngineConfig(optimizer=OptimizerConfig(name=name)), 10, in_parts=True, in_buffers=True)
        with pytest.raises(ValueError, match=r"max_unorm needs the norm of a whole weight, .* remove it"):
            Update(EngineConfig(optimizer=OptimizerConfig(name=name, options={"max_unorm": 1.0})), 10, in_parts=True)
    with pytest.raises(ValueError, match=r"Adafactor takes means over the rows and columns .* choose AdamW"):
        Update(EngineConfig(optimizer=OptimizerConfig(name="Adafactor")), 10, in_parts=True)


def test_weights_of_which_bitsandbytes_would_update_a_copy_are_refused():
    weight = torch.nn.Parameter(torch.ones(64, 128)[:, ::2])
    with pytest.raises(ValueError, match=r"AdamW8bit needs contiguous weights, and layer\.weight is not; choose AdamW"):
        build_optimizer(OptimizerConfig(name="AdamW8bit"), {"layer.weight": weight}, in_parts=True)
