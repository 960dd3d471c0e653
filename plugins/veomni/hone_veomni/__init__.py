"""The `veomni` engine: VeOmni's models, operators and FSDP2 under hone's batches, losses and packed attention.

In reading order: `settings`; `models`, VeOmni's classes and operators; `sharding`, its FSDP2; `engine`, which is
`fsdp2` with these two in the place of its own. `quiet_import` imports veomni without its log.
"""

from hone.engines.registry import EngineRegistry, Package

PLUGIN_API = 1


def register() -> None:
    """Add the engine to hone's registry."""
    EngineRegistry.register(
        model_type=("language_model", "value_model"),
        backend="veomni",
        target="hone_veomni.engine:VeomniEngine",
        settings="hone_veomni.settings:VeomniSettings",
        package=Package("veomni", "veomni", "pip install --no-deps veomni==0.1.12"),
    )
