"""Rollout servers on the machines of a Ray cluster: raylets with addresses of their own on loopback, real servers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from hone.config import ConfigError, build, load
from hone.engines.settings import EngineConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.base import current_platform
from hone.processes.child import ServerFailed
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.runtime import ray_cluster
from hone.runtime.local import LocalWorkerGroup
from hone.runtime.ray_cluster import PoolDevices, RankDevices, connect, reserve, shared_devices
from hone.runtime.ray_patches import LOOPBACK
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.event_loop import EventLoop
from hone.trainers.run.launch import run_policy
from hone.trainers.run.run_model import local_model
from hone.types import GenerationRequest, SamplingParams
from hone.weights.settings import WeightSyncConfig
from hone.workers.hosts.placing import hosts_of
from hone.workers.rollout import RolloutSpec, start_rollout
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker
from tests.runtime.machines import SECOND, THIRD, Machines
from tests.trainers.tiny import metrics, recipe

pytestmark = pytest.mark.slow

BOUND_S = 150.0
BEGIN_S = 240.0  # of a whole run with its servers, beside other tests: each of its processes imports torch first
BUILD = BuildConfig(hidden_size=32, layers=1, heads=2, mlp_size=64, max_positions=128)
LOCAL = ["actor.max_tokens_per_microbatch=64"]
POOL = ["runtime.backend.pools.rollout.nodes=2", "runtime.backend.pools.rollout.devices=1"]
BY_ARRIVAL = ("rollout/batch_size", "rollout/kv_cache_bytes", "rollout/prefill_tokens", "rollout/shared_prompt_tokens")
WANTED = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def machines():
    found = Machines(SECOND)  # the last tests lose it
    yield found
    found.end()


@pytest.fixture(scope="module")
def loop():
    made = EventLoop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return local_model(ModelConfig(build=BUILD), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def actor(model):
    worker = TrainWorker(TrainSpec(model, EngineConfig(compute_dtype="float32")))
    handle = TrainHandle(LocalWorkerGroup("actor", worker, lambda _: nullcontext()), lambda _: None)
    handle.initialize()
    return handle


@pytest.fixture
def start(machines, model, loop, tmp_path):
    """`start(pool={...})`: servers of the built-in engine, which a pool of that shape has room for."""
    started = []

    def make(pool=None, transport=None, replicas=2, builtin=None, **settings):
        pools = {"rollout": {"nodes": 2, "devices": 1} if pool is None else pool}
        backend = {"name": "ray", "address": machines.address, "start_timeout_s": BEGIN_S, "pools": pools}
        config = RolloutConfig(
            builtin=BuiltinSettings(**(builtin or {"process": "separate"})),
            start_timeout_s=BEGIN_S,
            replicas=replicas,
            **settings,
        )
        spec = RolloutSpec(
            config,
            build(WeightSyncConfig, {"transport": transport, "verify": "probe", "timeout_s": 60}, "the test"),
            model,
            "float32",
            load_tokenizer(model),
            tmp_path,
            runtime=build(RuntimeConfig, {"backend": backend, "threads": 1}, "the test"),
        )
        started.append(start_rollout(spec, loop, lambda _: nullcontext()))
        return started[-1]

    yield make
    for handle in started:
        handle.close()


async def many(rollout, number=8, step=1, **changes):
    return await asyncio.gather(
        *(
            rollout.generate(GenerationRequest(f"{step}/{i}/0/0", (5, 6, 7 + i), replace(WANTED, seed=i, **changes)))
            for i in range(number)
        )
    )


def serving(folder):
    """Process ids of the servers that have a folder on their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder).encode() in command and b"supervisor.py" not in command and state not in "ZX":
            found.append(int(pid))
    return found


def machine_of(replica):
    return replica._spec.host._actor.address


def folder_of(replica):
    return replica.connection.folder


def test_a_run_with_servers_on_two_machines_is_that_of_one(machines, tmp_path):
    """Without a pool of their own they lie where the ranks do."""

    def train(name, *given):
        rollout = {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}, "replicas": 2}
        sections = {"rollout": rollout, "weights": {"verify": "probe", "timeout_s": 60}, "run": {"steps": 3}}
        run_policy(load(PolicyRunConfig, recipe(tmp_path / name, sections), [*LOCAL, *given]))
        return metrics(tmp_path / name / "run")

    backend = ["runtime.backend=ray", "runtime.backend.nodes=2", f"runtime.backend.address={machines.address}"]
    one, other = train("local"), train("ray", *backend)
    assert len(one) == len(other) == 4
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        same = [name for name in theirs if not name.startswith(BY_ARRIVAL)]
        assert {n: mine[n] for n in same} == pytest.approx({n: theirs[n] for n in same}, abs=1e-5, rel=1e-5)
        assert theirs["step"] == 0 or theirs["weights/replicas"] == 2
        assert theirs["step"] == 0 or theirs["correction/max_abs_difference"] < 1e-4
    logs = tmp_path / "ray" / "run" / "servers"
    assert sorted(os.listdir(logs)) == ["builtin-0.log", "builtin-1.log"]
    assert serving(tmp_path) == []


def test_a_server_elsewhere_answers_with_the_token_only_and_is_started_again(start, actor, loop, tmp_path):
    """Its weights come by `delta`, which sends changes alone the second time."""
    rollout = start(transport={"name": "delta"})
    replicas = rollout._engine.replicas
    assert [machine_of(one) for one in replicas] == [LOOPBACK, SECOND]
    here, there = replicas
    assert (here._spec.host._port, here._spec.host.machine, there._spec.host.machine) == (0, "", SECOND)
    for version in (2, 3):
        assert rollout.sync_from(actor, version)["weights/replicas"].value == 2
    assert {one.weight_version for one in replicas} == {3}
    expected = [one.token_ids for one in loop.run(many(rollout))]
    port, token = there._spec.host._port, there._spec.token

    async def knock():
        found = {}
        async with aiohttp.ClientSession() as http:
            for path in ("generate", "receive_weights", "sleep", "stop", "look", "docs", "nothing"):
                for shown in (None, "Bearer wrong", f"Bearer {token[:-1]}", f"Basic {token}"):
                    headers = {"Authorization": shown} if shown else {}
                    url = f"http://{SECOND}:{port}/{path}"
                    async with http.post(url, json={"level": 2, "reason": "x"}, headers=headers) as reply:
                        found.setdefault(path, set()).add(reply.status)
            known = {"Authorization": f"Bearer {token}"}
            async with http.post(f"http://{SECOND}:{port}/nothing", headers=known) as reply:
                return found, reply.status

    found, known = loop.run(knock())
    assert set().union(*found.values()) == {401}
    assert known == 404
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    listens = [one[1] for one in sockets if one[3] == "0A"]
    assert [one for one in listens if one.endswith(f":{port:04X}")] == [f"0200007F:{port:04X}"], "this address alone"
    for pid in serving(folder_of(there)):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            assert token.encode() not in file.read()

    async def with_a_death():
        server, (pid, *_) = there.connection.process, serving(folder_of(there))
        running = asyncio.create_task(many(rollout, 8, max_tokens=100))
        while not rollout._engine.pool.of(there).running:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        found = await running
        assert await server.ends_within(BOUND_S)
        await rollout._engine.revived()
        return found, server.ended

    finished, ended = loop.run(with_a_death())
    rollout.wait_for(3, 60)
    assert ended == f"signal SIGKILL on {SECOND}"
    assert [one.token_ids[:24] for one in finished] == expected
    assert {version for one in finished for version in one.weight_versions} == {3}
    assert (there.alive, there.weight_version, machine_of(there)) == (True, 3, SECOND)
    assert [one.token_ids for one in loop.run(many(rollout))] == expected
    left = [folder_of(one) for one in replicas]
    rollout.close()
    assert [serving(folder) for folder in left] == [[], []]
    assert not any(folder.exists() for folder in left)
    assert there._spec.token not in (tmp_path / "servers" / "builtin-1.log").read_text()


def test_a_server_elsewhere_that_does_not_start_shows_its_last_lines(start, machines):
    with pytest.raises(ServerFailed, match="max_sequence_tokens=4096 is beyond the model's context"):
        start(pool={"nodes": 2, "devices": 1}, builtin={"process": "separate", "max_sequence_tokens": 4096})


def test_a_machine_that_does_not_see_the_run_folder_says_so(machines, loop, tmp_path):
    connect(RaySettings(address=machines.address))
    backend = {"name": "ray", "address": machines.address, "pools": {"rollout": {}}}
    runtime = build(RuntimeConfig, {"backend": backend}, "the test")
    (host,) = hosts_of("rollout", 1, 1, runtime, tmp_path / "elsewhere")
    with pytest.raises(
        ServerFailed, match=r"no place in the cluster: FileNotFoundError: .*elsewhere is not on .*: all m"
    ):
        loop.run(host.open())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"transport": "ipc"},
            r"weights\.transport: ipc is memory of this machine, and 1 of 2 .* choose collective, d",
        ),
        ({"transport": {"name": "delta", "over": "ipc"}}, r"weights\.transport\.over: ipc is memory .* collective"),
        ({"transport": "disk"}, r"weights\.transport\.folder: without one, disk writes into .* name a folder that all"),
        ({"replicas": 3}, r"pools\.rollout: 2 node\(s\) with 1 device\(s\) each have room for 2 server\(s\) .* are 3"),
    ],
)
def test_what_does_not_reach_another_machine_is_refused(start, given, message):
    with pytest.raises(ConfigError, match=message):
        start(**given)


def test_a_folder_that_all_machines_see_reaches_them_too(start, actor, loop, tmp_path):
    rollout = start(transport={"name": "disk", "folder": str(tmp_path / "files")})
    for version in range(2):
        rollout.sync_from(actor, version)
    assert {one.weight_version for one in rollout._engine.replicas} == {1}
    assert len(loop.run(many(rollout))) == 8


def test_servers_share_devices_with_ranks_from_machine_to_machine(machines):
    """Four ranks on each of two machines, by Ray's names of their devices; servers of two devices, and of eight."""
    connect(RaySettings(address=machines.address))
    ranks = [RankDevices(node, (str(device),)) for node in ("a", "b") for device in range(4)]
    shares = shared_devices(None, ranks, 60.0, 5, 2)
    assert [(one._node, one._devices()) for (one,) in shares] == [
        ("a", ("0", "1")),
        ("b", ("0", "1")),
        ("a", ("2", "3")),
        ("b", ("2", "3")),
        ("a", ("0", "1")),
    ]
    every = ("0", "1", "2", "3")
    wide = shared_devices(None, ranks, 60.0, 2, 8)
    assert [[(one._node, one._devices()) for one in parts] for parts in wide] == [[("a", every), ("b", every)]] * 2
    with pytest.raises(
        ConfigError, match=r"6 ranks .* more than the 4 device\(s\) .* and no multiple of it; on several"
    ):
        shared_devices(None, ranks, 60.0, 1, 6)
    with pytest.raises(ConfigError, match=r"12 ranks .* the run's ranks have 2 machine\(s\) with 4 device\(s\)"):
        shared_devices(None, ranks, 60.0, 1, 12)


@pytest.fixture
def held(machines):
    """All devices of the cluster, which a placement group holds until it is removed."""
    connect(RaySettings(address=machines.address))
    group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert group.wait(BOUND_S)
    yield group
    remove_placement_group(group)


def test_devices_that_others_use_are_waited_for_and_devices_that_there_are_not_are_not(held, caplog, monkeypatch):
    monkeypatch.setattr(ray_cluster, "QUIET_S", 0.1)
    platform, queue = current_platform(), RaySettings(start_timeout_s=0.5, queue_timeout_s=BOUND_S)
    with pytest.raises(ConfigError, match=r"1 free device\(s\) each within start_timeout_s=0\.5"):
        reserve(PoolDevices("", 1, 1), platform, RaySettings(start_timeout_s=0.5))
    for shape in (PoolDevices("", 1, 1500), PoolDevices("", 3, 1)):  # more than one machine has; more machines
        with pytest.raises(ConfigError, match=r"within start_timeout_s=0\.5; it has 2 node\(s\)"):
            reserve(shape, platform, queue)
    caplog.clear()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(reserve, PoolDevices("", 1, 1), platform, queue)
        while "waiting for 1 node(s) with 1 free device(s) each" not in caplog.text:
            assert not waiting.done()
            time.sleep(0.02)
        remove_placement_group(held)
        remove_placement_group(waiting.result(BOUND_S))


def test_the_runs_of_a_sweep_share_a_cluster(machines, held, tmp_path):
    given = ["runtime.backend=ray", f"runtime.backend.address={machines.address}", "run.steps=1"]
    command = [sys.executable, "-m", "hone", "train", recipe(tmp_path), *given]
    sweep = subprocess.Popen([*command, "--sweep", "run.seed=1,2", "--at-once", "2"])
    logs = [tmp_path / "run-sweep" / f"run.seed={seed}.log" for seed in (1, 2)]
    until = time.monotonic() + BEGIN_S
    while not all(log.is_file() and "waiting for 1 node(s) with 1 free" in log.read_text() for log in logs):
        assert sweep.poll() is None, [log.read_text() for log in logs if log.is_file()]
        assert time.monotonic() < until
        time.sleep(0.1)
    remove_placement_group(held)
    assert sweep.wait(BEGIN_S) == 0
    assert [len(metrics(log.with_suffix(""))) for log in logs] == [2, 2]


def test_servers_end_with_the_driver_that_is_killed(machines, tmp_path):
    rollout = {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}, "replicas": 2}
    path = recipe(tmp_path / "killed", {"rollout": rollout, "run": {"steps": 500}})
    given = ["runtime.backend=ray", f"runtime.backend.address={machines.address}", *POOL]
    log = tmp_path / "log"
    with log.open("wb") as out:
        run = subprocess.Popen([sys.executable, "-m", "hone", "train", str(path), *given], stdout=out, stderr=out)
    record, deadline = tmp_path / "killed" / "run" / "metrics.jsonl", time.monotonic() + BEGIN_S
    try:
        while not (record.is_file() and len(record.read_text().splitlines()) > 2):
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert len(serving(tmp_path / "killed" / "run" / "model")) >= 2
    finally:
        run.kill()
    run.wait(30)
    deadline = time.monotonic() + 30
    while (left := serving(tmp_path / "killed" / "run" / "model")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_a_lost_machine_costs_its_server_a_move_and_then_the_run_a_server(machines, start, actor, loop):
    """Machines go from here on. On a third one there is a place to move to; after it there is none."""
    rollout = start(max_restarts=2)
    router = rollout._engine
    _, there = router.replicas
    rollout.sync_from(actor, 0)
    expected = [one.token_ids for one in loop.run(many(rollout))]
    machines.add(THIRD)

    async def losing(address):
        running = asyncio.create_task(many(rollout, 8, max_tokens=100))
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        machines.lose(address)
        found = await running
        while there.alive:
            await asyncio.sleep(0.05)
        noticed = time.monotonic() - begun
        router.look()
        await router.revived()
        return [one.token_ids[:24] for one in found], noticed

    found, noticed = loop.run(losing(SECOND))
    assert found == expected
    assert noticed < BOUND_S
    rollout.wait_for(0, 60)
    assert (there.alive, there.weight_version, machine_of(there)) == (True, 0, THIRD)
    assert rollout.metrics()["rollout/replica_restarts"].value == 1
    assert rollout.sync_from(actor, 1)["weights/replicas"].value == 2
    assert [one.token_ids for one in loop.run(many(rollout))] == expected

    there._spec.host._devices._start_s = 5.0
    found, noticed = loop.run(losing(THIRD))
    assert found == expected
    assert noticed < BOUND_S
    assert not there.alive
    why = router.pool.members[1].why
    assert "start 2 failed: ServerFailed: server 1 of rollout got no place in the cluster: no machine of " in why
    assert rollout.sync_from(actor, 2)["weights/replicas"].value == 1
    assert [one.token_ids for one in loop.run(many(rollout))] == expected


def test_a_server_of_a_lost_machine_moves_to_a_free_place_of_its_pool(machines, start, actor, loop):
    machines.add(SECOND)
    rollout = start(max_restarts=1, pool={"nodes": 2, "devices": 2})
    router = rollout._engine
    _, there = router.replicas
    rollout.sync_from(actor, 0)
    expected = [one.token_ids for one in loop.run(many(rollout))]
    assert machine_of(there) == SECOND

    async def losing():
        machines.lose(SECOND)
        while there.alive:
            await asyncio.sleep(0.05)
        router.look()
        await router.revived()

    loop.run(losing())
    why = router.pool.members[1].why
    assert (there.alive, machine_of(there), there._spec.host.machine) == (True, LOOPBACK, ""), why
    assert rollout.sync_from(actor, 1)["weights/replicas"].value == 2
    assert [one.token_ids for one in loop.run(many(rollout))] == expected
