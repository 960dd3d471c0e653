"""Log-probs that the built-in engine gives to existing tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.rollout.builtin.cache import PackedPrompts
from hone.types import Scored

_ROWS = 1024  # rows of logits at once


@dataclass(frozen=True, slots=True)
class Following:
    """Log-prob of each token after the earlier ones of its sequence; float32 or wider."""

    logprobs: Tensor  # [T]; 0 for first tokens
    top_ids: Tensor  # [T, K] int64, the most likely tokens of each place, most likely first
    top_logprobs: Tensor  # [T, K]; entries of first tokens have no meaning, here and above

    def split(self, lengths: Sequence[int]) -> list[Following]:
        parts = zip(
            *(one.split(list(lengths)) for one in (self.logprobs, self.top_ids, self.top_logprobs)), strict=True
        )
        return [Following(*part) for part in parts]

    def scored(self) -> Scored:
        """The values of one sequence, on the host."""
        logprobs = tuple(self.logprobs.tolist())
        if self.top_ids.shape[1] == 0:
            return Scored(logprobs)
        ids, likely = (((), *map(tuple, one[1:].tolist())) for one in (self.top_ids, self.top_logprobs))
        return Scored(logprobs, tuple(ids), tuple(likely))


def following_logprobs(
    prompts: PackedPrompts, hidden: Tensor, head: Callable[[Tensor], Tensor], temperature: float, top_k: int = 0
) -> Following:
    """Score each token given the earlier ones of its sequence, and find the `top_k` most likely at its place."""
    tokens = prompts.rows.shape[0]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    found = torch.zeros(tokens, dtype=dtype, device=hidden.device)
    top_ids = torch.zeros(tokens, top_k, dtype=torch.int64, device=hidden.device)
    likely = torch.zeros(tokens, top_k, dtype=dtype, device=hidden.device)
    for start in range(0, tokens - 1, _ROWS):
        end = min(start + _ROWS, tokens - 1)
        logits = head(hidden[start:end]).to(found.dtype) / temperature
        targets = prompts.token_ids[start + 1 : end + 1]
        scores = F.log_softmax(logits, -1)
        found[start + 1 : end + 1] = scores.gather(1, targets[:, None])[:, 0]
        if top_k:
            likely[start + 1 : end + 1], top_ids[start + 1 : end + 1] = scores.topk(top_k)
    return Following(found.masked_fill(prompts.positions[:tokens] == 0, 0), top_ids, likely)


def score_in_turns(
    score: Callable[[PackedPrompts], Following],
    sequences: Sequence[tuple[int, ...]],
    max_tokens: int,
    device: torch.device,
) -> list[Following]:
    """Score each sequence, in forwards of at most `max_tokens` tokens or one longer sequence."""
    found: list[Following] = []
    for turn in in_turns(sequences, max_tokens):
        chosen = [sequences[number] for number in turn]
        prompts = PackedPrompts.of(chosen, list(range(len(turn))), device)
        found += score(prompts).split([len(sequence) for sequence in chosen])
    return found


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
