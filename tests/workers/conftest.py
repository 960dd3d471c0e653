"""A tiny model in a folder, an actor, and rollouts of every kind that are closed whatever happens."""

from dataclasses import dataclass, replace

import pytest
import torch

from hone.engines.settings import EngineConfig
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.rollout.base import ReplicaLost
from hone.rollout.router import Router
from hone.rollout.servers import adapter, connection
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.runtime.local import LocalWorkerGroup
from hone.tracking.metrics import Timer
from hone.trainers.run.event_loop import EventLoop
from hone.weights import sync
from hone.weights.settings import WeightSyncConfig
from hone.workers.publishing.publication import ToServers
from hone.workers.publishing.sending import WeightSender
from hone.workers.rollout import RolloutSpec, prepare_rollout, start_rollout
from hone.workers.rollout_role import RolloutHandle
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker

BUILD = BuildConfig(hidden_size=32, layers=2, heads=2, mlp_size=64, max_positions=128)


@pytest.fixture
def impatient(monkeypatch):
    """Short limits for a server that stands still. `STOP_TIMEOUT_S` is longer: one that runs answers within it."""
    monkeypatch.setattr(sync, "STOP_TIMEOUT_S", 3.0)
    monkeypatch.setattr(sync, "REASON_TIMEOUT_S", 1.0)
    monkeypatch.setattr(adapter, "STOP_S", 1.0)
    monkeypatch.setattr(connection, "GRACE_S", 1.0)


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

    def spec(self, weights=None, builtin=None, lora=None, new_weights=None, **settings):
        config = RolloutConfig(
            builtin=BuiltinSettings(**(builtin or {"process": "separate"})), start_timeout_s=300, **settings
        )
        tokenizer = load_tokenizer(self.model)
        spec = RolloutSpec(
            config, weights or WeightSyncConfig(timeout_s=60), self.model, "float32", tokenizer, self.folder, lora
        )
        return replace(spec, new_weights=new_weights)

    def __call__(self, **settings):
        self.started.append(start_rollout(self.spec(**settings), self.loop, Timer().phase))
        return self.started[-1]


class Sharer(Starter):
    """Two servers for several tests. Each test has a rollout of its own over them, which has no weights yet."""

    def begin(self):
        self.servers = super().__call__(replicas=2)._engine.replicas
        self.rollouts = []

    def __call__(self, **settings):
        spec = self.spec(**settings)
        router = Router(self.servers[: spec.settings.replicas], spec.settings, spec.tokenizer)
        sender = WeightSender(router, spec.weights, self.servers[0]._spec.token)
        parts = replace(
            prepare_rollout(spec, self.loop, Timer().phase)._parts,
            engine=router,
            publication=ToServers(router, sender, copies=spec.new_weights is not None),
            replicas=lambda: router.serving,
            lost=router.replica_failed,
            start=None,
        )
        self.rollouts.append(RolloutHandle(parts, self.loop, Timer().phase))
        return self.rollouts[-1]

    async def end(self):
        for rollout in self.rollouts:
            await rollout._publication.close()
            await rollout._engine.revived()
        self.rollouts.clear()
        for server in self.servers:
            await empty(server)


async def empty(server):
    """Take the weights away; a server that died or hangs, because a test failed, is started again."""
    try:
        await server.stop("the test has ended")
        if server.alive:
            return
    except (ReplicaLost, TimeoutError):
        pass
    await server.close()
    await server.start()


@pytest.fixture(scope="module")
def shared_loop():
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def _sharer(model, shared_loop, tmp_path_factory):
    sharer = Sharer(model, shared_loop, tmp_path_factory.mktemp("shared"))
    sharer.begin()
    yield sharer
    for handle in sharer.started:
        handle.close()


@pytest.fixture
def share(_sharer):
    """Starts rollouts over the two servers of the file, on a loop that is theirs."""
    yield _sharer
    _sharer.loop.run(_sharer.end())


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
