"""Advantage estimators beside verl's, on the same random groups.

Differences on purpose, which is why some cases are drawn without them (docs/algorithms.md lists them too):
- groups of one: `grpo_pass_k` gives 0 where verl raises;
- `optimal_token_baseline` with holes: verl pads by column and compares lengths counted without the holes, hone counts
  positions the same way for both, so only rows without holes are compared (`tir_...` is compared with holes).
"""

import pytest
import torch
import verl.trainer.ppo.core_algos as verl
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hone.algorithms import ADVANTAGES
from tests.oracle.sides import many, near, rows


def ours(name, batch, **options):
    """hone's advantages and returns, packed."""
    result = ADVANTAGES.get(name)(batch, ADVANTAGES.settings(name)(**options))
    return result.advantages, result.returns


def compare(name, sample, theirs, **options):
    found, _ = ours(name, sample.batch(), **options)
    near(sample.pad(found) * sample.mask, theirs * sample.mask)


@many
@given(rows(), st.sampled_from([1.0, 0.97]), st.sampled_from([1.0, 0.9, 0.0]))
def test_gae(sample, gamma, lam):
    values = sample.noise(1)
    advantages, returns = (
        verl.compute_gae_advantage_return(
            sample.rewards_on_tokens, values, sample.mask, torch.tensor(gamma), torch.tensor(lam)
        )
        if sample.mask.sum() > 1
        else (None, None)
    )
    if advantages is None:
        return
    found, found_returns = ours("gae", sample.batch(values=values), gamma=gamma, lam=lam)
    near(sample.pad(found_returns) * sample.mask, returns * sample.mask)
    near(sample.pad(found) * sample.mask, advantages * sample.mask)


@many
@given(rows(), st.booleans())
def test_grpo(sample, scaled):
    theirs, _ = verl.compute_grpo_outcome_advantage(
        sample.rewards_on_tokens, sample.mask, sample.index, norm_adv_by_std_in_grpo=scaled
    )
    compare("grpo", sample, theirs, scale_by="group" if scaled else "none")


@many
@given(rows(smallest_group=2), st.booleans())
def test_grpo_pass_k(sample, scaled):
    theirs, _ = verl.compute_grpo_passk_outcome_advantage(
        sample.rewards_on_tokens,
        sample.mask,
        sample.index,
        config=OmegaConf.create({"norm_adv_by_std_in_grpo": scaled}),
    )
    compare("grpo_pass_k", sample, theirs, scale=scaled)


@many
@given(rows(smallest_group=2))
def test_gdpo(sample):
    correct, style = sample.rewards, sample.noise(2)[:, 0]
    found, _ = ours(
        "gdpo", sample.batch(components={"correct": correct, "style": style}), weights={"correct": 1.0, "style": 0.5}
    )
    parts = []
    for component in (correct, style):
        on_tokens = torch.zeros_like(sample.mask)
        on_tokens[:, 0] = component
        part, _ = verl.compute_grpo_outcome_advantage(on_tokens, sample.mask, sample.index)
        parts.append(part)
    total = parts[0] + 0.5 * parts[1]
    theirs = verl.verl_F.masked_whiten(total, sample.mask) * sample.mask
    near(sample.pad(found) * sample.mask, theirs)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rloo", verl.compute_rloo_outcome_advantage),
        ("opo", verl.compute_opo_outcome_advantage),
        ("gpg", verl.compute_gpg_outcome_advantage),
    ],
)
def test_group_baselines(name, function):
    @many
    @given(rows(holes=True), st.booleans())
    def check(sample, sparse):
        if sparse:  # gpg counts the rewards that are not zero
            sample.rewards = torch.where(sample.rewards > 0, sample.rewards, 0)
        theirs, _ = function(sample.rewards_on_tokens, sample.mask, sample.index)
        compare(name, sample, theirs)

    check()


@many
@given(rows(smallest_group=2))
def test_reinforce_pp_baseline(sample):
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        sample.rewards_on_tokens, sample.mask, sample.index
    )
    compare("reinforce_pp_baseline", sample, theirs)


@many
@given(rows(smallest_group=2), st.sampled_from([1.0, 0.9]))
def test_reinforce_pp(sample, gamma):
    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        sample.rewards_on_tokens, sample.mask, config=OmegaConf.create({"gamma": gamma})
    )
    compare("reinforce_pp", sample, theirs, gamma=gamma)


@many
@given(rows())
def test_remax(sample):
    greedy = sample.noise(3)[:, 0]
    theirs, _ = verl.compute_remax_outcome_advantage(sample.rewards_on_tokens, greedy, sample.mask)
    found, _ = ours("remax", sample.batch(components={"greedy_reward": greedy}))
    near(sample.pad(found) * sample.mask, theirs * sample.mask)


@pytest.mark.parametrize(
    ("name", "function", "holes"),
    [
        ("optimal_token_baseline", verl.compute_optimal_token_baseline_advantage, False),
        ("tir_optimal_token_baseline", verl.compute_multi_turn_optimal_token_baseline_advantage, True),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_token_baselines(name, function, holes, weighted):
    @many
    @given(rows(holes=holes))
    def check(sample):
        old = sample.logprobs(4)
        chance = old.exp()  # of the sampled token; the others share the rest
        squared = chance.square() + (1 - chance).square() * sample.noise(5).sigmoid()
        weights = sample.noise(6).abs() + 0.1 if weighted else None
        theirs, _ = function(
            sample.rewards_on_tokens, sample.mask, sample.index, old, squared, rollout_is_weights=weights, epsilon=1e-30
        )  # its default, 1e-8, shows where the weights are small
        extras = {"is_weights": weights} if weighted else {}
        found, _ = ours(name, sample.batch(old_logprobs=old, sum_pi_squared=squared, extras=extras))
        near(sample.pad(found) * sample.mask, theirs * sample.mask)

    check()
