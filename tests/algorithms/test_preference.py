"""Preference and reward-model losses by hand, and the objectives that place them on packed pairs."""

import math

import pytest
import torch

from hone.algorithms import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from hone.algorithms.preference.losses import (
    KTO_BASELINE,
    Answers,
    Pairs,
    PreferenceObjective,
    RewardModelObjective,
    kto,
    kto_baseline,
    pair_rows,
)
from hone.algorithms.preference.settings import (
    BradleyTerrySettings,
    CdpoSettings,
    ChosenSftSettings,
    CombinedSettings,
    DpoSettings,
    HingeSettings,
    IpoSettings,
    KtoSettings,
    OrpoSettings,
    ProcessSettings,
    RobustSettings,
    SimpoSettings,
    WeightedLoss,
)
from hone.config import ConfigError, build
from hone.types import ModelOutput


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def answers(lp, ref, lengths):
    return Answers(*(torch.tensor(x, dtype=torch.float64) for x in (lp, ref, lengths)))


# margins: (-2 + 3) - (-6 + 4) = 3 and (-1 + 1) - (-1 + 2) = -1
PAIRS = Pairs(chosen=answers([-2.0, -1.0], [-3.0, -1.0], [2, 1]), rejected=answers([-6.0, -1.0], [-4.0, -2.0], [4, 2]))
ODDS = math.log(math.exp(-1.0) / (1 - math.exp(-1.0))) - math.log(math.exp(-1.5) / (1 - math.exp(-1.5)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DpoSettings(beta=0.5), [-math.log(sigmoid(1.5)), -math.log(sigmoid(-0.5))]),
        (IpoSettings(beta=0.5), [(0.5 + 0.5 - 1) ** 2, (0 - 0.5 - 1) ** 2]),
        (HingeSettings(beta=0.5), [0.0, 1.5]),
        (
            CdpoSettings(beta=0.5, label_smoothing=0.25),
            [-0.75 * math.log(sigmoid(s)) - 0.25 * math.log(sigmoid(-s)) for s in (1.5, -0.5)],
        ),
        (
            RobustSettings(beta=0.5, label_smoothing=0.25),
            [(-0.75 * math.log(sigmoid(s)) + 0.25 * math.log(sigmoid(-s))) / 0.5 for s in (1.5, -0.5)],
        ),
        (SimpoSettings(beta=2.0, margin=0.5), [-math.log(sigmoid(2 * 0.5 - 0.5)), -math.log(sigmoid(-2 * 0.5 - 0.5))]),
        (ChosenSftSettings(), [1.0, 1.0]),
        (
            CombinedSettings(
                parts=[
                    WeightedLoss(loss=HingeSettings(beta=0.5), weight=2.0),
                    WeightedLoss(loss=ChosenSftSettings(), weight=0.25),
                ]
            ),
            [2 * 0.0 + 0.25, 2 * 1.5 + 0.25],
        ),
        (OrpoSettings(beta=0.1), [1.0 - 0.1 * math.log(sigmoid(ODDS)), None]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_losses_of_pairs(settings, expected, close):
    found = PREFERENCE_LOSSES.get(settings.name)(PAIRS, settings)
    for value, number in zip(found, expected, strict=True):
        if number is not None:
            close(value, number)


# log-ratios: chosen 1 and 0, rejected -2 and 1
@pytest.mark.parametrize(
    ("chosen", "margins"),
    [
        ({"f_divergence": "reverse_kl"}, [3.0, -1.0]),
        ({"f_divergence": "forward_kl"}, [-math.exp(-1) + math.exp(2), -1 + math.exp(-1)]),
        ({"f_divergence": "js"}, [math.log(sigmoid(1) / sigmoid(-2)), math.log(sigmoid(0) / sigmoid(1))]),
        (
            {"f_divergence": "alpha", "alpha": 0.5},
            [-2 * math.exp(-0.5) + 2 * math.exp(1.0), -2.0 + 2 * math.exp(-0.5)],
        ),
    ],
    ids=lambda value: value.get("f_divergence", "") if isinstance(value, dict) else "",
)
def test_divergences_change_the_margin(chosen, margins, close):
    close(PAIRS.margin(DpoSettings(**chosen)), margins)
    hinge = PREFERENCE_LOSSES.get("hinge")(PAIRS, HingeSettings(beta=0.1, **chosen))
    close(hinge, [max(0, 1 - 0.1 * margin) for margin in margins])


def test_an_answer_that_became_impossible_has_a_finite_loss():
    far = Pairs(answers([-500.0], [0.0], [1]), answers([0.0], [-500.0], [1]))
    for chosen in ({"f_divergence": "forward_kl"}, {"f_divergence": "alpha", "alpha": 3.0}):
        assert torch.isfinite(PREFERENCE_LOSSES.get("dpo")(far, DpoSettings(**chosen))).all()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "dpo", "f_divergence": "alpha"}, "alpha is set exactly when"),
        ({"name": "dpo", "alpha": 0.5}, "alpha is set exactly when"),
        ({"name": "dpo", "f_divergence": "alpha", "alpha": 1.0}, "which is reverse_kl"),
        ({"name": "combined", "parts": [{"loss": "kto"}]}, "kto judges single answers"),
        ({"name": "combined", "parts": []}, "at least 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(loss, message):
    with pytest.raises(ConfigError, match=message):
        build(PREFERENCE_LOSSES.settings(loss["name"]), loss, "run.yaml", "loss")


def test_a_combined_loss_needs_the_reference_of_its_parts():
    assert CombinedSettings().needs_reference
    assert not CombinedSettings(parts=[WeightedLoss(loss=SimpoSettings())]).needs_reference


def test_robust_is_dpo_once_flipped_labels_are_averaged(close):
    """With flips of probability e, the mean of robust over both labels is dpo of the true one."""
    flipped = Pairs(PAIRS.rejected, PAIRS.chosen)
    settings = RobustSettings(label_smoothing=0.2)
    robust = PREFERENCE_LOSSES.get("robust")
    mean = 0.8 * robust(PAIRS, settings) + 0.2 * robust(flipped, settings)
    close(mean, PREFERENCE_LOSSES.get("dpo")(PAIRS, DpoSettings()).tolist())


def test_orpo_stays_finite_where_the_answer_is_certain():
    sure = answers([0.0], [0.0], [1]).lp.requires_grad_()
    pairs = Pairs(Answers(sure, torch.zeros(1), torch.ones(1)), answers([-1.0], [0.0], [1]))
    loss = PREFERENCE_LOSSES.get("orpo")(pairs, OrpoSettings())
    (gradient,) = torch.autograd.grad(loss.sum(), sure)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


def test_kto(close):
    judged = answers([-2.0, -2.0], [-3.0, -3.0], [1, 1])
    settings = KtoSettings(beta=0.5, desirable=2.0, undesirable=3.0)
    found = kto(judged, torch.tensor([True, False]), torch.tensor([0.5, 0.5]).double(), settings)
    close(found, [2 * (1 - sigmoid(0.25)), 3 * (1 - sigmoid(-0.25))])


def test_the_kto_baseline_is_never_negative(close):
    close(kto_baseline(torch.tensor([1.0, 0.0])), 0.5)
    close(kto_baseline(torch.tensor([-1.0, 0.0])), 0.0)


def test_every_registered_loss_is_in_these_tests():
    pairs = {"dpo", "ipo", "hinge", "cdpo", "robust", "simpo", "orpo", "sft", "combined"}
    assert set(PREFERENCE_LOSSES) == {*pairs, "kto"}
    assert set(REWARD_MODEL_LOSSES) == {"bradley_terry", "process"}
    for registry in (PREFERENCE_LOSSES, REWARD_MODEL_LOSSES):
        assert all(registry.settings(name)().name == name for name in registry)


# ------------------------------------------------------------------------------------------------------ objectives


@pytest.fixture
def packed(batches):
    """PAIRS packed: rejected 0, chosen 1, chosen 0, rejected 1."""
    return batches.build(
        [[0, 1, 1, 1, 1], [0, 1], [0, 1, 1], [0, 1, 1]],
        groups=[7, 9, 7, 9],
        rewards=[0.0, 1.0, 1.0, 0.0],
        ref_logprobs=[0, -1, -1, -1, -1, 0, -1, 0, -1, -2, 0, -1, -1],
    )


LP = [0, -3.0, -1.0, -1.0, -1.0, 0, -1.0, 0, -1.5, -0.5, 0, -0.5, -0.5]


def test_judged_answers_like_the_references_count_a_half(packed, close):
    """Before training the policy is the reference, up to rounding, and is neither right nor wrong."""
    objective = PreferenceObjective(KtoSettings(baseline=False))
    same = packed.ref_logprobs
    for lp in (same, same * (1 + 1e-7)):
        close(objective(ModelOutput(logprobs=lp), packed).metrics["train/preference_accuracy"], [0.5] * 13)
    more = objective(ModelOutput(logprobs=same + 0.1), packed)
    close(more.metrics["train/preference_accuracy"][[0, 5, 7, 10]], [0, 1, 1, 0])


def test_preference_objective_places_a_pairs_loss_on_both_ends(packed, close):
    objective = PreferenceObjective(DpoSettings(beta=0.5))
    lp = torch.tensor(LP, dtype=torch.float64, requires_grad=True)
    result = objective(ModelOutput(logprobs=lp), packed)
    first, second = -math.log(sigmoid(1.5)), -math.log(sigmoid(-0.5))
    close(result.values, [0, 0, 0, 0, first, 0, second, 0, 0, first, 0, 0, second])
    close(result.metrics["train/preference_accuracy"][[1, 6, 8, 11]], [1, 0, 1, 0])
    close(result.metrics["train/preference_margin"][[1, 6, 8, 11]], [1.5, -0.5, 1.5, -0.5])
    close(result.metrics["train/chosen_reward"][[4, 6]], [0.5, 0.0])  # beta (-2 + 3), beta (-1 + 1)
    close(result.metrics["train/rejected_reward"][[4, 6]], [-1.0, 0.5])
    close(result.metrics["train/chosen_logprob"][[4, 6]], [-2.0, -1.0])
    counted = result.counted["train/preference_accuracy"]
    assert counted.nonzero()[:, 0].tolist() == [4, 6, 9, 12]  # each sequence once, however long it is
    assert set(result.counted) == set(result.metrics)
    weighted = result.values.sum() / 4  # seq_mean_token_sum
    close(weighted, (first + second) / 2)
    (gradient,) = torch.autograd.grad(weighted, lp)
    assert gradient[1] > 0 > gradient[8]  # rejected goes down, chosen goes up
    assert objective.whole_groups


def test_preference_gradient_does_not_depend_on_micro_batches_of_whole_pairs(packed, batches):
    objective = PreferenceObjective(IpoSettings())
    lp = torch.tensor(LP, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(objective(ModelOutput(logprobs=lp), packed).values.sum(), lp)
    parts = torch.zeros(len(LP), dtype=torch.float64)
    for rows in ([2, 0], [1, 3]):
        output = ModelOutput(logprobs=lp[batches.positions(packed, rows)])
        parts += torch.autograd.grad(objective(output, batches.take(packed, rows)).values.sum(), lp)[0]
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)


def test_half_a_pair_is_refused(packed, batches):
    objective = PreferenceObjective(DpoSettings())
    with pytest.raises(ValueError, match="1 chosen and 0 rejected in 1 groups"):
        objective(ModelOutput(logprobs=torch.zeros(2)), batches.take(packed, [1]))
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        pair_rows(torch.tensor([0, 0, 0, 0]), torch.tensor([True, False, True, False]))


def test_losses_without_reference_do_not_ask_for_one(packed):
    bare = packed.with_(ref_logprobs=None)
    output = ModelOutput(logprobs=torch.tensor(LP))
    for settings in (SimpoSettings(), OrpoSettings()):
        assert not settings.needs_reference
        PreferenceObjective(settings)(output, bare)
    with pytest.raises(ValueError, match=r"Batch\.ref_logprobs"):
        PreferenceObjective(DpoSettings())(output, bare)


def test_kto_objective_judges_single_answers(packed, close):
    objective = PreferenceObjective(KtoSettings(beta=0.5))
    assert not objective.whole_groups
    output = ModelOutput(logprobs=torch.tensor(LP, dtype=torch.float64))
    with pytest.raises(ValueError, match="kto_baseline"):
        objective(output, packed)
    with_baseline = KTO_BASELINE.on(packed, torch.full((packed.num_sequences,), 0.5).double())
    # log-ratios -2 (bad), 0, 1 (good), 1 (bad)
    expected = [1 - sigmoid(1.25), 1 - sigmoid(-0.25), 1 - sigmoid(0.25), 1 - sigmoid(-0.25)]
    close(objective(output, with_baseline).values[[4, 6, 9, 12]], expected)


def test_bradley_terry_scores_the_last_loss_token(packed, close):
    objective = RewardModelObjective(BradleyTerrySettings(centring=0.1))
    values = torch.zeros(13, dtype=torch.float64)
    values[[4, 6, 9, 12]] = torch.tensor([1.0, 0.5, 3.0, 2.0]).double()
    result = objective(ModelOutput(values=values), packed)
    first, second = -math.log(sigmoid(2.0)) + 1.6, -math.log(sigmoid(-1.5)) + 0.625
    close(result.values[[4, 6, 9, 12]], [first, second, first, second])
    close(result.metrics["train/preference_accuracy"][[4, 6]], [1, 0])
    values[[4, 9]] = torch.tensor([1.0, 1.0 + 1e-7]).double()  # rounding, as in a pair that nothing has trained on
    close(objective(ModelOutput(values=values), packed).metrics["train/preference_accuracy"][[4, 6]], [0.5, 0])
    margin = REWARD_MODEL_LOSSES.get("bradley_terry")(
        torch.tensor([3.0]), torch.tensor([1.0]), BradleyTerrySettings(), margin=torch.tensor([2.0])
    )
    close(margin, [math.log(2.0)])


def test_process_reward_model_is_judged_per_token(batches, close):
    batch = batches.build([[0, 1, 0, 1]], extras={"labels": torch.tensor([0, 1.0, 0, 0.0])})
    objective = RewardModelObjective(ProcessSettings())
    result = objective(ModelOutput(values=torch.tensor([9.0, 2.0, 9.0, 1.0]).double()), batch)
    close(result.values, [0, -math.log(sigmoid(2.0)), 0, -math.log(sigmoid(-1.0))])
    close(result.metrics["train/preference_accuracy"][[1, 3]], [1, 0])
    fresh = objective(ModelOutput(values=torch.zeros(4)), batch)  # a new head judges nothing yet
    close(fresh.metrics["train/preference_accuracy"], [0.5, 0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="labels"):
        objective(ModelOutput(values=torch.zeros(4)), batch.with_(extras={}))
