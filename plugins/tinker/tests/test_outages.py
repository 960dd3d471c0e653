"""A service that refuses, is somebody else, or loses connections: one sentence each, or a run that goes on."""

import atexit
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import yaml

from hone.cli.main import main
from hone_tinker import connection
from hone_tinker.messages import read_answer, sampling_request
from plugins.tinker.tests.test_runs import RL, compare, figures, train
from tests.trainers.tiny import recipe


class Between(BaseHTTPRequestHandler):
    """Answers with `server.answers`, or passes on to `server.behind` and cuts the first answer to each request."""

    protocol_version = "HTTP/1.1"

    def handle_one(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.behind is None:
            status, kind, content = self.server.answers
            self.say(status, {"Content-Type": kind}, content)
        else:
            self.pass_on(body)

    def pass_on(self, body):
        asked = self.command, self.path, body
        if self.server.forgets and self.path.endswith("retrieve_future") and asked not in self.server.seen:
            self.server.seen.add(asked)
            self.say(410, {"Content-Type": "application/json"}, b'{"error": "its result is kept no more"}')
            return
        onward = http.client.HTTPConnection(self.server.behind, timeout=60)
        kept = {name: self.headers[name] for name in ("Content-Type", "X-API-Key", "Accept") if name in self.headers}
        onward.request(*asked, {**kept, "Host": self.headers["Host"]})
        reply = onward.getresponse()
        content = reply.read()
        onward.close()
        cut = asked not in self.server.seen
        self.server.seen.add(asked)
        self.say(reply.status, {"Content-Type": reply.headers["Content-Type"] or "text/plain"}, content, cut)

    do_GET = do_POST = handle_one

    def say(self, status, headers, content, cut=False):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = cut

    def log_message(self, *arguments):
        """Nothing: the tests read stderr."""


@pytest.fixture
def between(monkeypatch):
    """The server; sessions that a test opens are its own."""
    monkeypatch.setattr(connection, "_connections", {})
    made = ThreadingHTTPServer(("127.0.0.1", 0), Between)
    made.behind, made.answers, made.seen = None, (200, "application/json", b"{}"), set()
    made.forgets = False  # whether it has no result when it is asked for the first time, as one that was started anew
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    for one in connection._connections.values():
        one._finish()
        atexit.unregister(one._finish)
    made.shutdown()
    thread.join(10)
    made.server_close()


@pytest.fixture(scope="module")
def trained(server, base, tmp_path_factory):
    """The folder of a run of one step on the service, as settings and a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    backend = {"name": "tinker", "url": server.url, "base_model": "tiny"}
    actor = {"compute_dtype": "float32", "optimizer": {"lr": 3e-3}, "lora": {"rank": 4}}
    rollout = {"sampling": {"max_response_tokens": 3}}
    sections = {"model": {"path": str(base)}, "actor": actor, "rollout": rollout, "run": {"steps": 1}}
    sections["runtime"] = {"threads": 1, "backend": backend}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", server.key)
        return train(recipe(folder, sections))


def refusal(trained, url, output, capsys, timeout_s=1.0):
    """The line that `hone export` prints when the run's service is at `url`."""
    path = trained / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["runtime"]["backend"] |= {"url": url, "timeout_s": timeout_s}
    path.write_text(yaml.safe_dump(settings))
    capsys.readouterr()
    code = main(["export", str(trained), str(output)])
    said = capsys.readouterr().err
    assert (code, said.count("\n"), output.exists()) == (1, 1, False), said
    return said


JSON, HTML = "application/json", "text/html"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((401, JSON, b'{"error": "no such key"}'), "status 401: no such key; is TINKER_API_KEY a key of this service?"),
        ((404, HTML, b"<p>not here</p>"), "status 404: <p>not here</p>; is runtime.backend.url the address"),
        ((429, JSON, b'{"error": "busy"}'), "status 429: busy, for 1"),
        ((503, JSON, b"upstream connect error"), "status 503: upstream connect error, for 1"),
        ((200, JSON, b'{"session'), "answered with broken JSON: '{\"session', for 1"),
        ((200, JSON, b"[]"), "without session_id; is runtime.backend.url the address"),
        ((200, HTML, b"hello"), "without session_id; is runtime.backend.url the address"),
        ((200, JSON, b'{"session_id": "s"}'), "answered {'session_id': 's'}, without request_id"),
    ],
)
def test_what_a_service_answers_wrongly_is_one_sentence(trained, between, tmp_path, key, capsys, answers, said):
    between.answers = answers
    line = refusal(trained, between.url, tmp_path / "out", capsys)
    assert line.startswith("error: ")
    assert said in line
    assert between.url in line


def test_a_wrong_key_a_service_that_is_not_there_and_one_that_lost_the_checkpoint_are_one_sentence(
    trained, server, between, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    assert "is TINKER_API_KEY a key" in refusal(trained, server.url, tmp_path / "out", capsys, 60.0)
    assert "create_session at http://127.0.0.1:1" in refusal(trained, "http://127.0.0.1:1", tmp_path / "out", capsys)
    monkeypatch.setenv("TINKER_API_KEY", server.add_key("stranger"))
    lost = refusal(trained, server.url, tmp_path / "out", capsys, 60.0)
    assert "load_weights at" in lost
    assert connection.IS_IT_ONE not in lost  # the address has just opened a session


@pytest.mark.parametrize("url", ["127.0.0.1:8123", "http://127.0.0.1:99999", "http://[::1", "http://"])
def test_an_address_that_is_none_is_named(url, key):
    with pytest.raises(connection.ConfigError, match=r"runtime\.backend\.url should be the address of a service"):
        connection.connect(url, 1.0)


def test_a_key_with_a_line_break_inside_is_named(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-a\ntml-b")
    with pytest.raises(connection.ConfigError, match="TINKER_API_KEY has characters that no key has"):
        connection.connect("http://127.0.0.1:1", 1.0)


def test_samples_that_a_service_has_forgotten_are_asked_for_again_and_commands_are_not(server, key, between):
    between.behind, between.forgets = urlsplit(server.url).netloc, True
    service = connection.connect(between.url, 60.0)
    place = {"session_id": service.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    session = service.wait(service.post("create_sampling_session", place))["sampling_session_id"]
    params = {"max_tokens": 3, "seed": 1, "temperature": 1.0}
    body = sampling_request([8, 9, 10], params, sampling_session_id=session, seq_id=0)
    assert read_answer(service.wait(service.result("asample", body))).tokens
    assert any(path.endswith("retrieve_future") for _, path, _ in between.seen)
    made = {"session_id": service.session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    with pytest.raises(connection.ServiceFailed, match="kept no more"):
        service.wait(service.result("create_model", made))


@pytest.mark.slow
def test_a_run_whose_connections_break_in_the_middle_of_each_answer_has_the_figures_of_one_process(
    run_file, server, key, between
):
    between.behind = urlsplit(server.url).netloc
    steps = {"run": {"steps": 2}}
    here = figures(train(run_file("here", **steps)))
    there = figures(train(run_file("there", between.url, **steps)))
    compare(here, there, RL)
    called = {path.rpartition("/")[2] for _, path, _ in between.seen}
    assert {"forward_backward", "optim_step", "asample", "save_weights", "external_weights_urls"} <= called
