"""A tiny model in a folder, an actor, and rollouts of every kind that are closed whatever happens."""

from dataclasses import dataclass, replace

import pytest
import torch

from hone.engines.settings import EngineConfig
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.runtime.local import LocalWorkerGroup
from hone.tracking.metrics import Timer
from hone.trainers.run.event_loop import EventLoop
from hone.weights import sync
from hone.weights.settings import WeightSyncConfig
from hone.workers.rollout import RolloutSpec, start_rollout
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker

BUILD = BuildConfig(hidden_size=32, layers=2, heads=2, mlp_size=64, max_positions=128)


@pytest.fixture
def impatient(monkeypatch):
    """A server that stands still is not waited for so long."""
    for limit in ("REASON_TIMEOUT_S", "STOP_TIMEOUT_S"):
        monkeypatch.setattr(sync, limit, 3.0)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    built = ModelConfig(build=BUILD)
    with without_progress_bars():
        load_language_model(built).save_pretrained(folder)
    load_tokenizer(built).save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.fixture(scope="session")
def loop():
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def actor(model):
    group = LocalWorkerGroup(
        "actor", TrainWorker(TrainSpec(model, EngineConfig(compute_dtype="float32"))), Timer().phase
    )
    handle = TrainHandle(group, lambda metrics: None)
    handle.initialize()
    return handle


@dataclass
class Starter:
    """Starts rollouts, and ends them when the test is over."""

    model: ModelConfig
    loop: EventLoop
    folder: object

    def __post_init__(self):
        self.started = []

    def __call__(self, weights=None, builtin=None, lora=None, new_weights=None, **settings):
        config = RolloutConfig(
            builtin=BuiltinSettings(**(builtin or {"process": "separate"})), start_timeout_s=300, **settings
        )
        tokenizer = load_tokenizer(self.model)
        spec = RolloutSpec(
            config, weights or WeightSyncConfig(timeout_s=60), self.model, "float32", tokenizer, self.folder, lora
        )
        spec = replace(spec, new_weights=new_weights)
        self.started.append(start_rollout(spec, self.loop, Timer().phase))
        return self.started[-1]


@pytest.fixture
def start_beside(model, tmp_path):
    """Starts asynchronous rollouts, on a loop of their own: it stays in a thread once something was started."""
    loop = EventLoop()
    starter = Starter(model, loop, tmp_path)
    yield starter
    for handle in starter.started:
        handle.close()
    loop.close()


@pytest.fixture
def start(model, loop, tmp_path):
    starter = Starter(model, loop, tmp_path)
    yield starter
    for handle in starter.started:
        handle.close()
