"""transformers' names for the weights of a torchtitan decoder. Shapes are the same, so only names change.

torchtitan's adapter for Llama permutes queries and keys, because its Llama rotates neighbouring numbers. Here all
families rotate halves, as transformers does (`modules.Rotary`), so no weight is permuted.
"""

from __future__ import annotations

import re

LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
MODULES = {  # of a layer
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def transformers_name(name: str, is_value_model: bool) -> str:
    """A decoder's weight -> its key in the state dict of the transformers model, or of hone's value model."""
    prefix = "body." if is_value_model else "model."
    others = {
        "tok_embeddings.weight": f"{prefix}embed_tokens.weight",
        "norm.weight": f"{prefix}norm.weight",
        "lm_head.weight": "score.weight" if is_value_model else "lm_head.weight",
    }
    if name in others:
        return others[name]
    found = LAYER.fullmatch(name)
    if found is None or found[2] not in MODULES:
        raise KeyError(f"{name} has no Hugging Face name")
    return f"{prefix}layers.{found[1]}.{MODULES[found[2]]}.{found[3]}"
