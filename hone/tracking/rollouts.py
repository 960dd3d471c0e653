"""Write trajectories as lines of `rollouts.jsonl.gz`: prompt, response and reward, token by token.

The choice of a step's trajectories depends on the step and their number only, so two equal runs keep the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple

from hone.types import FAILED, Trajectory, TrajectoryGroup

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text: a tokenizer's `decode` that keeps special tokens."""


class OfTrainer(NamedTuple):
    """A number for each token of a trajectory, aligned with `token_ids`; None: the trainer computed none."""

    logprobs: Sequence[float] | None = None
    advantages: Sequence[float] | None = None


NONE = OfTrainer()
ByPlace = Mapping[tuple[int, int], OfTrainer]  # by group, and trajectory in the group

_DIGITS = 7  # log-probs are float32 sums; more digits would be noise, and they take most of the file


class TokenTexts:
    """The text of single tokens. Each is decoded once per run, because tokenizer calls are slow."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        for token_id in token_ids:
            if token_id not in self._known:
                self._known[token_id] = self._decode([token_id])
        return [self._known[token_id] for token_id in token_ids]

    def joined(self, token_ids: Sequence[int]) -> str:
        """Decode tokens together: one character may span several tokens."""
        return self._decode(list(token_ids))


def spread(total: int, keep: int) -> list[int]:
    """Choose `keep` positions spread evenly over `range(total)`, with the first and the last.

    >>> spread(9, 3)
    [0, 4, 8]
    """
    if keep >= total:
        return list(range(total))
    if keep <= 1:
        return [0][:keep]
    return [round(i * (total - 1) / (keep - 1)) for i in range(keep)]


def places_to_keep(groups: Sequence[TrajectoryGroup], keep: int | None, step: int = 0) -> list[tuple[int, int]]:
    """(group, trajectory in the group) of about `keep` trajectories of a step, in order; None: all of them.

    Whole groups are kept, other ones in each step, because an answer says little without the others to its prompt; if
    one group is more than `keep`, a part of it. The first answer that failed is always among them.
    """
    every = [(i, j) for i, group in enumerate(groups) for j in range(len(group.trajectories))]
    if keep is None or keep >= len(every):
        return every
    if keep == 0 or not every:
        return []
    size = max(len(group.trajectories) for group in groups)
    if keep < size:
        chosen = step % len(groups)
        places = {(chosen, j) for j in spread(len(groups[chosen].trajectories), keep)}
    else:
        whole = {(step + i) % len(groups) for i in spread(len(groups), keep // size)}
        places = {place for place in every if place[0] in whole}
    failed = next((place for place in every if groups[place[0]].trajectories[place[1]].status in FAILED), None)
    return sorted(places | ({failed} if failed is not None else set()))


def rollout_record(
    group: TrajectoryGroup, position: int, texts: TokenTexts, trainer: OfTrainer = NONE
) -> dict[str, Any]:
    """One line of `rollouts.jsonl.gz`; the caller prepends the step and the evaluation set (null: training).

    Lists per token (`token_ids`, `tokens`, `rollout_logprobs`, `logprob_gap`) cover everything after the prompt.
    Log-probs are null for tokens that the policy did not sample. `logprob_gap` is trainer minus rollout, or null if the
    trainer computed no log-probs. `advantages` is one number if all sampled tokens have the same. A failed trajectory
    was not scored: its reward is null. `weight_versions` is run-length encoded: [version, number of sampled tokens].
    `conversation` has what was said, called and read in each turn, if there are several turns or calls.
    """
    trajectory = group.trajectories[position]
    start = trajectory.prompt_length
    sampled = [bool(mask) for mask in trajectory.loss_mask[start:]]
    prompt_ids, token_ids = trajectory.token_ids[:start], trajectory.token_ids[start:]
    return {
        "prompt_id": trajectory.prompt_id,
        "draw": group.prompt.draw,
        "sample": trajectory.sample,
        "role": trajectory.role,
        "status": str(trajectory.status),
        "stop_reason": str(trajectory.stop_reason),
        "reward": trajectory.reward if trajectory.status.trainable else None,
        "components": dict(trajectory.components),
        "printed": dict(trajectory.printed),
        "advantages": _shared(trainer.advantages and _where(sampled, trainer.advantages[start:])),
        "error": trajectory.error,
        "question": _question(group),
        "prompt": texts.joined(prompt_ids),
        "response": trajectory.response,
        "ground_truth": group.prompt.ground_truth,
        "response_length": trajectory.response_length,
        "turns": trajectory.turns,
        "conversation": _conversation(trajectory, texts),
        "weight_versions": _spans(trajectory),
        "prompt_token_ids": list(prompt_ids),
        "token_ids": list(token_ids),
        "tokens": texts(token_ids),
        "rollout_logprobs": _where(sampled, trajectory.rollout_logprobs[start:]),
        "logprob_gap": _gap(trajectory, sampled, trainer.logprobs),
    }


def _question(group: TrajectoryGroup) -> str:
    """The text of the last user message, without chat template and system prompt."""
    asked = next((one for one in reversed(group.prompt.messages) if one["role"] == "user"), None)
    content = asked["content"] if asked is not None else ""
    if isinstance(content, str):
        return content
    return " ".join(str(part["text"]) for part in content if part.get("type") == "text")


def _conversation(one: Trajectory, texts: TokenTexts) -> list[dict[str, Any]]:
    """Return each turn's text, calls and observation; a single turn is the response."""
    if len(one.spans) < 2 and not any(span.calls for span in one.spans):
        return []
    ends = [*(span.start for span in one.spans[1:]), len(one.token_ids)]
    return [
        {
            "said": texts.joined(one.token_ids[span.start : span.end]),
            "calls": [asdict(call) for call in span.calls],
            "read": texts.joined(one.token_ids[span.end : end]),
            "reward": span.reward,
            "anchor": span.anchor,
        }
        for span, end in zip(one.spans, ends, strict=True)
    ]


def _spans(trajectory: Trajectory) -> list[list[int]]:
    versions = [v for v, mask in zip(trajectory.weight_versions, trajectory.loss_mask, strict=True) if mask]
    return [[version, len(list(run))] for version, run in groupby(versions)]


def _where(sampled: Sequence[bool], values: Sequence[float]) -> list[float | None]:
    return [_rounded(value) if mask else None for mask, value in zip(sampled, values, strict=True)]


def _shared(values: list[float | None] | Sequence[float] | None) -> Any:
    """The only number among the values, or all of them."""
    numbers = {value for value in values or () if value is not None}
    return numbers.pop() if len(numbers) == 1 else values


def _rounded(value: float) -> float:
    return round(float(value), _DIGITS) if math.isfinite(value) else float(value)


def _gap(
    trajectory: Trajectory, sampled: Sequence[bool], trainer_logprobs: Sequence[float] | None
) -> list[float | None] | None:
    if trainer_logprobs is None:
        return None
    if len(trainer_logprobs) != len(trajectory.token_ids):
        raise ValueError(
            f"{trajectory.prompt_id} sample {trajectory.sample}: {len(trainer_logprobs)} trainer log-probs "
            f"for {len(trajectory.token_ids)} tokens"
        )
    start = trajectory.prompt_length
    pairs = zip(trainer_logprobs[start:], trajectory.rollout_logprobs[start:], strict=True)
    return _where(sampled, [float(trainer) - rollout for trainer, rollout in pairs])
