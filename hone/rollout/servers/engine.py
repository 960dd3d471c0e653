"""Start of an engine in a Python environment of its own (vLLM, one of a plug-in): interpreter, options, variables.

`rollout.engine` has options by the engine's own names; `EngineDefaults` has those that hone sets.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import hone
from hone.config import ConfigError
from hone.platforms.base import current_platform
from hone.plugins import environment as plugin_environment
from hone.rollout.adapters import AdapterKind
from hone.rollout.base import ServerSpec
from hone.rollout.servers.adapter import RolloutServer, model_config

LOOK_S = 60.0  # deadline of a look into an environment
ANSWER = "lacking:"
LACKING = f"""
import importlib.util, sys
found = {{name: importlib.util.find_spec(name) for name in sys.argv[1:]}}
print("\\n{ANSWER}", *(name for name, spec in found.items() if spec is None or spec.origin is None))  # or a folder
"""


@dataclass(frozen=True)
class EngineDefaults:
    """Options and environment variables with which hone starts one engine, and options that users may not set."""

    reserved: Mapping[str, str] = field(default_factory=dict)  # option that hone sets -> why, or by which setting
    options: Mapping[str, Any] = field(default_factory=dict)
    cpu: Mapping[str, Any] = field(default_factory=dict)  # further options on a CPU
    accelerator: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu_environment: Mapping[str, str] = field(default_factory=dict)

    def engine_options(self, spec: ServerSpec, needed: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's options: hone's for this platform, then what this run needs, then `rollout.engine`."""
        given = {name.replace("-", "_"): value for name, value in spec.settings.engine.items()}
        check_reserved(spec.settings.engine, self.reserved)
        platform = self._platform_options(spec)
        files = {"load_format": "auto"} if spec.frozen else {}  # read the model's own weights
        found = {**self.options, **platform, **files, "dtype": spec.dtype, **needed, **given}
        if "skip_tokenizer_init" not in found and not has_tokenizer(spec):
            found["skip_tokenizer_init"] = True
        return found

    def _platform_options(self, spec: ServerSpec) -> dict[str, Any]:
        platform = current_platform()
        if platform.device == "cpu":
            return dict(self.cpu)
        return {**self.accelerator, **platform.rollout_options(spec.settings.backend, spec.nodes)}

    def server_environment(self, spec: ServerSpec, folder: Path) -> dict[str, str]:
        """Variables of the server, which imports hone from `folder`; values that the user has set are kept."""
        ours = {**self.environment, **(self.cpu_environment if current_platform().device == "cpu" else {})}
        given = {name: os.environ[name] for name in ours if name in os.environ and name != "OMP_NUM_THREADS"}
        path = [str(folder / "path"), spec.environment.get("PYTHONPATH", "")]
        return {
            **plugin_environment(),
            **ours,
            **given,
            **spec.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "HONE_TOKEN": spec.token,
        }


class EngineServer(RolloutServer):
    """A `RolloutServer` whose engine is installed in another Python environment; constructing checks that one too."""

    package: str  # of the engine, in its Python
    loads_files = True  # it loads weights in the layout of the model's files
    defaults: EngineDefaults
    how_to_install: str
    memory_option: str  # the share of a device's memory that it takes
    _packages: tuple[str, ...] = ()  # that it imports for this model, besides its own
    rope_option = ""  # by which it chooses the frequencies of `longrope` as hone does; empty: it does otherwise

    def __init__(self, spec: ServerSpec) -> None:
        whole = model_config(spec)
        self._config = whole.get_text_config()
        needed = self._adapter_options(spec, self._config) | self._model_options(self._config)
        self._options = self.defaults.engine_options(spec, needed)
        self._python = environment_python(spec.settings.backend, spec.settings.python, self.how_to_install)
        has_tokenizer = not self._options.get("skip_tokenizer_init", False)
        super().__init__(spec, whole, dtype_of(self._options["dtype"]), has_tokenizer)

    @classmethod
    def _adapter_options(cls, spec: ServerSpec, config: Any) -> dict[str, Any]:
        """Options of the engine for the adapters that it will serve on a model of this configuration.

        Raises ConfigError if it can serve none.
        """
        if spec.adapters:
            raise ConfigError(f"rollout.backend={spec.settings.backend} serves the policy only, and no other adapters")
        return {}

    @classmethod
    def _model_options(cls, config: Any) -> dict[str, Any]:
        """Options that the engine needs for a model of this configuration."""
        return {}

    @classmethod
    def _adapter_kinds(cls, spec: ServerSpec, model: str) -> list[AdapterKind]:
        """The other adapters' and the policy's own. Raises ConfigError for one it cannot take."""
        kinds = {name: AdapterKind.of(files.config, model) for name, files in spec.adapters.items()}
        for name, kind in kinds.items():
            if reason := cls.unfit_for_adapter(kind):
                raise ConfigError(f"adapter {name} ({spec.adapters[name].folder}): {reason}")
        return [*kinds.values(), *([spec.adapter] if spec.adapter else [])]

    @property
    def memory_fraction(self) -> tuple[str, float] | None:
        """The option that sets its share of a device's memory, and the share; None on a CPU."""
        share = self._options.get(self.memory_option)
        return None if share is None else (self.memory_option, float(share))

    @property
    def _takes_adapters(self) -> bool:
        return bool(self._options.get("enable_lora"))

    async def start(self) -> None:
        """As `RolloutServer.start`. Raises ConfigError for a Python that lacks a package."""
        if not self._spec.host.machine:  # elsewhere the server's log says what is missing
            await asyncio.to_thread(check_packages, self._python, self.package, self.how_to_install, self._packages)
        await super().start()


def has_tokenizer(spec: ServerSpec) -> bool:
    """Return whether the model's folder, or the hub for all that is known, has a tokenizer."""
    folder = Path(spec.tokenizer or spec.model).expanduser()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def command_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments: `{"enforce_eager": True, "max_model_len": 128}` -> `--enforce-eager --max-model-len=128`.

    False becomes `--no-...`, a mapping JSON, a list several arguments; None leaves the engine's own default. The
    engine's own parser checks names and values.
    """
    found: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, Mapping):
            found.append(f"{flag}={json.dumps(value)}")
        elif isinstance(value, list | tuple):
            found += [flag, *map(str, value)]
        else:
            found.append(f"{flag}={value}")
    return found


def check_reserved(options: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    """Raise ConfigError for an option that hone sets itself; `reserved` says by which setting, or why."""
    for name in options:
        plain = name.replace("-", "_")
        if plain in reserved:
            raise ConfigError(f"rollout.engine.{name} is not to be set here: {reserved[plain]}")


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
def check_packages(python: Path, engine: str, how_to_install: str, further: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for an interpreter without `engine`, or without what hone's part in its processes imports.

    `further`: packages that the engine imports for this model only.
    """
    packages = {engine: engine, "torch": "torch", "numpy": "numpy", "zmq": "pyzmq", "xxhash": "xxhash"}
    packages |= {name: name for name in further}
    command = [str(python), "-c", LACKING, *packages]
    clean = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # it would add the trainer's packages
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


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of this name. Raises ConfigError if there is none."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"rollout.engine.dtype should be a dtype such as bfloat16, found {name!r}")
    return found


__all__ = ["EngineDefaults", "EngineServer", "command_arguments"]
