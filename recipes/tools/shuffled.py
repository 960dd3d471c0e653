"""A control for the recipe: the advantages of `mt_grpo`, in random order among the turns of a batch."""

import torch

from hone.algorithms.advantages import Advantages
from hone.algorithms.settings import MtGrpoSettings
from hone.algorithms.turns import Turns, mt_grpo
from hone.types import Batch


def shuffled(batch: Batch, settings: MtGrpoSettings) -> Advantages:
    """Each turn gets the advantage of a random turn: the updates are as large as before and know nothing."""
    turns, found = Turns.of(batch), mt_grpo(batch, settings).advantages
    dice = torch.Generator().manual_seed(int(batch.token_ids.sum()))  # the same order when the run is repeated
    order = torch.randperm(turns.count, generator=dice)
    return Advantages(turns.on_tokens(turns.firsts(found)[order.to(found.device)], batch.loss_mask))
