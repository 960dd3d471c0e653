"""Log-probs that the built-in engine gives to existing tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.rollout.builtin.cache import PackedPrompts

_ROWS = 1024  # rows of logits at once


def following_logprobs(
    prompts: PackedPrompts, hidden: Tensor, head: Callable[[Tensor], Tensor], temperature: float
) -> Tensor:
    """Return each token's log-prob given the earlier ones of its sequence, [T] float32 or wider; 0 for the first."""
    tokens = prompts.rows.shape[0]
    found = torch.zeros(tokens, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for start in range(0, tokens - 1, _ROWS):
        end = min(start + _ROWS, tokens - 1)
        logits = head(hidden[start:end]).to(found.dtype) / temperature
        targets = prompts.token_ids[start + 1 : end + 1]
        found[start + 1 : end + 1] = F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    return found.masked_fill(prompts.positions[:tokens] == 0, 0)


def in_turns(sequences: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[list[int]]:
    """Yield the sequence numbers of each forward, in order: at most `max_tokens` tokens, or one longer sequence."""
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
