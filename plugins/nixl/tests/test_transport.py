"""NIXL by the contract of transports, and its threads and errors. Faults of all transports: tests/weights."""

import asyncio
import importlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from hone.weights import sync
from hone.weights.base import WeightSyncError
from tests.weights.test_transports import MAKE, OfTransport, plain, run


class TestNixl(OfTransport):
    transport = "nixl"


def test_nixl_works_during_a_sync_only(replicas):
    """Its own progress thread would keep a core busy from the first sync on, in the trainer and in every server."""
    replica, weights = replicas("r0"), plain()

    def used():
        fields = Path(f"/proc/{replica.processes[0].process.pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def body(manager):
        manager.add_replica(replica)
        await manager.sync(weights.items(), 1)
        before = used()
        await asyncio.sleep(1)
        assert used() - before < 0.5, "seconds of two processes that have nothing to do"
        await manager.sync(weights.items(), 2)
        assert manager.versions == {"r0": 2}

    run(MAKE["nixl"](), body)


def test_reads_that_nixl_cannot_serve_name_its_error(replicas, monkeypatch):
    """A sync of few buckets has none left to send when the first read fails."""
    module = importlib.import_module("hone_nixl.transport")
    service, engine = module._Service, MAKE["nixl"]()
    monkeypatch.setattr(sync, "REASON_TIMEOUT_S", 1.0)
    engine.timeout_s = 9
    replica = replicas("r0")

    class Broken:
        def get_new_notifs(self):
            raise RuntimeError("the network is gone")

    async def body(manager):
        manager.add_replica(replica)
        monkeypatch.setattr(module, "_Service", lambda agent: service(Broken()))
        try:
            with pytest.raises(WeightSyncError, match="NIXL cannot serve the reads of receivers: the network is gone"):
                await manager.sync({"one": torch.ones(4)}.items(), 1)
        finally:
            os.kill(replica.processes[0].process.pid, signal.SIGKILL)  # NIXL waits a minute in there

    run(engine, body)
