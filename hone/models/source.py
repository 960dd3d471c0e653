"""Finding a model's files before anything in them is used: a folder here, or a hub by its own client.

    ./folder             as it is
    owner/name           Hugging Face hub, by `huggingface_hub`: cached, resumed, checked and locked there
    modelscope:owner/name    ModelScope, by `modelscope` (an extra)

A branch or tag is resolved to its commit once, and every later look is at that commit.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is the client's own base class
    GatedRepoError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hone.models.errors import ModelError

MODELSCOPE = "modelscope:"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEXTS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]  # all but the weights
_WEIGHTS = ["*.safetensors"]  # never a pickle
_NOT_OURS = ["*/*.safetensors", "consolidated*"]  # the same weights in their authors' own formats


@dataclass(frozen=True, slots=True)
class Located:
    """A model's files in a folder of this machine."""

    folder: Path
    commit: str = ""  # on the hub that it came from; empty: a folder of one's own


def locate(source: str, key: str, revision: str | None = None, *, weights: bool = True) -> Located:
    """The folder of `source`, brought here first if it is on a hub; without `weights`, only what is said about them.

    `key` is the setting that names it, for errors. Raises ModelError: nothing there, an unknown revision, no access, no
    network and nothing in the cache.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return Located(folder)
    if folder.exists():
        raise ModelError(f"{key}: {source} is a file; a model is a folder with config.json")
    name = source.removeprefix(MODELSCOPE)
    if not _HUB_NAME.fullmatch(name):
        raise ModelError(f"{key}: no folder {source}{_near(folder.parent, folder.name)}")
    fetch = _from_modelscope if source.startswith(MODELSCOPE) else _from_hugging_face
    try:
        return fetch(name, revision, weights)
    except ModelError as error:
        raise ModelError(f"{key} {source!r} {error}") from error.__cause__


def check_source(source: str, key: str, name: str, trust_remote_code: bool, revision: str | None) -> dict[str, Any]:
    """The JSON file `name` of a folder or hub entry, after checking that nothing in it asks to run foreign code.

    Raises ModelError: no such folder, file missing or broken, code of its own (`auto_map`) without permission.
    """
    folder = locate(source, key, revision, weights=False).folder
    path = folder / name
    if not path.is_file():
        raise ModelError(f"{key}: folder {source} has no {name}{_near(folder)}")
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


@cache
def _from_hugging_face(name: str, revision: str | None, weights: bool) -> Located:
    wanted = revision or "main"
    try:
        found = snapshot_download(
            name, revision=wanted, allow_patterns=_TEXTS + _WEIGHTS * weights, ignore_patterns=_NOT_OURS
        )
    except RevisionNotFoundError as error:
        raise ModelError(f"has no revision {wanted!r} on the hub; a revision is a branch, a tag or a commit") from error
    except GatedRepoError as error:
        raise ModelError("asks for its terms to be accepted on the hub, and for a token of yours (HF_TOKEN)") from error
    except RepositoryNotFoundError as error:
        raise ModelError("is no folder here, and the hub has no such model (or HF_TOKEN may not read it)") from error
    except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ModelError(f"is no folder here, and not whole in the cache; {why}") from error
    except (HTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelError(f"is no folder here, and not to be had from the hub: {_first_line(error)}") from error
    folder = Path(str(found))
    return Located(folder, folder.name)


@cache
def _from_modelscope(name: str, revision: str | None, weights: bool) -> Located:
    """`modelscope` knows no commit of a branch: what is recorded is the revision that was asked for."""
    try:
        from modelscope import snapshot_download as download  # of an extra
        from modelscope_hub.errors import HubError
    except ImportError as error:
        raise ModelError("needs the package modelscope; it comes with hone-rl[modelscope]") from error
    wanted = revision or "master"
    try:
        found = download(name, revision=wanted, allow_patterns=_TEXTS + _WEIGHTS * weights, ignore_patterns=_NOT_OURS)
    except (HubError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"(revision {wanted!r}) is not to be had from ModelScope: {_first_line(error)}") from error
    return Located(Path(found), wanted)


def _near(folder: Path, name: str = "") -> str:
    """What a reader may have meant: model folders close by."""
    if not folder.is_dir():
        return f" (nor {folder})" if name else ""
    models = sorted(path.parent.name for path in folder.glob("*/config.json"))[:5]
    return f"; {folder} has the models {', '.join(models)}" if models else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
