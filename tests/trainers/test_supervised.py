"""Supervised training: the numbers of a plain loop, resumed to the bit, and a warm start that is made once."""

import math

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.config import ConfigError, load
from hone.data.rendering import Renderer
from hone.data.sources.base import DataError
from hone.data.stream import ItemStream, SampleMaker, read_all
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy, run_supervised
from hone.trainers.supervised.settings import SupervisedRunConfig
from hone.trainers.supervised.trainer import SupervisedTrainer
from tests.trainers.tiny import BASE, metrics, recipe

TASK = '''
import random
def rows(seed, size):
    """Answers of one to six characters: sequences of different lengths."""
    rng = random.Random(seed)
    for _ in range(size):
        text = "".join(rng.choices("abcd", k=rng.randint(1, 6)))
        yield {"prompt": text, "completion": text[::-1]}
'''


def source(folder, size, seed):
    task = folder / "samples.py"
    task.write_text(TASK, encoding="utf-8")
    return {"source": {"name": "python", "function": f"{task}:rows", "size": size, "seed": seed}}


def sft_recipe(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "kind": "sft",
        "run": {"dir": str(folder / "run"), "steps": 8, "seed": 3},
        "model": BASE["model"],
        "data": {"train": source(folder, 64, 1)},
        "samples_per_step": 8,
        "actor": {
            "compute_dtype": "float32",
            "max_tokens_per_microbatch": 60,  # several micro-batches in a step
            "optimizer": {"name": "AdamW", "lr": 5e-3, "weight_decay": 0.1},
            "schedule": {"name": "constant", "warmup_steps": 2},
        },
        "evaluation": {"sets": {"held_out": source(folder, 20, 2)}, "every_steps": 4},
        "checkpoint": {"every_steps": 2},
        "tracking": {"trackers": ["jsonl"]},
        "runtime": {"threads": 1},
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump({**settings, **changes}), encoding="utf-8")
    return path


def fine_tune(path, *overrides):
    loaded = load(SupervisedRunConfig, path, list(overrides))
    return loaded.config, run_supervised(loaded)


# ----------------------------------------------------------------------------------- against a loop without any of it


def plain_loss(model, samples):
    """Mean loss per learned token of a padded batch, by transformers' own loss."""
    longest = max(len(one.token_ids) for one in samples)

    def padded(rows, filler):
        return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])

    labels = [
        [token if learned else -100 for token, learned in zip(one.token_ids, one.loss_mask, strict=True)]
        for one in samples
    ]
    return model(
        input_ids=padded([one.token_ids for one in samples], 0),
        attention_mask=padded([[1] * len(one.token_ids) for one in samples], 0),
        labels=padded(labels, -100),
    ).loss


def plain_loop(config, model, renderer):
    """The losses of the same steps: same samples, AdamW, clipping and warm-up, in twenty lines of torch."""
    stream = ItemStream(SampleMaker, config.data, renderer, config.run.seed)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    losses = []
    for _ in range(config.run.steps):
        loss = plain_loss(model, stream.take(config.samples_per_step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_a_plain_transformers_loop(tmp_path):
    config, run = fine_tune(sft_recipe(tmp_path))
    renderer = Renderer(AutoTokenizer.from_pretrained(run / "model"))
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    untrained = model.state_dict()["model.embed_tokens.weight"].clone()

    held_out, _ = read_all(SampleMaker("held_out", config.evaluation.sets["held_out"], renderer, "held_out"))
    with torch.no_grad():
        before = plain_loss(model, held_out).item()
    expected = plain_loop(config, model, renderer)
    with torch.no_grad():
        after = plain_loss(model, held_out).item()

    steps = metrics(run)
    assert [m["train/loss"] for m in steps[1:]] == pytest.approx(expected, abs=1e-5)
    assert [m["train/nll"] for m in steps[1:]] == pytest.approx(expected, abs=1e-5)  # token_mean: the same number
    assert [m["step"] for m in steps if "eval/held_out/loss" in m] == [0, 4, 8]
    assert steps[0]["eval/held_out/loss"] == pytest.approx(before, abs=1e-5)
    assert steps[-1]["eval/held_out/loss"] == pytest.approx(after, abs=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(run / "export").state_dict()
    assert not torch.equal(exported["model.embed_tokens.weight"], untrained)
    assert all(torch.allclose(exported[name], value, atol=1e-4) for name, value in model.state_dict().items())


def test_the_loss_falls_on_samples_that_were_never_trained_on(tmp_path):
    _, run = fine_tune(sft_recipe(tmp_path), "run.steps=60", "evaluation.every_steps=0")
    steps = metrics(run)
    assert [m["step"] for m in steps if "eval/held_out/loss" in m] == [0, 60]
    assert steps[0]["eval/held_out/loss"] > 2.2  # 12 tokens: log 12 = 2.48 at random
    assert steps[-1]["eval/held_out/loss"] < 0.75 * steps[0]["eval/held_out/loss"]
    assert max(m["train/loss"] for m in steps[-5:]) < min(m["train/loss"] for m in steps[1:4])


@pytest.mark.parametrize("mode", ["seq_mean_token_mean", "token_sum"])
def test_the_aggregation_is_the_one_that_was_asked_for(tmp_path, mode):
    config, run = fine_tune(sft_recipe(tmp_path, aggregation={"mode": mode}), "run.steps=1")
    renderer = Renderer(AutoTokenizer.from_pretrained(run / "model"))
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    samples = ItemStream(SampleMaker, config.data, renderer, config.run.seed).take(config.samples_per_step)
    with torch.no_grad():
        means = [plain_loss(model, [one]).item() for one in samples]
    counts = [sum(one.loss_mask) for one in samples]
    assert len(set(counts)) > 1
    sums = [mean * count for mean, count in zip(means, counts, strict=True)]
    expected = sum(means) / len(means) if mode == "seq_mean_token_mean" else sum(sums)
    step = metrics(run)[1]
    assert step["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert step["train/nll"] == pytest.approx(sum(sums) / sum(counts), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- resuming


def weights(run):
    return load_file(run / "export" / "model.safetensors")


def assert_same_weights(one, other):
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_two_halves_equal_the_whole(tmp_path):
    _, whole = fine_tune(sft_recipe(tmp_path / "whole"))
    path = sft_recipe(tmp_path / "halves")
    fine_tune(path, "run.steps=4")
    _, halves = fine_tune(path)
    assert metrics(whole) == metrics(halves)
    assert_same_weights(whole, halves)


def test_the_checkpoint_with_the_lowest_held_out_loss_is_the_best(tmp_path):
    path = sft_recipe(tmp_path, checkpoint={"every_steps": 4, "keep": 1})
    _, run = fine_tune(path, "actor.optimizer.lr=10.0", "actor.optimizer.weight_decay=0.0")  # it can only get worse
    losses = {m["step"]: m["eval/held_out/loss"] for m in metrics(run) if "eval/held_out/loss" in m}
    assert min(losses, key=losses.get) == 0
    assert sorted(f.name for f in (run / "checkpoints").iterdir()) == ["step_00000000", "step_00000008"]


# -------------------------------------------------------------------------------------------------------- warm start


def warm_recipe(folder, steps=6):
    folder.mkdir(parents=True, exist_ok=True)
    warm = {
        "data": {"train": source(folder, 64, 5)},
        "steps": steps,
        "samples_per_step": 8,
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 5e-3}, "schedule": {"name": "cosine"}},
    }
    return recipe(folder, {"warm_start": warm, "run": {"steps": 2}, "evaluation": {}})


def train(path, *overrides):
    return run_policy(load(PolicyRunConfig, path, list(overrides)))


@pytest.mark.slow
def test_a_warm_start_is_made_once_and_the_policy_starts_from_it(tmp_path):
    path = warm_recipe(tmp_path)
    run = train(path)
    warm = run / "warm_start"
    assert [m["step"] for m in metrics(warm)] == list(range(7))
    assert metrics(warm)[-1]["train/loss"] < metrics(warm)[1]["train/loss"]
    first = load_file(run / "checkpoints" / "step_00000000" / "actor" / "model-00000-of-00001.safetensors")
    assert all(torch.equal(first[name], value) for name, value in weights(warm).items())

    written = {f: f.stat().st_mtime_ns for f in warm.rglob("*") if f.is_file()}
    train(path, "run.steps=3")
    assert {f: f.stat().st_mtime_ns for f in warm.rglob("*") if f.is_file()} == written
    assert [m["step"] for m in metrics(run)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_warm_start_that_was_cut_off_is_continued(tmp_path, monkeypatch):
    whole = train(warm_recipe(tmp_path / "whole"))
    path = warm_recipe(tmp_path / "cut")
    real = SupervisedTrainer.step

    def cut_off(self, step):
        if step == 4:
            raise KeyboardInterrupt
        real(self, step)

    monkeypatch.setattr(SupervisedTrainer, "step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        train(path)
    run = tmp_path / "cut" / "run"
    assert [m["step"] for m in metrics(run / "warm_start")] == [0, 1, 2, 3]
    assert not (run / "metrics.jsonl").exists()  # the policy run has not begun
    monkeypatch.setattr(SupervisedTrainer, "step", real)
    train(path)
    assert metrics(whole / "warm_start") == metrics(run / "warm_start")
    assert_same_weights(whole / "warm_start", run / "warm_start")
    assert metrics(whole) == metrics(run)
    assert_same_weights(whole, run)


def test_a_sample_over_the_token_budget_is_named(tmp_path):
    with pytest.raises(DataError, match=r"^train/\d+: the sequence has \d+ tokens, more than actor.max_tokens"):
        fine_tune(sft_recipe(tmp_path, evaluation={}), "actor.max_tokens_per_microbatch=4")


@pytest.mark.parametrize(("epochs", "limit", "steps"), [(2, None, 2 * 64 // 8), (0.5, None, 4), (1, 11, None)])
def test_epochs_are_counted_in_the_data(tmp_path, epochs, limit, steps):
    train = {**source(tmp_path, 64, 1), **({} if limit is None else {"max_sample_tokens": limit})}
    run = {"dir": str(tmp_path / "run"), "epochs": epochs}
    path = sft_recipe(tmp_path, run=run, data={"train": train}, evaluation={})
    config, folder = fine_tune(path)
    if steps is None:
        renderer = Renderer(AutoTokenizer.from_pretrained(folder / "model"))
        samples, dropped = read_all(SampleMaker("train", config.data.train, renderer, "data.train"))
        assert 0 < dropped < 64
        steps = math.ceil(len(samples) / 8)
    assert metrics(folder)[-1]["step"] == steps
    assert metrics(folder)[-1]["train/lr"] == pytest.approx(5e-3)


def test_a_share_of_an_epoch_is_not_rounded_up_by_a_binary_fraction(tmp_path):
    run = {"dir": str(tmp_path / "run"), "epochs": 1.1}  # 1.1 * 100 / 10 = 11.000000000000002
    train = source(tmp_path, 100, 1)
    _, folder = fine_tune(sft_recipe(tmp_path, run=run, data={"train": train}, samples_per_step=10, evaluation={}))
    assert metrics(folder)[-1]["step"] == 11


@pytest.mark.slow
def test_the_settings_that_a_run_wrote_can_be_run_again(tmp_path):
    _, folder = fine_tune(sft_recipe(tmp_path, run={"dir": str(tmp_path / "run"), "steps": 1}, evaluation={}))
    fine_tune(folder / "config.yaml", "run.steps=2")
    assert metrics(folder)[-1]["step"] == 2


@pytest.mark.parametrize("run", [{"steps": 8, "epochs": 1}, {}])
def test_a_supervised_run_has_steps_or_epochs(tmp_path, run):
    with pytest.raises(ConfigError, match="set steps or epochs"):
        fine_tune(sft_recipe(tmp_path, run={"dir": str(tmp_path / "run"), **run}))
