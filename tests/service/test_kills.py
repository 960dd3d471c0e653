"""A service that is killed (SIGKILL) and started again: nothing that was confirmed is lost, and no bit changes."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.service.conftest import Client, Server

PROMPT = [10, 11, 12, 13]
RANKS = (4, 16)
ROOT = Path(__file__).parents[2]


class Mortal(Server):
    """Services that are forked one after the other (`tests.service.mortal`), with the same folder and port."""

    def __init__(self, folder, **settings):
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        self.log = (folder / "log").open("w")
        command = [sys.executable, "-m", "tests.service.mortal"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, text=True, cwd=ROOT, **pipes)
        self.plan = iter(())  # of each start: where it kills itself (see `tests.service.mortal`)
        self.kills = []  # where
        super().__init__(folder, listen={"port": port}, **settings)

    def start(self):
        """Start the next one, and those after it that kill themselves before they serve."""
        while True:
            at, kills = next(self.plan, ("", 0, "")), len(self.kills)
            self.process.stdin.write(json.dumps([str(self.file), *at]) + "\n")
            self.process.stdin.flush()
            if self._until("serving", "ended").startswith("serving"):
                return
            if len(self.kills) == kills:
                pytest.fail(f"the service ended: {(self.folder / 'log').read_text()[-2000:]}")

    def _until(self, *wanted):
        """The next line that begins so."""
        for line in self.process.stdout:
            match line.split():
                case ["process", number]:
                    self.number = int(number)
                case ["key", *_, key]:
                    self.key = key
                case ["killed", *where]:
                    self.kills.append(" ".join(where))
                case ["serving", *_, url]:
                    self.url = url
            if line.startswith(wanted):
                return line
        return pytest.fail(f"nothing runs any more: {(self.folder / 'log').read_text()[-2000:]}")

    def kill(self):
        os.kill(self.number, signal.SIGKILL)
        self.revive()

    def revive(self):
        """Start the next one once this one has ended, which it is about to."""
        self._until("ended")
        self.start()

    def close(self):
        self.process.stdin.close()  # when the service has ended, nothing follows
        os.kill(self.number, signal.SIGKILL)
        self.process.wait(30)
        self.process.stdout.close()
        self.log.close()

    @property
    def checkpoints(self):
        return self.folder / "run/checkpoints"

    def content(self, folder):
        """The files of a checkpoint."""
        files = sorted(path for path in (self.checkpoints / folder).rglob("*") if path.is_file())
        return [(path.name, path.read_bytes().hex()) for path in files]

    def rows(self, query):
        """Rows of the registry."""
        with closing(sqlite3.connect(self.folder / "run/registry.sqlite", timeout=30)) as registry:
            return registry.execute(query).fetchall()

    def folders(self):
        """The folders of checkpoints that are there, and those that the registry names."""
        named = (
            "SELECT folder FROM checkpoints UNION SELECT folder FROM snapshots UNION SELECT state_folder FROM models"
        )
        there = {path.name for path in self.checkpoints.iterdir()}
        return there, {name for (name,) in self.rows(named)} - {""}


@pytest.fixture(scope="module")
def mortal(tmp_path_factory):
    made = Mortal(tmp_path_factory.mktemp("mortal"))
    yield made
    made.close()


class Patient(Client):
    """A client that sends a request again after a lost connection, as the real one does."""

    def revived(self):
        """Called when the service has been started again."""

    def call(self, *arguments, **named):
        while True:
            try:
                return super().call(*arguments, **named)
            except (urllib.error.URLError, ConnectionError, HTTPException):
                self.server.revive()
                self.revived()


def datum(number):
    tokens = np.random.default_rng(number).integers(8, 90, 7).tolist()
    return tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * 6}


class Run(Patient):
    """Two models of one session, with every kind of command."""

    def __init__(self, server):
        super().__init__(server)
        self.name = self.session()
        self.models = [f"{self.name}:train:{number}" for number in range(len(RANKS))]
        self.confirmed = set()  # checkpoints

    def results(self):
        """Results of all commands. The commands of both models are sent in turns, without waiting for results."""
        lanes = [self.commands(*one) for one in zip(self.models, RANKS, strict=True)]
        taken = [[], []]
        for number in range(max(map(len, lanes))):
            for lane, answers in zip(lanes, taken, strict=True):
                answers += [send() for send in lane[number : number + 1]]
        found = [[self.confirm(self.result(*one)) for one in answers] for answers in taken]
        found += [self.samples(), [self.ends(model, len(lane)) for model, lane in zip(self.models, lanes, strict=True)]]
        return json.loads(json.dumps(found, default=bytes.hex).replace(self.name, "session"))

    def confirm(self, result):
        assert isinstance(result, bytes) or "error" not in result, result
        if isinstance(result, dict) and result["type"].startswith("save_weights") and "path" in result:
            self.confirmed.add(result["path"])
        return result

    def commands(self, model, rank):
        """Functions that send the commands of a model, in order."""
        numbers = iter(range(1, 100))

        def train():
            number = next(numbers)
            return lambda: self.train(model, number, [datum(number)])

        def do(route, **body):
            number = next(numbers)
            return lambda: self.post(route, model_id=model, seq_id=number, **body)

        def step():
            return do("optim_step", adam_params={"learning_rate": 0.01})

        place = {"session_id": self.name, "model_seq_id": self.models.index(model)}
        made = [lambda: self.post("create_model", **place, base_model="tiny", lora_config={"rank": rank, "seed": 1})]
        if model != self.models[0]:
            return [*made, train(), train(), step(), train(), step()]
        path, sampler = f"tinker://{model}/weights/a", "save_weights_for_sampler"
        return [
            *(*made, train(), train(), step(), do("save_weights", path="a"), train()),
            *(do(sampler, sampling_session_seq_id=0), step(), do(sampler, path="named"), train()),
            *(do("load_weights", path=path, optimizer=True), train(), step()),
            *(do(sampler, sampling_session_seq_id=1, kind="inflight"), train(), step()),
            *(do("save_weights", path="a", overwrite=True), do("save_weights_external", path="out")),
            *(do(sampler, sampling_session_seq_id=2, kind="inflight"), train(), do("save_weights", path="end")),
        ]

    def samples(self):
        """Samples of each snapshot. They are in memory only: the client asks anew for those that are gone."""
        place = {"session_id": self.name, "sampling_session_seq_id": 3}
        self.post("create_sampling_session", **place, model_path=f"tinker://{self.models[0]}/sampler_weights/named")
        found = []
        for number in range(4):
            one = {"error": "kept no more"}
            while isinstance(one, dict):
                assert "kept no more" in one["error"], one
                one = self.asked(number)
            found.append(one)
        return found

    def asked(self, number):
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}, "num_samples": 2, "seq_id": 0}
        params = {"max_tokens": 4, "seed": 7}
        session = f"{self.name}:sample:{number}"
        return self.result(*self.post("asample", sampling_session_id=session, sampling_params=params, **body))

    def ends(self, model, number):
        """The files of a model's last state, and its log-probs."""
        rows, _ = self.trained(model, number, [datum(0)], forward_only=True)
        ((state,),) = self.server.rows(f"SELECT state_folder FROM models WHERE id = '{model}'")
        return rows[0].tobytes(), self.server.content(state)

    def revived(self):
        """Every checkpoint that was confirmed is listed, and every one that is listed is whole."""
        listed = [one["tinker_path"] for one in self.call("GET", "checkpoints?limit=1000")[1]["checkpoints"]]
        assert self.confirmed <= {*listed}
        for path in listed:
            assert self.post("weights_info", tinker_path=path)[0] == 200
            ((folder,),) = self.server.rows(f"SELECT folder FROM checkpoints WHERE path = '{path}'")
            assert any(load_file(file) for file in (self.server.checkpoints / folder).glob("**/*.safetensors"))


@pytest.fixture(scope="module")
def undisturbed(mortal):
    return Run(mortal).results()


def check(server, run, undisturbed):
    """The run ended as the one that was not disturbed, and nothing else is there."""
    assert run.results() == undisturbed
    there, named = server.folders()
    assert there == named


CHANGES = (
    *("INSERT models", "INSERT commands", "COMMIT", "os.mkdir", "INSERT checkpoints", "INSERT snapshots"),
    *("INSERT models", "shutil.rmtree"),  # when there is a state in whose place another one comes
)
CHOSEN = [(change, 1, when) for change in CHANGES for when in ("before", "after")]


def test_killed_before_and_after_each_kind_of_change_a_run_ends_as_one_that_was_not(mortal, undisturbed):
    run, mortal.kills, mortal.plan = Run(mortal), [], iter(CHOSEN)
    mortal.kill()
    check(mortal, run, undisturbed)
    assert mortal.kills == [f"{when} {change}" for change, _, when in CHOSEN]


def at_random(random, count):
    """Random places for the plan of `Mortal`: where each service kills itself."""
    return iter([("", random.randrange(1, 60), random.choice(("before", "after"))) for _ in range(count)])


def test_killed_at_random_moments_a_run_ends_as_one_that_was_not(mortal, undisturbed):
    run, mortal.kills, mortal.plan = Run(mortal), [], at_random(Random(0), 5)
    mortal.kill()
    check(mortal, run, undisturbed)
    assert len(mortal.kills) > 3


def test_what_was_confirmed_is_there_after_a_kill_and_a_name_that_is_taken_stays_taken(mortal):
    client = Patient(mortal)
    session = client.session()
    model = client.model(session)
    client.trained(model, 1, [datum(1)])
    client.step(model, 2, learning_rate=0.1)
    path = client.do("save_weights", model_id=model, seq_id=3, path="kept")["path"]
    snapshot = client.do("save_weights_for_sampler", model_id=model, seq_id=4, sampling_session_seq_id=0)
    before = client.sample(snapshot["sampling_session_id"], 0, PROMPT)[0]
    (mortal.checkpoints / "half-written").mkdir()
    mortal.kill()
    assert client.post("session_heartbeat", session_id=session)[0] == 200  # the session goes on
    assert not (mortal.checkpoints / "half-written").exists()
    assert client.sample(snapshot["sampling_session_id"], 1, PROMPT)[0] == before
    assert "there is a checkpoint" in client.do("save_weights", model_id=model, seq_id=5, path="kept")["error"]
    assert client.do("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)["path"] == path


def test_what_a_kill_left_half_done_is_done_after_it(mortal):
    client = Patient(mortal)
    session = client.session()
    model = client.model(session)
    client.do("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
    mortal.kills, mortal.plan = [], iter([("open", 1, "before"), ("DELETE snapshots", 1, "before")])
    mortal.kill()
    tokenizer = Path(client.post("get_info", model_id=model)[1]["model_data"]["tokenizer_id"])
    assert {path.name for path in tokenizer.iterdir()} == {
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert client.post(f"sessions/{session}/finish", reason={"type": "success"})[0] == 200
    assert mortal.kills == ["before open", "before DELETE snapshots"]
    assert mortal.rows(f"SELECT id FROM snapshots WHERE session = '{session}'") == []
    there, named = mortal.folders()
    assert there == named


def test_a_snapshot_whose_bytes_changed_is_not_served(mortal):
    client = Patient(mortal)
    model = client.model(client.session())
    client.do("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
    snapshot = client.do("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=1)
    newest = max(mortal.checkpoints.glob("*/adapter_model.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    refused = client.sample(snapshot["sampling_session_id"], 0, PROMPT)
    assert "has the digest" in refused["error"]
    assert refused["category"] == "server"
    other = snapshot["sampling_session_id"].removesuffix("1") + "0"
    assert len(client.sample(other, 0, PROMPT)[0]) == 1  # nobody else is hurt
