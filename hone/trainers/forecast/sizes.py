"""Sizes that a forecast needs from files: dimensions of the models, lengths of prompts and samples."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config import Config
from hone.data.packing import SHORTEST_SHARED, shared_beginning
from hone.data.preference_readers import PairMaker
from hone.data.settings import RowsConfig
from hone.data.sources.base import SUFFIXES, DataError, suffix_of
from hone.data.stream import PromptMaker, TooLong, make_renderer
from hone.models.errors import ModelError
from hone.models.loading import check_model_source
from hone.models.quantised import method_of
from hone.models.settings import ModelConfig
from hone.models.source import is_converted
from hone.models.tokenizer import load_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.planner.anatomy import Anatomy, examine
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.run_model import FOLDER, local_model
from hone.trainers.supervised.assembly import maker_of

TOKENIZER_FILE = "tokenizer_config.json"
READ = 200  # rows whose length is measured
POLICY = "actor"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and answers; of supervised data, of the items of a step. `source` says how they are known."""

    prompt: float = 0.0  # mean; of a pair what both answers begin with
    prompt_max: int = 0
    response: float = 0.0
    response_max: int = 0  # of supervised data the whole sequence
    source: str = ""
    rows: int = 0  # of the training data; 0: unknown
    sequences: int = 1  # of an item: two answers of a pair

    @property
    def sequence(self) -> float:
        """Mean tokens of a trained sequence."""
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything about a run that its settings alone do not say."""

    models: Mapping[str, Anatomy]  # by role; `actor` is always there
    lengths: Lengths


def sizes_of(config: Config, folder: Path, convert: bool = True, needs_rows: bool = True) -> Sizes:
    """Read the sizes of a run's models and of its first rows; models that have to be made are made in `folder`.

    Without `convert`, models are made only if that is quick: ModelError is raised for one that has to be dequantised
    or converted whole. Without `needs_rows`, rows or a tokenizer that are not there cost only what is counted with
    them: lengths are then the limits of the run file, and the number of rows is 0. Raises ModelError for a model that
    hone would not load, DataError for rows that it would not read.
    """
    known: dict[str, Anatomy] = {}
    found: dict[str, Anatomy] = {}
    models = models_of(config)
    for name, model in models.items() if not convert else ():
        if model.build is None and (is_converted(str(model.path)) or method_of(check_model_source(model))):
            raise ModelError(f"the model of {name}, {model.path}, would have to be converted first")
    local = {name: local_model(model, folder / name / FOLDER) for name, model in models.items()}
    for name, model in local.items():
        key = f"{model.path}@{model.revision}"
        known[key] = known.get(key) or examine(model)
        found[name] = known[key]
    lacks = "" if needs_rows else uncounted(config.data.train, local[POLICY])
    return Sizes(found, allowed_lengths(config, lacks) if lacks else measured_lengths(config, local[POLICY]))


def models_of(config: Any) -> dict[str, ModelConfig]:
    """The different models that a run file names, by role."""
    named: dict[str, ModelConfig | None] = {POLICY: config.model}
    if config.kind == "prefer":
        named["reference"] = config.reference.model
    if isinstance(config, PolicyRunConfig):
        named["reference"] = None if config.reference is None else config.reference.model
        named["critic"] = None if config.critic is None else config.critic.model
        named["process_reward"] = None if config.process_reward is None else config.process_reward.model
        teachers = {} if config.distillation is None else config.distillation.teachers
        named |= {f"teacher {name}": one.model for name, one in teachers.items()}
        rewards = {name: one.model for name, one in config.reward.components.items() if one.model is not None}
        named |= {f"reward {name}": ModelConfig(path=one.path) for name, one in rewards.items()}
    return {name: model for name, model in named.items() if model is not None}


def measured_lengths(config: Any, model: ModelConfig) -> Lengths:
    """Lengths of the first rows; of answers the longest, until a run or a user says more."""
    renderer = make_renderer(config.data, load_tokenizer(model), load_image_processor(model))
    if isinstance(config, PolicyRunConfig):
        prompts = PromptMaker("train", config.data.train, renderer, "data.train")
        tokens = [len(one.token_ids) for one in _first_items(prompts)]
        longest = config.rollout.sampling.max_response_tokens
        mean, most = _mean_and_most(tokens)
        said = f"prompts: mean of {len(tokens)} rows; answers: taken as long as allowed"
        return Lengths(mean, most, longest, longest, said, len(prompts.reader))
    maker = maker_of(config)("train", config.data.train, renderer, "data.train")
    items = _first_items(maker)
    pairs = 2 if items and hasattr(items[0], "rejected") else 1
    mean, most = _mean_and_most([_tokens(one) / pairs for one in items])
    alike, _ = _mean_and_most([_alike(one) for one in items] if pairs == 2 else [])
    return Lengths(alike, 0, mean - alike, round(most), f"mean of {len(items)} rows", len(maker.reader), pairs)


def uncounted(rows: RowsConfig, model: ModelConfig) -> str:
    """Return the file that is missing to count the tokens of rows; empty if none is known to be missing."""
    in_files = rows.source is None and suffix_of(rows.path) in SUFFIXES
    if in_files and not (Path(rows.path).exists() or glob.glob(rows.path, recursive=True)):
        return f"no file {rows.path}"
    folder = Path(model.path or "").expanduser()
    if model.path and not model.tokenizer and folder.is_dir() and not (folder / TOKENIZER_FILE).is_file():
        return f"no {TOKENIZER_FILE} in {folder}"
    return ""


def allowed_lengths(config: Any, lacks: str) -> Lengths:
    """The longest rows that the run file allows, for a plan where the rows cannot be counted (`lacks`).

    Raises DataError if it sets no limit, or counts its steps from the rows.
    """
    rl = isinstance(config, PolicyRunConfig)
    key = "max_prompt_tokens" if rl else "max_sample_tokens"
    limit = getattr(config.data.train, key)
    if limit is None:
        raise DataError(f"data.train: {lacks}; to plan without the rows, say how long they are: data.train.{key}=N")
    if config.run.steps is None:
        raise DataError(f"data.train: {lacks}; to plan without the rows, add run.steps=N in place of run.epochs")
    said = f"data.train.{key}: {lacks}"
    if rl:
        longest = config.rollout.sampling.max_response_tokens
        return Lengths(limit, limit, longest, longest, said)
    return Lengths(0.0, 0, limit, limit, said, sequences=2 if maker_of(config) is PairMaker else 1)


def _alike(pair: Any) -> int:
    """Tokens that both answers of a pair begin with, and that an engine computes once."""
    found = shared_beginning([list(pair.chosen.token_ids), list(pair.rejected.token_ids)])
    return found if found >= SHORTEST_SHARED else 0


def _tokens(item: Any) -> int:
    return len(item.token_ids) if hasattr(item, "token_ids") else int(item.tokens)


def _first_items(maker: Any) -> list[Any]:
    found = []
    for index in range(maker.reader.first, min(maker.reader.last, maker.reader.first + READ)):
        try:
            found.append(maker.make(index))
        except TooLong:
            continue
    return found


def _mean_and_most(tokens: Sequence[float]) -> tuple[float, int]:
    return (sum(tokens) / len(tokens), int(max(tokens))) if tokens else (0.0, 0)


__all__ = ["POLICY", "Lengths", "Sizes", "measured_lengths", "models_of", "sizes_of"]
