"""Tokens of a micro-batch, by device."""

import pytest

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.config import build
from hone.engines.settings import EngineConfig


class Counted(PolicyObjective):
    """A policy's objective that notes the tokens of each micro-batch."""

    def __init__(self):
        super().__init__(build(AlgorithmConfig, {}, "test"))
        self.tokens = []

    def __call__(self, output, batch):
        self.tokens.append(batch.num_tokens)
        return super().__call__(output, batch)


@pytest.mark.parametrize(
    ("budget", "lengths", "groups", "expected"),
    [
        (None, (900, 900, 900), [0, 1, 2], [1800, 900]),  # of a CPU: 2,048
        (None, (900, 900, 900, 900), [0, 0, 0, 1], [2700, 900]),  # answers to one prompt stay together
        (None, (900, 900, 2500), [0, 1, 2], [1800, 2500]),  # longer ones fit
        (4096, (900, 900, 900), [0, 1, 2], [2700]),
        (1000, (900, 900, 900), [0, 0, 0], [900, 900, 900]),
    ],
)
def test_a_cpu_packs_less_unless_the_run_file_says_how_much(make_engine, make_batch, budget, lengths, groups, expected):
    loss = Counted()
    engine = make_engine(max_tokens_per_microbatch=budget)
    engine.train_batch(make_batch(lengths, groups=groups), loss)
    assert sorted(loss.tokens) == sorted(expected)


def test_the_limit_of_a_sequence_is_the_same_on_every_device():
    automatic, chosen = EngineConfig(), EngineConfig(max_tokens_per_microbatch=100)
    assert automatic.token_limit == 16_384
    assert [automatic.packed_tokens(longest, "cpu") for longest in (10, 9_000, 20_000)] == [2_048, 9_000, 16_384]
    assert [automatic.packed_tokens(longest, "cuda") for longest in (10, 9_000)] == [16_384, 16_384]
    assert (chosen.token_limit, chosen.packed_tokens(9_000, "cpu")) == (100, 100)
