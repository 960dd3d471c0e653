"""An asynchronous run over three machines of a Ray cluster, one of which is lost while the run trains."""

import asyncio
import time

import pytest
import ray
from ray.util.placement_group import placement_group_table

from hone.cli.recipe import load_recipe
from hone.rollout.servers.builtin import BuiltinServer
from hone.runtime.ray_cluster import SHARE_OF_CPU
from hone.trainers.run.context import RunControl
from hone.trainers.run.launch import run_policy
from tests.faults.asynchronous import PATIENCE_S, count, settings
from tests.runtime.machines import LOOPBACK, SECOND, THIRD, Machines
from tests.trainers.test_asynchronous import assert_same
from tests.trainers.tiny import metrics, recipe

pytestmark = pytest.mark.slow

STEPS, LOST, BACK = 6, 2, 4
WIDE = {"nodes": 2, "devices": round(1 / SHARE_OF_CPU) + 1}  # more than one CPU on each of two machines


@pytest.fixture(scope="module")
def machines():
    """The first one is too small for a machine of the pool `WIDE`."""
    found = Machines(SECOND, THIRD, there=2)
    yield found
    found.end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_policy(load_recipe(recipe(tmp_path_factory.mktemp("whole"), evaluated(replicas=1))))


def evaluated(replicas):
    """The settings with an evaluation after steps 3 and 6."""
    return {key: value for key, value in settings(STEPS, replicas).items() if key != "evaluation"}


class Loss:
    """The machine of one server is lost when this server gets a request for version `LOST` or later.

    The evaluation after step 3 has requests for every server, so the machine is lost by then.
    """

    def __init__(self, machines):
        self.places = {}
        self.moved_to = ""
        self._machines = machines
        self._generate = BuiltinServer.generate
        self._server = None

    async def generate(self, server, *asked):
        if self._server is None and server.weight_version >= LOST and machine_of(server) == THIRD:
            self._server, self.places = server, places()
            await asyncio.to_thread(self._machines.lose, THIRD)
            async with asyncio.timeout(PATIENCE_S):
                while server.alive:  # a process of Ray ends some seconds after its raylet
                    await asyncio.sleep(0.05)
        return await self._generate(server, *asked)

    def wait_for_the_server(self, step, figures):
        """After step `BACK`, wait until the server runs again on another machine."""
        deadline = time.monotonic() + PATIENCE_S
        while step == BACK and not (self._server.alive and self._server.weight_version == BACK):
            assert time.monotonic() < deadline, "the server was not started again"
            time.sleep(0.05)
        if step == BACK:
            self.moved_to = machine_of(self._server)


def machine_of(server):
    return server._spec.host._actor.address


def places():
    """Number of machines of a pool -> addresses of these machines."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    pools = [
        one["bundles_to_node_id"].values() for one in placement_group_table().values() if one["state"] == "CREATED"
    ]
    return {len(nodes): {addresses[node] for node in nodes} for nodes in pools}


def test_a_run_that_loses_the_machine_of_a_server_ends_as_one_that_does_not(whole, machines, tmp_path, monkeypatch):
    loss = Loss(machines)
    monkeypatch.setattr(BuiltinServer, "generate", lambda *given: loss.generate(*given))
    backend = {"name": "ray", "address": machines.address, "start_timeout_s": PATIENCE_S, "pools": {"rollout": WIDE}}
    own = {"threads": 1, "stall_timeout_s": PATIENCE_S, "backend": backend}
    path = recipe(tmp_path, evaluated(replicas=2), {"runtime": own, "weights": {"timeout_s": PATIENCE_S / 2}})
    run = run_policy(load_recipe(path), RunControl(on_step=loss.wait_for_the_server))
    assert loss.places == {1: {LOOPBACK}, 2: {SECOND, THIRD}}
    assert loss.moved_to == SECOND
    assert sum(line["rollout/replica_restarts"] for line in metrics(run)[1:]) == 1
    assert count(run) == (4 * STEPS, 0, 0)
    assert_same(whole, run)
