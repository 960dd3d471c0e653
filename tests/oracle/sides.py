"""The same random groups for both sides: packed for hone, padded [B, L] (responses only) for the others.

Everything is drawn in float64 from one seed, so that a difference is one of formulas.
"""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hone.types import Batch

MODES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}

many = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass
class Rows:
    """Rows of several groups; `padded` tensors are [B, L], 0 past the end of a row."""

    lengths: list[int]
    groups: list[int]
    mask: torch.Tensor  # [B, L] float64, 1 on loss tokens; each row has at least one
    rewards: torch.Tensor  # [B]
    seed: int

    @property
    def index(self):
        return np.array([f"prompt-{group}" for group in self.groups])

    @property
    def present(self):
        """[B, L] bool: where a token is at all."""
        return torch.arange(self.mask.shape[1])[None] < torch.tensor(self.lengths)[:, None]

    def noise(self, salt, scale=1.0, shift=0.0):
        """[B, L] normal numbers of this example."""
        generator = torch.Generator().manual_seed(self.seed * 101 + salt)
        drawn = torch.randn(self.mask.shape, generator=generator, dtype=torch.float64) * scale + shift
        return torch.where(self.present, drawn, 0)

    def logprobs(self, salt, near=None, scale=0.3):
        """[B, L] log-probs; `near` others, if given."""
        if near is None:
            return torch.where(self.present, -self.noise(salt).abs() - 0.01, 0)
        return torch.where(self.present, (near + self.noise(salt, scale)).clamp(max=-1e-3), 0)

    @property
    def rewards_on_tokens(self):
        """[B, L]: each row's reward on its last loss token."""
        last = (self.mask * torch.arange(1, self.mask.shape[1] + 1)).argmax(1)
        return torch.zeros_like(self.mask).scatter(1, last[:, None], self.rewards[:, None])

    def pack(self, padded):
        return padded[self.present]

    def pad(self, packed):
        return torch.zeros_like(self.mask, dtype=packed.dtype).masked_scatter(self.present, packed)

    @property
    def cu_seqlens(self):
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def batch(self, **fields):
        """The packed batch; keyword tensors are padded [B, L] and are packed here."""
        lengths = self.lengths
        extras = {name: self.pack(value) for name, value in fields.pop("extras", {}).items()}
        return Batch(
            token_ids=torch.zeros(sum(lengths), dtype=torch.int64),
            position_ids=torch.cat([torch.arange(length) for length in lengths]),
            loss_mask=self.pack(self.mask).bool(),
            cu_seqlens=self.cu_seqlens,
            group_index=torch.tensor(self.groups),
            episode_index=torch.arange(len(lengths)),
            rewards=self.rewards,
            components=fields.pop("components", {}),
            extras=extras,
            **{name: self.pack(value) for name, value in fields.items()},
        )


@st.composite
def rows(draw, smallest_group=1, holes=True, binary=False):
    """Random groups. `holes`: tokens with mask 0 between loss tokens, as tools and users leave them."""
    sizes = draw(st.lists(st.integers(smallest_group, 5), min_size=1, max_size=4))
    count = sum(sizes)
    lengths = draw(st.lists(st.integers(2, 9), min_size=count, max_size=count))
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).double()
    if holes:
        keep = (torch.rand(mask.shape, generator=generator) > 0.3).double()
        keep[torch.arange(count), torch.tensor(lengths) - 1] = 1  # at least the last
        mask = mask * keep
    if binary:
        rewards = (torch.rand(count, generator=generator) > 0.5).double()
    else:
        rewards = torch.randn(count, generator=generator, dtype=torch.float64)
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    return Rows(lengths, groups, mask, rewards, seed)


def near(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)
