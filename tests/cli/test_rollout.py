"""`hone rollout` asks a run through its folder, and says in one line why a run cannot answer."""

import asyncio
import json
import threading

import pytest

from hone.cli.errors import BAD_INPUT
from hone.cli.rollout import rollout
from hone.trainers.run.folder import claim
from hone.workers.control import CONTROL, serve_control
from tests.trainers.tiny import recipe


class Names:
    """The servers of a run, by name."""

    def __init__(self):
        self.names = ["builtin-0"]

    async def add(self):
        self.names.append(f"builtin-{len(self.names)}")
        return self.names[-1]

    async def remove(self, name):
        if name not in self.names:
            raise ValueError(f"there is no replica {name!r}")
        self.names.remove(name)


@pytest.fixture
def run(tmp_path):
    """A run folder whose control folder is served, as by a run."""
    (tmp_path / "config.yaml").write_text("asynchrony: {staleness: 1}\n")
    servers, loop = Names(), asyncio.new_event_loop()
    (tmp_path / CONTROL).mkdir()
    serving = loop.create_task(serve_control(tmp_path / CONTROL, servers))
    loop.run_until_complete(asyncio.sleep(0))  # it has begun, and refuses no request as one of an earlier launch
    thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait([serving]),))
    with claim(tmp_path):
        thread.start()
        yield tmp_path, servers
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(60)
    loop.close()


def test_servers_join_and_leave_and_no_file_stays(run, capsys):
    folder, servers = run
    rollout("join", folder)
    rollout("leave", folder, ["builtin-0"])
    assert servers.names == ["builtin-1"]
    first, second = capsys.readouterr().out.splitlines()
    assert first == "builtin-1 has joined and receives weights"
    assert second == "builtin-0 has left; its answers go on at the other servers"
    assert list((folder / CONTROL).iterdir()) == []


def test_the_error_of_the_run_and_a_wait_that_ends(run):
    folder, _ = run
    with pytest.raises(BAD_INPUT, match="there is no replica 'builtin-9'"):
        rollout("leave", folder, ["builtin-9"])
    with pytest.raises(BAD_INPUT, match="did not answer within 0 s"):
        rollout("join", folder, timeout_s=0.0)


def test_a_malformed_request_does_not_end_the_run(run):
    folder, servers = run
    rollout("join", folder)
    (folder / CONTROL / "-a.request").write_text("{")  # before the next one in the order of names
    (folder / CONTROL / "-b.request").write_text(json.dumps({"verb": "explode"}))
    rollout("join", folder)
    assert servers.names == ["builtin-0", "builtin-1", "builtin-2"]
    assert "JSONDecodeError" in (folder / CONTROL / "-a.answer").read_text()
    assert "explode" in (folder / CONTROL / "-b.answer").read_text()


def test_a_request_to_a_run_that_starts_is_refused_and_not_lost(tmp_path):
    (tmp_path / "old.request").write_text(json.dumps({"verb": "join"}))
    servers = Names()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(serve_control(tmp_path, servers), 0.1))
    assert servers.names == ["builtin-0"]
    assert [(one.name, json.loads(one.read_text())["error"]) for one in tmp_path.iterdir()] == [
        ("old.answer", "the run was only starting; ask again")
    ]


def test_runs_that_cannot_be_asked(tmp_path):
    with pytest.raises(BAD_INPUT, match="no process is training the run"):
        rollout("join", tmp_path)
    (tmp_path / "config.yaml").write_text("run: {steps: 3}\n")
    with claim(tmp_path), pytest.raises(BAD_INPUT, match=r"asynchrony\.staleness above 0"):
        rollout("join", tmp_path)
    for verb, replica in (("leave", []), ("join", ["builtin-0"])):
        with pytest.raises(BAD_INPUT, match="hone rollout leave RUN REPLICA"):
            rollout(verb, tmp_path, replica)


def test_a_server_that_cannot_be_started(tmp_path, monkeypatch):
    monkeypatch.delenv("HONE_ROLLOUT_TOKEN", raising=False)
    run_file = recipe(tmp_path)
    with pytest.raises(BAD_INPUT, match="say where to listen: hone rollout serve RUN_FILE HOST:PORT"):
        rollout("serve", run_file, ["rollout.backend=vllm"])
    with pytest.raises(BAD_INPUT, match="HONE_ROLLOUT_TOKEN should be a secret"):
        rollout("serve", run_file, ["127.0.0.1:0"])
    monkeypatch.setenv("HONE_ROLLOUT_TOKEN", "0123456789abcdef")
    for address, said in (("0.0.0.0:8700", "every network of this machine"), ("here", "should be HOST:PORT")):
        with pytest.raises(BAD_INPUT, match=said):
            rollout("serve", run_file, [address])
