"""Training engines: one model on one set of devices, trained and evaluated by a few verbs.

In reading order: `base` is the contract; `engine`, the step that all backends share; `forward`, one micro-batch through
the model, with `layout` (its packed row), `logprobs` (scores of its tokens) and `vocabulary` (a head cut over ranks);
`optimizers`, the update; `parts`, which part of a tensor a rank holds; `checkpoint` and `export`, the files; `moe`,
experts; `activations` and `probe`, memory and checks of a model; `settings`; `registry`, which class serves a backend.
Each backend has a folder: `fsdp2/`, `megatron/`. `lora/` is shared.
"""
