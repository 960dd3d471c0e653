"""Loading of Hugging Face models for training, with packed attention; a missing or unexpected weight is an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hone.models.attention.adapting import adapt
from hone.models.attention.packed import PACKED
from hone.models.attention.stateful import separate_sequences, unknown_states
from hone.models.attention.support import obstacle
from hone.models.building import build_model
from hone.models.dropout import set_dropout
from hone.models.errors import ModelError
from hone.models.files.left_out import require_all_files
from hone.models.files.progress_bars import without_progress_bars
from hone.models.files.tensors import save_tensors
from hone.models.four_bit import finish, quantise, reading_options
from hone.models.numerics.precision import hold_in
from hone.models.quantised import loading_options, method_of, refuse_leftovers
from hone.models.rotary import fix_rotary
from hone.models.settings import FourBitConfig, ModelConfig
from hone.models.source import check_source, locate
from hone.models.transformers_patches import ShardFn, loaded_weights_stay, shard_while_loading
from hone.models.value_head import SCORE, VALUE_HEAD_FILE, read_value_head, values_of
from hone.models.vision.model import FAMILIES, attention_names, auto_class, freeze_tower
from hone.registry import unknown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

ClassOf = Callable[[str], type[PreTrainedModel]]
"""Model type -> another package's class for it, with transformers' config and names of weights."""


class ValueModel(nn.Module):
    """Body of a language model with a head of one number per token instead of logits.

    The head starts at zero, so before training every value is 0 and advantages are plain returns.
    """

    def __init__(self, body: PreTrainedModel, head_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.body = body
        hidden = body.config.get_text_config().hidden_size
        self.score = nn.Linear(hidden, 1, bias=False, dtype=head_dtype or body.dtype)
        nn.init.zeros_(self.score.weight)

    def values(self, hidden: Tensor) -> Tensor:
        """Values of hidden states, [R, hidden] -> [R], in float32 at least."""
        return values_of(self.score.weight, hidden)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the body in the Hugging Face format (for `AutoModel`), and the head in the same folder."""
        self.body.save_pretrained(folder)
        save_tensors({SCORE: self.score.weight.detach().contiguous()}, Path(folder) / VALUE_HEAD_FILE)


def load_language_model(
    model: ModelConfig,
    shard: ShardFn | None = None,
    four_bit: FourBitConfig | None = None,
    class_of: ClassOf | None = None,
) -> PreTrainedModel:
    """Load a causal language model in `model.dtype` on the CPU, with packed attention.

    `shard` shards the empty model, so that only this rank's shards are read from its files; a model from `model.build`
    is whole first. `four_bit` quantises each linear layer as it is read. `class_of` gives another class than
    transformers' own. Raises ModelError naming the folder and the problem: missing folder, config.json or weights,
    unknown architecture or quantisation, untrusted code.
    """
    if model.build is not None:
        built = _as_used(_in_class(build_model(model.build, DTYPES[model.dtype]), class_of), model)
        return _finished(built, shard, four_bit)
    kind = str(check_model_source(model).get("model_type"))
    cls: Any = auto_class(kind) if class_of is None else class_of(kind)
    return _as_used(_from_pretrained(cls, model, shard, four_bit), model)


def load_value_model(
    model: ModelConfig,
    shard: ShardFn | None = None,
    head_dtype: torch.dtype | None = None,
    four_bit: FourBitConfig | None = None,
    class_of: ClassOf | None = None,
) -> ValueModel:
    """Load a value model: the body of the language model at `model.path`, and its head if there is one (`value_head`).

    `shard`, `four_bit` and `class_of` act on the body as in `load_language_model`; the head stays whole, in the body's
    precision or `head_dtype`.
    """
    if model.build is not None:
        built = cast(PreTrainedModel, build_model(model.build, DTYPES[model.dtype]).base_model)
        return ValueModel(_finished(_as_used(_in_class(built, class_of), model), shard, four_bit), head_dtype)
    config = check_model_source(model)
    cls = AutoModel if class_of is None else class_of(str(config.get("model_type")))
    value_model = ValueModel(_as_used(_from_pretrained(cls, model, shard, four_bit), model), head_dtype)
    head = read_value_head(folder_of(model), config)
    if head is not None:
        value_model.load_state_dict({SCORE: head}, strict=False)
    return value_model


def load_head(model: ModelConfig) -> PreTrainedModel:
    """Load a language model's output layer only; all other weights are on the meta device.

    Loads the whole model if its files lack that layer under its name (a model from `model.build`, or quantised).
    """
    if model.build is not None or method_of(check_model_source(model)):
        return load_language_model(model)
    empty = _empty(auto_class(str(check_model_source(model).get("model_type"))), model)
    layer = cast(nn.Module, empty.get_output_embeddings())
    named = list(empty.named_parameters(remove_duplicate=False))
    for key, parameter in list(layer.named_parameters()):
        found = _read_first(folder_of(model), [name for name, one in named if one is parameter])
        if found is None:
            return load_language_model(model)
        setattr(layer, key, nn.Parameter(found.to(DTYPES[model.dtype]), requires_grad=False))
    return empty


def _read_first(folder: Path, names: list[str]) -> Tensor | None:
    """Read the first of these tensors found in the safetensors files; tied weights are stored under one name."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in names:
                if name in file.keys():  # noqa: SIM118  not a mapping
                    tensor: Tensor = file.get_tensor(name)
                    return tensor
    return None


def has_value_head(model: ModelConfig) -> bool:
    """Return whether the folder has a value head, so that the model is a critic or reward model."""
    return read_value_head(folder_of(model), check_model_source(model)) is not None


def folder_of(model: ModelConfig, weights: bool = True) -> Path:
    """The local folder with the model's files; downloads them first if `model.path` is on a hub."""
    assert model.path is not None
    return locate(model.path, model.key_of("path"), model.revision, weights=weights).folder


def check_model_source(model: ModelConfig) -> dict[str, Any]:
    """Read a model's config.json. Raises ModelError if hone cannot train such a model."""
    assert model.path is not None
    config = check_source(model.path, model.key_of("path"), "config.json", model.trust_remote_code, model.revision)
    loading_options(config, _source(model), sharded=False)  # raises ModelError if hone cannot dequantise it
    kind = config.get("model_type")
    known = [*(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING), *FAMILIES]
    if kind not in known and not (model.trust_remote_code and config.get("auto_map")):
        problem = unknown("causal language model architecture", str(kind), known).split(" (there is:")[0]
        raise ModelError(f"{_source(model)}: {problem} (model_type in config.json)")
    return config


def _source(model: ModelConfig) -> str:
    return f"{model.key_of('path')} {model.path!r}"


def _as_used(loaded: PreTrainedModel, model: ModelConfig) -> PreTrainedModel:
    """Apply `model.use` to a loaded model. Raises ModelError if its layers carry a state that hone does not know."""
    if reason := unknown_states(loaded):
        source = f"architecture {loaded.config.model_type!r}" if model.path is None else _source(model)
        raise ModelError(f"{source} cannot be trained: {reason}")
    adapt(loaded)
    fix_rotary(loaded, model.used.context, model.path or f"architecture {loaded.config.model_type!r}")
    set_dropout(loaded, model.used.dropout)
    separate_sequences(loaded)
    if model.used.vision is not None and model.used.vision.freeze_tower:
        freeze_tower(loaded)
    return loaded


def _in_class(built: PreTrainedModel, class_of: ClassOf | None) -> PreTrainedModel:
    """The same model with the same weights, as an instance of another class."""
    if class_of is None:
        return built
    kind = built.config.model_type
    with torch.random.fork_rng(devices=[]):
        made: PreTrainedModel = class_of(kind)._from_config(
            built.config, dtype=built.dtype, attn_implementation=attention_names(kind, PACKED)
        )
    made.load_state_dict(built.state_dict())
    return made


def _finished(built: PreTrainedModel, shard: ShardFn | None, four_bit: FourBitConfig | None) -> PreTrainedModel:
    """Quantise and shard a model that was built whole."""
    if four_bit is not None:
        quantise(built, four_bit, f"architecture {built.config.model_type!r}")
    if shard is not None:
        shard(built)
    return built


def _from_pretrained(
    cls: Any, model: ModelConfig, shard: ShardFn | None, four_bit: FourBitConfig | None
) -> PreTrainedModel:
    config = check_model_source(model)
    kind = str(config.get("model_type"))
    dtype = DTYPES[model.dtype]
    quantised = loading_options(config, _source(model), sharded=shard is not None)
    narrow = {} if four_bit is None else reading_options(_empty(cls, model), four_bit, str(model.path))

    def held(empty: PreTrainedModel) -> None:
        hold_in(empty, dtype)  # FSDP gathers the weights of a layer in one dtype
        assert shard is not None
        shard(empty)

    sharded: AbstractContextManager[dict[str, Any]] = nullcontext({}) if shard is None else shard_while_loading(held)
    require_all_files(folder_of(model))  # what is wrong is a sentence here, and may be a traceback in transformers
    try:
        _refuse_untrainable(model)
        with without_progress_bars(), loaded_weights_stay(), sharded as options:
            loaded, report = cls.from_pretrained(
                folder_of(model),
                trust_remote_code=model.trust_remote_code,
                dtype=dtype,
                attn_implementation=attention_names(kind, PACKED),
                use_safetensors=True,  # never a pickle
                output_loading_info=True,
                **options,
                **(narrow or quantised),
            )
    except ModelError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{_source(model)} cannot be loaded: {reason}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{_source(model)} lacks {len(missing)} weights: {', '.join(missing[:5])}")
    result: PreTrainedModel = loaded
    refuse_leftovers(report["unexpected_keys"], _source(model))
    if quantised:
        result._weight_conversions = None  # type: ignore[assignment]  # or saving would quantise again
        if dtype != torch.bfloat16:  # transformers dequantises to bfloat16
            result.to(dtype)  # type: ignore[arg-type]
    if four_bit is not None:
        finish(result)
    elif shard is None:
        hold_in(result, dtype)
    return result


def _refuse_untrainable(model: ModelConfig) -> None:
    """Raise ModelError, before any weight is read, if packed attention cannot compute this model exactly."""
    config = AutoConfig.from_pretrained(folder_of(model), trust_remote_code=model.trust_remote_code)
    if reason := obstacle(config):
        raise ModelError(f"{_source(model)} ({config.model_type}) cannot be trained: {reason}")


def empty_model(model: ModelConfig, is_value_model: bool) -> PreTrainedModel | ValueModel:
    """Build the model at `model.path` without weights, on the meta device: its names, shapes and config.

    Raises ModelError if its files are quantised.
    """
    if not is_value_model:
        return _empty(auto_class(str(check_model_source(model).get("model_type"))), model)
    body = _empty(AutoModel, model)
    with torch.device("meta"):
        return ValueModel(body)


def _empty(cls: Any, model: ModelConfig) -> PreTrainedModel:
    """Build the model without weights, on the meta device. Raises ModelError if its files are quantised."""
    if method := method_of(check_model_source(model)):
        raise ModelError(
            f"{_source(model)} is quantised ({method}) already; a run's own model is dequantised into the run "
            "folder first: start there, or name its <run.dir>/model here"
        )
    trusted = model.trust_remote_code
    config = AutoConfig.from_pretrained(folder_of(model, weights=False), trust_remote_code=trusted)
    with torch.device("meta"):
        return cls.from_config(config, trust_remote_code=trusted)  # type: ignore[no-any-return]
