"""Training engines: one model on one set of devices, trained and evaluated by a few verbs.

In reading order: `base` is the contract; `engine`, the step that all backends share; `forward`, one micro-batch through
the model, with `layout` (its packed row), `logprobs` (scores of its tokens; by Triton: `kernels/`), `vocabulary` (a
head cut over ranks) and `reference_head` (for a KL over the vocabulary);
`optimizers`, the update, with `decay` (the weights that decay); `parts`, which part of a tensor a rank holds;
`checkpoint/` and `export`, the files; `moe`, experts; `memory`, of activations and of an idle engine; `checks/`, of a
model at the start; `settings`; `registry`, which class serves a backend; `unsupported`, errors for settings
that a backend does not have.
The backend `fsdp2/` has a folder; those of other projects are plug-ins, which share `lora/` and `rebuilt/`.
"""
