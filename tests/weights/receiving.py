"""Receivers for the tests: real processes, one per rank, that take offers and keep what comes, as a server would.

A fault is a word for the receiving process: what it does wrong in the next sync. `dies:3` kills itself with SIGKILL
while it holds the third tensor; others are in `_take`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading

import torch

from hone.rollout.base import WeightReceipt
from hone.weights.base import AdapterTensors, Full
from hone.weights.delivery import receive
from hone.weights.digests.digest import digest_tensors
from hone.weights.transports.ipc import memory
from tests.forks import CONTEXT
from tests.weights.devices import have_devices

TOKEN = "a token for tests"


def serve(pipe, *devices):
    """One rank: holds the whole weights of the last sync, and apart from them the adapter."""
    have_devices(*devices)
    torch.set_num_threads(1)
    held: dict[type, dict[str, torch.Tensor]] = {Full: {}, AdapterTensors: {}}
    while True:
        try:
            offer, rank, token, fault, copy, in_place = pipe.recv()
        except EOFError:
            return
        try:
            holds = held[Full]  # an adapter's tensors have other names
            targets = dict(holds) if in_place else None
            with receive(offer, rank, token, copy, targets) as delivery:
                holds = held[type(delivery.payload)]
                _take(delivery, holds, fault, pipe)
                sender = _sender(delivery)
            facts = {name: (str(t.dtype), tuple(t.shape)) for name, t in holds.items()}
            found = digest_tensors(holds.items(), delivery.method)
            kept = (sender, next(iter(memory._kept), ""))
            pipe.send((delivery.version, delivery.digest, found, facts, kept, delivery.method))
        except Exception as error:  # noqa: BLE001  told to the test
            pipe.send(f"{type(error).__name__}: {error}")


def _sender(delivery):
    """The process that the kernel names at the other end of the connection to the sender's memory; 0: there is none."""
    connection = getattr(getattr(delivery._receiver, "_channel", None), "_lifeline", None)
    if connection is None or not hasattr(socket, "SO_PEERCRED"):
        return 0
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def _take(delivery, holds, fault, pipe):
    what, _, number = fault.partition(":")
    for count, (name, tensor) in enumerate(delivery, 1):
        if what == "dies" and count == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raises" and count == int(number):
            raise ValueError("the loader does not like this tensor")
        if what == "leaves" and count == int(number):
            return
        if what == "stuck" and count == int(number):
            pipe.send("it is stuck")
            signal.pause()
        if what == "silent" and count == int(number):
            signal.pause()
        if what == "skips" and name == number:
            continue
        if what == "keeps" and name == number and name in holds:  # as a tied head that nobody updates
            continue
        if tensor is not holds.get(name):
            holds[name] = tensor.clone()


class Rank:
    """One receiving process."""

    target = staticmethod(serve)

    def __init__(self, *devices):
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=self.target, args=(theirs, *devices), daemon=True)
        self.process.start()
        theirs.close()
        self._turn = threading.Lock()

    def take(self, *request):
        """Ask, and wait for the answer: (version, digest of what came, digest of what is held, facts), or an error."""
        with self._turn:
            self._pipe.send(request)
            if not self._pipe.poll(60):
                raise TimeoutError("the receiving process did not answer within 60 s")
            return self._pipe.recv()

    def stop(self):
        self._pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


class ProcessReplica:
    """A replica whose ranks are processes; what the manager's protocol asks for, and notes of what was asked."""

    def __init__(self, name="r0", ranks=1, token=TOKEN, devices=(), kind=Rank):
        """`devices`: of each rank, the names of the devices it sees, its own first; without: none."""
        self.kind = kind
        self.devices = devices or [()] * ranks
        self.name = name
        self.ranks = ranks
        self.token = token
        self.fault = ""  # of its last rank
        self.copy = True
        self.in_place = False  # written into what it holds
        self.asked = []
        self.facts = {}
        self.held = ("", "")  # method and digest of what the last rank holds
        self.delays = {}  # what -> seconds
        self.senders = []  # of each rank: the process that sent, and the name of its buckets
        self.processes = [kind(*seen) for seen in self.devices]

    async def pause(self, mode):
        self.asked.append(f"pause {mode}")
        await asyncio.sleep(self.delays.get("pause", 0))

    async def resume(self):
        self.asked.append("resume")

    async def stop(self, reason):
        self.asked.append(f"stop: {reason}")

    async def receive_weights(self, offer):
        faults = [""] * (self.ranks - 1) + [self.fault]
        answers = await asyncio.gather(
            *(
                asyncio.to_thread(rank.take, offer, number, self.token, fault, self.copy, self.in_place)
                for number, (rank, fault) in enumerate(zip(self.processes, faults, strict=True))
            )
        )
        wrong = [answer for answer in answers if isinstance(answer, str)]
        if wrong:
            raise RuntimeError(wrong[0])
        self.facts = answers[-1][3]
        self.held = answers[-1][5], answers[-1][2]
        self.senders = [answer[4] for answer in answers]
        return [WeightReceipt(self.name, version, held, len(facts), 0) for version, _, held, facts, *_ in answers]

    def replace_rank(self, number=-1):
        self.processes[number].stop()
        self.processes[number] = self.kind(*self.devices[number])

    def close(self):
        for rank in self.processes:
            with contextlib.suppress(OSError):
                rank.stop()
