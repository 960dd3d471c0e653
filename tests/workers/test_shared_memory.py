"""Whether models and rollout servers fit on the device that they share, before the first step finds out."""

import pytest
import torch

from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.fsdp2.settings import Fsdp2Settings
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.rollout.servers import vllm
from hone.workers.rollout_role import DeviceShare
from hone.workers.shared_memory import GIB, why_no_room
from hone.workers.train import TrainSpec
from tests.engines.spread import LOSSES, make_batch

SHARE = DeviceShare(0.5, 1, "rollout.engine.gpu_memory_utilization")


@pytest.mark.parametrize(
    ("kept", "training", "share", "sleeps", "expected"),
    [
        (39, 40, SHARE, True, ""),
        (
            41,
            20,
            SHARE,
            True,
            "while the rollout generates, a device that both use needs 81.0 GiB and has 80.0: 41.0 GiB",
        ),
        (41, 20, SHARE, True, "gpu_memory_utilization=0.48 or actor.backend.offload=true"),
        (30, 20, SHARE, False, "while a model trains, a device that both use needs 90.0 GiB and has 80.0: 50.0 GiB"),
        (30, 20, SHARE, False, "40.0 GiB for rollout servers (rollout.engine.gpu_memory_utilization=0.5)"),
        (
            30,
            60,
            SHARE,
            True,
            "weights, optimizer state and gradients, activations not counted; set actor.optimizer.name",
        ),
        (30, 0, DeviceShare(0.4, 2, SHARE.key), True, "64.0 GiB for rollout servers"),
        (30, 0, DeviceShare(0.4, 2, SHARE.key), True, "gpu_memory_utilization=0.31 or"),
    ],
)
def test_the_arithmetic_of_a_shared_device(kept, training, share, sleeps, expected):
    found = why_no_room(80 * GIB, kept * GIB, training * GIB, share, sleeps)
    assert (expected in found) if expected else found == ""


def engine_of(optimizer, dtype, backend=None):
    model = ModelConfig(build=BuildConfig(hidden_size=256, layers=1, mlp_size=512, max_positions=64), dtype=dtype)
    config = EngineConfig(
        compute_dtype="bfloat16", optimizer=optimizer, max_tokens_per_microbatch=64, backend=backend or Fsdp2Settings()
    )
    made = Fsdp2Engine(TrainSpec(model, config, total_steps=10), "cpu")
    made.initialize()
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(),
        OptimizerConfig(name="SGD"),
        OptimizerConfig(name="SGD", options={"momentum": 0.9}),
        OptimizerConfig(name="AdamW8bit"),
    ],
    ids=lambda one: f"{one.name}{one.options or ''}",
)
def test_the_state_of_the_first_step_is_foreseen(optimizer, dtype):
    engine = engine_of(optimizer, dtype)
    needs = engine.memory_needs()
    masters = engine.weights.masters.values()
    assert needs.training == sum(one.numel() * one.element_size() for one in masters)
    engine.train_batch(make_batch(1), LOSSES["policy"])
    states = [value for state in engine.update.optimizer.state.values() for value in state.values()]
    kept = sum(one.nbytes for one in states if isinstance(one, torch.Tensor) and one.dim())
    assert needs.kept == pytest.approx(
        kept, rel=0.1 if optimizer.name == "AdamW8bit" else 0
    )  # its vectors keep float32
    assert engine.memory_needs().kept == 0, "what is there is counted as allocated"


def test_an_offloaded_model_needs_the_device_only_while_it_trains():
    needs = engine_of(OptimizerConfig(), "float32", Fsdp2Settings(offload=True)).memory_needs()
    plain = engine_of(OptimizerConfig(), "float32")
    weights = sum(one.nbytes for one in plain.model.parameters()) + sum(
        one.nbytes for one in plain.weights.masters.values()
    )
    assert needs.kept == 0
    assert needs.training == weights + plain.memory_needs().kept + plain.memory_needs().training


def test_vllm_says_what_it_takes():
    assert vllm.ACCELERATOR_DEFAULTS[vllm.VllmServer.memory_option] == 0.5
