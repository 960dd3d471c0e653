"""Learning from preferences: the numbers of plain forwards, whole pairs, resumed to the bit, every loss learns."""

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.algorithms import PREFERENCE_LOSSES
from hone.algorithms.preference.losses import PreferenceObjective
from hone.algorithms.preference.settings import DpoSettings
from hone.config import ConfigError, load
from hone.data.packing import Sample, select
from hone.data.preference_readers import JudgedMaker, PairMaker
from hone.data.preferences import Pair, pack_pairs
from hone.data.rendering import Renderer
from hone.data.sources.base import DataError
from hone.data.stream import ItemStream
from hone.engines.settings import EngineConfig
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.runtime.settings import RuntimeConfig
from hone.tracking.metrics import Timer
from hone.trainers.run.recorder import Recorder
from hone.trainers.run.roles import place_role
from hone.trainers.supervised.preference import PER_ANSWER
from hone.trainers.supervised.reference import FILE, StoredReference
from hone.trainers.supervised.settings import PreferenceRunConfig
from hone.trainers.supervised.trainer import weighed
from hone.workers.train import TrainSpec, TrainWorker
from tests.trainers.preference_task import answer_logprob, prefer, source, written
from tests.trainers.tiny import BASE, metrics

OTHER = {"build": {**BASE["model"]["build"], "seed": 1}}  # a reference that is not the policy: ratios are not 1


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# ---------------------------------------------------------------------------------- against plain transformers forwards


@pytest.fixture
def models(tmp_path):
    """(policy, reference) as plain models, once a run is in tmp_path."""

    def both():
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
        reference = load_language_model(ModelConfig(build=BuildConfig(**OTHER["build"])))
        with without_progress_bars():
            reference.save_pretrained(tmp_path / "reference")
        return policy, AutoModelForCausalLM.from_pretrained(tmp_path / "reference")

    return both


def drawn(tmp_path, path, maker, batches=1):
    config = load(PreferenceRunConfig, path).config
    renderer = Renderer(AutoTokenizer.from_pretrained(tmp_path / "run" / "model"))
    return ItemStream(maker, config.data, renderer, config.run.seed).take(batches * config.samples_per_step)


def expected_pair_loss(name, chosen, rejected):
    """chosen, rejected: (log-prob, reference's log-prob, tokens)"""
    margin = (chosen[0] - chosen[1]) - (rejected[0] - rejected[1])
    mean_margin = (chosen[0] - chosen[1]) / chosen[2] - (rejected[0] - rejected[1]) / rejected[2]
    means = chosen[0] / chosen[2], rejected[0] / rejected[2]
    odds = [math.log(math.exp(mean) / (1 - math.exp(mean))) for mean in means]
    won, lost = -math.log(sigmoid(0.1 * margin)), -math.log(sigmoid(-0.1 * margin))
    return {
        "dpo": won,
        "ipo": (mean_margin - 5) ** 2,
        "hinge": max(0.0, 1 - 0.1 * margin),
        "cdpo": 0.9 * won + 0.1 * lost,
        "robust": (0.9 * won - 0.1 * lost) / 0.8,
        "simpo": -math.log(sigmoid(2 * (means[0] - means[1]) - 1)),
        "orpo": -means[0] - 0.1 * math.log(sigmoid(odds[0] - odds[1])),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "ipo", "hinge", "cdpo", "robust", "simpo", "orpo"])
def test_the_loss_of_two_pairs_is_the_formula_on_plain_forwards(tmp_path, models, name):
    compared = name not in ("simpo", "orpo")
    changes = {"reference": {"model": OTHER, "logprobs": "live"}} if compared else {}
    path = written(tmp_path, "prefer", name, samples_per_step=2, evaluation={}, **changes)
    prefer(path, "run.steps=1")
    policy, reference = models()
    losses, margins = [], []
    for pair in drawn(tmp_path, path, PairMaker):
        chosen, rejected = (
            (answer_logprob(policy, one), answer_logprob(reference, one) if compared else 0.0, sum(one.loss_mask))
            for one in (pair.chosen, pair.rejected)
        )
        losses.append(expected_pair_loss(name, chosen, rejected))
        margins.append((chosen[0] - chosen[1]) - (rejected[0] - rejected[1]))
    step = metrics(tmp_path / "run")[1]
    assert step["train/loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert step["train/preference_loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    if name == "dpo":
        assert step["train/preference_margin"] == pytest.approx(0.1 * sum(margins) / 2, abs=1e-5)
        assert step["train/preference_accuracy"] == sum(margin > 0 for margin in margins) / 2


def test_kto_measures_its_baseline_on_answers_under_other_prompts(tmp_path, models):
    path = written(tmp_path, "prefer", "kto", samples_per_step=5, evaluation={}, reference={"model": OTHER})
    prefer(path, "run.steps=1")
    policy, reference = models()
    answers = drawn(tmp_path, path, JudgedMaker)

    def log_ratio(sample):
        return answer_logprob(policy, sample) - answer_logprob(reference, sample)

    crossed = []
    for i, one in enumerate(answers):
        answer = answers[(i + 1) % 5].sample
        prompt, begin = one.sample.loss_mask.index(1), answer.loss_mask.index(1)
        ids = (*one.sample.token_ids[:prompt], *answer.token_ids[begin:])
        crossed.append(log_ratio(Sample(ids, (0,) * prompt + answer.loss_mask[begin:])))
    baseline = sum(crossed) / 5
    assert baseline > 0.01
    ahead = [0.1 * (log_ratio(one.sample) - baseline) for one in answers]
    expected = [1 - sigmoid(a if one.good else -a) for a, one in zip(ahead, answers, strict=True)]
    step = metrics(tmp_path / "run")[1]
    assert step["train/kto_baseline"] == pytest.approx(baseline, abs=1e-5)
    assert step["train/loss"] == pytest.approx(sum(expected) / 5, abs=1e-5)
    good = [log_ratio(one.sample) for one in answers if one.good]
    assert step["train/chosen_reward"] == pytest.approx(0.1 * sum(good) / len(good), abs=1e-5)

    bare = written(tmp_path / "bare", "prefer", {"name": "kto", "baseline": False}, samples_per_step=5,
                   evaluation={}, reference={"model": OTHER})  # fmt: skip
    prefer(bare, "run.steps=1")
    ahead = [0.1 * log_ratio(one.sample) for one in answers]
    expected = [1 - sigmoid(a if one.good else -a) for a, one in zip(ahead, answers, strict=True)]
    assert metrics(tmp_path / "bare" / "run")[1]["train/loss"] == pytest.approx(sum(expected) / 5, abs=1e-5)


@pytest.mark.parametrize("reference", ["precomputed", pytest.param("live", marks=pytest.mark.slow)])
def test_kto_leaves_out_what_fits_under_no_other_prompt(tmp_path, reference):
    """Every row has 13 tokens, a long prompt with a long answer 20: a budget of 14 holds rows, but not all crosses."""
    path = written(tmp_path, "prefer", "kto", samples_per_step=2, evaluation={},
                   data={"train": source(tmp_path, "lopsided", 24, 1)}, reference={"logprobs": reference})  # fmt: skip
    prefer(path, "actor.max_tokens_per_microbatch=14")
    rows = drawn(tmp_path, path, JudgedMaker, batches=8)
    alone = [sum(one.sample.loss_mask.index(1) > 5 for one in rows[i : i + 2]) == 1 for i in range(0, 16, 2)]
    assert {True, False} == set(alone)  # a long prompt beside a short one has only the long answer to take
    assert [step["train/kto_left_out"] for step in metrics(tmp_path / "run")[1:]] == alone


# --------------------------------------------------------------------------------------------------------- whole pairs


@pytest.fixture(scope="module")
def gradients():
    """gradients(batch, max_tokens) -> the gradient of every weight, in double precision."""
    build = BuildConfig(hidden_size=16, layers=1, heads=2, mlp_size=24, max_positions=64, characters="abcd")
    model = ModelConfig(build=build, dtype="float64")

    def found(batch, max_tokens):
        config = EngineConfig(compute_dtype="float64", max_tokens_per_microbatch=max_tokens)
        worker = TrainWorker(TrainSpec(model, config, total_steps=1))
        worker.initialize()
        worker.engine.forward_backward(batch, PreferenceObjective(DpoSettings(beta=0.5)))
        return {name: weight.grad.clone() for name, weight in worker.engine.weights.masters.items()}

    return found


answers = st.lists(st.integers(8, 11), min_size=1, max_size=6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    [(2, [8, 9, 10], [9, 8, 8])] * 3, 5, random.Random(0)
)  # two bins of three sequences would be fewer, but cut a pair
@given(
    st.lists(st.tuples(st.integers(1, 5), answers, answers), min_size=2, max_size=5),
    st.integers(0, 30),
    st.randoms(use_true_random=False),
)
def test_the_gradient_does_not_depend_on_the_cut(gradients, rows, spare, rng):
    """For any budget that a pair fits in, any packing order, and the two answers either way round."""
    pairs = []
    for prompt, *both in rows:
        ids = [(*range(5, 5 + prompt), *answer) for answer in both]
        chosen, rejected = (Sample(one, (0,) * prompt + (1,) * (len(one) - prompt)) for one in ids)
        pairs.append(Pair(chosen, rejected))
    batch = weighed(pack_pairs(pairs), PER_ANSWER)
    batch = batch.with_(ref_logprobs=-torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(0)).double())
    whole = gradients(batch, 10_000)
    order = list(range(batch.num_sequences))
    rng.shuffle(order)
    cut = gradients(select(batch, order), max(pair.tokens for pair in pairs) + spare)
    assert any(bool(grad.abs().max() > 0) for grad in whole.values()) or all(p.chosen == p.rejected for p in pairs)
    for name, grad in whole.items():
        torch.testing.assert_close(cut[name], grad, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_runs_with_different_budgets_are_the_same_run(tmp_path):
    for budget in (24, 1000):
        prefer(written(tmp_path / str(budget), "prefer", "dpo"), f"actor.max_tokens_per_microbatch={budget}")
    small, large = (metrics(tmp_path / str(budget) / "run") for budget in (24, 1000))
    for one, other in zip(small, large, strict=True):
        if one["step"] == 0:  # policy and reference are the same, so rounding noise decides which answer wins
            del one["eval/held_out/accuracy"], other["eval/held_out/accuracy"]
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


# ------------------------------------------------------------------------------------------------------------ reference


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_precomputed_and_live_references_give_the_same_run(tmp_path, loss):
    for kind in ("precomputed", "live"):
        prefer(written(tmp_path / kind, "prefer", loss, reference={"logprobs": kind, "model": OTHER}))
    assert (tmp_path / "precomputed" / "run" / FILE).is_file()
    assert not (tmp_path / "live" / "run" / FILE).exists()
    stored, live = (metrics(tmp_path / kind / "run") for kind in ("precomputed", "live"))
    for one, other in zip(stored, live, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_a_stored_reference_asks_its_model_once(tmp_path, monkeypatch):
    spec = TrainSpec(ModelConfig(build=BuildConfig(**BASE["model"]["build"])), EngineConfig(compute_dtype="float32"))
    asked = []

    def model():
        asked.append(1)
        return place_role("reference", spec, RuntimeConfig(threads=1), Recorder(Timer()))

    def stored(identity="a"):
        return StoredReference(tmp_path / FILE, identity, model)

    batch = pack_pairs([Pair(Sample((5, 8, 2), (0, 1, 1)), Sample((5, 9, 10, 2), (0, 1, 1, 1)))])
    first = stored()
    first.prepare(iter([batch, batch]), 2)
    assert len(asked) == 1
    again = stored()
    coming = iter([batch])
    again.prepare(coming, 2)
    assert list(coming) == [batch]  # everything is in the file: a run that is continued reads no data
    again.prepare(iter([batch]), 3)
    assert len(asked) == 1
    assert torch.equal(first.logprobs(batch), again.logprobs(batch))
    sums = torch.zeros(2).index_add(0, torch.tensor([0, 0, 0, 1, 1, 1, 1]), again.logprobs(batch))
    logprobs = model().infer_batch(batch).logprobs
    torch.testing.assert_close(sums, torch.stack([logprobs[:3].sum(), logprobs[3:].sum()]), rtol=1e-5, atol=1e-5)
    other_data = stored()
    monkeypatch.setattr("hone.trainers.supervised.reference.WRITE_S", -1.0)
    other_data.logprobs(pack_pairs([Pair(Sample((5, 8, 2), (0, 1, 1)), Sample((5, 7, 2), (0, 1, 1)))]))
    assert len(asked) == 3  # the data changed
    stored().logprobs(pack_pairs([Pair(Sample((5, 8, 2), (0, 1, 1)), Sample((5, 7, 2), (0, 1, 1)))]))
    assert len(asked) == 3  # what was computed for it is kept, too
    stored("another model").logprobs(batch)
    assert len(asked) == 4  # what another model said is not used
    (tmp_path / FILE).write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"reference\.safetensors cannot be read"):
        stored()


def test_losses_without_reference_refuse_to_be_given_one(tmp_path):
    path = written(tmp_path, "prefer", "simpo", reference={"logprobs": "live"})
    with pytest.raises(ConfigError, match=r"no part of this run uses these keys: reference\.logprobs"):
        prefer(path)
    assert not (tmp_path / "run" / FILE).exists()


# ------------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_two_halves_equal_the_whole(tmp_path, loss):
    prefer(written(tmp_path / "whole", "prefer", loss))
    path = written(tmp_path / "halves", "prefer", loss)
    prefer(path, "run.steps=4")
    prefer(path)
    whole, halves = tmp_path / "whole" / "run", tmp_path / "halves" / "run"
    assert metrics(whole) == metrics(halves)
    assert [m["step"] for m in metrics(whole) if "eval/held_out/accuracy" in m] == [0, 4, 8]
    a, b = (load_file(run / "export" / "model.safetensors") for run in (whole, halves))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert (whole / FILE).read_bytes() == (halves / FILE).read_bytes()


# ------------------------------------------------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.parametrize("loss", sorted(PREFERENCE_LOSSES))
def test_every_loss_learns_what_is_preferred(tmp_path, loss):
    beta = {"simpo": 2.0, "kto": 0.5, "orpo": 1.0}.get(loss, 0.5)
    quick = ("run.steps=30", "evaluation.every_steps=0", "checkpoint.every_steps=30")
    path = written(tmp_path, "prefer", {"name": loss, "beta": beta}, samples_per_step=24)
    prefer(path, *quick, "actor.max_tokens_per_microbatch=4096")
    steps = metrics(tmp_path / "run")
    assert steps[0]["eval/held_out/accuracy"] < 0.8
    assert steps[-1]["eval/held_out/accuracy"] >= 0.9
    assert steps[-1]["eval/held_out/loss"] < steps[0]["eval/held_out/loss"]
    assert steps[-1]["train/chosen_reward"] > steps[-1]["train/rejected_reward"]


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_pair_that_does_not_fit_is_named(tmp_path):
    path = written(tmp_path, "prefer", "dpo")
    with pytest.raises(DataError, match=r"held_out/\d+: the two .*tokens_per_microbatch=15.* max_sample_tokens=7"):
        prefer(path, "actor.max_tokens_per_microbatch=15")
    prefer(path, "actor.max_tokens_per_microbatch=24", "run.steps=1")


def test_kto_needs_another_answer_for_its_baseline(tmp_path):
    path = written(tmp_path, "prefer", "kto", samples_per_step=1)
    with pytest.raises(DataError, match=r"samples_per_step.* at least 2, or loss\.baseline false"):
        prefer(path, "run.steps=1")
