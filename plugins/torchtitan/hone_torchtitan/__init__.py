"""The `torchtitan` engine: torchtitan's decoder, parallelised by torchtitan, under hone's batches and losses.

In reading order: `settings`; `mesh`, torchtitan's meshes; `families`, which Hugging Face models it builds; `modules`,
what hone puts in place of torchtitan's attention, rotary positions, embedding and head; `sharding`, the decoder over
the meshes; `names`, what each weight is called by transformers; `engine`. `quiet_import` imports torchtitan without its
warnings, and refuses other versions. What torchtitan takes for an accelerator is in `cpu_patches`; nothing of it is
applied on one.
"""

from hone.engines.registry import EngineRegistry, Package

PLUGIN_API = 1


def register() -> None:
    """Add the engine to hone's registry."""
    EngineRegistry.register(
        model_type=("language_model", "value_model"),
        backend="torchtitan",
        target="hone_torchtitan.engine:TitanEngine",
        settings="hone_torchtitan.settings:TitanSettings",
        package=Package("torchtitan", "torchtitan", "pip install --no-deps torchtitan==0.3.0"),
    )
