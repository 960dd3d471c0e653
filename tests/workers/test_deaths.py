"""Replicas that die, or stand still, at the worst moments of a sync; what is sampled afterwards is what it says."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hone.config import ConfigError
from hone.rollout.base import ReplicaLost
from hone.types import GenerationRequest, SamplingParams
from hone.weights.base import WeightSyncError
from hone.weights.settings import CollectiveSettings, WeightSyncConfig
from hone.workers.publishing import sending
from hone.workers.publishing.probe import PROMPT_TOKENS, Probe

pytestmark = pytest.mark.slow

WANTED = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def loop(shared_loop):
    return shared_loop


async def many(rollout, step=1):
    asked = (
        rollout.generate(GenerationRequest(f"{step}/{i}/0/0", (5, 6, 7 + i), replace(WANTED, seed=i))) for i in range(6)
    )
    return await asyncio.gather(*asked)


def train(actor):
    """Change the weights in place, as an optimizer step does."""
    actor.updates += 1
    with torch.no_grad():
        for parameter in actor._group._worker.engine.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def kill(replica):
    os.kill(replica.connection.process.process_ids()[0], signal.SIGKILL)


def wait_for_all(rollout, loop, version):
    """Until every server that died has started again, and all have proven the version."""
    loop.run(rollout._engine.revived())
    rollout.wait_for(version, 60)


@pytest.mark.parametrize("frozen", ["in the middle", "before it serves"])
def test_a_revival_that_spans_a_training_step_does_not_serve(share, start, actor, loop, frozen):
    """The loop stands still between two calls of `run`: a replica is half restored while the weights change."""
    rollout = share(replicas=2, weights=WeightSyncConfig(verify="probe", timeout_s=60))
    rollout._publication.sender._engine.bucket_bytes = 1 << 14  # several buckets, and no tensor is cut
    inside = start(builtin={"process": "inside"})
    rollout.sync_from(actor, 0)
    router = rollout._engine
    victim, other = router.replicas
    frozen_there, go_on = asyncio.Event(), asyncio.Event()
    weights, resume = actor.weights, victim.resume

    def slowly(dtype, in_files):
        for number, item in enumerate(weights(dtype, in_files)):
            if number == 8 and frozen == "in the middle":
                frozen_there.set()
            yield item

    async def resume_late():
        await resume()
        frozen_there.set()
        await go_on.wait()

    async def until_the_freeze():
        kill(victim)
        while victim.alive:
            await asyncio.sleep(0.02)
        actor.weights = slowly
        if frozen == "before it serves":
            victim.resume = resume_late
        router.look()
        await frozen_there.wait()

    loop.run(until_the_freeze())
    actor.weights, victim.resume = weights, resume
    train(actor)
    go_on.set()
    rollout.sync_from(actor, 1)
    inside.sync_from(actor, 1)
    wait_for_all(rollout, loop, 1)
    assert {replica.weight_version for replica in router.serving} == {1}
    found, right = loop.run(many(rollout)), loop.run(many(inside))
    assert {version for one in found for version in one.weight_versions} == {1}
    assert [one.token_ids for one in found] == [one.token_ids for one in right]
    rollout.sync_from(actor, 2)  # proves by the probe that both compute with these weights
    assert (victim.weight_version, other.weight_version) == (2, 2)
    assert router.serving == [victim, other]


def test_a_death_in_a_group_costs_the_others_another_sync_and_not_the_run(share, actor, loop):
    """`collective`: a broadcast that lost a member is lost by all."""
    rollout = share(replicas=2, weights=WeightSyncConfig(transport=CollectiveSettings(), timeout_s=60))
    rollout.sync_from(actor, 0)
    victim, other = rollout._engine.replicas
    weights = actor.weights
    killed = []

    def deadly(dtype, in_files):
        for number, item in enumerate(weights(dtype, in_files)):
            if number == 3 and not killed:
                killed.append(victim)
                kill(victim)
                time.sleep(0.3)
            yield item

    actor.weights = deadly
    metrics = rollout.sync_from(actor, 1)
    assert metrics["weights/replicas"].value == 1
    assert other.weight_version == 1
    wait_for_all(rollout, loop, 1)
    assert (victim.alive, victim.weight_version) == (True, 1)
    assert {version for one in loop.run(many(rollout)) for version in one.weight_versions} == {1}


@pytest.mark.usefixtures("impatient")
def test_the_probe_leaves_out_who_died_and_does_not_wait_for_who_stands_still(share, actor, loop, monkeypatch):
    rollout = share(replicas=2, weights=WeightSyncConfig(verify="probe", timeout_s=60))
    rollout.sync_from(actor, 0)
    victim, other = rollout._engine.replicas
    send = rollout._publication.sender.send

    async def send_and_kill(*arguments):
        rollout._publication.sender.send = send  # once: what is sent after the restart leaves it alive
        metrics = await send(*arguments)
        kill(victim)
        while victim.alive:
            await asyncio.sleep(0.02)
        return metrics

    rollout._publication.sender.send = send_and_kill
    metrics = rollout.sync_from(actor, 1)
    assert metrics["correction/probe_max_abs_difference"].value < 1e-4, "the other's"
    wait_for_all(rollout, loop, 1)
    assert (victim.alive, victim.weight_version) == (True, 1)

    async def send_and_freeze(*arguments):
        rollout._publication.sender.send = send
        metrics = await send(*arguments)
        os.kill(other.connection.process.process_ids()[0], signal.SIGSTOP)
        monkeypatch.setattr(other, "_request_timeout_s", 1.0)
        return metrics

    rollout._publication.sender.send = send_and_freeze
    rollout.sync_from(actor, 2)
    assert rollout._engine.serving == [victim], "the other does not serve what it did not prove"
    wait_for_all(rollout, loop, 2)
    assert {one.weight_version for one in rollout._engine.serving} == {2}
    assert (other.alive, other.weight_version) == (True, 2)


def pid(replica):
    return replica.connection.process.process_ids()[0]


@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_with_requests_is_restarted_and_nobody_notices(share, actor, loop):
    rollout = share(replicas=2, request_timeout_s=20)  # it counts as hung after a quarter of this
    rollout.sync_from(actor, 0)
    victim, other = rollout._engine.replicas
    alone = loop.run(many(rollout, 1))
    stopped = pid(victim)
    os.kill(stopped, signal.SIGSTOP)
    found = loop.run(many(rollout, 2))
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    wait_for_all(rollout, loop, 0)
    counted = rollout.metrics()
    assert counted["rollout/replica_restarts"].value == 1
    assert counted["rollout/requests_resent"].value == 3
    assert not Path(f"/proc/{stopped}").exists()
    assert rollout._engine.serving == [victim, other]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("moment", ["before the sync", "in the middle"])
@pytest.mark.parametrize("transport", [None, CollectiveSettings()], ids=["ipc", "collective"])
def test_a_server_that_hangs_in_a_sync_costs_the_others_nothing_but_time(share, actor, loop, moment, transport):
    rollout = share(replicas=2, weights=WeightSyncConfig(transport=transport, timeout_s=10))
    rollout.sync_from(actor, 0)
    router = rollout._engine
    victim, other = router.replicas
    weights, stopped = actor.weights, []

    def freezing(dtype, in_files):
        for number, item in enumerate(weights(dtype, in_files)):
            if number == (0 if moment == "before the sync" else 3) and not stopped:
                stopped.append(pid(victim))
                os.kill(stopped[0], signal.SIGSTOP)
            yield item

    rollout._publication.sender._engine.bucket_bytes = 1 << 14  # several buckets
    if moment == "before the sync":
        stopped.append(pid(victim))
        os.kill(stopped[0], signal.SIGSTOP)
    actor.weights = freezing
    train(actor)
    rollout.sync_from(actor, 1)
    assert router.serving == [other], "the other has proved version 1, this one has proved nothing"
    assert other.weight_version == 1
    wait_for_all(rollout, loop, 1)
    assert router.serving == [victim, other]
    assert not Path(f"/proc/{stopped[0]}").exists()
    assert {version for one in loop.run(many(rollout)) for version in one.weight_versions} == {1}


def test_after_a_sync_that_failed_nobody_serves_who_did_not_prove_it(share, actor, loop, monkeypatch):
    rollout = share(replicas=2)
    rollout.sync_from(actor, 0)
    router = rollout._engine
    victim, other = router.replicas
    receive = victim.receive_weights

    async def other_bytes(offer):
        (receipt,) = await receive(offer)
        return [replace(receipt, digest="0" * 16)]

    monkeypatch.setattr(victim, "receive_weights", other_bytes)
    monkeypatch.setattr(sending, "DYING_S", 0.0)  # nobody dies
    with pytest.raises(WeightSyncError, match=f"replica {victim.name}: "):
        rollout.sync_from(actor, 1)
    assert router.serving == [other]
    assert {version for one in loop.run(many(rollout)) for version in one.weight_versions} == {1}


def test_the_probe_tells_the_router_who_died():
    class Dead:
        name = "dead"

        async def generate(self, *_):
            raise ReplicaLost("no process")

    told = []
    probe = Probe(100, 1.0, [torch.float32], 128, mixture=False)
    assert asyncio.run(probe.ask([Dead()], 1, lambda replica, why: told.append((replica.name, why)))) == []
    assert told == [("dead", "no process")]
    assert probe.compare([], None, 1) == {}
    with pytest.raises(ReplicaLost):
        asyncio.run(probe.ask([Dead()], 1))


def test_the_prompt_of_the_probe_fills_blocks_of_a_prefix_cache_where_the_context_lets_it():
    assert PROMPT_TOKENS >= 2 * 32
    assert len(Probe(100, 1.0, [torch.float32], 4096, mixture=False).prompt) == PROMPT_TOKENS
    assert len(Probe(100, 1.0, [torch.float32], 40, mixture=False).prompt) == 32


def test_a_builtin_server_has_one_device(start):
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel = 2: the built-in engine uses one device"):
        start(tensor_parallel=2)
