"""Adapters on disk, in PEFT's format, and which base model they belong to.

adapter_config.json            PEFT's settings: rank, alpha, target modules, the base model's path
adapter_model.safetensors      "base_model.model.<module>.lora_A.weight" ..., whole tensors
value_head.safetensors         the head of a value model
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hone.full_disk import until_room
from hone.models.errors import ModelError
from hone.models.files.tensors import save_tensors
from hone.models.loading import folder_of
from hone.models.settings import ModelConfig
from hone.models.value_head import VALUE_HEAD_FILE

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

_SAMPLES, _SAMPLE_BYTES = 16, 65536  # of each weight file: enough to tell two models of one architecture apart
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # PEFT settings with which an adapter is not W + s B A
    "bias": ("none", None),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "lora_bias": (None, False),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
}


class AdapterError(ModelError):
    """An adapter that cannot be made, read or used; the message names the key or file."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """The adapter in a folder."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]  # without `PREFIX`
    head: dict[str, Tensor]  # of a value model; empty: the folder has none

    @property
    def modules(self) -> list[str]:
        """The modules (or, for experts, wrapped modules) that it adapts."""
        return sorted({name.split(".lora_A.")[0] for name in self.tensors if ".lora_A." in name})


def read_adapter(path: str, key: str) -> StoredAdapter:
    """Read an adapter that PEFT or hone has written; errors call the setting `key`. Raises AdapterError."""
    folder = Path(path).expanduser()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            there = ", ".join(sorted(p.parent.name for p in folder.parent.glob(f"*/{CONFIG_FILE}"))[:5])
            raise AdapterError(
                f"{key}: {path} has no {name}" + (f"; {folder.parent} has the adapters {there}" if there else "")
            )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
        head = load_file(folder / VALUE_HEAD_FILE) if (folder / VALUE_HEAD_FILE).is_file() else {}
    except (ValueError, OSError, SafetensorError) as error:
        raise AdapterError(f"{key}: {path} cannot be read: {error}") from error
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{key}: {path} is an adapter of type {config.get('peft_type')}, should be LORA")
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise AdapterError(f"{key}: {path} has {name}={config[name]!r}, which hone does not train on")
    begun = config.get("init_lora_weights", True)
    if str(begun).lower().startswith(("pissa", "olora", "corda", "lora_ga", "loftq")):
        raise AdapterError(
            f"{key}: {path} was begun by {begun} and changes its base model; convert it with PEFT's "
            "path_initial_model_for_weight_conversion first"
        )
    found = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    ends = tuple(f"{name}." for name in config.get("modules_to_save") or ())
    strange = [name for name in found if ".lora_" not in name and not any(f".{one}" in f".{name}" for one in ends)]
    if strange:
        raise AdapterError(f"{key}: {path} holds {strange[0]}, which is no part of a LoRA adapter")
    return StoredAdapter(config, found, head)


def write_adapter(
    folder: Path, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], head: dict[str, Tensor], writes: bool
) -> None:
    """Write an adapter's files. Every rank takes the `tensors`, which is a collective, and one rank `writes`."""
    found = {name: tensor.contiguous().cpu() for name, tensor in tensors}
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(found, folder / WEIGHTS_FILE)
    text = json.dumps(config, indent=2, sort_keys=True)
    until_room(lambda: (folder / CONFIG_FILE).write_text(text, encoding="utf-8"))
    if head:
        save_tensors({name: tensor.contiguous().cpu() for name, tensor in head.items()}, folder / VALUE_HEAD_FILE)


def base_identity(model: ModelConfig) -> dict[str, Any]:
    """Return the identity of an adapter's base: path, revision, and a digest of config.json and of parts of the files.

    The digest takes the first and last bytes of each file and 16 places between: two models of one architecture differ,
    even if one was fine-tuned from the other.
    """
    digest = blake2b(digest_size=16)
    if model.build is not None:
        digest.update(model.build.model_dump_json().encode())
        return {"path": None, "revision": None, "digest": digest.hexdigest()}
    folder = folder_of(model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("_name_or_path", "transformers_version"):  # of the writer, not of the model
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES + 1):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return {"path": model.path, "revision": model.revision, "digest": digest.hexdigest()}


def check_base(stored: dict[str, Any], mine: dict[str, Any], where: Path) -> None:
    """Raise AdapterError if a checkpoint's adapter was trained on another base model than this run's."""
    if stored["digest"] != mine["digest"]:
        raise AdapterError(
            f"{where} holds an adapter for {_name(stored)}, and this run's base model is {_name(mine)}: other "
            "weights; set model.path to the base that it was trained on"
        )


def file_name(name: str) -> str:
    """The name in PEFT's file of a tensor that the model's state dict calls `name`."""
    name = name.replace(".default.", ".")
    return name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name


def _name(identity: dict[str, Any]) -> str:
    path = identity["path"] or "a model built on the spot"
    revision = f" at {identity['revision']}" if identity["revision"] else ""
    return f"{path}{revision} (digest {identity['digest'][:12]})"
