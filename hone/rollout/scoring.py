"""Scoring: how likely the built-in engine finds tokens that somebody else sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.rollout.cache import PackedPrompts

_ROWS = 1024  # of logits at once


def following_logprobs(
    prompts: PackedPrompts, hidden: Tensor, head: Callable[[Tensor], Tensor], temperature: float
) -> Tensor:
    """Log-prob of each token after the earlier ones of its sequence, [T] float32 or wider; 0 for first tokens."""
    tokens = prompts.rows.shape[0]
    found = torch.zeros(tokens, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for start in range(0, tokens - 1, _ROWS):
        end = min(start + _ROWS, tokens - 1)
        logits = head(hidden[start:end]).to(found.dtype) / temperature
        targets = prompts.token_ids[start + 1 : end + 1]
        found[start + 1 : end + 1] = F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    return found.masked_fill(prompts.positions[:tokens] == 0, 0)


def in_turns(sequences: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[list[int]]:
    """Numbers of the sequences of each forward, in order: at most `max_tokens` tokens, or a single longer sequence."""
    turn: list[int] = []
    tokens = 0
    for number, sequence in enumerate(sequences):
        if turn and tokens + len(sequence) > max_tokens:
            yield turn
            turn, tokens = [], 0
        turn.append(number)
        tokens += len(sequence)
    if turn:
        yield turn
