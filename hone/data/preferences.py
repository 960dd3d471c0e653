"""Preference data: pairs of answers, judged answers, answers judged step by step, and their packing.

    Pair         chosen, rejected ----------------\
    Judged       one answer, good or bad ----------+--pack_...--> Batch: rewards 1 and 0, a pair is one group
    Steps        one answer, each step right? ----/                      (labels of steps: extras)

`hone.algorithms.preference.losses` reads the extra tensors by these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hone.data.packing import Sample, pack_samples
from hone.types import Batch

MARGIN = "margin"  # of Batch.components, [N]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt; `chosen` was preferred.

    Pair(chosen=Sample((5, 6, 7, 2), (0, 0, 1, 1)), rejected=Sample((5, 6, 8, 2), (0, 0, 1, 1)), row="train/3")
    """

    chosen: Sample
    rejected: Sample
    margin: float = 0.0  # by how much the chosen answer is better, if the data have margins
    row: str = ""  # "<data set>/<row number>", for messages

    @property
    def tokens(self) -> int:
        """Number of tokens, which must all be in one micro-batch."""
        return len(self.chosen.token_ids) + len(self.rejected.token_ids)


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer with a good or bad verdict."""

    sample: Sample
    good: bool
    row: str = ""

    @property
    def tokens(self) -> int:
        return len(self.sample.token_ids)


@dataclass(frozen=True, slots=True)
class Steps:
    """One answer in steps: the loss mask is 1 on the token that follows each step, `labels` has the verdicts.

    Steps(Sample((5, 6, 9, 7, 2), (0, 0, 1, 0, 1)), labels=(1.0, 0.0)): steps `6` (right) and `7` (wrong)
    """

    sample: Sample
    labels: tuple[float, ...]  # one for each 1 of the mask
    row: str = ""

    @property
    def tokens(self) -> int:
        return len(self.sample.token_ids)


def pack_pairs(pairs: Sequence[Pair]) -> Batch:
    """Pack pairs: sequence 2i is the chosen answer of pair i, 2i + 1 the rejected one; a pair is a group.

    `rewards` are 1 and 0. Margins are in `components`, if any pair has one.
    """
    batch = pack_samples([sample for pair in pairs for sample in (pair.chosen, pair.rejected)])
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32).repeat_interleave(2)
    return batch.with_(
        group_index=torch.arange(len(pairs)).repeat_interleave(2),
        rewards=torch.tensor([1.0, 0.0]).repeat(len(pairs)),
        components={MARGIN: margins} if bool(margins.any()) else {},
    )


def pack_judged(answers: Sequence[Judged]) -> Batch:
    """Pack single answers; `rewards` is 1 for good answers and 0 for bad ones."""
    batch = pack_samples([one.sample for one in answers])
    return batch.with_(rewards=torch.tensor([float(one.good) for one in answers]))


def mismatched(answers: Sequence[Judged], max_tokens: int) -> list[Judged]:
    """Give each prompt the answer to the next one, to measure KTO's baseline (arXiv 2402.01306 section 4.1).

    The last prompt gets the first answer. If a combination has more than `max_tokens` tokens, the prompt gets the
    first later answer that fits; a prompt that no other answer fits is left out.
    """
    crossed = []
    for index, one in enumerate(answers):
        others = (answers[(index + step) % len(answers)] for step in range(1, len(answers)))
        pairs = (_answered(one.sample, other.sample) for other in others)
        fitting = next((sample for sample in pairs if len(sample.token_ids) <= max_tokens), None)
        if fitting is not None:
            crossed.append(replace(one, sample=fitting))
    return crossed


def _answered(prompt: Sample, answer: Sample) -> Sample:
    """Join one sample's prompt (all before its first loss token) and another sample's answer (the rest)."""
    end, begin = prompt.loss_mask.index(1), answer.loss_mask.index(1)
    return Sample(
        (*prompt.token_ids[:end], *answer.token_ids[begin:]),
        (*prompt.loss_mask[:end], *answer.loss_mask[begin:]),
        prompt.source,
    )
