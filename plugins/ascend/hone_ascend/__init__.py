"""Huawei's Ascend NPUs: the platform `ascend`, and the engine `megatron` on it. No part of either ever ran on an NPU.

In reading order: `platform`; `mindspeed`, Megatron-Core with MindSpeed's patches, for which hone-megatron is installed.
"""

import importlib.util

from hone.engines.registry import EngineRegistry
from hone.platforms import PLATFORMS

PLUGIN_API = 1


def register() -> None:
    """Add the platform to hone's registry; and with hone-megatron, its engine for these devices."""
    PLATFORMS.register("ascend", "hone_ascend.platform:AscendPlatform")
    if importlib.util.find_spec("hone_megatron") is None:
        return
    from hone_megatron import PACKAGE, SETTINGS  # whichever of the two plug-ins comes first names the settings

    EngineRegistry.register(
        model_type=("language_model", "value_model"),
        backend="megatron",
        device="npu",
        vendor="huawei",
        target="hone_ascend.mindspeed.engine:MindSpeedEngine",
        settings=SETTINGS,
        package=PACKAGE,
    )
