"""The Python environment in which an engine's own processes run: found, and looked at before a server starts there."""

from __future__ import annotations

import subprocess
from functools import lru_cache
from pathlib import Path

import hone
from hone.config import ConfigError

LOOK_S = 60.0  # deadline of a look into an environment
LACKING = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"


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
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"rollout.python: {python} does not run ({error}); {how_to_install}") from error
    lacking = done.stdout.split()
    if engine in lacking:
        raise ConfigError(f"rollout.python: {python} has no {engine}; {how_to_install}")
    if lacking:
        missing = " ".join(packages[name] for name in lacking)
        raise ConfigError(f"rollout.python: {python} has no {missing}: {python} -m pip install {missing}")
