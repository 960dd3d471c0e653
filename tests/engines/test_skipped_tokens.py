"""What a training step leaves out: answers without advantage, where that is exact; and how much it packs on a CPU."""

import pytest
import torch

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.config import build
from hone.engines.settings import EngineConfig
from hone.models.settings import BuildConfig, ModelConfig

LENGTHS, GROUPS = (9, 5, 12, 5, 20), [0, 0, 1, 1, 2]
SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}


class Counted(PolicyObjective):
    """A policy's objective that notes the tokens of each micro-batch."""

    def __init__(self, everything=False, **settings):
        super().__init__(build(AlgorithmConfig, settings, "test"))
        self.skips_zero_advantages &= not everything
        self.tokens = []

    def __call__(self, output, batch):
        self.tokens.append(batch.num_tokens)
        return super().__call__(output, batch)


@pytest.fixture
def batch(make_batch):
    """batch(rows) -> a batch whose sequences `rows` have no advantage."""

    def make(rows, **fields):
        whole = make_batch(LENGTHS, groups=GROUPS)
        sequence = torch.repeat_interleave(whole.lengths)
        zero = torch.isin(sequence, torch.tensor(rows, dtype=torch.int64))
        old = torch.full((whole.num_tokens,), -4.0)
        advantages = torch.where(zero, 0.0, whole.advantages)
        return whole.with_(advantages=advantages, old_logprobs=old, ref_logprobs=old, **fields)

    return make


def weights(engine):
    return torch.cat([one.detach().flatten().double() for _, one in engine.get_per_tensor_param()[0]])


def stepped(make_engine, loss, *batches, **engine):
    made = make_engine(max_tokens_per_microbatch=24, **engine)
    metrics = [made.train_batch(one, loss) for one in batches]
    return made, metrics


def test_answers_without_advantage_are_left_out_and_change_no_weight(make_engine, batch):
    skipping, full = Counted(), Counted(everything=True)
    ours, found = stepped(make_engine, skipping, batch([0, 1, 3]))
    theirs, wanted = stepped(make_engine, full, batch([0, 1, 3]))
    assert (sum(skipping.tokens), sum(full.tokens)) == (12 + 20, sum(LENGTHS))
    assert len(skipping.tokens) == 2  # 32 tokens, 24 in a micro-batch
    assert found[0]["train/loss"].value == pytest.approx(wanted[0]["train/loss"].value, rel=1e-6)
    assert found[0]["train/grad_norm"].value == pytest.approx(wanted[0]["train/grad_norm"].value, rel=1e-5)
    assert (weights(ours) - weights(theirs)).abs().max() < 1e-6


def test_a_step_without_any_advantage_is_still_a_step(make_engine, batch):
    skipping, full = Counted(), Counted(everything=True)
    before, _ = stepped(make_engine, Counted(), batch([0]))
    ours, found = stepped(make_engine, skipping, batch([0]), batch([0, 1, 2, 3, 4]))
    theirs, _ = stepped(make_engine, full, batch([0]), batch([0, 1, 2, 3, 4]))
    assert found[1]["train/grad_norm"].value == 0.0
    assert skipping.tokens[-1] == LENGTHS[0]  # one answer
    assert (weights(ours) - weights(theirs)).abs().max() < 1e-6
    assert (weights(ours) - weights(before)).abs().max() > 1e-5  # AdamW moves on


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": {"coef": 0.1}},
        {"entropy_coef": 0.1},
        {"loss": "dro"},
        {"loss": "sft"},
    ],
    ids=str,
)
def test_answers_with_another_gradient_are_computed(make_engine, batch, settings):
    loss = Counted(**settings)
    stepped(make_engine, loss, batch([0, 1, 3]))
    assert sum(loss.tokens) == sum(LENGTHS)


def test_the_experts_of_a_mixture_see_every_answer(make_engine, batch):
    loss = Counted()
    mixture = BuildConfig(**SIZES, architecture="qwen3_moe", options={"num_experts": 4, "num_experts_per_tok": 2})
    stepped(make_engine, loss, batch([0, 1, 3]), model=ModelConfig(build=mixture))
    assert sum(loss.tokens) == sum(LENGTHS)


@pytest.mark.parametrize(
    ("budget", "lengths", "expected"),
    [
        (None, (900, 900, 900), [1800, 900]),  # of a CPU: 2,048
        (None, (900, 900, 2500), [1800, 2500]),  # longer ones fit
        (4096, (900, 900, 900), [2700]),
        (1000, (900, 900, 900), [900, 900, 900]),
    ],
)
def test_a_cpu_packs_less_unless_the_run_file_says_how_much(make_engine, make_batch, budget, lengths, expected):
    loss = Counted(everything=True)
    engine = make_engine(max_tokens_per_microbatch=budget)
    engine.train_batch(make_batch(lengths), loss)
    assert sorted(loss.tokens) == sorted(expected)


def test_the_limit_of_a_sequence_is_the_same_on_every_device():
    automatic, chosen = EngineConfig(), EngineConfig(max_tokens_per_microbatch=100)
    assert automatic.token_limit == 16_384
    assert [automatic.packed_tokens(longest, "cpu") for longest in (10, 9_000, 20_000)] == [2_048, 9_000, 16_384]
    assert [automatic.packed_tokens(longest, "cuda") for longest in (10, 9_000)] == [16_384, 16_384]
    assert (chosen.token_limit, chosen.packed_tokens(9_000, "cpu")) == (100, 100)
