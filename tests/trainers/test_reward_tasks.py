"""Reward models: the numbers of plain forwards, resumed to the bit, an export that scores as it was trained to."""

import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from hone.algorithms.preference.losses import LABELS
from hone.config import load
from hone.data.packing import Sample, pack_samples
from hone.data.preference_readers import PairMaker, StepsMaker
from hone.data.preferences import Steps
from hone.data.rendering import Renderer
from hone.data.stream import ItemStream, read_all
from hone.engines.settings import EngineConfig
from hone.models.loading import VALUE_HEAD_FILE
from hone.models.settings import ModelConfig
from hone.trainers.exports.checkpoint import export_checkpoint
from hone.trainers.supervised.reward_tasks import pack_steps
from hone.trainers.supervised.settings import RewardModelRunConfig
from hone.workers.train import TrainSpec, TrainWorker
from tests.trainers.preference_task import train_reward_model, written
from tests.trainers.tiny import metrics


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def plain_values(folder, sample):
    """The value before each marked token, by a plain forward of the exported body and head."""
    body = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    head = load_file(folder / VALUE_HEAD_FILE)["score.weight"][0]
    with torch.no_grad():
        states = body(torch.tensor([sample.token_ids])).last_hidden_state[0]
    return [float(states[i - 1] @ head) for i, marked in enumerate(sample.loss_mask) if marked]


def renderer_of(run):
    return Renderer(AutoTokenizer.from_pretrained(run / "export"))


def held_out(path, run, maker):
    config = load(RewardModelRunConfig, path).config
    return read_all(maker("held_out", config.evaluation.sets["held_out"], renderer_of(run), "held_out"))[0]


# --------------------------------------------------------------------------------------------------------- the numbers


def test_comparisons_are_the_formula_on_plain_forwards(tmp_path):
    """The trained model's held-out loss, from nothing but its export; the margins of the data are in it."""
    path = written(tmp_path, "reward_model", {"name": "bradley_terry", "centring": 0.3})
    run = train_reward_model(path)
    pairs = held_out(path, run, PairMaker)
    assert len({pair.margin for pair in pairs}) > 1
    losses, won = [], 0
    for pair in pairs:
        chosen, rejected = (plain_values(run / "export", one)[-1] for one in (pair.chosen, pair.rejected))
        losses.append(-math.log(sigmoid(chosen - rejected - pair.margin)) + 0.3 * (chosen + rejected) ** 2)
        won += chosen > rejected
    last = metrics(run)[-1]
    assert last["eval/held_out/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert last["eval/held_out/accuracy"] == pytest.approx(won / len(pairs))
    assert metrics(run)[0]["eval/held_out/margin"] == 0.0  # a fresh head scores everything 0


def test_the_first_gradient_is_that_of_plain_forwards(tmp_path):
    """One step of gradient descent from the fresh head, redone with autograd on plain, unpacked forwards."""
    path = written(tmp_path, "reward_model", "bradley_terry", samples_per_step=2, evaluation={})
    plain = ("actor.optimizer.name=SGD", "actor.optimizer.lr=1.0", "actor.optimizer.weight_decay=0.0")
    more = ("actor.schedule.warmup_steps=0", "actor.max_grad_norm=null", "run.steps=1")
    run = train_reward_model(path, *plain, *more)
    config = load(RewardModelRunConfig, path).config
    pairs = ItemStream(PairMaker, config.data, renderer_of(run), config.run.seed).take(2)
    body = AutoModel.from_pretrained(run / "model", dtype=torch.float32)
    head = torch.zeros(32, requires_grad=True)
    loss = torch.zeros(())
    for pair in pairs:
        states = [body(torch.tensor([one.token_ids])).last_hidden_state[0, -2] for one in (pair.chosen, pair.rejected)]
        loss = loss - torch.nn.functional.logsigmoid((states[0] - states[1]) @ head - pair.margin) / 2
    (gradient,) = torch.autograd.grad(loss, head)
    assert metrics(run)[1]["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    found = load_file(run / "export" / VALUE_HEAD_FILE)["score.weight"][0]
    torch.testing.assert_close(found, -gradient, rtol=1e-4, atol=1e-6)


def test_verdicts_on_steps_are_the_formula_on_plain_forwards(tmp_path):
    path = written(tmp_path, "reward_model", "process")
    run = train_reward_model(path)
    losses, right = [], []
    for one in held_out(path, run, partial(StepsMaker, separator="\n")):
        for value, label in zip(plain_values(run / "export", one.sample), one.labels, strict=True):
            losses.append(-math.log(sigmoid(value if label else -value)))
            right.append((value > 0) == (label > 0.5))
    last = metrics(run)[-1]
    assert last["eval/held_out/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert last["eval/held_out/accuracy"] == pytest.approx(sum(right) / len(right))


# ------------------------------------------------------------------------------------------------- export and resuming


@pytest.mark.slow
def test_the_export_is_a_value_model_again(tmp_path):
    path = written(tmp_path, "reward_model", "bradley_terry")
    run = train_reward_model(path)
    spec = TrainSpec(ModelConfig(path=str(run / "export")), EngineConfig(compute_dtype="float32"), "value_model")
    worker = TrainWorker(spec)
    worker.initialize()
    samples = [pair.chosen for pair in held_out(path, run, PairMaker)[:3]]
    batch = pack_samples(samples)
    values = worker.infer_batch(batch).values
    scores = [float(values[end - 1]) for end in batch.cu_seqlens[1:]]
    assert scores == pytest.approx([plain_values(run / "export", one)[-1] for one in samples], abs=1e-5)
    assert min(map(abs, scores)) > 1e-4
    export_checkpoint(run, tmp_path / "again", "latest")
    for name in ("model.safetensors", VALUE_HEAD_FILE):
        one, other = load_file(run / "export" / name), load_file(tmp_path / "again" / name)
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["bradley_terry", "process"])
def test_two_halves_equal_the_whole(tmp_path, loss):
    whole = train_reward_model(written(tmp_path / "whole", "reward_model", loss))
    path = written(tmp_path / "halves", "reward_model", loss)
    train_reward_model(path, "run.steps=4")
    halves = train_reward_model(path)
    assert metrics(whole) == metrics(halves)
    for name in ("model.safetensors", VALUE_HEAD_FILE):
        one, other = load_file(whole / "export" / name), load_file(halves / "export" / name)
        assert all(torch.equal(one[key], other[key]) for key in one)


# ------------------------------------------------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["bradley_terry", "process"])
def test_it_learns_to_tell_good_from_bad(tmp_path, loss):
    path = written(tmp_path, "reward_model", loss, samples_per_step=24)
    quick = ("run.steps=40", "evaluation.every_steps=0", "checkpoint.every_steps=40")
    run = train_reward_model(path, *quick, "actor.max_tokens_per_microbatch=4096", "actor.optimizer.lr=1e-2")
    steps = metrics(run)
    assert steps[0]["eval/held_out/accuracy"] < 0.8
    assert steps[-1]["eval/held_out/accuracy"] >= 0.9
    assert steps[-1]["eval/held_out/loss"] < steps[0]["eval/held_out/loss"]


def test_packed_steps():
    first = Steps(Sample((5, 6, 9, 7, 2), (0, 0, 1, 0, 1)), labels=(1.0, 0.0))
    batch = pack_steps([first, Steps(Sample((5, 2), (0, 1)), labels=(1.0,))])
    assert torch.equal(LABELS.of(batch), torch.tensor([0, 0, 1.0, 0, 0, 0, 1.0]))
