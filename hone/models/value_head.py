"""Files of value heads: hone's own file next to the model, or a transformers sequence classifier with one label.

value_head.safetensors     score.weight [1, hidden]; the value at a token judges the text before it
*ForSequenceClassification score.weight among the weights; the score of a text is taken after its last token
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from hone.models.errors import ModelError
from hone.models.files.left_out import INDEX, WHOLE, read_index
from hone.models.files.tensors import save_tensors

VALUE_HEAD_FILE = "value_head.safetensors"
SCORE = "score.weight"
_CLASSIFIER = "ForSequenceClassification"


def values_of(head: Tensor, hidden: Tensor) -> Tensor:
    """Values of hidden states with a head [1, hidden]: [R, hidden] -> [R], in float32 at least."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden.to(wide) @ head.to(wide).T)[:, 0]


def is_classifier(config: dict[str, Any]) -> bool:
    """Return whether config.json describes a transformers sequence classifier (most published reward models)."""
    return any(str(name).endswith(_CLASSIFIER) for name in config.get("architectures") or ())


def read_value_head(folder: Path, config: dict[str, Any]) -> Tensor | None:
    """Read the head [1, hidden] from a model's folder; None if it has none.

    Raises ModelError for a classifier of several classes, or one whose head is not a single matrix `score.weight`.
    """
    if (folder / VALUE_HEAD_FILE).is_file():
        return load_file(folder / VALUE_HEAD_FILE)[SCORE]
    if not is_classifier(config):
        return None
    head = _find(folder)
    if head is None:
        raise ModelError(f"{folder} is a sequence classifier without {SCORE!r}; hone reads heads of that name only")
    if head.shape[0] != 1:
        raise ModelError(f"{folder} has {head.shape[0]} classes; a value or reward model has one output")
    return head


def check_classifier(folder: Path) -> None:
    """Raise ModelError if transformers has no sequence classifier with a `score` head for this architecture."""
    _empty_classifier(AutoConfig.from_pretrained(folder, num_labels=1))


def _empty_classifier(config: Any) -> Any:
    try:
        with torch.device("meta"):
            empty = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        kind = config.model_type
        raise ModelError(f"transformers has no sequence classifier of the architecture {kind!r}") from error
    if SCORE not in dict(empty.named_parameters()):
        raise ModelError(f"{type(empty).__name__} of transformers has no head named {SCORE!r}")
    return empty


def to_classifier(folder: Path, pad_token_id: int) -> None:
    """Convert an exported value model, in place, to a transformers sequence classifier with one label.

    The score of a text is then the value at the next token. Raises ModelError if transformers has no such classifier
    for the architecture.
    """
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    config.pad_token_id = pad_token_id  # transformers finds the last token of each text with it
    empty = _empty_classifier(config)
    prefix = f"{empty.base_model_prefix}."
    head = load_file(folder / VALUE_HEAD_FILE)[SCORE]
    paths = sorted(folder.glob("model*.safetensors"))
    for path in paths:
        tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(path).items()}
        save_tensors(tensors | ({SCORE: head} if path == paths[-1] else {}), path)
    index = folder / INDEX
    if index.is_file():
        said = json.loads(index.read_text(encoding="utf-8"))
        where = {f"{prefix}{name}": file for name, file in said["weight_map"].items()}
        said["weight_map"] = where | {SCORE: paths[-1].name}
        said["metadata"]["total_size"] += head.nbytes
        index.write_text(json.dumps(said, indent=1), encoding="utf-8")
    config.architectures = [type(empty).__name__]
    config.save_pretrained(folder)
    (folder / VALUE_HEAD_FILE).unlink()


def _find(folder: Path) -> Tensor | None:
    index = read_index(folder)
    name = WHOLE if index is None else index[0].get(SCORE, WHOLE)
    if not (folder / name).is_file():
        return None
    with safe_open(folder / name, framework="pt") as file:
        found: Tensor | None = file.get_tensor(SCORE) if SCORE in file.keys() else None  # noqa: SIM118
    return found
