"""An advantage estimator and a policy loss in one file: run files name them as `one_file.py:centred` and so on."""

from hone.algorithms.advantages import Advantages, Episodes, sequence_rewards
from hone.algorithms.losses import LossInputs, finish
from hone.algorithms.settings import AdvantageSettings, PolicyLossSettings
from hone.config import setting
from hone.types import Batch, LossOutput


class CentredSettings(AdvantageSettings):
    """Reward against the group's mean, within bounds."""

    bound: float = setting(1.0, "largest advantage, and with a minus sign the smallest", gt=0)


def centred(batch: Batch, settings: CentredSettings) -> Advantages:
    """r - the group's mean, between -bound and bound."""
    rewards = sequence_rewards(batch)
    episodes = Episodes.of(batch, rewards)
    lead = (episodes.rewards - episodes.mean(episodes.rewards)).clamp(-settings.bound, settings.bound)
    return Advantages(episodes.on_tokens(lead, batch, rewards.dtype))


class Softened(PolicyLossSettings):
    """-A rho^power. The class is both the settings and the loss."""

    power: float = setting(0.5, "exponent of the ratio; 1: the plain policy gradient", gt=0, le=1)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of each token, [T]."""
        return finish(inputs, -inputs.advantages * (self.power * inputs.log_ratio).exp(), inputs.log_ratio)
