"""Requests to a server that is ended meanwhile."""

import asyncio

import pytest

from hone.rollout.base import ReplicaLost, ServerSpec
from hone.rollout.servers.connection import ServerConnection
from hone.rollout.servers.host import SOCKET
from hone.rollout.settings import RolloutConfig

# Answers GET with 200, with 401 without a token, and POST with the head of a reply (/begun), with nothing (/silent), or
# with an error: /dying, which ends the server while it calls itself healthy, and /wrong, which does not.
SERVER = """
import os, socketserver, sys, threading
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        first, head = self.rfile.readline(), b""
        while (line := self.rfile.readline()).strip():
            head += line
        if first.startswith(b"GET"):
            status = b"200 OK" if b"Bearer token" in head else b"401 Unauthorized"
            self.wfile.write(b"HTTP/1.1 " + status + b"\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n")
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


def launch(site):
    return [str(site.python), "-c", SERVER, str(site.folder / SOCKET)], {}


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
