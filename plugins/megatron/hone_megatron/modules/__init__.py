"""Modules that hone puts into Megatron-Core's layer specs, where Megatron's own do not compute what transformers does.

- `attention`: over packed rows; `thd`: the same by Transformer Engine; `latent`: DeepSeek's
- `norm`: the norms of every layer
- `router`: chooses experts; `experts`: their matrices; `clamped`: the experts of gpt-oss
- `expert_adapters`: LoRA on experts
"""
