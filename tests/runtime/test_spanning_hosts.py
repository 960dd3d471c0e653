"""One server on two machines of a Ray cluster: it starts, is watched and ends as one. Its processes here only wait."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hone.config import ConfigError, build
from hone.engines.settings import LoraConfig
from hone.processes.child import ServerFailed
from hone.rollout.settings import RolloutConfig
from hone.runtime.ray_cluster import connect
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.weights.settings import WeightSyncConfig
from hone.workers.hosts.placing import hosts_of, reaching
from hone.workers.hosts.spanning import SpanningHost
from hone.workers.rollout import _check_spread
from tests.runtime.machines import SECOND, THIRD, Machines

pytestmark = pytest.mark.slow

BOUND_S = 150.0
WAITING = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def machines():
    found = Machines(SECOND, THIRD)
    connect(RaySettings(address=found.address))
    yield found
    found.end()


def runtime_of(machines, nodes=2):
    backend = {"name": "ray", "address": machines.address, "start_timeout_s": 60}
    return build(RuntimeConfig, {"backend": {**backend, "pools": {"rollout": {"nodes": nodes}}}}, "the test")


@pytest.fixture
def host(machines, tmp_path):
    (found,) = hosts_of("rollout", 1, 2, runtime_of(machines), tmp_path)
    return found


def launches(sites, program=WAITING):
    return [([sys.executable, "-c", program], {"NUMBER": str(site.span.number)}) for site in sites]


async def up(logs):
    return all(one.is_file() and one.read_text().strip() for one in logs)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("lost", [0, 1])
def test_the_end_of_one_machines_process_is_the_end_of_the_server(host, tmp_path, lost):
    log = tmp_path / "s.log"
    logs = [log, tmp_path / "s.1.log"]

    async def life():
        site = await host.open()
        sites = [site, *site.others]
        assert [one.span.number for one in sites] == [0, 1]
        assert {one.span.addresses for one in sites} == {site.span.addresses}
        assert len(set(site.span.addresses)) == 2
        assert len({one.span.port for one in sites}) == 1
        assert all(one.folder.is_dir() for one in sites)
        process = host.process("s", launches(sites), log)
        assert not process.alive
        for one in logs:
            one.unlink(missing_ok=True)
        await process.start(lambda: up(logs), BOUND_S)
        pids = [int(one.read_text().split()[-1]) for one in logs]
        assert [running(pid) for pid in pids] == [True, True]
        assert (process.alive, process.ended) == (True, "")
        os.kill(pids[lost], signal.SIGKILL)
        assert await process.ends_within(BOUND_S)
        ended = process.ended
        assert running(pids[1 - lost])
        await process.stop()
        await host.close()
        assert [running(pid) for pid in pids] == [False, False]
        assert not any(one.folder.exists() for one in sites)
        return ended, site.span.addresses[lost]

    for _ in range(2):  # it can be started again
        ended, address = asyncio.run(life())
        assert ended == f"signal SIGKILL on {address}"


def test_a_machine_that_cannot_start_its_process_leaves_nothing_running(host, tmp_path):
    async def life():
        site = await host.open()
        good, _ = launches([site, *site.others])
        process = host.process("s", [good, (["/no/such/program"], {})], tmp_path / "s.log")
        begun = time.monotonic()
        try:
            with pytest.raises(ServerFailed):
                await process.start(lambda: up([tmp_path / "never"]), BOUND_S)
            assert time.monotonic() - begun < BOUND_S
            assert not process.alive
        finally:
            await process.stop()
            await host.close()
        written = (tmp_path / "s.log").read_text().split()
        assert not any(running(int(pid)) for pid in written)

    asyncio.run(life())


def test_weights_go_by_broadcast_and_servers_get_whole_machines(machines, host, tmp_path):
    config = build(WeightSyncConfig, {}, "the test")
    assert reaching(config, [host]).transport.name == "collective"
    assert isinstance(host, SpanningHost)
    del host
    (alone,) = hosts_of("rollout", 1, 1, runtime_of(machines, nodes=1), tmp_path)
    assert not isinstance(alone, SpanningHost)
    with pytest.raises(ConfigError, match=r"room for 1 server\(s\) of 2 device\(s\), but there are 2"):
        hosts_of("rollout", 2, 2, runtime_of(machines), tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"backend": "sglang", "tensor_parallel": 2, "engine": {"attn_dp_size": 2}},
            "with attn_dp_size hone starts SGLang on one",
        ),
        ({"backend": "sglang", "tensor_parallel": 2}, ""),
        ({"backend": "builtin"}, "a server of builtin uses one machine"),
        ({"backend": "vllm", "engine": {"data_parallel_size": 2}}, "with data_parallel_size hone starts vLLM on one"),
        ({"backend": "vllm", "tensor_parallel": 2}, ""),
    ],
)
def test_what_an_engine_cannot_spread_is_refused(host, settings, reason):
    config = RolloutConfig(**settings)
    if not reason:
        _check_spread(config, None, [host])
        _check_spread(config, LoraConfig(sync="merged"), [host])
        with pytest.raises(ConfigError, match=r"servers on one machine only, and .* set actor\.lora\.sync=merged"):
            _check_spread(config, LoraConfig(), [host])
        return
    with pytest.raises(ConfigError, match=rf"is more than the devices of one machine, and {reason}"):
        _check_spread(config, None, [host])
