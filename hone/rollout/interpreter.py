"""The Python environment in which an engine's own processes run: found, and looked at before a server starts there."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path

import hone
from hone.config import ConfigError

LOOK_S = 60.0  # deadline of a look into an environment
ANSWER = "lacking:"
LACKING = f"""
import importlib.util, sys
found = {{name: importlib.util.find_spec(name) for name in sys.argv[1:]}}
print("\\n{ANSWER}", *(name for name, spec in found.items() if spec is None or spec.origin is None))  # or a folder
"""


def environment_python(backend: str, python: str, how_to_install: str) -> Path:
    """The Python that has the engine: `python`, else `.venv-<backend>`. Raises ConfigError that says how to make it."""
    if python:
        found = Path(python).expanduser()
        if not found.is_file():
            raise ConfigError(f"rollout.python: there is no interpreter {python}; {how_to_install}")
        return found.absolute()
    for place in (Path.cwd(), Path(hone.__file__).parents[1]):
        if (found := place / f".venv-{backend}" / "bin" / "python").is_file():
            return found
    raise ConfigError(
        f"rollout.backend={backend} needs a Python environment of its own, and .venv-{backend} is not there: "
        f"{how_to_install}"
    )


@lru_cache(maxsize=8)
def check_packages(python: Path, engine: str, how_to_install: str) -> None:
    """Raises ConfigError for an interpreter without `engine`, or without what hone's part in its processes imports."""
    packages = {engine: engine, "torch": "torch", "numpy": "numpy", "zmq": "pyzmq", "xxhash": "xxhash"}
    command = [str(python), "-c", LACKING, *packages]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # that of the trainer's Python
    try:
        done = subprocess.run(command, cwd="/", env=clean, capture_output=True, text=True, timeout=LOOK_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"rollout.python: {python} does not run ({error}); {how_to_install}") from error
    last = next(reversed(done.stdout.splitlines()), "")
    if done.returncode or not last.startswith(ANSWER):
        said = (done.stderr.strip() or done.stdout.strip() or "nothing")[-200:]
        raise ConfigError(
            f"rollout.python: {python} is no Python that runs: it ended with {done.returncode} and said {said!r}; "
            f"{how_to_install}"
        )
    lacking = last.removeprefix(ANSWER).split()
    if engine in lacking:
        raise ConfigError(f"rollout.python: {python} has no {engine}; {how_to_install}")
    if lacking:
        missing = " ".join(packages[name] for name in lacking)
        raise ConfigError(f"rollout.python: {python} has no {missing}: {python} -m pip install {missing}")
