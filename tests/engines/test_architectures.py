"""Any Hugging Face causal language model trains on packed sequences exactly, or is refused before the first step."""

import pytest
import torch

from hone.data.packing import select
from hone.models.errors import ModelError
from hone.models.settings import BuildConfig, ModelConfig

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "mlp_size": 48, "max_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "moe_intermediate_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts"), 8),
    **dict.fromkeys(("n_group", "num_experts_per_tok"), 2),
    "topk_group": 1,
}
TRAINED = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {},
    "deepseek_v3": LATENT,
    "qwen3_next": EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "jamba": {"num_experts": 2, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
}
REFUSED = {
    "recurrent_gemma": (
        {"hidden_size": 32, "layers": 3, "heads": 4, "mlp_size": 48},
        {"lru_width": 32},
        "packed sequences",
    ),
    "bert": (SIZES, {}, "an encoder"),
    "falcon": ({"hidden_size": 32, "layers": 2, "heads": 4}, {}, "its attention is its own"),
    "inkling_text": ({"hidden_size": 32, "layers": 2, "heads": 4}, {"num_key_value_heads": 2}, "position bias"),
}


@pytest.mark.parametrize("architecture", TRAINED)
def test_it_trains_and_scores_like_the_model_itself(architecture, make_engine, make_batch, losses):
    build = BuildConfig(**SIZES, architecture=architecture, options=TRAINED[architecture])
    engine = make_engine(model=ModelConfig(build=build), optimizer={"lr": 1e-2})
    batch = make_batch()
    first = engine.train_batch(batch, losses.likelihood)["train/loss"].value
    for _ in range(5):
        last = engine.train_batch(batch, losses.likelihood)["train/loss"].value
    assert last < first
    batch = make_batch(lengths=(13, 9, 12, 7, 20, 12), prompt=6, groups=[0, 0, 1, 2, 1, 0])  # with shared prompts
    found = engine.infer_batch(batch).logprobs
    engine.model.set_attn_implementation("eager")
    for i in range(batch.num_sequences):
        one = select(batch, [i])
        with torch.no_grad():
            logits = engine.model(one.token_ids[None], use_cache=False).logits[0].float()
        expected = torch.log_softmax(logits[:-1], -1).gather(1, one.token_ids[1:, None])[:, 0] * one.loss_mask[1:]
        ours = found[batch.cu_seqlens[i] + 1 : batch.cu_seqlens[i + 1]]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


WITHOUT_CHOICE = {  # every token takes all experts: rounding changes choices between near ties, in transformers too
    "gpt_oss": {**TRAINED["gpt_oss"], "num_experts_per_tok": 4, "sliding_window": 5},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 8},
}


@pytest.mark.parametrize("architecture", WITHOUT_CHOICE)
def test_gradients_in_bfloat16_are_as_close_as_those_of_transformers(architecture, make_engine, make_batch, losses):
    build = BuildConfig(**SIZES, kv_heads=2, architecture=architecture, options=WITHOUT_CHOICE[architecture])
    batch = make_batch(lengths=(13, 9, 12, 7, 20, 12), prompt=6, groups=[0, 0, 1, 2, 1, 0])
    engine = make_engine(model=ModelConfig(build=build), compute_dtype="bfloat16", max_tokens_per_microbatch=999)
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in engine.weights.masters.items():
            near = 1.0 if name.endswith("norm.weight") else 0.0
            weight.copy_(near + 0.15 * torch.randn(weight.shape, generator=drawn))
    engine.weights.publish()
    masters = {name: weight.detach().clone() for name, weight in engine.weights.masters.items()}

    def of_transformers(dtype):
        engine.model.config._attn_implementation = engine.model.config._experts_implementation = "eager"
        model = type(engine.model)(engine.model.config)
        model.load_state_dict(masters, strict=False)
        model.to(dtype)
        for i in range(batch.num_sequences):
            one = select(batch, [i])
            logits = model(one.token_ids[None], use_cache=False).logits[0].float()
            logprobs = torch.log_softmax(logits[:-1], -1).gather(1, one.token_ids[1:, None])[:, 0]
            (-logprobs * one.loss_mask[1:] * one.loss_weights[1:]).sum().backward()
        return torch.cat([model.get_parameter(name).grad.double().flatten() for name in masters])

    engine.forward_backward(batch, losses.likelihood)
    ours = torch.cat([weight.grad.double().flatten() for weight in engine.weights.masters.values()])
    exact, theirs = of_transformers(torch.float64), of_transformers(torch.bfloat16)
    errors = [float((found - exact).norm() / exact.norm()) for found in (ours, theirs)]
    assert errors[0] < 1.5 * errors[1] < 0.1, errors


@pytest.mark.filterwarnings("ignore")  # transformers mentions kernels that are not installed
@pytest.mark.parametrize("architecture", REFUSED)
def test_it_is_refused_before_the_first_step(architecture, make_engine):
    sizes, options, message = REFUSED[architecture]
    build = BuildConfig(**sizes, architecture=architecture, options=options)
    with pytest.raises(ModelError, match=message):
        make_engine(model=ModelConfig(build=build))
