"""Scores answers with a reward model: a value model that reads the tokens before each mark.

    answer --its own tokens if the vocabulary is the same, else rendered again--> tokens with marks
           --infer_batch--> values at the marks --the one value, or for a process reward model min, mean, last--> score

A mark is on the token that follows what is judged, because a value belongs to the state before its token: the end token
of the answer, or for a process reward model also the first token of each separator, as in the training of such models.
A sequence classifier of transformers (most published reward models) judges the whole rendered conversation instead, its
last token read too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hone.config import ConfigError
from hone.data.messages import RenderingError
from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig
from hone.models.loading import check_model_source, folder_of, has_value_head
from hone.models.settings import ModelConfig, UseConfig
from hone.models.tokenizer import load_tokenizer, vocabulary_digest
from hone.models.value_head import VALUE_HEAD_FILE, is_classifier
from hone.platforms.base import compute_dtype, current_platform
from hone.rewards.model import Answer
from hone.rewards.pool import Outcome
from hone.rewards.settings import RewardModelConfig
from hone.trainers.exports.rendering import read_rendering
from hone.types import Message
from hone.workers.scoring import ScoringModel
from hone.workers.train import TrainSpec

FOLLOWS = 0  # a token after the last one, so that its state has a value: which one makes no difference


class Unscorable(ValueError):
    """An answer that the reward model cannot score: its reward fails, it is not 0."""


def reward_model_spec(config: RewardModelConfig) -> TrainSpec:
    """Return the spec of an engine for the reward model. Raises ConfigError if the folder holds none."""
    dtype = compute_dtype(config.compute_dtype, current_platform())
    model = ModelConfig.model_validate({"path": config.path, "dtype": dtype, "use": UseConfig(context=config.context)})
    if not has_value_head(model):
        raise ConfigError(
            f"{config.path} is not a reward model: it has no {VALUE_HEAD_FILE}, as exports of `hone reward-model` do, "
            "and is no sequence classifier of transformers"
        )
    engine = EngineConfig(max_tokens_per_microbatch=config.max_tokens_per_batch, compute_dtype=config.compute_dtype)
    return TrainSpec(model, engine, "value_model")


class AnswerScorer:
    """Scores the answers of a policy with one loaded reward model."""

    def __init__(self, config: RewardModelConfig, vocabulary: str, scoring: ScoringModel) -> None:
        """`vocabulary` is the digest of the policy's. Raises ModelError for a folder without a usable tokenizer, and
        ConfigError for a rendering.json that cannot be read.
        """
        model = ModelConfig(path=config.path)
        tokenizer = load_tokenizer(model)
        self._rendering = read_rendering(folder_of(model, weights=False), tokenizer)
        self._renderer = self._rendering.renderer
        self._reads_all = is_classifier(check_model_source(model))
        if self._reads_all and config.aggregation is not None:
            raise ConfigError(f"aggregation is for process reward models, and {config.path} scores whole conversations")
        self._same_tokens = vocabulary_digest(tokenizer) == vocabulary and not self._reads_all
        self._scoring = scoring
        self._aggregation = config.aggregation
        self._separator = config.step_separator if config.aggregation is not None else ""
        positions = check_model_source(model).get("max_position_embeddings")
        self._limits = {"max_tokens_per_batch": config.max_tokens_per_batch}
        if positions is not None:
            self._limits["the model's max_position_embeddings"] = int(positions)

    def __call__(self, answers: Sequence[Answer]) -> list[Outcome]:
        """The score of each answer, in order; an answer that cannot be scored has an error and no value."""
        outcomes: list[Outcome | None] = []
        samples: list[Sample] = []
        for answer in answers:
            try:
                samples.append(self._prepared(answer))
                outcomes.append(None)
            except (Unscorable, RenderingError) as error:
                outcomes.append(Outcome(error=str(error)))
        scored = iter(self._scores(samples))
        return [next(scored) if outcome is None else outcome for outcome in outcomes]

    def _prepared(self, answer: Answer) -> Sample:
        token_ids, marks = self._as_sampled(answer) if self._same_tokens else self._rendered(answer)
        for name, limit in self._limits.items():
            if len(token_ids) > limit:
                raise Unscorable(
                    f"the answer has {len(token_ids)} tokens in the reward model's vocabulary, more than {name}={limit}"
                )
        return Sample(token_ids, marks, "answers")

    def _as_sampled(self, answer: Answer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ids, start = answer.token_ids, answer.prompt_length
        if start >= len(ids):
            raise Unscorable("the answer has no tokens")
        if ids[-1] not in self._renderer.end_token_ids:  # cut off: scored as if it had ended there
            ids = (*ids, FOLLOWS)
        said = [self._renderer.decode([token]) for token in ids[start:-1]] if self._separator else []
        marked = {len(ids) - 1, *(start + index for index in separator_tokens(said, self._separator))}
        return ids, tuple(int(position in marked) for position in range(len(ids)))

    def _rendered(self, answer: Answer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The reward model's own system prompt, template and tokens.

        The text does not contain what an environment said between turns.
        """
        if answer.turns > 1:
            why = "reads rendered conversations" if self._reads_all else "has another vocabulary than the policy"
            raise Unscorable(
                f"the reward model {why}, and an answer of {answer.turns} turns cannot be rendered from its text"
            )
        if self._reads_all:
            return self._whole(answer)
        steps = answer.response.split(self._separator) if self._separator else [answer.response]
        steps = [step for step in steps if step.strip()] or [answer.response]
        messages = self._rendering.with_system_prompt(answer.messages)
        return self._renderer.render_steps(messages, steps, self._separator, answer.tools)

    def _whole(self, answer: Answer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The conversation as the template renders it when it is over; a classifier's score is its last token's."""
        said = Message(role="assistant", content=answer.response)
        messages = [*self._rendering.with_system_prompt(answer.messages), said]
        ids = (*self._renderer.render_finished(messages, answer.tools), FOLLOWS)
        return ids, tuple(int(position == len(ids) - 1) for position in range(len(ids)))

    def _scores(self, samples: Sequence[Sample]) -> list[Outcome]:
        if not samples:
            return []
        batch = pack_samples(samples)
        values = self._scoring.infer_batch(batch).values
        assert values is not None  # it is a value model
        marked = iter(values[batch.loss_mask].tolist())
        return [self._outcome(list(itertools.islice(marked, sum(sample.loss_mask)))) for sample in samples]

    def _outcome(self, values: Sequence[float]) -> Outcome:
        if not all(map(math.isfinite, values)):
            return Outcome(error=f"the reward model's score is {values}")
        if self._aggregation is None:
            return Outcome(value=values[-1])
        right = [1 / (1 + math.exp(-max(-700.0, value))) for value in values]
        each = {"last": right[-1], "mean": sum(right) / len(right), "min": min(right)}
        return Outcome(value=each[self._aggregation], parts={"steps": float(len(right))})


def separator_tokens(pieces: Sequence[str], separator: str) -> list[int]:
    """Find the tokens, given as text, that begin a separator with something to judge before and after it.

    >>> separator_tokens(["a", "b", "\\n", "c", "\\n"], "\\n"), separator_tokens(["x", ".\\n", "\\ny"], "\\n\\n")
    ([2], [1])
    """
    if not separator:
        return []
    text = "".join(pieces)
    ends = list(itertools.accumulate(len(piece) for piece in pieces))
    found: list[int] = []
    step, at = 0, text.find(separator)
    while at >= 0:
        after = at + len(separator)
        if text[step:at].strip() and text[after:].strip():
            found.append(next(index for index, end in enumerate(ends) if at < end))
        step, at = after, text.find(separator, after)
    return found
