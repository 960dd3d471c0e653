"""MindSpeed's patches on megatron-core, and what this machine lacks for them.

import mindspeed.megatron_adaptor     torch's `cuda` becomes `npu` (torch_npu.contrib.transfer_to_npu), and modules
                                      of megatron-core are patched; before anything imports these
repatch(settings)                     the patches again, for a program without Megatron's command line
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from hone_ascend.platform import TOOLKIT, TOOLKIT_VARIABLE, AscendPlatform, toolkit_version

ADAPTOR = "mindspeed.megatron_adaptor"
PACKAGES = {  # package -> what installs it
    "torch_npu": "pip install torch_npu, in the version of your torch",
    "megatron.core": "pip install megatron-core==0.16.1",
    "mindspeed": "git clone -b core_r0.16.0 https://gitcode.com/Ascend/MindSpeed.git && pip install -e MindSpeed; "
    "PyPI's package of this name does not build",
}
FEWEST_PATCHES = ["--optimization-level", "0"]  # what megatron-core needs to run on an NPU, without fused operators

_found_megatron: list[str] = []
"""Modules of megatron-core that were imported before the patches, and lack some of them."""


def missing() -> list[str]:
    """List what has to be installed before MindSpeed can be imported here, and how."""
    lacks = [f"{name} ({how})" for name, how in PACKAGES.items() if not _is_there(name)]
    if not toolkit_version():
        where = f"no {TOOLKIT}, and {TOOLKIT_VARIABLE} names none; run its set_env.sh after the installation"
        lacks.insert(0, f"CANN, Huawei's toolkit ({where})")
    return lacks


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def patch_megatron() -> None:
    """Apply MindSpeed's patches, once. Raises ImportError naming everything that is missing."""
    if ADAPTOR in sys.modules:
        return
    if lacks := missing():
        raise ImportError(f"megatron on an NPU needs MindSpeed, and this machine lacks {'; '.join(lacks)}")
    if reason := AscendPlatform().why_unavailable():
        raise ImportError(f"megatron on an NPU needs MindSpeed, which needs an NPU: {reason}")
    _found_megatron.extend(name for name in sys.modules if name.startswith("megatron.core."))
    arguments = sys.argv
    sys.argv = [*arguments[:1], *FEWEST_PATCHES]  # the adaptor reads the command line of the program
    try:
        importlib.import_module(ADAPTOR)
    except (OSError, RuntimeError) as error:
        raise ImportError(f"{ADAPTOR} cannot be imported: {error}") from error
    finally:
        sys.argv = arguments


def repatch(settings: Mapping[str, Any]) -> None:
    """Tell MindSpeed's patches the settings of this engine.

    Raises RuntimeError if megatron-core was imported before it was patched.
    """
    if _found_megatron:
        raise RuntimeError(
            f"{_found_megatron[0]} was imported before MindSpeed could patch it; use the megatron engine for no other "
            "device in a process that trains on an NPU"
        )
    sys.modules[ADAPTOR].repatch(dict(settings))
