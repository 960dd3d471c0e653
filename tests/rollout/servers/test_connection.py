"""Starts of a server that does not check the token, and requests to one that is ended meanwhile."""

import asyncio
from functools import partial

import pytest

from hone.processes.child import ServerFailed
from hone.rollout.base import ReplicaLost, ServerSpec
from hone.rollout.servers.connection import ServerConnection
from hone.rollout.servers.host import SOCKET
from hone.rollout.settings import RolloutConfig

# Answers GET with 200, and without the token with the status of the second argument; 0: it does not answer. POST gets
# the head of a reply (/begun), nothing (/silent), or an error: /dying, which ends the server while it calls itself
# healthy, and /wrong, which does not.
SERVER = """
import os, socketserver, sys, threading
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        first, head = self.rfile.readline(), b""
        while (line := self.rfile.readline()).strip():
            head += line
        if first.startswith(b"GET"):
            status = "200" if b"Bearer token" in head else sys.argv[2]
            if status == "0":
                threading.Event().wait()
            self.wfile.write(f"HTTP/1.1 {status} .\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n".encode())
            return
        if b"/dying" in first or b"/wrong" in first:
            if b"/dying" in first:
                threading.Timer(0.2, os._exit, [7]).start()
            self.wfile.write(b"HTTP/1.1 500 Error\\r\\ncontent-length: 6\\r\\nconnection: close\\r\\n\\r\\nfailed")
            return
        print("asked", flush=True)
        if b"/begun" in first:
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 9\\r\\n\\r\\n")
        threading.Event().wait()
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
Server(sys.argv[1], Handler).serve_forever()
"""


@pytest.fixture
def connection(tmp_path):
    return ServerConnection(ServerSpec(RolloutConfig(), "model", "float32", 0, tmp_path, "token"), "/health")


def launch(site, without_token=401):
    return [str(site.python), "-c", SERVER, str(site.folder / SOCKET), str(without_token)], {}


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (200, RuntimeError, r"server builtin-0 answers without the run's token \(status 200\)"),
        (0, ServerFailed, "server builtin-0 was not ready after 3 s"),
    ],
)
def test_a_server_has_to_refuse_whoever_has_no_token_before_it_is_ready(status, error, message, connection):
    """One that stops answering between the two questions is given up at the deadline of its start."""

    async def story():
        with pytest.raises(error, match=message):
            await asyncio.wait_for(connection.start(partial(launch, without_token=status), 3), 60)
        assert not connection.alive
        assert connection.folder is None

    asyncio.run(story())


@pytest.mark.parametrize("path", ["/silent", "/begun"])
def test_requests_of_a_server_that_is_ended_are_lost_at_once(path, connection):
    """Also those whose reply has begun: the router sends them to another replica, and does not wait for a deadline."""

    async def asked():
        while "asked" not in connection.process.last_lines():
            await asyncio.sleep(0.01)

    async def story():
        await connection.start(launch, 60)
        request = asyncio.create_task(connection.post(path, {}, timeout_s=3600))
        await asyncio.wait_for(asked(), 60)
        if path == "/begun":  # the head has arrived a moment later
            await connection.get("/health")
        await asyncio.wait_for(connection.close(), 60)
        with pytest.raises(ReplicaLost, match=f"replica builtin-0 was ended during {path}"):
            await asyncio.wait_for(request, 60)

    asyncio.run(story())


def test_an_error_of_a_server_that_dies_is_the_loss_of_it_and_of_one_that_lives_is_an_error(connection):
    """A server may answer with an error, and still call itself healthy, in the moment in which its engine dies."""

    async def story():
        await connection.start(launch, 60)
        with pytest.raises(RuntimeError, match=r"replica builtin-0 refused /wrong \(status 500\): failed"):
            await connection.post("/wrong")
        with pytest.raises(ReplicaLost, match=r"refused /dying \(status 500\): failed; it ended with"):
            await connection.post("/dying")
        await connection.close()

    asyncio.run(story())


def test_a_server_ends_though_a_late_request_waits_to_see_whether_it_died(connection):
    """On another machine, a late request waits up to 90 s for its process to die: closing must end that process."""

    async def story():
        await connection.start(launch, 60)
        connection._host.machine = "elsewhere"
        request = asyncio.create_task(connection.post("/silent", {}, timeout_s=0.2))
        await asyncio.sleep(0.6)
        assert not request.done()
        await asyncio.wait_for(asyncio.gather(connection.close(), connection.close()), 60)
        assert not connection.alive
        with pytest.raises(ReplicaLost, match=r"did not answer /silent within 0.2 s; it ended with"):
            await asyncio.wait_for(request, 60)

    asyncio.run(story())


def test_closing_again_while_requests_end_is_fine(connection):
    async def story():
        await connection.start(launch, 60)
        requests = [asyncio.create_task(connection.post("/silent", {}, timeout_s=3600)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.gather(connection.close(), connection.close()), 60)
        for one in await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60):
            assert isinstance(one, ReplicaLost)

    asyncio.run(story())
