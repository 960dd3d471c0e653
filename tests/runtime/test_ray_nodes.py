"""The Ray runtime over two machines, each a raylet with an address of its own on loopback."""

import threading
import time
from contextlib import nullcontext

import pytest

from hone.config import ConfigError, load
from hone.runtime import ray as runtime
from hone.runtime.base import WorkerFailed
from hone.runtime.ray_patches import LOOPBACK
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.runtime.machines import SECOND, Machines
from tests.runtime.workers import Echo, Hanging, Spec
from tests.trainers.tiny import metrics, recipe

pytestmark = pytest.mark.slow

LOCAL = ["run.steps=2", "actor.max_tokens_per_microbatch=64"]
BOUND_S = 120.0


@pytest.fixture(scope="module")
def machines():
    found = Machines(SECOND)
    yield found
    found.end()


def place(worker_class, machines, devices):
    backend = RaySettings(nodes=2, devices=devices, address=machines.address, start_timeout_s=240)
    config = RuntimeConfig(backend=backend, threads=1)
    return runtime.RayWorkerGroup.place("critic", worker_class, Spec(), config, lambda _: nullcontext())


def test_ranks_of_a_machine_are_neighbours(machines):
    group = place(Echo, machines, 2)
    assert [rank.facts.node for rank in group._pool._ranks] == [LOOPBACK, LOOPBACK, SECOND, SECOND]
    assert group.call("where", "x") == ("x", 0)


def test_a_run_on_two_machines_is_that_of_one_process(machines, tmp_path):
    def train(name, *given):
        run_policy(load(PolicyRunConfig, recipe(tmp_path / name), [*LOCAL, *given]))
        return metrics(tmp_path / name / "run")

    backend = ["runtime.backend=ray", "runtime.backend.nodes=2", f"runtime.backend.address={machines.address}"]
    one, other = train("local"), train("ray", *backend)
    assert len(one) == len(other) == 3
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5) for name in theirs)


def test_more_machines_than_there_are(machines):
    backend = RaySettings(nodes=3, address=machines.address, start_timeout_s=1)
    message = r"runtime.backend: the cluster did not have 3 node\(s\) with 1 free .* it has 2 node\(s\)"
    with pytest.raises(ConfigError, match=message):
        runtime._pool("actor", RuntimeConfig(backend=backend))


def test_a_lost_machine_ends_the_run(machines, capfd):
    """The last test here: the cluster has one machine after it."""
    group = place(Hanging, machines, 1)
    lost = threading.Timer(2.0, machines.lose, [SECOND])
    lost.start()
    begun = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        group.call("train_batch", None, None)
    assert time.monotonic() - begun < BOUND_S
    lost.join()
    assert f"role critic: rank 1 of 2 on node {SECOND} (process " in str(caught.value)
    assert "was lost in phase train_batch" in str(caught.value)
    printed = capfd.readouterr().err
    assert f"last lines of the log of rank 1 of 2 on node {SECOND}" in printed
    assert "(its machine does not answer)" in printed
