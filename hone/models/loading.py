"""Loading Hugging Face models for training: packed attention, every weight accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from hone.models.attention import PACKED
from hone.models.building import build_model
from hone.models.errors import ModelError
from hone.models.settings import ModelConfig
from hone.models.source import check_source
from hone.models.transformers_patches import ShardFn, shard_while_loading
from hone.registry import unknown

VALUE_HEAD_FILE = "value_head.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class ValueModel(nn.Module):
    """The body of a language model with one number per token instead of logits.

    The head starts at zero: before training, every value is 0 and advantages are plain returns.
    """

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        hidden = body.config.get_text_config().hidden_size
        self.score = nn.Linear(hidden, 1, bias=False, dtype=body.dtype)
        nn.init.zeros_(self.score.weight)

    def values(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R], in float32 at least: values are compared with returns, not with each other."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden.to(wide) @ self.score.weight.to(wide).T)[:, 0]

    def save_pretrained(self, folder: str | Path) -> None:
        """The body in the Hugging Face format (for `AutoModel`), and the head beside it."""
        self.body.save_pretrained(folder)
        save_file({"score.weight": self.score.weight.detach().contiguous()}, Path(folder) / VALUE_HEAD_FILE)


def load_language_model(model: ModelConfig, shard: ShardFn | None = None) -> PreTrainedModel:
    """A causal language model in `model.dtype` on the CPU, with packed attention.

    With `shard`, the model is sharded while it is empty, and then only this rank's shards are read from its files; a
    model that is built on the spot is built whole first. Raises ModelError naming the folder and what is wrong:
    missing, no config.json, unknown or quantised architecture, code of its own, weights missing.
    """
    if model.build is not None:
        built = build_model(model.build, DTYPES[model.dtype])
        if shard is not None:
            shard(built)
        return built
    check_model_source(model)
    return _from_pretrained(AutoModelForCausalLM, model, shard)


def load_value_model(model: ModelConfig, shard: ShardFn | None = None) -> ValueModel:
    """A value model: the body of the language model at `model.path`, and its value head if one lies beside it.

    `shard` is as in `load_language_model`, and is given the body; the head is small and whole.
    """
    if model.build is not None:
        body = cast(PreTrainedModel, build_model(model.build, DTYPES[model.dtype]).base_model)
        if shard is not None:
            shard(body)
        return ValueModel(body)
    check_model_source(model)
    value_model = ValueModel(_from_pretrained(AutoModel, model, shard))
    head = Path(str(model.path)) / VALUE_HEAD_FILE
    if head.is_file():
        value_model.load_state_dict(load_file(head), strict=False)
    return value_model


def check_model_source(model: ModelConfig) -> dict[str, Any]:
    """The content of a model's config.json, if hone can train such a model. Raises ModelError if not."""
    assert model.path is not None
    config = check_source(model.path, "model.path", "config.json", model.trust_remote_code, model.revision)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"model.path {model.path!r} is quantised ({method}); hone trains unquantised weights")
    kind = config.get("model_type")
    known = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]
    if kind not in known and not (model.trust_remote_code and config.get("auto_map")):
        problem = unknown("causal language model architecture", str(kind), known).split(" (there is:")[0]
        raise ModelError(f"model.path {model.path!r}: {problem} (model_type in config.json)")
    return config


def _from_pretrained(cls: Any, model: ModelConfig, shard: ShardFn | None) -> PreTrainedModel:
    sharded: AbstractContextManager[dict[str, Any]] = nullcontext({}) if shard is None else shard_while_loading(shard)
    try:
        with without_progress_bars(), sharded as options:
            loaded, report = cls.from_pretrained(
                model.path,
                revision=model.revision or "main",
                trust_remote_code=model.trust_remote_code,
                dtype=DTYPES[model.dtype],
                attn_implementation=PACKED,
                use_safetensors=True,  # never a pickle
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"model.path {model.path!r} cannot be loaded: {reason}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"model.path {model.path!r} lacks {len(missing)} weights: {', '.join(missing[:5])}")
    result: PreTrainedModel = loaded
    return result


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
