"""What holds whatever is drawn: failures touch nobody, order is nothing, no variance and clipping mean no gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.filtering.settings import DynamicSamplingSettings, OverlongSettings, SkipZeroVarianceSettings
from hone.algorithms.losses import LossInputs
from hone.algorithms.settings import AlgorithmConfig, GrpoSettings, PpoSettings
from hone.data.packing import pack
from hone.types import ModelOutput, Prompt, Status, StopReason, Trajectory, TrajectoryGroup

FAILURES = [status for status in Status if not status.trainable]
LONGEST = 5
WITHOUT_VARIANCE = [  # estimators that give a group of equal rewards exactly nothing
    *(GrpoSettings(scale_by=scale) for scale in ("group", "batch", "none")),
    *(ADVANTAGES.settings(name)() for name in ("grpo_pass_k", "rloo", "opo", "gpg", "max_rl", "remax")),
]
BY_ADVANTAGE = sorted(set(POLICY_LOSSES) - {"sft", "dro", "kl_cov"})  # the others pull or push without an advantage
CLIPPED = ("ppo", "gspo", "dppo_tv", "dppo_kl", "gmpo", "clip_cov")


def estimator(name):
    return ADVANTAGES.settings(name)(**({"weights": {"a": 1.0, "b": 0.5}} if name == "gdpo" else {}))


# -------------------------------------------------------------------------------------- trajectories and their order


@st.composite
def played(draw):
    """Two to four groups of up to four trajectories each; every token of every trajectory has an id of its own."""
    value = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    groups = []
    for number in range(draw(st.integers(2, 4))):
        members = []
        for sample in range(draw(st.integers(1, 4))):
            mask = (0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST)))
            first = 1000 * number + 100 * sample
            members.append(
                Trajectory(
                    prompt_id=f"set/{number}",
                    sample=sample,
                    token_ids=tuple(range(first, first + len(mask))),
                    prompt_length=1,
                    loss_mask=mask,
                    rollout_logprobs=tuple(-0.1 * bit for bit in mask),
                    weight_versions=tuple(bit - 1 for bit in mask),
                    response="",
                    stop_reason=StopReason.STOP,
                    status=draw(st.sampled_from([Status.OK, Status.TRUNCATED])),
                    reward=draw(value),
                    components={"a": draw(value), "b": draw(value)},
                    episode=sample,
                )
            )
        greedy = members[0].with_(reward=draw(value))
        groups.append(TrajectoryGroup(Prompt(f"set/{number}", (0,), (), None, "set"), tuple(members), greedy))
    return groups


TAKES_NO_PENALTY = ("gdpo", "max_rl")  # refused: one reads components alone, the other rewards of 0 and 1


def known(ids, scale):
    """A figure for each token that depends on nothing but the token: what a model's forward would give."""
    return scale * torch.sin(ids.double() * 12.9898).abs().float()


def advantages(name, groups):
    """(prompt, sample) -> the advantages of its tokens, by the calls that a trainer makes."""
    config = AlgorithmConfig(
        advantage=estimator(name),
        overlong=None if name in TAKES_NO_PENALTY else OverlongSettings(buffer_tokens=2, factor=0.5),
        dynamic_sampling=DynamicSamplingSettings(skip_zero_variance=SkipZeroVarianceSettings()),
    )
    algorithm = Algorithm(config, steps_per_batch=2, max_response_tokens=LONGEST)
    kept, _ = algorithm.groups.keep(algorithm.groups.shape(groups))
    if not kept:
        return {}
    batch = pack(kept)
    ids = batch.token_ids
    filled = batch.with_(
        values=known(ids, 1.0),
        old_logprobs=-known(ids, 2.0),
        extras={"process_rewards": known(ids, 0.3)},
        sum_pi_squared=known(ids, 0.5),
        anchors=ids // 1000 * 2 + ids % 2,  # two states in each group
    )
    done = algorithm.advantages(filled)
    names = [(one.prompt_id, one.sample) for group in kept for one in group.trainable]
    parts = done.advantages.split(batch.lengths.tolist())
    return dict(zip(names, parts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_failed_trajectory_never_changes_anothers_advantage(name):
    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(groups=played(), data=st.data())
    def check(groups, data):
        with_failures = []
        for group in groups:
            lost = data.draw(st.lists(st.sampled_from(FAILURES), max_size=3))
            failed = [
                group.trajectories[0].with_(
                    sample=90 + number,
                    episode=90 + number,
                    status=status,
                    reward=data.draw(st.sampled_from([0.0, 1e9, math.nan])),
                    components={"a": math.nan, "other": 7.0},
                    token_ids=(7, 7),
                    loss_mask=(0, 1),
                    rollout_logprobs=(0.0, -9.0),
                )
                for number, status in enumerate(lost)
            ]
            members = data.draw(st.permutations([*group.trajectories, *failed]))
            kept_order = sorted(members, key=lambda one: (one.status.trainable, one.sample))
            with_failures.append(TrajectoryGroup(group.prompt, tuple(kept_order), group.greedy))
        expected, found = advantages(name, groups), advantages(name, with_failures)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)

    check()


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_the_order_of_groups_and_of_their_members_does_not_matter(name):
    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(groups=played(), data=st.data())
    def check(groups, data):
        mixed = [
            TrajectoryGroup(group.prompt, tuple(data.draw(st.permutations(group.trajectories))), group.greedy)
            for group in data.draw(st.permutations(groups))
        ]
        expected, found = advantages(name, groups), advantages(name, mixed)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            torch.testing.assert_close(found[key], values, atol=2e-5, rtol=2e-5)

    check()


# ---------------------------------------------------------------------------------------------- where nothing is learnt


@pytest.mark.parametrize("loss", BY_ADVANTAGE)
@pytest.mark.parametrize("advantage", WITHOUT_VARIANCE, ids=lambda s: f"{s.name}-{getattr(s, 'scale_by', '')}")
def test_a_group_of_equal_rewards_has_no_gradient(batches, advantage, loss):
    """Groups of three: the first all the same, the second not; the policy has moved since the rollout."""
    generator = torch.Generator().manual_seed(2)
    masks = [[0, 1, 1], [0, 1, 0, 1], [0, 1], [0, 1, 1], [0, 1], [0, 1, 1, 1]]
    tokens = sum(map(len, masks))
    old = -torch.rand(tokens, generator=generator)
    rewards = torch.tensor([0.3, 0.3, 0.3, 1.0, 0.0, 0.0])
    batch = batches.build(
        masks, groups=[0, 0, 0, 1, 1, 1], rewards=rewards, old_logprobs=old, dtype=torch.float32,
        components={"greedy_reward": torch.tensor([0.3] * 3 + [0.5] * 3)}, entropy=torch.ones(tokens),
    )  # fmt: skip
    algorithm = Algorithm(AlgorithmConfig(advantage=advantage, loss=POLICY_LOSSES.settings(loss)()), 2)
    weighed = algorithm.weigh(algorithm.advantages(batch))
    lp = (old + 0.05 * torch.randn(tokens, generator=generator)).requires_grad_()
    (algorithm.policy_objective()(ModelOutput(logprobs=lp), weighed).values * weighed.loss_weights).sum().backward()
    flat = batches.positions(batch, [0, 1, 2])
    assert (lp.grad[flat] == 0).all()
    assert (lp.grad[batches.positions(batch, [3, 4, 5])] != 0).any() or loss == "gspo"  # all of its band may be left


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clipped_token_has_no_gradient(name):
    seen = 0

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, 2**31), st.lists(st.integers(1, 5), min_size=1, max_size=4))
    def check(seed, lengths):
        nonlocal seen
        generator = torch.Generator().manual_seed(seed)
        count = sum(lengths)
        old = -2 * torch.rand(count, generator=generator, dtype=torch.float64)
        lp = (old + 0.8 * torch.randn(count, generator=generator, dtype=torch.float64)).requires_grad_()
        inputs = LossInputs(
            lp=lp,
            old=old,
            advantages=torch.randn(count, generator=generator, dtype=torch.float64),
            mask=torch.rand(count, generator=generator) > 0.2,
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
            selected=torch.rand(count, generator=generator) > 0.7,
        )
        chosen = PpoSettings(dual_clip=2.0) if name == "ppo" else POLICY_LOSSES.settings(name)()
        output = POLICY_LOSSES.get(name)(inputs, chosen)
        (gradient,) = torch.autograd.grad(output.values.sum(), lp)
        flags = [flag for metric, flag in output.metrics.items() if "clip_fraction" in metric or "covariance" in metric]
        clipped = (torch.stack(flags).amax(0) > 0) & inputs.mask
        seen += int(clipped.sum())
        assert (gradient[clipped] == 0).all()
        assert (gradient[~inputs.mask] == 0).all()

    check()
    assert seen > 50


def test_every_loss_with_a_clip_is_in_these_tests():
    """cispo clips the weight and keeps every token's gradient; that is its point."""
    with_a_clip = {
        name for name in POLICY_LOSSES if {"clip_high", "threshold"} & POLICY_LOSSES.settings(name).model_fields.keys()
    }
    assert with_a_clip == {*CLIPPED, "cispo"}
