"""A service whose tenants or disk run out of room: what does not fit is refused or fails, and the rest is served."""

import sqlite3
import subprocess
from contextlib import closing

import pytest

from hone.service.futures import Futures, Outcome
from hone.service.protocol.refusals import Busy
from tests.faults.test_full_disk import fill
from tests.service.conftest import Client, Server

MIB = 1 << 20
LONG = list(range(8, 88)) * 3
DATUM = (LONG[:-1], {"target_tokens": LONG[1:], "weights": [1.0] * (len(LONG) - 1)})
LARGE = [DATUM] * 65  # about 250 KB


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of 24 MiB, or None where none can be mounted."""
    folder = tmp_path_factory.mktemp("room") / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, timeout=60).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)


@pytest.fixture(scope="module")
def small(tmp_path_factory, disk):
    """A service with its folder on that disk, and room for 1 MiB of each tenant."""
    place = tmp_path_factory.mktemp("small") if disk is None else disk
    made = Server(place, limits={"held_bytes": MIB})
    yield made
    made.close()


def test_a_tenant_with_too_many_bytes_that_wait_is_told_to_come_again_and_others_are_not(small):
    client, other = Client(small, small.add_key("many")), Client(small, small.add_key("others"))
    model, theirs = (one.model(one.session()) for one in (client, other))
    taken = [client.train(model, number, LARGE, forward_only=True) for number in range(2, 6)]
    assert [status for status, _ in taken] == [200] * 4
    status, refused = client.train(model, 6, LARGE, forward_only=True)
    assert status == 429
    assert "bytes in waiting requests and results" in refused["error"]
    assert other.train(theirs, 2, LARGE)[0] == 200
    first = client.train(model, 1, LARGE, forward_only=True)  # all others wait for it
    assert all(isinstance(client.result(*one), bytes) for one in (first, *taken))
    last = client.train(model, 6, LARGE, forward_only=True)
    assert isinstance(client.result(*last), bytes)


def test_results_that_were_fetched_make_room_the_oldest_first():
    futures = Futures(60.0, 100)
    for name, tenant in (("a", "other"), ("c", "one"), ("d", "one")):
        futures.open(name, tenant, size=1)
        futures.resolve(name, Outcome(bytes(45)))
    futures.note_fetched("a")
    with pytest.raises(Busy):
        futures.make_room("one", 20)  # nothing of its own was fetched
    futures.note_fetched("c")
    futures.note_fetched("d")
    assert futures.make_room("one", 20) == ["c"]
    assert futures.make_room("one", 55) == []
    assert futures.make_room("one", 56) == ["d"]
    assert futures.announce("a")  # other tenants' are there


def only_on(disk):
    if disk is None:
        pytest.skip("no small file system can be mounted here")


def folders(server_disk):
    return {path.name for path in (server_disk / "run/checkpoints").iterdir()}


def test_a_checkpoint_without_room_fails_alone_and_leaves_no_files(small, disk):
    only_on(disk)
    client = Client(small, small.add_key("saves"))
    model = client.model(client.session(), rank=64)
    client.trained(model, 1, [DATUM])
    client.step(model, 2, learning_rate=0.01)
    before = folders(disk)
    fill(disk / "zeros", spare=256 << 10)
    failed = client.do("save_weights", model_id=model, seq_id=3)
    assert failed["category"] == "server"
    assert "No space left" in failed["error"]
    assert folders(disk) == before
    (disk / "zeros").unlink()
    assert "path" in client.do("save_weights", model_id=model, seq_id=4)


def test_a_command_whose_end_the_disk_has_no_room_for_fails_alone_and_the_model_goes_on_with_room(small, disk):
    only_on(disk)
    client, other = Client(small, small.add_key("trains")), Client(small, small.add_key("samples"))
    model = client.model(client.session())
    sampler = other.post(
        "create_sampling_session", session_id=other.session(), sampling_session_seq_id=0, base_model="tiny"
    )[1]["sampling_session_id"]
    client.trained(model, 1, [DATUM])
    client.step(model, 2, learning_rate=0.01)
    taken = [client.train(model, number, LARGE) for number in range(3, 7)]
    with closing(sqlite3.connect(disk / "run/registry.sqlite")) as registry:  # or its log has room for some results
        while registry.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            pass
    fill(disk / "zeros", spare=0)
    for one in taken:
        failed = client.result(*one)
        if isinstance(failed, dict):
            break
    assert failed["category"] == "server"
    assert "full" in failed["error"]
    assert len(other.sample(sampler, 0, LONG[:4])[0]) == 1  # others are served, and this one's commands wait
    assert client.call("GET", "healthz")[0] == 200
    (disk / "zeros").unlink()
    assert all(isinstance(client.result(*later), bytes) for later in taken[taken.index(one) + 1 :])
    assert "no step was made" in client.step(model, 7)["error"]
    loss = client.trained(model, 8, [DATUM])[1]["loss:sum"]
    assert "metrics" in client.step(model, 9, learning_rate=0.02)
    small.kill()
    small.start()
    assert client.trained(model, 10, [DATUM], forward_only=True)[1]["loss:sum"] < loss
    assert client.result(*one) == failed  # it does not run again
