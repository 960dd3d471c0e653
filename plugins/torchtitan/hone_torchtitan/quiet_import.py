"""Imports torchtitan first, without its warnings, if it is the version whose modules this engine was tested with."""

from __future__ import annotations

import importlib.metadata
import warnings

VERSION = "0.3.0"


def require_version(found: str) -> None:
    """Raise ImportError for another version, with the command that installs the right one."""
    if found != VERSION:
        raise ImportError(
            f"torchtitan {found} is installed, and the torchtitan engine works with {VERSION} only: "
            f"pip install --no-deps torchtitan=={VERSION}"
        )


require_version(importlib.metadata.version("torchtitan"))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchtitan.models.llama3
        import torchtitan.models.qwen3  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"torchtitan needs {missing.name}, which is not installed: pip install spmd_types==0.2.3 tyro triton"
        ) from missing
