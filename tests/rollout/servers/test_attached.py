"""Attaching to a server that was started elsewhere: who may, what is compared, and what ends with the run."""

import asyncio
import json
import os
from contextlib import suppress

import pytest

from hone.config import ConfigError, build
from hone.processes.child import ServerFailed
from hone.rollout.servers.attached import KEYS, AttachedHost, shared_token
from hone.rollout.servers.front import Front
from hone.rollout.settings import RolloutConfig

TOKEN = "0123456789abcdef"
SERVES = {**dict.fromkeys(KEYS, 1), "hone": "1.0", "model": {"hidden_size": 32, "layers": 2}}


class Place:
    """A front with an echoing socket behind it."""

    def __init__(self, folder):
        self.path = folder / "s"
        self.cleaned = 0
        self._writers = []

    async def __aenter__(self):
        self._echo = await asyncio.start_unix_server(self._serve, self.path)
        self.front = Front(self.path, TOKEN, SERVES, self._clean)
        self.port = await self.front.open("127.0.0.1")
        return self

    async def __aexit__(self, *_):
        await self.front.close()
        self._echo.close()
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _clean(self):
        self.cleaned += 1

    async def _serve(self, reader, writer):
        self._writers.append(writer)
        while line := await reader.readline():
            writer.write(line.upper())

    def process(self, token=TOKEN, **changed):
        host = AttachedHost(f"127.0.0.1:{self.port}", token, {**SERVES, **changed})
        return host.process("builtin-0", [], self.path)

    async def say(self, line):
        """An answer to one line, and the connection."""
        reader = await self.reach()
        self._writers[-1].write(line)
        return await reader.readline(), reader

    async def reach(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader


@pytest.fixture
def story(tmp_path):
    """`story(coroutine function of a place)`: its result."""

    def run(tell):
        async def whole():
            async with asyncio.timeout(30), Place(tmp_path) as place:
                return await tell(place)

        return asyncio.run(whole())

    return run


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token": "another-token-000"}, "refuses this run: the token is not this server's"),
        ({"hone": "2.0"}, "the version of hone is '1.0' there and '2.0' here"),
        ({"backend": 2}, r"rollout\.backend is 1 there and 2 here"),
        (
            {"model": {"hidden_size": 64, "layers": 2}},
            "model is another: its hidden_size is 32 there and 64 here",
        ),
        ({"keep_cache": True, "context": 7}, r"model\.use\.context is 1 there and 7 here"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_by_name(changed, said, story):
    async def tell(place):
        process = place.process(**changed)
        with pytest.raises(ServerFailed, match=rf"rollout\.addresses: 127\.0\.0\.1:\d+ .*{said}"):
            await process.launch()
        assert not process.alive

    story(tell)


def test_an_address_where_nothing_or_something_else_listens(story):
    async def banner(reader, writer):
        writer.write(b"SSH-2.0\n")
        await reader.read()
        writer.close()

    async def tell(place):
        other = await asyncio.start_server(banner, "127.0.0.1", 0)
        place.port = other.sockets[0].getsockname()[1]
        with pytest.raises(ServerFailed, match="is not a rollout server of hone"):
            await place.process().launch()
        other.close()
        await other.wait_closed()
        with pytest.raises(ServerFailed, match=r"no rollout server answers at 127.*hone rollout serve RUN_FILE 127"):
            await place.process().launch()

    story(tell)


ANSWERS = [
    *(b"", b"\n", b"{", b"[]\n", b"3\n", b'"a"\n', b"\xff\n", b"null\n", b"9" * 5000 + b"\n", b"[" * 100_000 + b"\n"),
    *(json.dumps({"serves": served}).encode() + b"\n" for served in (None, 3, "a", [], [3], {}, {"hone": None})),
    *(json.dumps({"error": error}).encode() + b"\n" for error in (None, 3, ["a"], {"a": 1}, "a" * 10_000)),
    *(
        json.dumps({"serves": {**SERVES, "model": one}}).encode() + b"\n"
        for one in (None, [], {}, {"layers": [2]}, "x" * 10_000)
    ),
    json.dumps({"serves": {key: value for key, value in SERVES.items() if key != "model"}}).encode() + b"\n",
]


def test_a_malformed_answer_of_a_server_is_one_line(story):
    answers = iter(ANSWERS)

    async def answer(reader, writer):
        await reader.readline()
        writer.write(next(answers))
        writer.close()

    async def tell(place):
        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        place.port = other.sockets[0].getsockname()[1]
        for given in ANSWERS:
            with pytest.raises(ServerFailed, match=r"^rollout\.addresses: ") as caught:
                await place.process(model={"hidden_size": 32, "layers": 2, "experts": None}).launch()
            assert "\n" not in str(caught.value), given
            assert len(str(caught.value)) < 1500, given
        other.close()

    story(tell)


def test_an_answer_that_comes_byte_by_byte_has_one_deadline(story, monkeypatch):
    monkeypatch.setattr("hone.rollout.servers.attached.ANSWER_S", 0.3)

    gone = asyncio.Event()

    async def drip(reader, writer):
        with suppress(ConnectionError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()
        gone.set()

    async def tell(place):
        other = await asyncio.start_server(drip, "127.0.0.1", 0)
        place.port = other.sockets[0].getsockname()[1]
        with pytest.raises(ServerFailed, match=r"no rollout server answers at 127.* timed out"):
            await place.process().launch()
        await gone.wait()
        other.close()

    story(tell)


def test_one_run_at_a_time_and_what_it_sent_ends_with_it(story):
    async def tell(place):
        assert (await place.say(b"GET / HTTP/1.1\n"))[0] == b"", "nothing is passed on before a run has attached"
        first, second = place.process(), place.process()
        await first.launch()
        assert first.alive
        assert place.cleaned == 1
        with pytest.raises(ServerFailed, match="another run uses it"):
            await second.launch()
        answer, reader = await place.say(b"hello\n")
        assert answer == b"HELLO\n"
        await first.stop()
        assert not first.alive
        assert await reader.read() == b"", "its request was cut off"
        await second.launch()
        assert (await place.say(b"again\n"))[0] == b"AGAIN\n"
        await place.front.close()
        await second.wait_dead()
        assert second.ended == "the loss of its connection"

    story(tell)


def test_a_stranger_holds_no_connection(story, monkeypatch):
    monkeypatch.setattr("hone.rollout.servers.front.FIRST_S", 0.05)

    async def tell(place):
        assert await (await place.reach()).read() == b""
        assert (await place.say(b"x" * 70_000))[0] == b""

    story(tell)


def test_settings_that_do_not_fit_addresses():
    both = {"backend": "vllm", "addresses": ["127.0.0.1:1", "127.0.0.1:2"]}
    assert build(RolloutConfig, both, "the test").replicas == 2
    for changed, said in (
        ({"replicas": 3}, "names 2 servers; remove replicas"),
        ({"addresses": ["here"]}, "should be HOST:PORT"),
        ({"addresses": ["a:1", "a:1"]}, "a:1 is there twice"),
        ({"backend": "builtin"}, "set builtin.process to separate"),
        ({"sleep_while_training": "level_1"}, "never sleep"),
    ):
        with pytest.raises(ConfigError, match=said):
            build(RolloutConfig, {**both, **changed}, "the test")


def test_the_token_is_asked_for(monkeypatch):
    monkeypatch.delenv("HONE_ROLLOUT_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"HONE_ROLLOUT_TOKEN should be a secret .* found 0 characters"):
        shared_token(os.environ)
    assert shared_token({"HONE_ROLLOUT_TOKEN": TOKEN}) == TOKEN
