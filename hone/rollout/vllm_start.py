"""What is decided before a vLLM server starts: its options, its environment, its Python, and whether the model may run.

Tested with vLLM 0.32.0; nothing of it is imported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import hone
from hone.config import ConfigError
from hone.models.source import check_source
from hone.platforms.base import current_platform
from hone.rollout.base import ServerSpec
from hone.rollout.engine_options import check_reserved

SOCKET = "s"  # its name; a socket's whole path has to be short

HOW_TO_INSTALL = (
    "`make .venv-vllm` makes one for CPUs; for NVIDIA GPUs: python3 -m venv .venv-vllm && "
    ".venv-vllm/bin/pip install vllm==0.32.0; or name the interpreter of another one in rollout.python"
)

RESERVED = {
    **dict.fromkeys(("model", "revision", "tokenizer", "tokenizer_revision"), "the model is model.path"),
    **dict.fromkeys(("host", "port", "uds", "api_key", "root_path"), "the server listens where only hone finds it"),
    **dict.fromkeys(("middleware", "worker_extension_cls", "weight_transfer_config"), "hone puts its own there"),
    **dict.fromkeys(("served_model_name", "enable_scale_out", "tokens_only"), "hone speaks to the server by these"),
    "trust_remote_code": "it is model.trust_remote_code",
    "tensor_parallel_size": "it is rollout.tensor_parallel",
    "data_parallel_size": "it is rollout.replicas",
    "pipeline_parallel_size": "each rank must hold a part of every layer; use rollout.tensor_parallel",
    "logprobs_mode": "the trainer needs log-probs of the distribution that was sampled (processed_logprobs)",
    "seed": "every request has its own",
}
OWN_OPTIONS: Mapping[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,
    "middleware": "hone.workers.vllm.ControlGuard",
    "worker_extension_cls": "hone.workers.vllm.HoneWorker",
    "weight_transfer_config": {"backend": "hone"},
}
DEFAULTS: Mapping[str, Any] = {
    "load_format": "dummy",  # the first sync brings the weights
    "enable_prompt_tokens_details": True,  # how much of a prompt came from the prefix cache
    "disable_uvicorn_access_log": True,
}
CPU_DEFAULTS: Mapping[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 * 2**20,
    "block_size": 32,
    "max_model_len": -1,  # as long as the model can, if that much KV fits
}
ACCELERATOR_DEFAULTS: Mapping[str, Any] = {
    "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.5,  # the rest is for a trainer on the same device
}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens the control paths, which the guard stands before
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less, where there is one worker
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


def server_options(spec: ServerSpec, folder: Path) -> dict[str, Any]:
    """Options that hone sets itself; the server's socket is in `folder`."""
    return {
        "model": spec.model,
        "uds": str(folder / SOCKET),
        "tensor_parallel_size": spec.settings.tensor_parallel,
        **OWN_OPTIONS,
        "revision": spec.revision or None,
        "tokenizer": spec.tokenizer or None,
        "trust_remote_code": spec.trust_remote_code or None,
    }


def server_environment(spec: ServerSpec, folder: Path) -> dict[str, str]:
    """Environment variables of the server; what the user has set of vLLM's stays."""
    ours = {**ENVIRONMENT, **(CPU_ENVIRONMENT if current_platform().device == "cpu" else {})}
    given = {name: os.environ[name] for name in ours if name in os.environ and name != "OMP_NUM_THREADS"}
    path = [str(folder / "path"), spec.environment.get("PYTHONPATH", "")]
    return {
        **ours,
        **given,
        **spec.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "HONE_TOKEN": spec.token,
    }


def engine_options(spec: ServerSpec) -> dict[str, Any]:
    """vLLM's options: ours for this platform, overridden by `rollout.engine`."""
    given = dict(spec.settings.engine)
    check_reserved(given, RESERVED)
    platform = CPU_DEFAULTS if current_platform().device == "cpu" else ACCELERATOR_DEFAULTS
    found = {**DEFAULTS, **platform, "dtype": spec.dtype, **{name.replace("-", "_"): v for name, v in given.items()}}
    if "skip_tokenizer_init" not in found and not _has_tokenizer(spec):
        found["skip_tokenizer_init"] = True
    return found


def served_dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"rollout.engine.dtype should be a dtype such as bfloat16, found {name!r}")
    return found


def _has_tokenizer(spec: ServerSpec) -> bool:
    folder = Path(spec.tokenizer or spec.model).expanduser()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def interpreter(python: str) -> Path:
    """The Python that has vLLM. Raises ConfigError, with the command that makes one, if there is none."""
    if python:
        found = Path(python).expanduser()
        if not found.is_file():
            raise ConfigError(f"rollout.python: there is no interpreter {python}; {HOW_TO_INSTALL}")
        return found.absolute()
    places = [Path.cwd(), Path(hone.__file__).parents[1]]
    for place in places:
        if (found := place / ".venv-vllm" / "bin" / "python").is_file():
            return found
    raise ConfigError(
        f"rollout.backend=vllm needs a Python environment with vLLM, and .venv-vllm is not there: {HOW_TO_INSTALL}"
    )


def refuse_own_code(spec: ServerSpec) -> None:
    """Raises ModelError for a model or tokenizer that brings code of its own, unless that was allowed."""
    revision = spec.revision or None
    check_source(spec.model, "model.path", "config.json", spec.trust_remote_code, revision)
    tokenizer = Path(spec.tokenizer or spec.model).expanduser()
    if (tokenizer / "tokenizer_config.json").is_file():
        check_source(str(tokenizer), "the tokenizer", "tokenizer_config.json", spec.trust_remote_code, None)


def vocabulary(spec: ServerSpec) -> int:
    config = AutoConfig.from_pretrained(
        spec.model, revision=spec.revision or "main", trust_remote_code=spec.trust_remote_code
    )
    size: int = config.get_text_config().vocab_size
    return size


def private_folder() -> Path:
    """A folder that only this user can enter: the server's socket, and a path with hone's package and nothing else.

    A socket's path has to be short; and the folder that holds `hone` may hold a torch that is not the server's.
    """
    folder = Path(tempfile.mkdtemp(prefix="hone-vllm-"))
    (folder / "path").mkdir()
    (folder / "path" / "hone").symlink_to(Path(hone.__file__).parent.absolute(), target_is_directory=True)
    return folder
