"""Mixtures of experts in training: figures and losses by hand, whatever the cut; routes replayed to the bit."""

import functools
import math
from typing import get_args

import pytest
import torch

from hone.algorithms.aggregation import loss_weights
from hone.algorithms.settings import AggregationSettings, Mode
from hone.data.packing import select
from hone.engines.settings import MoeConfig
from hone.models.attention.packed import packed
from hone.models.errors import ModelError
from hone.models.routing import ROUTES, Routers, Routing, watched
from hone.models.settings import BuildConfig, ModelConfig, UseConfig
from hone.types import LossOutput, merge_metrics
from tests.engines.spread import OPTIONS, Case, likelihood, make_batch, own_part
from tests.engines.spread import make_engine as make_case
from tests.families.checks import make_batch as family_batch
from tests.families.checks import make_engine as make_family
from tests.families.types import save_tiny
from tests.ranks import run_ranks

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}
SPREAD = {"initializer_range": 0.3}  # routers that differ much between tokens
LOSSES = MoeConfig(router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
WHOLE = MoeConfig(router_aux_loss_coef=0.5, balance_over="batch")
REPLAY = MoeConfig(routing_replay="rollout", router_aux_loss_coef=0.5)


def mixture(architecture="qwen3_moe", **options):
    options = OPTIONS.get(architecture, {}) | SPREAD | options
    return ModelConfig(build=BuildConfig(**SIZES, architecture=architecture, options=options))


def values_of(metrics):
    return {name: metric.value for name, metric in metrics.items()}


# --------------------------------------------------------------------------------------------------------- by hand


SHARES = [math.exp(x) / sum(map(math.exp, range(4))) for x in (3, 2, 1, 0)]


def choosing_alike(make_engine, moe):
    """Biases 3, 2, 1, 0 and no weights: every token takes experts 0 and 1 of 4, with the same scores."""
    options = {"num_local_experts": 4, "num_experts_per_tok": 2}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    engine = make_engine(model=mixture("gpt_oss", **options), moe=moe)
    for layer in engine.model.model.layers:
        layer.mlp.router.weight.data.zero_()
        layer.mlp.router.bias.data = torch.tensor([3.0, 2.0, 1.0, 0.0])
    return engine


def test_figures_and_losses_of_routers_that_all_choose_alike(make_engine, make_batch, losses):
    engine = choosing_alike(make_engine, LOSSES)
    found = values_of(engine.forward_backward(make_batch(), losses.likelihood))
    assert found["train/router_aux_loss"] == pytest.approx(2 * SHARES[0] + 2 * SHARES[1], rel=1e-5)  # f = 2, 2, 0, 0
    assert found["train/router_z_loss"] == pytest.approx(math.log(sum(map(math.exp, range(4)))) ** 2, rel=1e-5)
    assert found["train/expert_load_max_over_mean"] == found["train/expert_load_worst_layer"] == 2.0
    assert found["train/experts_unused"] == 0.5
    assert found["train/router_entropy"] == pytest.approx(-sum(p * math.log(p) for p in SHARES), rel=1e-5)
    assert "train/routes_replaced" not in found


@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_coefficient_means_the_same_however_token_losses_are_added_up(mode, make_engine, make_batch):
    """With `seq_mean_token_sum` (DPO, `rloo`) and the like, loss weights add up to the length of an answer."""
    batch = make_batch(lengths=(23, 9, 30))
    settings = AggregationSettings(mode=mode, norm_tokens=7 if mode.endswith("norm") else None)
    batch = batch.with_(loss_weights=loss_weights(batch.loss_mask, batch.cu_seqlens, settings))
    engine = choosing_alike(make_engine, LOSSES)
    found = values_of(engine.forward_backward(batch, lambda output, part: LossOutput(output.logprobs * 0)))
    expected = 0.5 * 2 * (SHARES[0] + SHARES[1]) + 0.1 * math.log(sum(map(math.exp, range(4)))) ** 2
    assert found["train/loss"] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def routes_and_scores(engine, batch, index):
    """What the model itself does with one sequence alone: chosen [T, layers, K], shares and logits [layers, T, E]."""
    one = select(batch, [index])
    routing = Routing(Routers.find(engine.model))
    with watched(routing), packed(one.cu_seqlens):
        engine.model(one.token_ids[None], position_ids=one.position_ids[None], use_cache=False)
    logits, shares = (torch.stack(list(parts)) for parts in zip(*routing.scored(), strict=True))
    return routing.choices().long(), shares, logits


@pytest.mark.parametrize("moe", [LOSSES, WHOLE], ids=["sequence", "batch"])
def test_losses_and_loads_are_sums_over_whole_sequences(moe, make_engine, make_batch, losses):
    engine = make_engine(model=mixture(), moe=moe)
    batch = make_batch(lengths=(13, 9, 12, 7), prompt=6, groups=[0, 0, 1, 1])  # prompts that the row holds once
    each = [routes_and_scores(engine, batch, i) for i in range(batch.num_sequences)]
    counts = [torch.nn.functional.one_hot(chosen, 4).sum((0, 2)).double() for chosen, _, _ in each]  # [layers, E]
    loads = sum(counts)
    balance, z_loss, entropy, tokens, weights = 0.0, 0.0, 0.0, 0, 0.0
    for i, (chosen, shares, logits) in enumerate(each):
        frequency = counts[i] * 4 / (2 * len(chosen)) if moe is LOSSES else loads / loads.mean(-1, keepdim=True)
        weight = float(batch.loss_mask[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]].sum())
        balance += weight * float((frequency * shares.mean(1)).sum(-1).mean())
        z_loss += weight * float(logits.logsumexp(-1).square().mean())
        entropy += float(-(shares * shares.log()).sum())
        tokens, weights = tokens + 2 * len(chosen), weights + weight
    found = values_of(engine.forward_backward(batch, losses.likelihood))
    assert found["train/router_aux_loss"] == pytest.approx(balance / weights, rel=1e-5)
    if moe is LOSSES:
        assert found["train/router_z_loss"] == pytest.approx(z_loss / weights, rel=1e-5)
    assert found["train/router_entropy"] == pytest.approx(entropy / tokens, rel=1e-5)
    busiest = loads.amax(-1) / loads.mean(-1)
    assert found["train/expert_load_max_over_mean"] == pytest.approx(float(busiest.mean()))
    assert found["train/expert_load_worst_layer"] == pytest.approx(float(busiest.max()))
    assert found["train/experts_unused"] == float((loads == 0).double().mean())
    plain = make_engine(model=mixture())
    alone = values_of(plain.forward_backward(batch, losses.likelihood))
    sums = moe.router_aux_loss_coef * found["train/router_aux_loss"]
    sums += moe.router_z_loss_coef * found.get("train/router_z_loss", 0.0)
    assert found["train/loss"] == pytest.approx(alone["train/loss"] + sums, rel=1e-5)


def test_a_dense_model_has_no_such_figures(make_engine, make_batch, losses):
    found = make_engine().forward_backward(make_batch(), losses.likelihood)
    assert not [name for name in found if "expert" in name or "rout" in name]


def test_balance_is_learned(make_engine, make_batch, losses):
    engine = make_engine(model=mixture(), moe=MoeConfig(router_aux_loss_coef=10.0), optimizer={"lr": 1e-2})
    found = [values_of(engine.train_batch(make_batch(), losses.likelihood)) for _ in range(40)]
    assert found[0]["train/router_aux_loss"] > 1.2
    assert found[-1]["train/router_aux_loss"] < 1.05
    assert found[-1]["train/expert_load_max_over_mean"] < found[0]["train/expert_load_max_over_mean"] - 0.1


# ------------------------------------------------------------------------------------------------------ invariance


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("moe", [LOSSES, WHOLE, REPLAY], ids=["sequence", "batch", "replay"])
def test_gradients_depend_on_no_cut(moe, checkpointing, make_engine, make_batch, losses):
    batch = make_batch(lengths=(13, 9, 12, 7, 20, 12), prompt=6, groups=[0, 0, 1, 2, 1, 0])
    batch = with_other_routes(make_engine(model=mixture()), batch)
    results = []
    for cap in (20, 32, 128):
        engine = make_engine(
            model=mixture(),
            moe=moe,
            max_tokens_per_microbatch=cap,
            activation_checkpointing=checkpointing,
            optimizer={"name": "SGD", "lr": 1.0},
            max_grad_norm=None,
        )
        metrics = values_of(engine.train_batch(batch, losses.policy))
        results.append((metrics, dict(engine.get_per_tensor_param()[0])))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, results[0][1][name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite", "nemotron_h", "qwen3_next"])
def test_layers_are_recomputed_with_the_experts_that_were_chosen_in_groups(kind, tmp_path, losses):
    """Also beside layers with a state."""
    folder, batch = save_tiny(kind, tmp_path / "model"), family_batch(0)
    found = []
    for checkpointing in (False, True):
        engine = make_family(folder, activation_checkpointing=checkpointing)
        with engine.train_mode():
            engine.forward_backward(batch, losses.likelihood)
        found.append({name: weight.grad for name, weight in engine.weights.masters.items()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-5, atol=1e-6)


def with_other_routes(engine, batch, seed=5):
    """The batch with routes that are not the model's: every token's experts are drawn, the same in a shared prompt."""
    routes = engine.infer_batch(batch, frozenset({ROUTES})).extras[ROUTES]
    assert routes.dtype == torch.int16
    assert routes.shape == (batch.num_tokens, 2, 2)
    drawn = torch.rand(128, routes.shape[1], 4, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :2]
    routes = drawn[batch.token_ids].to(torch.int16)
    routes[batch.cu_seqlens[1:] - 1] = -1  # nothing was computed of last tokens
    return batch.with_(routed_experts=routes)


ALL, SEQUENCE, TENSOR, EXPERT = ({}, *({name: 2} for name in ("sequence", "tensor", "expert")))
CASES = [
    *((LOSSES, parallel) for parallel in (ALL, SEQUENCE, EXPERT)),
    *((WHOLE, parallel) for parallel in (ALL, SEQUENCE)),
    *((REPLAY, parallel) for parallel in (ALL, SEQUENCE, TENSOR, EXPERT)),
]


def make_spread(moe, parallel):
    return make_case(Case("qwen3_moe", optimizer="SGD", engine={"moe": moe}, parallel=parallel))


def steps(moe, parallel):
    """Two steps on this rank's share of batches with routes; metrics of each, then the weights."""
    engine = make_spread(moe, parallel)
    found = {}
    for seed in range(2):  # the second has answers to one prompt
        batch = own_part(engine, with_drawn_routes(make_batch(seed)))
        metrics = values_of(engine.train_batch(batch, likelihood))
        if not engine.ranks.is_output_rank:
            metrics["train/loss"] = 0.0
        found |= {f"{seed} {name}": value for name, value in metrics.items()}
    asked = own_part(engine, make_batch(1))
    found["seen"] = int(engine.infer_batch(asked, frozenset({ROUTES})).extras[ROUTES].long().sum())
    return found | dict(engine.get_per_tensor_param()[0])


def with_drawn_routes(batch):
    drawn = torch.rand(128, 2, 4, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :2]
    return batch.with_(routed_experts=drawn[batch.token_ids].to(torch.int16))


def all_steps():
    return {f"{i}/{key}": value for i, case in enumerate(CASES) for key, value in steps(*case).items()}


@functools.cache
def alone_steps(balance_over, routing_replay):
    moe = next(moe for moe, _ in CASES if (moe.balance_over, moe.routing_replay) == (balance_over, routing_replay))
    return steps(moe, {})


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, all_steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{m.balance_over}-{m.routing_replay}-{p}" for m, p in CASES]
)
def test_two_ranks_are_as_one(number, two_ranks):
    moe, parallel = CASES[number]
    alone = alone_steps(moe.balance_over, moe.routing_replay)
    ranks = [{k.partition("/")[2]: v for k, v in one.items() if k.startswith(f"{number}/")} for one in two_ranks]
    shared = bool(parallel) and "expert" not in parallel  # both ranks have the whole batch
    for key, value in alone.items():
        mine = [rank[key] for rank in ranks]
        if isinstance(value, torch.Tensor):
            for one in mine:
                torch.testing.assert_close(one, value, rtol=1e-5, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")
        elif key == "seen" or key.endswith("train/loss"):
            total = mine[0] if key == "seen" and shared else sum(mine)
            assert total == pytest.approx(value, rel=1e-5), key
        elif "_loss" not in key or shared:  # means over the tokens of each rank are merged by their counts
            assert mine == pytest.approx([value, value], rel=1e-5), key


def test_figures_of_ranks_merge_to_the_whole(make_engine, make_batch, losses):
    """Every rank has the step's loads, so merging them is merging equal numbers."""
    engine = make_engine(model=mixture())
    one = engine.forward_backward(make_batch(), losses.likelihood)
    merged = merge_metrics(one, one)
    for name in ("expert_load_max_over_mean", "expert_load_worst_layer", "experts_unused", "router_entropy"):
        assert merged[f"train/{name}"].value == one[f"train/{name}"].value


# ---------------------------------------------------------------------------------------------------------- replay


def test_replayed_routes_are_those_of_the_batch(make_engine, make_batch, losses):
    plain, engine = make_engine(model=mixture()), make_engine(model=mixture(), moe=REPLAY)
    batch = make_batch(lengths=(13, 9, 12, 7), prompt=6, groups=[0, 0, 1, 1])
    routed = with_other_routes(plain, batch)
    seen = engine.infer_batch(routed, frozenset({ROUTES})).extras[ROUTES]
    asked = routed.routed_experts
    known = asked[:, 0, 0] >= 0
    assert torch.equal(seen[known], asked[known])
    assert not known.all()
    assert (seen[~known] >= 0).all()
    own = plain.infer_batch(routed)
    assert torch.equal(own.logprobs, plain.infer_batch(batch).logprobs)  # who was not told to replay does not
    assert (own.logprobs - engine.infer_batch(routed).logprobs).abs().max() > 1e-2
    again = plain.infer_batch(batch, frozenset({ROUTES}))
    same = batch.with_(routed_experts=again.extras[ROUTES])
    assert torch.equal(engine.infer_batch(same).logprobs, again.logprobs)
    figures = values_of(engine.forward_backward(same, losses.likelihood))
    assert figures["train/routes_replaced"] == 0
    figures = values_of(engine.forward_backward(routed, losses.likelihood))
    assert 0.2 < figures["train/routes_replaced"] < 0.8


def test_gradients_flow_to_the_replayed_experts_and_their_router_weights_only(make_engine, make_batch, losses):
    engine = make_engine(model=mixture(), moe=MoeConfig(routing_replay="rollout"))
    batch = make_batch()
    routes = torch.tensor([1, 3], dtype=torch.int16).expand(batch.num_tokens, 2, 2)
    engine.forward_backward(batch.with_(routed_experts=routes), losses.likelihood)
    for layer in engine.model.model.layers:
        experts, router = layer.mlp.experts.down_proj.grad, layer.mlp.gate.weight.grad
        assert experts[[1, 3]].abs().amax((1, 2)).min() > 0
        assert experts[[0, 2]].abs().max() == 0
        assert router.abs().amax(-1).min() > 0  # of all: the shares are a softmax over them


def test_prompts_are_shared_as_far_as_they_went_the_same_way(make_engine, make_batch):
    """Two answers whose prompt went to other experts from its third token on: each is replayed as it was."""
    engine = make_engine(model=mixture(), moe=REPLAY)
    batch = with_other_routes(engine, make_batch(lengths=(16, 15), prompt=12, groups=[0, 0]))
    routes = batch.routed_experts.clone()
    routes[16 + 6 : 16 + 12] = (routes[16 + 6 : 16 + 12] + 1) % 4
    batch = batch.with_(routed_experts=routes)
    whole = engine.infer_batch(batch, frozenset({ROUTES}))
    parts = [engine.infer_batch(select(batch, [i]), frozenset({ROUTES})) for i in range(2)]
    assert torch.equal(whole.extras[ROUTES], torch.cat([one.extras[ROUTES] for one in parts]))
    joined = torch.cat([one.logprobs for one in parts])
    torch.testing.assert_close(whole.logprobs, joined, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        (MoeConfig(routing_replay="rollout"), r"moe\.routing_replay: .*it has no experts; remove the key"),
        (MoeConfig(router_aux_loss_coef=0.1), r"moe\.router_aux_loss_coef: .*it has no experts; remove the key"),
        (MoeConfig(router_z_loss_coef=0.1), r"moe\.router_z_loss_coef: .*it has no experts; remove the key"),
    ],
)
def test_a_dense_model_is_asked_for_nothing_of_the_kind(moe, message, make_engine):
    with pytest.raises(ModelError, match=message):
        make_engine(moe=moe)


def test_routers_out_of_reach_are_refused_where_they_are_needed_and_train_where_not(make_engine, make_batch, losses):
    model = mixture("phimoe", num_local_experts=4, num_experts_per_tok=2)
    model = model.model_copy(update={"use": UseConfig(dropout="config")})  # it draws experts in training
    found = make_engine(model=model).forward_backward(make_batch(), losses.likelihood)
    assert not [name for name in found if "expert" in name]
    with pytest.raises(ModelError, match=r"moe\.routing_replay: .*2 of its 2 routers do not choose experts with topk"):
        make_engine(model=model, moe=MoeConfig(routing_replay="rollout"))


def test_routes_of_another_model_and_missing_ones_are_refused(make_engine, make_batch, losses):
    engine = make_engine(model=mixture(), moe=REPLAY)
    batch = make_batch()
    with pytest.raises(ValueError, match="routing_replay=rollout needs the experts that the rollout chose"):
        engine.forward_backward(batch, losses.likelihood)
    for shape, largest in (((3, 2), 3), ((2, 2), 4)):
        routes = torch.full((batch.num_tokens, *shape), largest, dtype=torch.int16)
        with pytest.raises(ValueError, match="was recorded with another model"):
            engine.infer_batch(batch.with_(routed_experts=routes))
