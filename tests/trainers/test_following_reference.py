"""A reference that follows the policy: the blend, the KL after it, checkpoints, and what cannot be combined with it."""

from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from hone.config import ConfigError, load
from hone.engines.settings import EngineConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.runtime.local import LocalWorkerGroup
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker
from tests.trainers.tiny import BASE, metrics, recipe

KL = {"algorithm": {"kl": {"kind": "k3", "coef": 0.05}}}
MODEL = "model-00000-of-00001.safetensors"


def following(every, **more):
    return {**KL, "reference": {"follow": {"every_steps": every, **more}}}


def train(folder, *changes, overrides=()):
    path = recipe(folder, {"checkpoint": {"every_steps": 1, "keep": 9}}, *changes)
    run_policy(load(PolicyRunConfig, path, list(overrides)))
    return folder / "run"


def saved(run, step, role):
    return load_file(run / "checkpoints" / f"step_{step:08d}" / role / MODEL)


@pytest.fixture(scope="module")
def blended(tmp_path_factory):
    """Two steps, after each of which the reference moves a quarter of the way."""
    return train(tmp_path_factory.mktemp("blended"), following(1, mixup=0.25), {"run": {"steps": 2}})


def test_the_reference_is_the_blend_of_policies_computed_by_hand(blended):
    start, first, second = (saved(blended, step, "actor") for step in range(3))
    assert saved(blended, 0, "reference").keys() == start.keys()
    for name, reference in saved(blended, 2, "reference").items():
        after_one = 0.25 * first[name] + 0.75 * start[name]
        assert torch.equal(saved(blended, 0, "reference")[name], start[name])
        torch.testing.assert_close(saved(blended, 1, "reference")[name], after_one, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(reference, 0.25 * second[name] + 0.75 * after_one, rtol=1e-6, atol=1e-7)
        assert not torch.equal(first[name], second[name])


def test_a_reference_that_becomes_the_policy_has_no_kl_to_it_in_the_next_step(tmp_path):
    steps = metrics(train(tmp_path, following(2), {"run": {"steps": 5}, "evaluation": {}}))
    near = [step["train/kl_loss"] == 0.0 for step in steps[1:]]
    assert near == [True, False, True, False, True]  # it moved after steps 2 and 4


@pytest.mark.slow
def test_a_run_in_two_parts_equals_the_whole(tmp_path):
    follow = following(2, mixup=0.5), {"run": {"steps": 5}, "evaluation": {}}
    constant = "actor.schedule.name=constant"
    whole = train(tmp_path / "whole", *follow, overrides=[constant])
    train(tmp_path / "parts", *follow, overrides=[constant, "run.steps=3"])
    parts = train(tmp_path / "parts", *follow, overrides=[constant])
    assert metrics(parts) == metrics(whole)
    for role in ("actor", "reference"):
        one, other = saved(parts, 5, role), saved(whole, 5, role)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_bfloat16_reference_blends_in_the_precision_of_the_policy(tmp_path):
    """A hundredth of a small difference is less than the last bit of a bfloat16 weight, and has to add up."""
    engine = EngineConfig(compute_dtype="bfloat16")
    models = [ModelConfig(build=BuildConfig(**BASE["model"]["build"], seed=seed)) for seed in (0, 1)]
    specs = [TrainSpec(models[0], engine, follows=True), TrainSpec(models[1], engine, total_steps=1)]
    workers = [TrainWorker(spec) for spec in specs]
    reference, policy = (
        TrainHandle(LocalWorkerGroup(role, worker, lambda _: nullcontext()), lambda _: None)
        for role, worker in zip(("reference", "actor"), workers, strict=True)
    )
    reference.initialize()
    policy.initialize()
    start, target = dict(reference.weights(None)), dict(policy.weights(None))
    for _ in range(3):
        reference.follow(policy, 0.01)
    for name, weight in reference.weights(None):
        expected = 0.99**3 * start[name] + (1 - 0.99**3) * target[name]
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)
    working = dict(workers[0].engine.model.named_parameters())
    exact = dict(workers[0].weights(None))
    assert all(torch.equal(one, exact[name].bfloat16()) for name, one in working.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"kl": {"coef": 0.0}}}, "reference: algorithm.kl.coef is 0"),
        ({"algorithm": {"kl": {"kind": "full", "coef": 0.1}}}, "algorithm.kl.kind: full: the actor keeps a copy"),
        ({"actor": {**BASE["actor"], "lora": {"rank": 2}}}, "actor.lora: .* remove one of them"),
        ({"reference": {"model": BASE["model"], "follow": {"every_steps": 1}}}, "reference.model: .* remove one"),
    ],
)
def test_what_cannot_follow_is_refused_at_the_start(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, {**following(1), **change})
    assert not (tmp_path / "run" / "checkpoints").exists()
