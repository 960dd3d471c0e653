"""Looking at a model's folder (or hub entry) before anything in it is used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from hone.models.errors import ModelError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_source(source: str, key: str, name: str, trust_remote_code: bool, revision: str | None) -> dict[str, Any]:
    """The JSON file `name` of a folder or hub entry, after checking that nothing in it asks to run foreign code.

    Raises ModelError: no such folder, file missing or broken, code of its own (`auto_map`) without permission.
    """
    path = _find(source, key, name, revision)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{key}: {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{key}: {path} should hold a JSON object, found {type(config).__name__}")
    if config.get("auto_map") and not trust_remote_code:
        raise ModelError(
            f"{key} {source!r} brings Python code of its own (auto_map in {name}), which hone does not run; "
            "read that code, then set model.trust_remote_code=true if you want it"
        )
    return config


def _find(source: str, key: str, name: str, revision: str | None) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / name).is_file():
            raise ModelError(f"{key}: folder {source} has no {name}{_near(folder)}")
        return folder / name
    if folder.exists():
        raise ModelError(f"{key}: {source} is a file; a model is a folder with {name}")
    if not _HUB_NAME.fullmatch(source):
        raise ModelError(f"{key}: no folder {source}{_near(folder.parent, folder.name)}")
    try:
        found = cached_file(source, name, revision=revision or "main")
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{key} {source!r} is no folder here, and not to be had from the hub: {reason}") from error
    if found is None:
        raise ModelError(f"{key} {source!r} has no {name}")
    return Path(found)


def _near(folder: Path, name: str = "") -> str:
    """What a reader may have meant: model folders close by."""
    if not folder.is_dir():
        return f" (nor {folder})" if name else ""
    models = sorted(path.parent.name for path in folder.glob("*/config.json"))[:5]
    return f"; {folder} has the models {', '.join(models)}" if models else ""
