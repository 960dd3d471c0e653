"""The mathematics, imported when a run file chooses it."""

import torch

from hone.algorithms.advantages import Advantages, Episodes, sequence_rewards
from hone.algorithms.losses import LossInputs, finish
from hone.types import Batch, LossOutput
from hone_quantile import DampedSettings, QuantileSettings


def quantile(batch: Batch, settings: QuantileSettings) -> Advantages:
    """r - the group's quantile."""
    episodes = Episodes.of(batch, sequence_rewards(batch))
    groups = (episodes.rewards[episodes.group == number] for number in range(episodes.num_groups))
    baseline = torch.stack([rewards.quantile(settings.level) for rewards in groups])[episodes.group]
    return Advantages(episodes.on_tokens(episodes.rewards - baseline, batch, torch.float32))


def damped(inputs: LossInputs, settings: DampedSettings) -> LossOutput:
    """-A rho, times the damping where A < 0."""
    factor = torch.where(inputs.advantages < 0, settings.damping, 1.0)
    return finish(inputs, -factor * inputs.advantages * inputs.log_ratio.exp(), inputs.log_ratio)
