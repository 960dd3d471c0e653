"""The rollout of a run: in the trainer's process or as servers, the same tokens and the same proofs."""

import asyncio
import json
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from transformers import LlamaConfig

from hone.config import ConfigError, build
from hone.platforms.cpu import CpuPlatform
from hone.processes.child import ServerFailed
from hone.rollout.settings import RolloutConfig
from hone.runtime.settings import PoolSettings, RaySettings, RuntimeConfig
from hone.types import Completion, GenerationRequest, ModelOutput, SamplingParams, StopReason
from hone.weights.base import WeightSyncError
from hone.weights.settings import WeightSyncConfig
from hone.workers.publishing.probe import Probe
from hone.workers.publishing.publication import LOOK_S
from hone.workers.rollout import _trainers_here, device_share, prepare_rollout, server_specs, with_context

WANTED = SamplingParams(max_tokens=24, ignore_eos=True)
INSIDE = {"process": "inside"}


async def many(rollout, number=8, step=1, **changes):
    return await asyncio.gather(
        *(
            rollout.generate(GenerationRequest(f"{step}/{i}/0/0", (5, 6, 7 + i), replace(WANTED, seed=i, **changes)))
            for i in range(number)
        )
    )


def living(folder):
    """Process ids of everything that was started with this folder on its command line."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                command = file.read()
            with open(f"/proc/{entry}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if entry.isdigit() and str(folder).encode() in command and state not in "ZX":
            found.append(int(entry))
    return found


@pytest.mark.slow
def test_servers_say_what_the_engine_inside_says_and_outlive_a_dead_one(start, actor, loop, tmp_path):
    """One story, because a server takes seconds to start: equality, versions, the proof, a death, the end."""
    inside = start(builtin=INSIDE)
    servers = start(weights=WeightSyncConfig(verify="probe", timeout_s=60), replicas=2)
    for rollout in (inside, servers):
        metrics = rollout.sync_from(actor, 3)
        assert metrics["weights/version"].value == 3
    assert metrics["weights/replicas"].value == 2
    assert metrics["weights/buckets"].value >= 1
    assert metrics["correction/probe_max_abs_difference"].value < 1e-4
    assert servers.weight_version == 3
    expected = loop.run(many(inside))
    found = loop.run(many(servers))
    assert [(c.token_ids, c.weight_versions) for c in found] == [(c.token_ids, c.weight_versions) for c in expected]
    for one, two in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    assert servers.metrics()["rollout/tokens"].value == 8 * 24, "the probe's tokens are not the step's"

    victim, other = servers._engine.replicas
    assert sorted(os.listdir(tmp_path / "servers")) == ["builtin-0.log", "builtin-1.log"]

    async def with_a_death():
        running = asyncio.create_task(many(servers, 16, max_tokens=100))
        await asyncio.sleep(0.02)
        os.kill(victim.connection.process.process_ids()[0], signal.SIGKILL)
        return await running, await servers._engine.revived()

    finished, _ = loop.run(with_a_death())
    servers.wait_for(3, 60)
    assert [c.token_ids for c in finished] == [c.token_ids for c in loop.run(many(inside, 16, max_tokens=100))]
    assert {version for c in finished for version in c.weight_versions} == {3}
    assert servers.metrics()["rollout/replica_restarts"].value == 1
    assert (victim.alive, victim.weight_version, other.weight_version) == (True, 3, 3)
    again = loop.run(many(servers, 4))
    assert [c.token_ids for c in again] == [c.token_ids for c in loop.run(many(inside, 4))]

    os.kill(victim.connection.process.process_ids()[0], signal.SIGKILL)
    servers.sync_from(actor, 4)  # reaches the other; the dead one gets it when it has started again
    assert other.weight_version == 4
    loop.run(servers._engine.revived())
    servers.wait_for(4, 60)
    assert (victim.alive, victim.weight_version) == (True, 4)

    assert len(living(start.model.path)) >= 2
    folders = [replica.connection.folder for replica in (victim, other)]
    servers.close()
    assert living(start.model.path) == []
    assert not any(folder.exists() for folder in folders)
    servers.close()


@pytest.mark.slow
def test_every_door_of_a_server_asks_for_the_token(start, actor, loop, tmp_path):
    """Its HTTP routes and its weight channel; what those who know the token may not say is refused too."""
    rollout = start()
    (server,) = rollout._engine.replicas
    folder = server.connection.folder
    token = server._spec.token
    verbs = ["generate", "receive_weights", "pause", "resume", "abort_all", "sleep", "wake_up", "look", "health"]
    paths = [*verbs, "docs", "openapi.json", "nothing"]

    async def knock():
        found = {}
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(folder / "s"))) as http:
            for path in paths:
                for shown in (None, "Bearer wrong", f"Bearer {token[:-1]}", f"Basic {token}", f"Bearer {token} x"):
                    headers = {"Authorization": shown} if shown else {}
                    async with http.post(f"http://server/{path}", json={"level": 2}, headers=headers) as reply:
                        found.setdefault(path, set()).add(reply.status)
            async with http.post("http://server/nothing", headers={"Authorization": f"Bearer {token}"}) as reply:
                return found, reply.status

    found, known = loop.run(knock())
    assert found == {path: {401} for path in paths}
    assert known == 404
    rollout.sync_from(actor, 0)
    assert len(loop.run(many(rollout, 2))) == 2, "nobody put it to sleep"
    assert folder.stat().st_mode & 0o077 == 0, "nobody else reaches its socket"
    for pid in [*server.connection.process.process_ids(), server.connection.process._tree.pid]:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            assert token.encode() not in file.read()
    assert token not in repr(server._spec)
    assert token not in (tmp_path / "servers" / "builtin-0.log").read_text()

    async def hang_up():
        """A caller that leaves frees its slot there: the same id can be used again, and soon nothing runs."""
        long = replace(WANTED, max_tokens=110)
        for _ in range(5):
            running = asyncio.create_task(server.generate(GenerationRequest("same", (5, 6), long)))
            await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for _ in range(100):
                await asyncio.sleep(0.02)
                server.metrics()
                await server.look()
                if not server.metrics()["rollout/tokens"].value:
                    break
        return await server.generate(GenerationRequest("same", (5, 6), replace(WANTED, max_tokens=2)))

    assert len(loop.run(hang_up()).token_ids) == 2

    with pytest.raises(ValueError, match="vocabulary"):
        loop.run(rollout.generate(GenerationRequest("bad", (10**6,), WANTED)))
    with pytest.raises(ValueError, match="malformed request"):
        loop.run(server.connection.post("/pause", {}))
    with pytest.raises(ValueError, match="abort, wait, keep"):
        loop.run(server.connection.post("/pause", {"mode": "never"}))
    with pytest.raises(RuntimeError, match="format"):
        loop.run(server.receive_weights({"version": 1, "payload": {"kind": "full"}, "timeout_s": 1.0}))
    loop.run(server.resume())
    rollout.sync_from(actor, 1)
    before = [c.token_ids for c in loop.run(many(rollout, 2))]
    right = rollout._publication.sender._engine._token
    rollout._publication.sender._engine._token = "not " + right
    with pytest.raises(WeightSyncError):
        rollout.sync_from(actor, 2)
    rollout._publication.sender._engine._token = right
    rollout.sync_from(actor, 3)
    after = loop.run(many(rollout, 2))
    assert [c.token_ids for c in after] == before
    assert {version for c in after for version in c.weight_versions} == {3}


def test_room_is_made_and_taken_back_around_a_sync(start, actor, loop):
    rollout = start(builtin=INSIDE, sleep_while_training="level_2")
    rollout.sync_from(actor, 0)
    first = loop.run(many(rollout, 2))
    rollout.make_room()
    rollout.make_room()
    with pytest.raises(RuntimeError, match="asleep"):
        loop.run(many(rollout, 1))
    rollout.sync_from(actor, 1)
    again = loop.run(many(rollout, 2))
    assert [c.token_ids for c in again] == [c.token_ids for c in first]
    assert {version for c in again for version in c.weight_versions} == {1}


def test_the_trainer_leaves_what_it_has_freed_to_the_rollout(start, actor, loop):
    rollout = start(builtin=INSIDE, sleep_while_training="level_1")
    rollout.sync_from(actor, 0)
    rollout.make_room()
    pieces = [torch.ones(8 << 10) for _ in range(6000)]  # 190 MiB that an update needs, and something that it keeps
    last = pieces[-1]
    pieces.clear()
    before = CpuPlatform().memory().reserved
    rollout.sync_from(actor, 1)
    assert before - CpuPlatform().memory().reserved > 150 * 2**20
    assert last.sum() == 8 << 10


def test_on_a_cpu_nothing_sleeps_unless_it_is_told_to(start, actor, loop):
    rollout = start(builtin=INSIDE)
    rollout.sync_from(actor, 0)
    rollout.make_room()
    assert len(loop.run(many(rollout, 1))) == 1


def test_two_engines_inside_share_the_requests(start, actor, loop):
    one, two = start(builtin=INSIDE), start(builtin=INSIDE, replicas=2)
    for rollout in (one, two):
        rollout.sync_from(actor, 0)
    assert [c.token_ids for c in loop.run(many(two))] == [c.token_ids for c in loop.run(many(one))]
    assert two.metrics()["rollout/replicas_serving"].value == 2


@pytest.mark.parametrize(
    ("weights", "settings", "message"),
    [
        ({"transport": "ipc"}, {"builtin": INSIDE}, "'ipc' is for servers"),
        ({"transport": "pigeon"}, {}, "unknown weight transport 'pigeon'"),
        ({"transport": {"name": "ipc", "host": "x"}}, {}, "weights.transport.*host"),
        ({"transport": {"name": "collective", "host": "192.0.2.1"}}, {}, r"cannot listen on '192\.0\.2\.1'"),
        ({"transport": {"name": "disk", "folder": "/proc/none"}}, {}, "'/proc/none' cannot be created"),
        ({"transport": {"name": "delta", "anchor_every": 0}}, {}, "anchor_every"),
    ],
)
def test_a_transport_has_to_fit_the_rollout(start, weights, settings, message):
    with pytest.raises(ConfigError, match=message):
        start(weights=build(WeightSyncConfig, weights, "the test", "weights"), **settings)


DELTA = {"name": "delta", "over": "ipc", "anchor_every": 2}


@pytest.mark.slow
def test_a_run_file_chooses_transports_with_their_own_settings(start, actor, loop, tmp_path):
    inside = start(builtin=INSIDE)
    inside.sync_from(actor, 0)
    right = [one.token_ids for one in loop.run(many(inside))]
    for transport in (
        "ipc",
        {"name": "collective", "host": "localhost"},
        {"name": "disk", "folder": str(tmp_path / "files")},
        DELTA,
    ):
        rollout = start(weights=build(WeightSyncConfig, {"transport": transport}, "the test"))
        metrics = [rollout.sync_from(actor, version) for version in range(3)]
        assert [one.token_ids for one in loop.run(many(rollout))] == right, transport
        first, second, third = (one["weights/bytes"].value for one in metrics)
        changes_alone = transport == DELTA
        assert (second < first / 10) == changes_alone, "nothing has changed"
        assert third == first, "an anchor"
        rollout.close()
    assert (tmp_path / "files").is_dir()


@pytest.mark.slow
def test_a_server_that_does_not_start_is_an_error_with_its_last_lines(start):
    with pytest.raises(ServerFailed, match="max_sequence_tokens=4096 is beyond the model's context"):
        start(builtin={"process": "separate", "max_sequence_tokens": 4096})
    assert living(start.model.path) == []


def test_specs_of_servers_hold_no_secret_in_their_text(start, tmp_path, model):
    rollout = start(builtin=INSIDE)
    assert rollout.weight_version == -1
    spec = replace_spec(start, tmp_path)
    for one in server_specs(spec, "secret-token"):
        assert "secret-token" not in repr(one)
        assert one.environment["OMP_NUM_THREADS"] == "1"
        assert json.dumps([str(one.logs), one.model, one.dtype])
    assert [one.name for one in server_specs(spec, "t")] == ["builtin-0", "builtin-1", "builtin-2"]


class EightDevices(CpuPlatform):
    """A machine with eight accelerators, as far as the placement of servers asks."""

    device = "npu"

    def device_count(self):
        return 8

    def why_no_sleep(self, backend):
        return ""

    def rollout_environment(self, indices):
        return {}


@pytest.mark.parametrize(
    ("replicas", "runtime", "devices"),
    [
        (2, RuntimeConfig(), [(1,), (2,)]),
        (8, RuntimeConfig(), [(1,), (2,), (3,), (4,), (5,), (6,), (7,), (1,)]),
        (5, RuntimeConfig(backend=RaySettings(devices=4)), [(4,), (5,), (6,), (7,), (4,)]),
        (2, RuntimeConfig(backend=RaySettings(devices=8)), [(0,), (1,)]),  # there are no others
        # the actor in a pool of its own: no role uses the run's other devices
        (2, RuntimeConfig(backend=RaySettings(pools={"actor": PoolSettings(devices=6)})), [(6,), (7,)]),
        (1, RuntimeConfig(backend=RaySettings(devices=5, pools={"critic": PoolSettings(devices=2)})), [(7,)]),
    ],
)
def test_servers_beside_a_trainer_that_goes_on_get_other_devices(
    start, tmp_path, monkeypatch, replicas, runtime, devices
):
    monkeypatch.setattr("hone.workers.rollout.current_platform", EightDevices)
    spec = replace(replace_spec(start, tmp_path), settings=RolloutConfig(replicas=replicas), new_weights="recompute")
    specs = server_specs(replace(spec, runtime=runtime), "t")
    assert [one.devices for one in specs] == devices
    share = device_share(
        specs, SimpleNamespace(memory_fraction=("fraction", 0.5)), _trainers_here(replace(spec, runtime=runtime))
    )
    assert (share is None) == (devices[0] != (0,))


@pytest.mark.parametrize(("new_weights", "level"), [(None, 2), ("recompute", 0)])
def test_servers_sleep_only_while_a_trainer_waits(start, tmp_path, monkeypatch, loop, new_weights, level):
    monkeypatch.setattr("hone.workers.rollout.current_platform", EightDevices)
    settings = RolloutConfig(builtin={"process": "separate"})
    spec = replace(replace_spec(start, tmp_path), settings=settings, new_weights=new_weights)
    rollout = prepare_rollout(spec, loop, lambda name: nullcontext())
    assert rollout._parts.sleep_level == level


def replace_spec(start, folder):
    from hone.rollout.settings import RolloutConfig
    from hone.workers.rollout import RolloutSpec

    return RolloutSpec(RolloutConfig(replicas=3), WeightSyncConfig(), start.model, "float32", None, folder)


# ---------------------------------------------------------------------------------------------------------- the probe


def says(*logprobs, version=4):
    tokens = tuple(range(20, 20 + len(logprobs)))
    return Completion("p", tokens, logprobs, (version,) * len(logprobs), StopReason.LENGTH)


def infer(*logprobs):
    """A trainer that gives these log-probs to the sampled tokens."""

    def run(batch):
        found = torch.zeros(batch.num_tokens)
        found[batch.loss_mask] = torch.tensor(logprobs)
        return ModelOutput(logprobs=found)

    return run


def test_the_probe_takes_rounding_for_rounding():
    probe = Probe(100, 1.0, [torch.float32], 128, mixture=False)
    metrics = probe.compare([("a", says(-1.0, -2.0)), ("b", says(-1.0, -2.0))], infer(-1.0, -2.0005, -1.0, -2.0), 4)
    assert metrics["correction/probe_max_abs_difference"].value == pytest.approx(5e-4, abs=1e-6)


@pytest.mark.parametrize("wrong", [-2.01, float("nan")])
def test_the_probe_stops_the_step_where_a_replica_computes_otherwise(wrong):
    probe = Probe(100, 1.0, [torch.float32], 128, mixture=False)
    with pytest.raises(WeightSyncError, match="replica b serves weight version 4, but its log-probs") as caught:
        probe.compare([("a", says(-1.0, -2.0)), ("b", says(-1.0, wrong))], infer(-1.0, -2.0, -1.0, -2.0), 4)
    assert caught.value.replicas == ("b",)


def test_the_probe_is_as_strict_as_the_coarser_dtype_allows():
    coarse = Probe(100, 1.0, [torch.float32, torch.bfloat16], 128, mixture=False)
    coarse.compare([("a", says(-1.0))], infer(-1.1), 4)
    with pytest.raises(WeightSyncError):
        coarse.compare([("a", says(-1.0))], infer(-1.4), 4)


def test_one_token_of_a_mixture_may_go_to_other_experts_where_scores_are_rounded():
    apart, everywhere = infer(-1.0, -1.4, -1.0), infer(-1.4, -1.4, -1.4)
    sampled = [("a", says(-1.0, -1.0, -1.0))]
    mixture = Probe(100, 1.0, [torch.bfloat16], 128, mixture=True)
    found = mixture.compare(sampled, apart, 4)
    assert found["correction/probe_max_abs_difference"].value == pytest.approx(0.4)
    for wrong in (everywhere, infer(-1.0, float("nan"), -1.0)):
        with pytest.raises(WeightSyncError, match="at half of its tokens"):
            mixture.compare(sampled, wrong, 4)
    for strict in (
        Probe(100, 1.0, [torch.bfloat16], 128, mixture=False),
        Probe(100, 1.0, [torch.float32], 128, mixture=True),
    ):
        with pytest.raises(WeightSyncError):
            strict.compare(sampled, apart, 4)


def test_the_probe_looks_at_versions():
    with pytest.raises(WeightSyncError, match=r"weight versions \{3\}, sent was 4"):
        Probe(100, 1.0, [torch.float32], 128, mixture=False).compare([("a", says(-1.0, version=3))], infer(-1.0), 4)


def test_a_stale_head_is_caught_by_the_probe(start, actor, loop):
    """The fault is real: an engine that keeps its old output head and a digest that nobody compares."""
    rollout = start(builtin=INSIDE, weights=WeightSyncConfig(verify="probe"))
    rollout.sync_from(actor, 0)
    engine = rollout._engine
    with torch.no_grad():
        engine.weights()["lm_head.weight"].mul_(-1)
    with pytest.raises(WeightSyncError, match="does not compute with the weights it was sent"):
        rollout._compare(rollout._parts.probe, actor, 0)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("backend", "rope", "context", "engine", "expected"),
    [
        ("vllm", LONGROPE, None, {}, 16),
        ("vllm", LONGROPE, 40, {}, 40),
        ("vllm", LONGROPE, 40, {"max_model_len": 64}, 64),
        (
            "vllm",
            LONGROPE,
            None,
            {"max_model_len": 64},
            r"max_model_len=64 and model\.use\.context=16 .*set model",
        ),
        ("vllm", LONGROPE, 40, {"max_model_len": 16}, r"max_model_len=16 and model\.use\.context=40"),
        ("sglang", LONGROPE, None, {}, "sglang lays out .* longrope otherwise .* builtin, or vllm"),
        ("vllm", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, None, {}, "dynamic otherwise .* builtin$"),
        ("vllm", {"rope_type": "default", "rope_theta": 1e4}, None, {}, None),
    ],
)
def test_servers_choose_rotary_frequencies_as_the_trainer_does(backend, rope, context, engine, expected):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64, rope_parameters=rope)
    config.run_context = context
    settings = RolloutConfig(backend=backend, engine=engine)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            with_context(settings, config)
    else:
        assert with_context(settings, config).engine.get("max_model_len") == expected


@pytest.mark.slow
def test_servers_that_gave_their_weights_back_get_the_next_ones_and_nothing_before(share, actor):
    rollout = share(replicas=1, sleep_while_training="level_2")
    rollout.sync_from(actor, 0)
    for version in (1, 2):
        rollout.make_room()
        share.loop.run(asyncio.sleep(2 * LOOK_S))  # as while a trainer trains: the publication looks at its replicas
        rollout.sync_from(actor, version)
        answers = share.loop.run(many(rollout, 2, version))
        assert {one for answer in answers for one in answer.weight_versions} == {version}
    assert rollout.metrics()["rollout/replica_restarts"].value == 0
