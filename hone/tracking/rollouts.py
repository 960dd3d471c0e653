"""Trajectories as lines for people: what was asked, answered and rewarded, token by token.

Which of a step's trajectories are kept depends on nothing but their number, so two equal runs keep the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from hone.types import Trajectory, TrajectoryGroup

Decode = Callable[[Sequence[int]], str]
"""Token ids to text: a tokenizer's `decode`, special tokens shown."""

TrainerLogprobs = Mapping[tuple[int, int], Sequence[float]]
"""(group, trajectory within the group) -> the trainer's log-prob of every token, aligned with `token_ids`."""

_DIGITS = 7  # log-probs are float32 sums: more digits would be noise, and they are most of the file


class TokenTexts:
    """The text of single tokens, decoded once per run: a tokenizer call per token and step would cost real time."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        for token_id in token_ids:
            if token_id not in self._known:
                self._known[token_id] = self._decode([token_id])
        return [self._known[token_id] for token_id in token_ids]

    def joined(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that belong together: a character may be spread over several of them."""
        return self._decode(list(token_ids))


def spread(total: int, keep: int) -> list[int]:
    """`keep` positions spread evenly over `range(total)`, first and last included.

    >>> spread(9, 3)
    [0, 4, 8]
    """
    if keep >= total:
        return list(range(total))
    if keep <= 1:
        return [0][:keep]
    return [round(i * (total - 1) / (keep - 1)) for i in range(keep)]


def places_to_keep(groups: Sequence[TrajectoryGroup], keep: int | None) -> list[tuple[int, int]]:
    """(group, trajectory within the group) of `keep` trajectories of a step, in their order; None: all of them."""
    places = [(i, j) for i, group in enumerate(groups) for j in range(len(group.trajectories))]
    return places if keep is None else [places[position] for position in spread(len(places), keep)]


def rollout_record(
    group: TrajectoryGroup, position: int, texts: TokenTexts, trainer_logprobs: Sequence[float] | None = None
) -> dict[str, Any]:
    """One line of `rollouts.jsonl`, without the step and the evaluation set (null: training) that it begins with.

    Lists that speak of tokens (`token_ids`, `tokens`, `rollout_logprobs`, `logprob_gap`) cover everything after the
    prompt; log-probs are null on tokens that the policy did not sample. `logprob_gap` is trainer minus rollout, and
    null as a whole where the trainer computed none. A trajectory that failed has reward null: it was not scored.
    `weight_versions` is run-length: [version, number of sampled tokens].
    """
    trajectory = group.trajectories[position]
    start = trajectory.prompt_length
    sampled = [bool(mask) for mask in trajectory.loss_mask[start:]]
    prompt_ids, token_ids = trajectory.token_ids[:start], trajectory.token_ids[start:]
    return {
        "prompt_id": trajectory.prompt_id,
        "draw": group.prompt.draw,
        "sample": trajectory.sample,
        "status": str(trajectory.status),
        "stop_reason": str(trajectory.stop_reason),
        "reward": trajectory.reward if trajectory.status.trainable else None,
        "components": dict(trajectory.components),
        "error": trajectory.error,
        "prompt": texts.joined(prompt_ids),
        "response": trajectory.response,
        "ground_truth": group.prompt.ground_truth,
        "response_length": trajectory.response_length,
        "turns": trajectory.turns,
        "weight_versions": _spans(trajectory),
        "prompt_token_ids": list(prompt_ids),
        "token_ids": list(token_ids),
        "tokens": texts(token_ids),
        "rollout_logprobs": _where(sampled, trajectory.rollout_logprobs[start:]),
        "logprob_gap": _gap(trajectory, sampled, trainer_logprobs),
    }


def _spans(trajectory: Trajectory) -> list[list[int]]:
    versions = [v for v, mask in zip(trajectory.weight_versions, trajectory.loss_mask, strict=True) if mask]
    return [[version, len(list(run))] for version, run in groupby(versions)]


def _where(sampled: Sequence[bool], values: Sequence[float]) -> list[float | None]:
    return [_rounded(value) if mask else None for mask, value in zip(sampled, values, strict=True)]


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
