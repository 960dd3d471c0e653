"""Loading Hugging Face models for training: packed attention, every weight accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from hone.models.attention import PACKED
from hone.models.building import build_model
from hone.models.errors import ModelError
from hone.models.four_bit import finish, quantise, reading_options
from hone.models.quantised import loading_options, method_of, refuse_leftovers
from hone.models.settings import FourBitConfig, ModelConfig
from hone.models.source import check_source, locate
from hone.models.transformers_patches import ShardFn, shard_while_loading
from hone.models.value_head import SCORE, VALUE_HEAD_FILE, read_value_head
from hone.models.vision import FAMILIES, attention_names, auto_class, freeze_tower
from hone.registry import unknown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class ValueModel(nn.Module):
    """The body of a language model with one number per token instead of logits.

    The head starts at zero: before training, every value is 0 and advantages are plain returns.
    """

    def __init__(self, body: PreTrainedModel, head_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.body = body
        hidden = body.config.get_text_config().hidden_size
        self.score = nn.Linear(hidden, 1, bias=False, dtype=head_dtype or body.dtype)
        nn.init.zeros_(self.score.weight)

    def values(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R], in float32 at least: values are compared with returns, not with each other."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden.to(wide) @ self.score.weight.to(wide).T)[:, 0]

    def save_pretrained(self, folder: str | Path) -> None:
        """The body in the Hugging Face format (for `AutoModel`), and the head beside it."""
        self.body.save_pretrained(folder)
        save_file({SCORE: self.score.weight.detach().contiguous()}, Path(folder) / VALUE_HEAD_FILE)


def load_language_model(
    model: ModelConfig, shard: ShardFn | None = None, four_bit: FourBitConfig | None = None
) -> PreTrainedModel:
    """A causal language model in `model.dtype` on the CPU, with packed attention.

    With `shard`, the model is sharded while it is empty, and then only this rank's shards are read from its files; a
    model that is built on the spot is built whole first. With `four_bit`, linear layers are held so, each from when it
    is read. Raises ModelError naming the folder and what is wrong: missing, no config.json, unknown or quantised
    architecture, code of its own, weights missing.
    """
    if model.build is not None:
        built = _as_used(build_model(model.build, DTYPES[model.dtype]), model)
        return _finished(built, shard, four_bit)
    kind = str(check_model_source(model).get("model_type"))
    return _as_used(_from_pretrained(auto_class(kind), model, shard, four_bit), model)


def load_value_model(
    model: ModelConfig,
    shard: ShardFn | None = None,
    head_dtype: torch.dtype | None = None,
    four_bit: FourBitConfig | None = None,
) -> ValueModel:
    """A value model: the body of the language model at `model.path`, and the head that lies there (see `value_head`).

    `shard` and `four_bit` are as in `load_language_model`, for the body; the head is small and whole, in the body's
    precision or `head_dtype`.
    """
    if model.build is not None:
        body = _as_used(cast(PreTrainedModel, build_model(model.build, DTYPES[model.dtype]).base_model), model)
        return ValueModel(_finished(body, shard, four_bit), head_dtype)
    config = check_model_source(model)
    value_model = ValueModel(_as_used(_from_pretrained(AutoModel, model, shard, four_bit), model), head_dtype)
    head = read_value_head(folder_of(model), config)
    if head is not None:
        value_model.load_state_dict({SCORE: head}, strict=False)
    return value_model


def has_value_head(model: ModelConfig) -> bool:
    """Whether a head lies beside the body, so that it is a critic or reward model, and not a language model."""
    return read_value_head(folder_of(model), check_model_source(model)) is not None


def folder_of(model: ModelConfig, weights: bool = True) -> Path:
    """The folder with the files of the model at `model.path`, brought here first if it is on a hub."""
    assert model.path is not None
    return locate(model.path, "model.path", model.revision, weights=weights).folder


def check_model_source(model: ModelConfig) -> dict[str, Any]:
    """The content of a model's config.json, if hone can train such a model. Raises ModelError if not."""
    assert model.path is not None
    config = check_source(model.path, "model.path", "config.json", model.trust_remote_code, model.revision)
    loading_options(config, model.path, sharded=False)  # refuses what cannot be dequantised
    kind = config.get("model_type")
    known = [*(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING), *FAMILIES]
    if kind not in known and not (model.trust_remote_code and config.get("auto_map")):
        problem = unknown("causal language model architecture", str(kind), known).split(" (there is:")[0]
        raise ModelError(f"model.path {model.path!r}: {problem} (model_type in config.json)")
    return config


def _as_used(loaded: PreTrainedModel, model: ModelConfig) -> PreTrainedModel:
    """The model with what `model.vision` asks of it."""
    if model.vision is not None and model.vision.freeze_tower:
        freeze_tower(loaded)
    return loaded


def _finished(built: PreTrainedModel, shard: ShardFn | None, four_bit: FourBitConfig | None) -> PreTrainedModel:
    """A model that was built whole, as it is held."""
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
    quantised = loading_options(config, str(model.path), sharded=shard is not None)
    narrow = {} if four_bit is None else reading_options(_empty(cls, model), four_bit, str(model.path))
    sharded: AbstractContextManager[dict[str, Any]] = nullcontext({}) if shard is None else shard_while_loading(shard)
    try:
        with without_progress_bars(), sharded as options:
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
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"model.path {model.path!r} cannot be loaded: {reason}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"model.path {model.path!r} lacks {len(missing)} weights: {', '.join(missing[:5])}")
    result: PreTrainedModel = loaded
    refuse_leftovers(report["unexpected_keys"], str(model.path))
    if quantised:
        result._weight_conversions = None  # type: ignore[assignment]  # or saving would quantise again
        if dtype != torch.bfloat16:  # which is what transformers dequantises to
            result.to(dtype)  # type: ignore[arg-type]
    if four_bit is not None:
        finish(result)
    return result


def _empty(cls: Any, model: ModelConfig) -> PreTrainedModel:
    """The model of the same files without weights. Raises ModelError for one that is quantised already."""
    if method := method_of(check_model_source(model)):
        raise ModelError(
            f"model.path {model.path!r} is quantised ({method}) already; a run's own model is dequantised into the run "
            "folder first: start there, or name its <run.dir>/model here"
        )
    trusted = model.trust_remote_code
    config = AutoConfig.from_pretrained(folder_of(model, weights=False), trust_remote_code=trusted)
    with torch.device("meta"):
        return cls.from_config(config, trust_remote_code=trusted)  # type: ignore[no-any-return]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws bars even for a few tensors, across whatever display the run has."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
