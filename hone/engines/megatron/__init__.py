"""The `megatron` engine: Megatron-Core's model, parallelism and gradient buffers under hone's batches and losses.

In reading order: `settings`; `mesh`, the process groups; `families`, which Hugging Face models it builds; `names`,
which box of which Hugging Face weight each Megatron parameter is; `reading`, weights from files; `model`, the modules;
`rows`, a micro-batch as the model wants it; `pipeline`, micro-batches through the stages; `weights`, masters over
Megatron's buffers; `engine`. `quiet_import` imports megatron-core without its warnings. What megatron-core takes for
CUDA is in `cpu_patches`; nothing of it is applied on an accelerator.
"""
