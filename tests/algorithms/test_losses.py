"""Every policy loss against numbers worked out by hand: values, gradients, and which tokens have none."""

import math

import pytest
import torch

from hone.algorithms import POLICY_LOSSES
from hone.algorithms.losses import LossInputs
from hone.algorithms.settings import (
    CispoSettings,
    ClipCovSettings,
    DppoKlSettings,
    DppoTvSettings,
    DroSettings,
    GmpoSettings,
    GpgSettings,
    GspoSettings,
    KlCovSettings,
    PpoSettings,
    ReinforceSettings,
    SapoSettings,
    SftSettings,
    TopEntropySettings,
)


def evaluate(settings, ratios, advantages, old=-1.0, lengths=None, **more):
    """Values, gradients with respect to lp, and metrics, for tokens that have these ratios to `old`."""
    ratios = torch.tensor(ratios, dtype=torch.float64)
    old = torch.as_tensor(old, dtype=torch.float64).expand(len(ratios))
    lp = (old + ratios.log()).requires_grad_()
    inputs = LossInputs(
        lp=lp,
        old=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=more.pop("mask", torch.ones(len(ratios), dtype=torch.bool)),
        cu_seqlens=torch.tensor([0, *(lengths or [len(ratios)])]).cumsum(0),
        **more,
    )
    output = POLICY_LOSSES.get(settings.name)(inputs, settings)
    (gradient,) = torch.autograd.grad(output.values.sum(), lp)
    return output.values.detach(), gradient, output.metrics


def test_ppo_takes_the_pessimistic_side(close):
    ratios, advantages = [1.0, 1.5, 1.5, 0.5, 0.5, 1.1], [2.0, 2.0, -2.0, 2.0, -2.0, 2.0]
    values, gradient, metrics = evaluate(PpoSettings(clip_high=0.25), ratios, advantages)
    close(values, [-2.0, -2.5, 3.0, -1.0, 1.6, -2.2])
    close(gradient, [-2.0, 0.0, 3.0, -1.0, 0.0, -2.2])  # the two clipped tokens have none
    close(metrics["train/clip_fraction_low"], [0, 0, 0, 0, 1, 0])
    close(metrics["train/clip_fraction_high"], [0, 1, 0, 0, 0, 0])
    close(metrics["train/ratio"], ratios)
    close(metrics["train/approx_kl"][1], 0.5 - math.log(1.5))
    close(metrics["train/policy_loss"], values.tolist())


def test_ppo_dual_clip_bounds_negative_advantages_only(close):
    values, gradient, metrics = evaluate(PpoSettings(dual_clip=3.0), [5.0, 5.0, 2.0], [-2.0, 2.0, -2.0])
    close(values, [6.0, -2.4, 4.0])
    close(gradient, [0.0, 0.0, 4.0])
    close(metrics["train/clip_fraction_dual"], [1, 0, 0])


def test_a_log_ratio_beyond_20_is_clamped(close):
    values, gradient, _ = evaluate(PpoSettings(dual_clip=None), [math.exp(30.0)], [-1.0], old=-40.0)
    close(values / math.exp(20.0), [1.0])
    close(gradient, [0.0])


def test_reinforce(close):
    values, gradient, _ = evaluate(ReinforceSettings(), [1.0, 1.0], [2.0, -0.5])
    close(values, [2.0, -0.5])  # -A lp with lp = -1
    close(gradient, [-2.0, 0.5])


def test_sft_ignores_the_advantage(close):
    values, gradient, _ = evaluate(SftSettings(), [1.0, 1.0], [2.0, -0.5])
    close(values, [1.0, 1.0])
    close(gradient, [-1.0, -1.0])


def test_gpg_is_the_plain_policy_gradient(close):
    values, gradient, _ = evaluate(GpgSettings(), [1.5, 0.5], [2.0, -0.5], old=-2.0)
    close(values, [-2.0 * (-2 + math.log(1.5)), 0.5 * (-2 + math.log(0.5))])
    values_twin, gradient_twin, _ = evaluate(ReinforceSettings(), [1.5, 0.5], [2.0, -0.5], old=-2.0)
    assert torch.equal(values, values_twin)
    assert torch.equal(gradient, gradient_twin)


def test_gspo_uses_the_geometric_mean_of_the_sequence(close):
    # first sequence: ratios 4 and 1, geometric mean 2; second: 1.1
    settings = GspoSettings(clip_low=0.2, clip_high=0.2)
    values, gradient, metrics = evaluate(settings, [4.0, 1.0, 1.1], [-1.0, 1.0, 1.0], lengths=[2, 1])
    close(values, [2.0, -1.2, -1.1])
    close(gradient, [2.0, 0.0, -1.1])
    close(metrics["train/ratio"], [2.0, 2.0, 1.1])
    close(metrics["train/clip_fraction_high"], [0, 1, 0])


def test_gspo_mean_leaves_out_masked_tokens_and_bounds_the_log_at_10(close):
    mask = torch.tensor([True, False, True])
    settings = GspoSettings(clip_low=1.0, clip_high=1e9)
    values, _, _ = evaluate(settings, [4.0, 100.0, 1.0], [-1.0, -1.0, -1.0], mask=mask)
    close(values, [2.0, 0.0, 2.0])
    values, gradient, _ = evaluate(settings, [math.exp(15.0)], [-1.0], old=-20.0)
    close(values / math.exp(10.0), [1.0])
    close(gradient, [0.0])


def test_cispo_keeps_a_gradient_where_ppo_has_none(close):
    settings = CispoSettings(clip_low=0.5, clip_high=1.0)
    values, gradient, metrics = evaluate(settings, [4.0, 0.25, 1.5], [1.0, 1.0, -1.0], old=-2.0)
    close(gradient, [-2.0, -0.5, 1.5])
    close(values, [-2.0 * (-2 + math.log(4)), -0.5 * (-2 + math.log(0.25)), 1.5 * (-2 + math.log(1.5))])
    close(metrics["train/clip_fraction_high"], [1, 0, 0])
    close(metrics["train/clip_fraction_low"], [0, 1, 0])


def test_sapo_gate(close):
    # at rho = 1: (4 / tau) * 0.5, slope 4 * 0.25 = 1 for any tau
    values, gradient, _ = evaluate(SapoSettings(), [1.0, 1.0], [1.0, -1.0])
    close(values, [-2.0, 2 / 1.05])
    close(gradient, [-1.0, 1.0])
    values, _, _ = evaluate(SapoSettings(tau_positive=2.0), [1.5], [1.0])
    close(values, [-2 / (1 + math.exp(-1.0))])


def test_dppo_tv_leaves_out_what_moved_too_far(close):
    # p_old = 0.4; p = 0.6, 0.5, 0.2, 0.6
    settings = DppoTvSettings(clip_low=0.15, clip_high=0.15)
    values, gradient, metrics = evaluate(settings, [1.5, 1.25, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0], old=math.log(0.4))
    close(gradient, [0.0, -1.25, 0.0, 1.5])
    close(values, [0.0, -1.25 * math.log(0.5), 0.0, 1.5 * math.log(0.6)])
    close(metrics["train/clip_fraction_high"], [1, 0, 0, 0])
    close(metrics["train/clip_fraction_low"], [0, 0, 1, 0])


def test_dppo_truncates_its_weight(close):
    _, gradient, _ = evaluate(DppoTvSettings(clip_high=1.0), [30.0], [1.0], old=math.log(0.01))
    close(gradient, [-20.0])


def test_dppo_kl_lets_a_token_move_back(close):
    # p_old = 0.5, p = 0.75: KL = 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25) = 0.143841
    for threshold, expected in ((0.1438, 0.0), (0.1439, -1.5)):
        _, gradient, _ = evaluate(DppoKlSettings(threshold=threshold), [1.5], [1.0], old=math.log(0.5))
        close(gradient, [expected])
    _, gradient, metrics = evaluate(DppoKlSettings(), [1.5, 0.5], [-1.0, 1.0], old=math.log(0.5))
    close(gradient, [1.5, -0.5])  # both move towards p_old
    close(metrics["train/clip_fraction_low"], [0, 0])


def test_gmpo(close):
    # log-ratios 1, -1 at A > 0: min side clamps 1 to 0.4 and leaves -1; mean -0.3
    e = math.e
    values, gradient, metrics = evaluate(GmpoSettings(), [e, 1 / e, 1 / e], [2.0, 2.0, -1.0], lengths=[2, 1])
    close(values, [-2 * math.exp(-0.3)] * 2 + [math.exp(-0.4)])
    close(gradient, [0.0, -2 * math.exp(-0.3), 0.0])  # of the sum over the sequence's two equal values
    close(metrics["train/clip_fraction_high"], [1, 0, 0])
    close(metrics["train/clip_fraction_low"], [0, 0, 1])


def test_clip_cov_takes_the_loss_of_picked_tokens_away(close):
    picked = torch.tensor([True, False, True])
    values, gradient, metrics = evaluate(ClipCovSettings(), [1.0, 1.0, 2.0], [1.0, 1.0, 1.0], selected=picked)
    close(values, [0.0, -1.0, -1.2])
    close(gradient, [0.0, -1.0, 0.0])
    close(metrics["train/covariance_fraction"], [1, 0, 0])  # the last one was clipped anyway


def test_kl_cov_penalises_picked_tokens(close):
    picked = torch.tensor([True, False])
    values, gradient, _ = evaluate(KlCovSettings(coef=0.5), [2.0, 2.0], [1.0, 1.0], selected=picked)
    close(values, [-2.0 + 0.5 * math.log(2), -2.0])
    close(gradient, [-1.5, -2.0])


@pytest.mark.parametrize("settings", [ClipCovSettings(), KlCovSettings()], ids=lambda s: s.name)
def test_covariance_losses_say_that_nothing_was_picked(settings):
    with pytest.raises(ValueError, match="selected"):
        evaluate(settings, [1.0], [1.0])


def test_dro(close):
    values, gradient, _ = evaluate(DroSettings(beta=0.5), [math.e], [2.0], old=-3.0)
    close(values, [-(-2 * 2 - 0.25)])  # lp = -2, lp - old = 1
    close(gradient, [-(2 - 0.5)])


ALL = [
    PpoSettings(),
    PpoSettings(dual_clip=2.0),
    ReinforceSettings(),
    GspoSettings(clip_low=0.2, clip_high=0.2),
    CispoSettings(),
    SftSettings(),
    SapoSettings(),
    DppoTvSettings(),
    DppoKlSettings(),
    GmpoSettings(),
    ClipCovSettings(),
    KlCovSettings(),
    DroSettings(),
    GpgSettings(),
    TopEntropySettings(),
]


@pytest.mark.parametrize("settings", [*ALL, TopEntropySettings(loss=DroSettings())], ids=lambda one: one.name)
def test_settings_say_whether_the_gradient_is_zero_without_advantage(settings):
    selected = torch.ones(3, dtype=torch.bool)
    _, gradient, _ = evaluate(settings, [1.5, 0.5, 4.0], [0.0, 0.0, 0.0], selected=selected)
    assert bool((gradient == 0).all()) == settings.zero_without_advantage


def test_top_entropy_is_another_loss_on_the_picked_tokens(close):
    settings = TopEntropySettings(loss=ReinforceSettings())
    picked = torch.tensor([True, False, True])
    values, gradient, metrics = evaluate(settings, [1.0] * 3, [2.0, 3.0, -0.5], selected=picked)
    close(values, [2.0, 0.0, -0.5])
    close(gradient, [-2.0, 0.0, 0.5])
    close(metrics["train/entropy_fraction"], [1, 0, 1])
    close(metrics["train/policy_loss"], [2.0, 0.0, -0.5])


def test_every_registered_loss_is_in_these_tests():
    assert {settings.name for settings in ALL} == set(POLICY_LOSSES)


@pytest.mark.parametrize("settings", ALL, ids=lambda s: s.name)
def test_importance_weights_multiply_and_masks_silence(settings, close):
    """Also with rubbish where the mask is 0: what stands there must not matter."""
    mask = torch.tensor([True, True, False, True])
    some = {"selected": torch.zeros(4, dtype=torch.bool), "mask": mask, "lengths": [3, 1]}
    arguments = ([1.1, 0.9, 1.0, 1.05], [1.0, -1.0, 1.0, 2.0])
    plain, gradient, _ = evaluate(settings, *arguments, **some)
    weights = torch.tensor([2.0, 0.0, math.nan, 0.5]).double()
    weighted, weighted_gradient, metrics = evaluate(settings, *arguments, is_weights=weights, **some)
    close(weighted, [2 * plain[0].item(), 0.0, 0.0, 0.5 * plain[3].item()])
    if settings.name != "gmpo":  # a token of gmpo carries the gradient of its whole sequence
        close(weighted_gradient, [2 * gradient[0].item(), 0.0, 0.0, 0.5 * gradient[3].item()])
    assert gradient[2] == 0
    for name, values in metrics.items():
        assert name.startswith("train/")
        assert values.shape == plain.shape
        assert not values.requires_grad


@pytest.mark.parametrize("settings", ALL, ids=lambda s: s.name)
def test_at_ratio_1_the_gradient_is_that_of_the_policy_gradient(settings, close):
    """-A for every loss (sft: -1): all of them agree where the policy is the old one."""
    advantages = [1.0, -2.0, 0.5]
    selected = torch.full((3,), settings.name == "top_entropy")
    _, gradient, _ = evaluate(settings, [1.0] * 3, advantages, lengths=[1, 1, 1], selected=selected)
    close(gradient, [-1.0] * 3 if settings.name == "sft" else [-a for a in advantages])


@pytest.mark.parametrize("settings", ALL, ids=lambda s: s.name)
def test_zero_advantage_gives_zero_gradient(settings, close):
    _, gradient, _ = evaluate(settings, [1.0, 1.0], [0.0, 0.0], selected=torch.zeros(2, dtype=torch.bool))
    close(gradient, [-1.0, -1.0] if settings.name == "sft" else [0.0, 0.0])
