"""The `automodel` engine: NeMo Automodel's parallelisation, and its Qwen3, under hone's batches and losses.

In reading order: `settings`; `models`, Automodel's own classes; `sharding`, its tensor parallelism and FSDP2; `engine`,
which is `fsdp2` with these two in the place of its own.
"""
