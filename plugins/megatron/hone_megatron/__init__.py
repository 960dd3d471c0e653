"""The `megatron` engine: Megatron-Core's model, parallelism and gradient buffers under hone's batches and losses.

In reading order: `settings`; `mesh`, the process groups; `families`, which Hugging Face models it builds; `names`,
which box of which Hugging Face weight each Megatron parameter is; `model`, built with the layers of `modules`;
`recompute`, what of it the backward computes again; `adapters`, LoRA in them; `rows`, a micro-batch as the model wants
it; `routed`, forwards of mixtures of experts; `pipeline`, micro-batches through the stages; `weights`, masters over
Megatron's buffers, and `moving`, to CPU memory and back; `engine`. `quiet_import` imports megatron-core without its
warnings. `patches` are for every device. What megatron-core takes for CUDA is in `cpu_patches`; nothing of it is
applied on an accelerator.
"""

from hone.engines.registry import EngineRegistry, Package

PLUGIN_API = 1
SETTINGS = "hone_megatron.settings:MegatronSettings"
PACKAGE = Package("megatron", "megatron-core", "pip install megatron-core==0.16.1")


def register() -> None:
    """Add the engine to hone's registry."""
    EngineRegistry.register(
        model_type=("language_model", "value_model"),
        backend="megatron",
        target="hone_megatron.engine:MegatronEngine",
        settings=SETTINGS,
        package=PACKAGE,
    )
