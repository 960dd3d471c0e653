"""Ray ranks that send their weights themselves, to servers of the built-in engine."""

import os
import signal
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hone.engines.settings import EngineConfig
from hone.models.tokenizer import load_tokenizer
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.runtime import ray as runtime
from hone.runtime.base import WorkerFailed
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.trainers.run.event_loop import EventLoop
from hone.weights.settings import WeightSyncConfig
from hone.weights.snapshot import Copied
from hone.weights.transports.bucketed.folders import PREFIX
from hone.workers.rollout import RolloutSpec, start_rollout
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker
from tests.workers.conftest import model  # noqa: F401  a fixture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool():
    """The runtime of two ranks, which the last test loses."""
    return RuntimeConfig(backend=RaySettings(devices=2), threads=1)


@pytest.fixture
def actor(model, pool):  # noqa: F811
    spec = TrainSpec(model, EngineConfig(compute_dtype="float32"))
    group = runtime.RayWorkerGroup.place("actor", TrainWorker, spec, pool, lambda _: nullcontext())
    handle = TrainHandle(group, lambda metrics: None)
    handle.initialize()
    return handle


@pytest.fixture
def rollout(model, tmp_path):  # noqa: F811
    loop = EventLoop()
    settings = RolloutConfig(
        builtin=BuiltinSettings(process="separate", dtype="bfloat16"), replicas=2, start_timeout_s=300
    )
    tokenizer = load_tokenizer(model)
    spec = RolloutSpec(settings, WeightSyncConfig(timeout_s=60), model, "float32", tokenizer, tmp_path)
    started = start_rollout(spec, loop, lambda _: nullcontext())
    yield started
    started.close()
    loop.close()


@pytest.fixture
def sockets(actor, rollout, monkeypatch):
    """The folder of the driver's temporary folders from now on; other tests have theirs elsewhere."""
    with tempfile.TemporaryDirectory(prefix="hone-") as own:
        monkeypatch.setattr(tempfile, "tempdir", own)
        yield Path(own)


def test_ranks_send_without_the_object_store_and_a_killed_rank_is_named(actor, rollout, sockets, monkeypatch):
    group = actor._group
    size = sum(tensor.nbytes for tensor in Copied.of(actor.weights(torch.bfloat16)).tensors.values())

    def refuse(self):
        raise AssertionError("the driver opened the stream of the ranks")

    monkeypatch.setattr(runtime.RayWorkerGroup, "_stream", refuse)
    for version in (0, 1):
        metrics = rollout.sync_from(actor, version)
        assert metrics["weights/senders"].value == 1  # without devices, the first rank sends to all
        assert metrics["weights/replicas"].value == 2
        assert metrics["weights/bytes"].value == size
        assert rollout.weight_version == version
    assert list(sockets.glob(f"{PREFIX}*")) == []
    rank = group._pool._ranks[1].facts.process
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(WorkerFailed, match=r"rank 1 of 2 .* was lost in phase send_weights"):
        rollout.sync_from(actor, 2)
    assert list(sockets.glob(f"{PREFIX}*")) == []
