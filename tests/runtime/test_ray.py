"""The Ray runtime over real actors: the figures of one process, errors with names in bounded time, loopback only."""

import asyncio
import gc
import inspect
import json
import os
import signal
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch

from hone.config import ConfigError, load
from hone.data.packing import Sample, pack_samples
from hone.platforms.base import compute_dtype, current_platform
from hone.runtime import ray as runtime
from hone.runtime.base import ActorLost, WorkerFailed
from hone.runtime.batch_plan import to_array, to_tensor
from hone.runtime.ray_cluster import RayDevices, _answer
from hone.runtime.ray_patches import kept_sigterm, on_loopback
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.tracking.base import RunInfo
from hone.tracking.settings import TraceSettings
from hone.tracking.trackers.trace import TraceTracker, read_trace
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.runtime.workers import SQUARE, Broken, Echo, Hanging, Killed, LongRows, Second, Spec, Waiting
from tests.trainers.tiny import metrics, recipe

LOCAL = ["run.steps=4", "actor.schedule.name=constant", "actor.max_tokens_per_microbatch=64"]
BOUND_S = 120.0  # an error has to come long before any of Ray's or torch's own timeouts; seconds are the usual


def overrides(devices):
    return [*LOCAL, "runtime.backend.name=ray", f"runtime.backend.devices={devices}"]


def train(folder, given):
    run_policy(load(PolicyRunConfig, recipe(folder), given))
    return metrics(folder / "run")


def config(devices=2, stall_timeout_s=1800.0):
    return RuntimeConfig(backend=RaySettings(devices=devices), threads=1, stall_timeout_s=stall_timeout_s)


def place(worker_class, role="actor", **changes):
    return runtime.RayWorkerGroup.place(role, worker_class, Spec(), config(**changes), lambda _: nullcontext())


@pytest.fixture(scope="module")
def pool():
    """Two ranks, kept between the tests that lose none."""
    previous = signal.signal(signal.SIGTERM, stopped)
    yield runtime._pool("actor", config())
    signal.signal(signal.SIGTERM, previous)


def stopped(number, frame):
    """A handler of the program that starts Ray."""
    raise KeyboardInterrupt


def assert_close(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5) for name in theirs)


@pytest.mark.ci
@pytest.mark.slow
def test_a_run_on_two_ranks_is_that_of_one_process(pool, tmp_path):
    local = train(tmp_path / "local", LOCAL)
    assert_close(train(tmp_path / "ray", overrides(2)), local)
    parts = list((tmp_path / "ray" / "run" / "checkpoints" / "step_00000004" / "actor").glob("model*"))
    assert len(parts) == 2  # written by the ranks


@pytest.mark.slow
def test_ranks_compute_in_the_dtype_that_auto_chooses_for_the_driver(pool, tmp_path):
    given = [*overrides(2), "actor.compute_dtype=auto", "run.steps=2", "checkpoint.every_steps=2"]
    assert train(tmp_path, given)[-1]["step"] == 2
    engine = json.loads(next((tmp_path / "run").rglob("engine.json")).read_text())
    assert engine["compute_dtype"] == compute_dtype("auto", current_platform())


@pytest.mark.slow
def test_a_reference_follows_the_policy_over_two_ranks(pool, tmp_path):
    kl = ["algorithm.kl.coef=0.05", "algorithm.kl.kind=k3"]
    follow = [*kl, "reference.follow.every_steps=2", "reference.follow.mixup=0.5"]
    local = train(tmp_path / "local", [*LOCAL, *follow])
    assert_close(train(tmp_path / "ray", [*overrides(2), *follow]), local)
    still = train(tmp_path / "still", [*LOCAL, *kl])
    assert [a["train/kl_loss"] == b["train/kl_loss"] for a, b in zip(local[1:], still[1:], strict=True)][:3] == [
        True,
        True,
        False,
    ]
    parts = list((tmp_path / "ray" / "run" / "checkpoints" / "step_00000004" / "reference").glob("model*"))
    assert len(parts) == 2  # written by the ranks


def test_named_tensors_go_whole_to_every_rank(pool):
    sums = place(Echo).call("sums", {"a": torch.ones(3), "b": torch.full((2,), 2.0, dtype=torch.bfloat16)}, 0.5)
    assert sums == {"a": 1.5, "b": 2.0}


@pytest.mark.slow
def test_one_rank_is_equal_to_the_bit(tmp_path):
    given = ["run.steps=2"]
    assert train(tmp_path / "ray", [*overrides(1), *given]) == train(tmp_path / "local", [*LOCAL, *given])


def make_batch(lengths):
    samples = [Sample(tuple(range(2, 2 + n)), (0,) + (1,) * (n - 1)) for n in lengths]
    return pack_samples(samples)


def test_batches_are_split_and_results_merged_by_type(pool):
    group = place(Echo)
    batch = make_batch([9, 1, 4, 4])
    output = group.call("infer_batch", batch, frozenset())
    assert torch.equal(output.logprobs, batch.token_ids.float() + 1)
    assert torch.equal(output.extras["exact"], batch.token_ids.to(torch.bfloat16))
    tokens = [int((output.extras["rank"] == rank).sum()) for rank in range(2)]
    assert sorted(tokens) == [8, 10]
    before = batch.token_ids.clone()
    factor = 2.5
    found = group.call("train_batch", batch, lambda x: x * factor)
    assert found["a"].value == pytest.approx(tokens[1] / 18)
    assert found["b"].value == 5.0
    assert torch.equal(batch.token_ids, before)
    assert group.call("where", Path("runs/x")) == ("runs/x", 0)


def test_each_rank_of_a_pool_has_a_lane_on_the_timeline(pool, tmp_path):
    """From the call until its answer; the file is what viewers of Chrome's trace format read."""
    tracker = TraceTracker(TraceSettings(), RunInfo(tmp_path))
    place(Echo).call("infer_batch", make_batch([9, 1, 4, 4]), frozenset())
    tracker.log(1, {})
    tracker.close()
    events = read_trace(tmp_path / "trace.json")
    lanes = {one["args"]["name"]: one["tid"] for one in events if one["name"] == "thread_name"}
    for rank in range(2):
        done = [one["name"] for one in events if one["ph"] == "X" and one["tid"] == lanes[f"trainer rank {rank}"]]
        assert done[0] == "making actor"
        assert {"forward", "idle"} <= set(done)


def test_batches_are_dealt_out_with_attentions_square(pool):
    """By tokens, the sequences of 8 and 11 tokens would go to one rank; see `test_split.py`."""
    output = place(LongRows).call("infer_batch", make_batch(SQUARE), frozenset())
    ranks = [int(one[0]) for one in output.extras["rank"].split(SQUARE)]
    assert ranks == [0, 0, 0, 1, 1]


def test_results_are_those_of_output_ranks(pool):
    group = place(Second)
    assert group.call("where", "x") == ("x", 0)
    output = group.call("infer_batch", make_batch([3, 2]))
    assert output.logprobs.tolist() == [3.0, 4.0, 5.0, 3.0, 4.0]


def test_weights_come_in_buckets_and_whole(pool):
    group = place(Echo)
    usual = group._pool.bucket_bytes
    assert usual > 5 * 2**19
    group._pool.bucket_bytes = 2**20
    try:
        asked = []
        submit = group._pool.submit
        group._pool.submit = lambda call, role: asked.append(role) or submit(call, role)
        found = dict(group.call("weights", 5))
    finally:
        group._pool.bucket_bytes = usual
        del group._pool.submit
    assert {name: (one.dtype, one.unique().tolist()) for name, one in found.items()} == {
        f"w{number}": (torch.bfloat16, [float(number)]) for number in range(5)
    }
    assert len(asked) == 1 + 4  # the call; two, two, one tensor, and the end


def test_a_tensor_is_put_into_the_store_once_while_it_lives():
    shelf = runtime.Shelf()
    runtime.connect(RaySettings())
    tensor = torch.arange(5)
    first, _ = shelf.put(tensor)
    assert shelf.put(tensor)[0] is first
    assert shelf.put(tensor.clone())[0] is not first
    del tensor
    gc.collect()
    assert len(shelf._placed) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn])
def test_tensors_survive_as_arrays(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    back = to_tensor(*to_array(tensor))
    assert back.dtype == dtype
    assert torch.equal(back.float(), tensor.float())


def listening():
    """Addresses that this process and its descendants listen on, as the kernel writes them."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    family = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    inodes = set()
    for process in family:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_nothing_listens_beyond_loopback_and_tokens_are_asked_for(pool):
    found = listening()
    assert len(found) > 6  # Ray's servers, the ranks, their meeting point
    assert {one for one in found if one not in ("0100007F", "0000000000000000FFFF00000100007F")} == set()
    assert os.environ.get("RAY_AUTH_MODE", "token") == "token"


def test_ray_leaves_the_end_of_a_run_to_hone(pool):
    """Ray's own handler calls `sys.exit(15)`, which would be a failed run and no stopped one."""
    with pytest.raises(KeyboardInterrupt):  # of Python and of C++: the latter's would abort this process
        os.kill(os.getpid(), signal.SIGTERM)
    with kept_sigterm():  # while it starts, too
        import_module("ray._private.utils").set_sigterm_handler(signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is stopped


def test_an_actor_of_a_server_ends_by_sigterm_though_it_waits_for_the_server(pool):
    """Ray's own handler waits for the coroutines, so that the actor would neither answer nor end."""

    async def lost():
        devices = RayDevices(None, import_module("ray").get_runtime_context().get_node_id(), BOUND_S)
        actor = await devices.start_actor(Waiting)
        call = actor.begin("ended")
        os.kill(await actor.ask("process", timeout_s=BOUND_S), signal.SIGTERM)
        try:
            return await _answer(call, 20.0)
        finally:
            actor.leave()

    with pytest.raises(ActorLost):
        asyncio.run(lost())


def test_the_patches_are_still_needed(pool):
    assert "set_sigterm_handler" in inspect.unwrap(import_module("ray._private.worker").init).__code__.co_names
    services = import_module("ray._private.services")
    original = services.resolve_ip_for_localhost
    with on_loopback():
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
    assert services.resolve_ip_for_localhost is original
    assert "get_node_ip_address" in original.__code__.co_names  # it replaces loopback by another address


def test_settings_that_clash_are_errors_of_input(pool, tmp_path):
    with pytest.raises(ConfigError, match=r"^actor\.backend\.parallel\.expert = 3 does not divide"):
        train(tmp_path, [*overrides(2), "actor.backend.parallel.expert=3"])


def fails(worker_class, capfd, **changes):
    """What a call says that cannot end, and what it printed before; within the bound."""
    group = place(worker_class, "critic", **changes)
    begun = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        group.call("train_batch", make_batch([2, 3]), None)
    assert time.monotonic() - begun < BOUND_S
    with pytest.raises(WorkerFailed, match="role critic has no ranks any more"):
        group.call("initialize")
    return caught.value, capfd.readouterr().err


def test_a_rank_that_raises_is_named_with_its_last_lines(capfd):
    error, printed = fails(Broken, capfd)
    assert "role critic: rank 1 of 2 on node 127.0.0.1" in str(error)
    assert "failed in phase train_batch: ZeroDivisionError: division by zero" in str(error)
    assert "1 / 0" in str(error.__cause__)
    assert "about to divide" in printed


def test_a_rank_that_is_killed_is_named_with_its_last_lines(capfd):
    error, printed = fails(Killed, capfd)
    assert "role critic: rank 1 of 2 on node 127.0.0.1" in str(error)
    assert "was lost in phase train_batch" in str(error)
    assert "still here" in printed


@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_with_its_stack(capfd):
    error, printed = fails(Hanging, capfd, stall_timeout_s=4.0)
    assert "role critic: no progress in phase train_batch for runtime.stall_timeout_s=4" in str(error)
    assert "train_batch of critic for" in printed
    assert "time.sleep(1000)" in printed
    assert "in barrier" in printed  # the other rank's stack


def test_too_few_devices_are_an_error_before_anything_starts():
    given = RaySettings(nodes=2, address="local", start_timeout_s=0.5)
    with pytest.raises(ConfigError, match=r"2 node\(s\) with 1 free device"):
        runtime._pool("actor", RuntimeConfig(backend=given))
