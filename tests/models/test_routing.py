"""Routes of any mixture of experts are seen as its router chose them, and replayed with its own weights for them."""

import math

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from hone.models.attention.packed import packed
from hone.models.errors import ModelError
from hone.models.loading import load_language_model
from hone.models.routing import Routers, Routing, checkpoint_contexts, expert_count, mixture_layers, watched
from hone.models.settings import BuildConfig, ModelConfig

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "mlp_size": 48, "max_positions": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
NARROW = EXPERTS | {"moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
LATENT = GROUPED | {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "qwen3_moe": NARROW,
    "qwen2_moe": NARROW | {"shared_expert_intermediate_size": 16},
    "mixtral": LOCAL,
    "olmoe": EXPERTS,
    "deepseek_v3": LATENT,
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "glm4_moe": GROUPED | {"first_k_dense_replace": 1},
    "gpt_oss": LOCAL | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "granitemoe": LOCAL,
    "minimax_m2": LOCAL,
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "flex_olmo": EXPERTS,
    "exaone_moe": NARROW,
    "hy_v3": NARROW,
    "mellum": NARROW,
}


def build(architecture, options):
    source = ModelConfig(build=BuildConfig(**SIZES, architecture=architecture, options=options))
    return load_language_model(source).eval()


def run(model):
    with packed(torch.tensor([0, 4, 9])), torch.no_grad():
        ids = torch.arange(3, 12)[None]
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        return model(ids, position_ids=positions, use_cache=False).logits[0]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_is_seen_and_replayed(architecture):
    model = build(architecture, FAMILIES[architecture])
    unseen = run(model)
    routers = Routers.find(model)
    mixtures = [layer for layer in model.base_model.layers if "xperts" in str(layer)]
    assert routers == Routers(len(mixtures), 8, 2)
    assert mixture_layers(model.config) == tuple(range(2 - len(mixtures), 2))
    assert expert_count(model.config) == 8
    routers.check(lambda: run(model), architecture)
    own = Routing(routers)
    with watched(own):
        assert torch.equal(run(model), unseen)
    routes = own.choices()
    assert routes.shape == (9, len(mixtures), 2)
    again = Routing(routers, routes)
    with watched(again):
        assert torch.equal(run(model), unseen)
    assert sum(int(one.sum()) for one in again.replaced.values()) == 0
    other = (routes + 3) % 8  # other experts, and in DeepSeek's and GLM's others than their group lets them choose from
    replayed = Routing(routers, other)
    with watched(replayed):
        changed = run(model)
    assert torch.equal(replayed.choices(), other)
    assert (changed - unseen).abs().max() > 0
    assert torch.isfinite(changed).all()
    assert sum(int(one.sum()) for one in replayed.replaced.values()) > 0
    for logits, shares in again.scored():
        assert logits.shape == shares.shape == (9, 8)
        torch.testing.assert_close(shares.sum(-1), torch.ones(9))


def test_a_dense_model_has_no_routers():
    model = build("qwen3", {})
    assert Routers.find(model) is None
    assert expert_count(model.config) == 0
    assert mixture_layers(model.config) == ()


def test_routers_that_choose_by_other_means_are_refused():
    model = build("phimoe", LOCAL)
    with pytest.raises(ModelError, match="phimoe: 2 of its 2 routers do not choose experts with topk"):
        Routers.find(model).check(lambda: run(model), "phimoe")


# -------------------------------------------------------------------------------------------------- weights by hand


def route(router, logits, given=None):
    """A router that has the identity as weights, so its inputs are its logits; what it returns, and the routing."""
    logits = torch.tensor([logits], requires_grad=True)
    router.weight.data = torch.eye(logits.shape[-1])
    routers = Routers.find(torch.nn.ModuleList([router]))
    routing = Routing(routers, None if given is None else torch.tensor([[given]]))
    with watched(routing):
        _, weights, experts = router(logits)
    return logits, weights, experts[0].tolist(), routing


def test_weights_are_the_routers_for_the_replayed_experts():
    config = Qwen3MoeConfig(hidden_size=4, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    logits, weights, experts, routing = route(Qwen3MoeTopKRouter(config), [2.0, 1.0, 0.0, -1.0], [2, 3])
    assert experts == [2, 3]
    share = 1 / (1 + math.exp(-1))  # of e^0 and e^-1
    assert weights[0].tolist() == pytest.approx([share, 1 - share])
    weights[0, 0].backward()
    slope = share * (1 - share)
    assert logits.grad[0].tolist() == pytest.approx([0, 0, slope, -slope], abs=1e-6)
    assert routing.replaced[0].tolist() == [2]
    total = sum(math.exp(x) for x in (2, 1, 0, -1))
    assert routing.scored()[0][1][0].tolist() == pytest.approx([math.exp(x) / total for x in (2, 1, 0, -1)])


def test_a_router_that_takes_topk_of_logits():
    config = GptOssConfig(hidden_size=4, num_local_experts=4, num_experts_per_tok=2)
    _, weights, experts, routing = route(GptOssTopKRouter(config), [2.0, 1.0, 0.0, -1.0], [3, 0])
    assert experts == [3, 0]
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(3)), 1 / (1 + math.exp(-3))])
    assert routing.replaced[0].tolist() == [1]
    assert routing.logits[0][0][0].tolist() == [2.0, 1.0, 0.0, -1.0]


def test_experts_of_a_group_that_the_router_would_not_take():
    sizes = {
        "hidden_size": 4,
        "num_attention_heads": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    }
    third = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, routed_scaling_factor=2.0, norm_topk_prob=True))
    _, weights, experts, routing = route(third, [2.0, 1.0, 0.0, -1.0], [2, 3])
    assert experts == [2, 3]
    low = 1 / (1 + math.e)  # sigmoid of -1; that of 0 is a half
    assert weights[0].tolist() == pytest.approx([2 * 0.5 / (0.5 + low), 2 * low / (0.5 + low)])
    sigmoids = [1 / (1 + math.exp(-x)) for x in (2, 1, 0, -1)]
    assert routing.scored()[0][1][0].tolist() == pytest.approx([x / sum(sigmoids) for x in sigmoids])
    second = DeepseekV2TopkRouter(
        DeepseekV2Config(**sizes, routed_scaling_factor=1.0, topk_method="group_limited_greedy")
    )
    _, weights, experts, _ = route(second, [2.0, 1.0, 0.0, -1.0], [2, 3])
    total = sum(math.exp(x) for x in (2, 1, 0, -1))
    assert experts == [2, 3]
    assert weights[0].tolist() == pytest.approx([1 / total, math.exp(-1) / total])


def test_a_token_without_routes_chooses_itself():
    config = Qwen3MoeConfig(hidden_size=4, num_experts=4, num_experts_per_tok=2)
    _, _, experts, routing = route(Qwen3MoeTopKRouter(config), [0.0, 1.0, 3.0, 2.0], [-1, -1])
    assert experts == [2, 3]
    assert routing.replaced[0].tolist() == [0]


def test_a_recomputation_takes_the_experts_of_the_forward_whatever_it_computes():
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=4, num_experts=4, num_experts_per_tok=2))
    router.weight.data = torch.eye(4)
    routing = Routing(Routers.find(torch.nn.ModuleList([router])))
    with packed(torch.tensor([0, 1])), watched(routing):
        _, again = checkpoint_contexts()
        first = router(torch.tensor([[3.0, 2.0, 1.0, 0.0]]))[2]
    with again:
        second = router(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))[2]
    assert first.tolist() == second.tolist() == [[0, 1]]
    assert routing.choices().tolist() == [[[0, 1]]]  # and it is not noted again
    assert router(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))[2].tolist() == [[3, 2]]
