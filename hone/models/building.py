"""Model folders that hone makes itself: models built from an architecture with given sizes, and models saved whole."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hone.models.attention.packed import PACKED
from hone.models.attention.support import obstacle
from hone.models.errors import ModelError
from hone.models.files.partial import alone
from hone.models.settings import BuildConfig
from hone.models.tokenizer import SPECIAL_TOKENS
from hone.models.transformers_patches import name_body
from hone.models.vision.building import BUILT, vision_language_config
from hone.models.vision.model import attention_names, auto_class
from hone.registry import unknown

GENERATION = "generation_config.json"

# Our name -> names in transformers' configs; the first one that a config has is set.
_FIELDS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "mlp_size": ("intermediate_size", "n_inner"),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "tie_embeddings": ("tie_word_embeddings",),
}


def build_config(build: BuildConfig) -> PreTrainedConfig:
    """The transformers config of the model. Raises ModelError for an unknown architecture or option."""
    if build.vision is not None or build.architecture in BUILT:
        return vision_language_config(build)
    architectures = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]
    if build.architecture not in architectures:
        raise ModelError("model.build.architecture: " + unknown("architecture", build.architecture, architectures))
    cls = CONFIG_MAPPING[build.architecture]
    fields = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    values = _sizes(build, fields)
    for option in build.options:
        if option not in fields:
            raise ModelError("model.build.options: " + unknown(f"setting of {cls.__name__}", option, sorted(fields)))
    vocabulary = len(SPECIAL_TOKENS) + len(build.characters)
    values |= {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config: PreTrainedConfig = cls(**{**values, **build.options})
    return config


def _sizes(build: BuildConfig, fields: set[str]) -> dict[str, Any]:
    sizes = {
        "hidden_size": build.hidden_size,
        "layers": build.layers,
        "heads": build.heads,
        "kv_heads": build.kv_heads or build.heads,
        "head_size": build.head_size or build.hidden_size // build.heads,
        "mlp_size": build.mlp_size,
        "max_positions": build.max_positions,
        "tie_embeddings": build.tie_embeddings,
    }
    values: dict[str, Any] = {}
    for name, value in sizes.items():
        theirs = next((word for word in _FIELDS[name] if word in fields), None)
        if theirs is not None:
            values[theirs] = value
        elif name == "layers" and any(isinstance(one, list) and len(one) == value for one in build.options.values()):
            continue  # a list of the kinds of layers says how many there are (Nemotron-H)
        elif getattr(build, name) != type(build).model_fields[name].default:
            raise ModelError(
                f"model.build.{name}={getattr(build, name)} does not exist in architecture {build.architecture!r}; "
                "remove it, or choose another architecture"
            )
    return values


def build_model(build: BuildConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose random weights depend only on sizes and seed. Does not use the caller's random generators.

    Raises ModelError for an architecture that hone cannot train.
    """
    config = build_config(build)
    if reason := obstacle(config):
        raise ModelError(f"model.build.architecture={config.model_type!r} cannot be trained: {reason}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(build.seed)
        kind = config.model_type
        model: PreTrainedModel = auto_class(kind).from_config(
            config, dtype=dtype, attn_implementation=attention_names(kind, PACKED)
        )
    name_body(model)
    return model


@contextmanager
def into_place(folder: Path, writes: bool = True) -> Iterator[Path]:
    """A new folder beside `folder` to write into. It takes the place of `folder` at the end, or is removed on an error.

    Without `writes`, another rank writes: nothing is removed or moved here. Raises BlockingIOError if another process
    is writing `folder`.
    """
    folder = folder.resolve()  # a link to another disk stays one
    partial, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    if not writes:
        yield partial
        return
    with alone(folder.with_name(f".{folder.name}.lock")):
        if old.exists() and not folder.exists():  # a process was killed between the two renames below
            old.rename(folder)
        for one in (partial, old):  # of a process that was killed
            shutil.rmtree(one, ignore_errors=True)
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def save_configs(model: Any, config: Any, folder: Path) -> None:
    """Write config.json and, for a model that generates, generation_config.json.

    transformers loads files of published models that its own `save_pretrained` refuses to write: a temperature beside
    `do_sample: false`, or generation settings in config.json. The latter move to generation_config.json.
    """
    config, generation = _apart(config, getattr(model, "generation_config", None))
    config.save_pretrained(folder)
    if model.can_generate() and generation is not None:
        _write(generation, folder)


def save_model(model: Any, folder: Path) -> None:
    """`model.save_pretrained(folder)` for a whole model in this process, with the configs of `save_configs`."""
    config, given = model.config, getattr(model, "generation_config", None)
    plain, generation = _apart(config, given)
    try:
        model.config = plain
        if given is not None:
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder)
    finally:
        model.config = config
        if given is not None:
            model.generation_config = given
    if model.can_generate() and generation is not None:
        _write(generation, folder)


def _write(generation: GenerationConfig, folder: Path) -> None:
    generation.to_json_file(folder / GENERATION, use_diff=True, keys_to_pop=["compile_config"])


def _apart(config: Any, generation: GenerationConfig | None) -> tuple[Any, GenerationConfig | None]:
    """Copies of a model's config without generation settings, and of its generation config with them."""
    config, generation = copy.deepcopy(config), copy.deepcopy(generation)
    for name, value in config._get_generation_parameters().items():
        setattr(config, name, None)
        if generation is not None and getattr(generation, name, None) is None:
            setattr(generation, name, value)
    return config, generation
