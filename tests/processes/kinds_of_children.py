"""The program of a child: does what the request names."""

import os
import signal
import subprocess
import sys
import tempfile
import time

from hone.processes.request_loop import RequestLoop

LATE_S = 0.3


def main():
    loop = RequestLoop()
    requests = loop.requests()
    hello = next(requests).body
    if hello.get("fails"):
        loop.loaded({"error": "no such thing"})
        return
    if hello.get("stops"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if hello.get("hangs"):
        time.sleep(600)
    loop.loaded({"pid": os.getpid()})
    for request in requests:
        WAYS[request.body["way"]](loop, request)


def echo(loop, request):
    loop.reply(request.batch, {"echo": request.body})


def writes_a_file(loop, request):
    descriptor, path = tempfile.mkstemp()
    os.close(descriptor)
    loop.reply(request.batch, {"path": path})


def prints_for_ever(loop, request):
    while True:
        os.write(1, b"x" * 65536)


def prints_then_echo(loop, request):
    sys.stdout.write("a line\nanother\n" + "y" * 50_000)
    sys.stdout.flush()
    echo(loop, request)


def forks(loop, request):
    if os.fork() == 0:
        time.sleep(LATE_S)  # meanwhile the parent gets the next request
        loop.reply(request.batch + 1, {"echo": "of the fork"})
        os._exit(0)
    echo(loop, request)


def forks_without_guard(loop, request):
    if os.fork() == 0:
        time.sleep(LATE_S)
        loop._process = os.getpid()
        loop.reply(request.batch + 1, {"echo": "of the fork"})
        os._exit(0)
    echo(loop, request)


def replies_late(loop, request):
    time.sleep(LATE_S)
    echo(loop, request)


def detaches(loop, request):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    loop.reply(request.batch, {"pids": [os.getpid(), child.pid]})


def dies(loop, request):
    print("goodbye", flush=True)
    os._exit(3)


WAYS = {
    function.__name__: function
    for function in (
        echo, writes_a_file, prints_for_ever, prints_then_echo, forks, forks_without_guard, replies_late, detaches,
        dies,
    )
}  # fmt: skip

if __name__ == "__main__":
    main()
