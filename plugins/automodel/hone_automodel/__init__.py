"""The `automodel` engine: NeMo Automodel's parallelisation, and its Qwen3, under hone's batches and losses.

In reading order: `settings`; `models`, Automodel's own classes; `sharding`, its tensor parallelism and FSDP2; `engine`,
which is `fsdp2` with these two in the place of its own.
"""

from hone.engines.registry import EngineRegistry, Package

PLUGIN_API = 1


def register() -> None:
    """Add the engine to hone's registry."""
    EngineRegistry.register(
        model_type=("language_model", "value_model"),
        backend="automodel",
        target="hone_automodel.engine:AutomodelEngine",
        settings="hone_automodel.settings:AutomodelSettings",
        package=Package("nemo_automodel", "nemo-automodel", "pip install --no-deps nemo-automodel==0.7.0"),
    )
