"""`compute_dtype: auto`: what a run computes in on each kind of device, and that rollout and trainer agree."""

import pytest
import torch
from safetensors.torch import load_file

from hone.config import load
from hone.engines.checkpoint.files import CheckpointError
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.platforms.base import PlatformRegistry
from hone.platforms.cpu import CpuPlatform, lacking_bfloat16
from hone.registry import Registry
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from hone.trainers.run.roles import lost_updates
from hone.workers.train import TrainSpec, TrainWorker
from tests.trainers.tiny import metrics, recipe

FLAGS = {
    "emulating": ("avx2",),
    "multiplying": ("avx512_bf16",),
}  # of two pretended processors
AUTO_ACTOR = {"actor": {"optimizer": {"lr": 3e-3}}, "run": {"steps": 2}}
BUILD = BuildConfig(hidden_size=32, layers=1, heads=2, mlp_size=64, max_positions=32)


@pytest.fixture
def on(monkeypatch):
    """on(name): from here on, this process runs on a CPU with the flags of `FLAGS[name]`."""
    registry = Registry("platform", {"cpu": "hone.platforms.cpu:CpuPlatform"})
    monkeypatch.setattr("hone.platforms.base.PLATFORMS", registry)
    for name, flags in FLAGS.items():
        body = {"why_bfloat16_is_slow": lambda self, flags=flags: lacking_bfloat16(flags)}
        PlatformRegistry.register(platform=name)(type(name.title(), (CpuPlatform,), body))
    return lambda name: monkeypatch.setenv("HONE_PLATFORM", name)


def train(path, *overrides):
    run_policy(load(PolicyRunConfig, path, list(overrides)))
    return path.parent / "run"


@pytest.mark.parametrize(
    ("name", "said", "dtype", "gap"),
    [
        ("emulating", "float32 (auto: this processor has neither AVX512-BF16 nor AMX", torch.float32, 1e-5),
        ("multiplying", "bfloat16 (auto: multiplying multiplies bfloat16 natively here)", torch.bfloat16, 0.05),
    ],
)
def test_rollout_and_trainer_compute_in_what_fits_the_device(name, said, dtype, gap, on, tmp_path, capsys):
    on(name)
    update = {"update": {"prompts_per_step": 4, "samples_per_prompt": 4, "minibatches": 2}}
    run = train(recipe(tmp_path, AUTO_ACTOR, update))
    assert f"computed in {said}" in capsys.readouterr().err
    steps = metrics(run)[1:]
    assert len(steps) == 2
    assert all(step["correction/mean_abs_difference"] < gap for step in steps)
    exported = load_file(run / "export" / "model.safetensors")  # weights as they are computed with
    assert {tensor.dtype for tensor in exported.values()} == {dtype}


def test_weights_that_are_too_coarse_for_the_learning_rate_are_warned_about():
    coarse, fine = ModelConfig(build=BUILD, dtype="bfloat16"), ModelConfig(build=BUILD)
    small, large = (EngineConfig(optimizer=OptimizerConfig(lr=lr)) for lr in (1e-6, 1e-3))
    said = lost_updates(coarse, small)
    assert "model.dtype=bfloat16 stores 8 significant bits" in said
    assert "set model.dtype=float32 (compute_dtype may stay bfloat16), or " in said
    assert [lost_updates(*one) for one in ((coarse, large), (fine, small), (fine, large))] == [None] * 3


@pytest.mark.slow
def test_a_run_continues_in_the_dtype_that_it_began_in(on, tmp_path):
    path = recipe(tmp_path, AUTO_ACTOR)
    on("emulating")
    train(path)
    on("multiplying")
    with pytest.raises(
        CheckpointError, match=r"computed in float32, and actor\.compute_dtype: auto chooses bfloat16 on this machine; "
    ):
        train(path, "run.steps=4")
    run = train(path, "run.steps=4", "actor.compute_dtype=float32")
    assert len(metrics(run)[1:]) == 4


def test_a_rank_that_would_choose_otherwise_than_its_driver_refuses(on):
    on("multiplying")
    model = ModelConfig(build=BUILD)
    assert TrainWorker(TrainSpec(model, EngineConfig(), driver_dtype="bfloat16")).engine.compute == torch.bfloat16
    with pytest.raises(ValueError, match=r"auto chooses bfloat16 on a rank \(.*\) and float32 on the machine that"):
        TrainWorker(TrainSpec(model, EngineConfig(), driver_dtype="float32"))
    explicit = EngineConfig(compute_dtype="float32")
    assert TrainWorker(TrainSpec(model, explicit, driver_dtype="float32")).engine.compute == torch.float32
