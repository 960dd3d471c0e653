"""A child that gets requests: its replies are its own, its output moves no deadline, and nothing of it is left."""

import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from hone.processes import request_process
from hone.processes.request_process import ChildLost, ChildSpec, RequestProcess

MODULE = "tests.processes.kinds_of_children"


@pytest.fixture
def child(tmp_path):
    process = RequestProcess(ChildSpec("test process", MODULE, log=tmp_path / "logs" / "child.log"))
    process.hello({}, 60)
    yield process
    process.kill()


def ask(child, way, seconds=20.0, **more):
    child.request(json.dumps({"way": way, **more}))
    return child.replies(time.monotonic() + seconds)


def gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_it_replies_to_one_request_after_another(child):
    for number in range(3):
        assert ask(child, "echo", number=number) == [{"echo": {"way": "echo", "number": number}}]
    assert child.pid != os.getpid()


def test_output_without_end_moves_no_deadline_and_fills_no_memory(child):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert ask(child, "prints_for_ever", seconds=1.5) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_output_goes_to_the_log_and_its_end_into_the_error(child, tmp_path):
    log = tmp_path / "logs" / "child.log"
    assert ask(child, "prints_then_echo")
    deadline = time.monotonic() + 10
    while (not log.exists() or log.stat().st_size < 50_015) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert log.read_text() == "a line\nanother\n" + "y" * 50_000
    with pytest.raises(ChildLost, match=r"the test process ended with exit status 3; it printed: .*goodbye"):
        ask(child, "dies")


def test_the_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(request_process, "LOG_BYTES", 20)
    child = RequestProcess(ChildSpec("test process", MODULE, log=tmp_path / "log"))
    try:
        child.hello({}, 60)
        assert ask(child, "prints_then_echo")
    finally:
        child.kill()
    assert (tmp_path / "log").read_bytes() == b"a line\nanother\nyyyyy" + request_process.FULL


@pytest.mark.parametrize("way", ["forks", "forks_without_guard"])
def test_a_forked_copy_cannot_reply_in_place_of_the_child(child, way):
    """It replies while the child itself is at the next request."""
    assert ask(child, way) == [{"echo": {"way": way}}]
    assert ask(child, "replies_late", number=2) == [{"echo": {"way": "replies_late", "number": 2}}]
    assert ask(child, "replies_late", number=3) == [{"echo": {"way": "replies_late", "number": 3}}]


def test_a_reply_to_an_earlier_request_does_not_count(child):
    assert ask(child, "replies_late", seconds=0.05, number=1) == []
    assert ask(child, "echo", number=2) == [{"echo": {"way": "echo", "number": 2}}]


@pytest.mark.parametrize("how", ["kill", "stop", "death"])
def test_the_whole_tree_ends_also_a_child_in_a_session_of_its_own(child, how):
    ((reply,),) = [ask(child, "detaches")]
    assert child.pid in reply["pids"]
    if how == "death":
        os.kill(child.pid, signal.SIGKILL)
    else:
        child.stop()
        getattr(child, how)()  # told twice, it ends once
    assert all(map(gone, reply["pids"]))


def test_temporary_files_of_a_killed_child_are_removed(child):
    ((reply,),) = [ask(child, "writes_a_file")]
    path = Path(reply["path"])
    assert path.exists()
    child.kill()
    assert not path.parent.exists()


def test_a_child_that_does_not_load_says_why(tmp_path):
    child = RequestProcess(ChildSpec("test process", MODULE))
    try:
        assert child.hello({"fails": True}, 60) == {"error": "no such thing"}
    finally:
        child.kill()


@pytest.mark.parametrize(
    ("how", "says"),
    [("stops", "gave no sign of life for 0.5 s while it started"), ("hangs", "was not ready after 1 s")],
    ids=["stops", "hangs"],
)
def test_a_child_that_does_not_get_ready_is_given_up(monkeypatch, how, says):
    monkeypatch.setattr(request_process, "SILENT_S", 0.5 if how == "stops" else 30)
    child = RequestProcess(ChildSpec("test process", MODULE))
    try:
        with pytest.raises(ChildLost, match=says):
            child.hello({how: True}, 1 if how == "hangs" else 60)
    finally:
        child.kill()
