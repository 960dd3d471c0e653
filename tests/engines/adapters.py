"""Base models, and what the tests of adapters ask of engines that train one beside them."""

import peft
import torch
from transformers import AutoModelForCausalLM

from hone.models.settings import BuildConfig

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}
DEEPSEEK = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BUILDS = {
    "qwen3": BuildConfig(**SIZES),
    "untied": BuildConfig(**SIZES, tie_embeddings=False, seed=3),
    "gpt2": BuildConfig(**{k: v for k, v in SIZES.items() if k != "kv_heads"}, architecture="gpt2"),
    "qwen3_moe": BuildConfig(**SIZES, architecture="qwen3_moe", options=MOE),
    "deepseek": BuildConfig(
        **{**SIZES, "kv_heads": 4}, architecture="deepseek_v3", options={**DEEPSEEK, "first_k_dense_replace": 1}
    ),
}


def weights(engine):
    return dict(engine.get_per_tensor_param()[0])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def teach(engine, make_batch, loss, steps=3):
    return [engine.train_batch(make_batch(seed=seed), loss)["train/loss"].value for seed in range(steps)]


def by_peft(base, adapter, batch):
    """Log-probs at temperature 0.9 of every token with a loss, as PEFT's model gives them, sequence by sequence."""
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    found = torch.zeros(batch.num_tokens)
    with torch.no_grad():
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            ids = batch.token_ids[start:end]
            scores = torch.log_softmax(model(ids[None]).logits[0, :-1].float() / 0.9, -1)
            found[start + 1 : end] = scores.gather(1, ids[1:, None])[:, 0]
    return found[batch.loss_mask], model
