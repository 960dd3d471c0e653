"""Section `weight sync`: another process receives weights of the device over each transport, and proves them.

sharing: weights on the device --CheckpointEngineManager--> main: receives, keeps, replies with the digest
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hone.cli.conformance.record import LONGEST, Recorder
from hone.platforms.base import current_platform
from hone.plugins import load_plugins
from hone.processes.request_loop import RequestLoop
from hone.processes.request_process import ChildLost, ChildSpec, RequestProcess
from hone.registry import reason
from hone.rollout.base import WeightReceipt
from hone.weights import TRANSPORTS
from hone.weights.base import CheckpointEngine
from hone.weights.delivery import receive
from hone.weights.digests.digest import digest_tensors
from hone.weights.sync import CheckpointEngineManager

PROGRAM = "hone.cli.conformance.sharing"
START_S = 120.0
SYNC_S = 60.0
BUCKET_BYTES = 8 << 20
ROWS, COLUMNS = 2048, 1024


def sharing(record: Recorder) -> None:
    """Two syncs over each transport; the second changes the weights, so that stale ones are noticed."""
    platform = current_platform()
    where = platform.torch_device(0)
    platform.set_device(0)
    with record.check("share device memory between processes") as figures:
        why = platform.why_no_ipc()
        figures["ipc uses"] = f"shared host memory ({why})" if why else "device memory"
    token = secrets.token_hex(32)
    process = RequestProcess(ChildSpec("receiving process", PROGRAM))
    try:
        with record.check("start a receiving process"):
            process.hello({"token": token}, START_S)
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, dict[str, Any]] = {"ipc": {}, "collective": {}, "disk": {"folder": Path(folder)}}
            for name, given in options.items():
                with record.check(f"{name}: the digest of two syncs is the sender's") as figures:
                    engine = TRANSPORTS.get(name)(BUCKET_BYTES, SYNC_S, token, **given)
                    figures["GB/s"] = asyncio.run(_two_syncs(engine, process, where))
    finally:
        process.kill()


async def _two_syncs(engine: CheckpointEngine, process: RequestProcess, where: torch.device) -> float:
    """Send two versions; GB/s of the second. Raises WeightSyncError if the receiver's digest differs."""
    manager = CheckpointEngineManager(engine)
    manager.add_replica(_Receiver(process))
    rate = 0.0
    try:
        for version in (1, 2):
            generator = torch.Generator().manual_seed(version)
            table = torch.randn(ROWS, COLUMNS, generator=generator)
            weights = {
                "float32": table.to(where),
                "bfloat16": table.to(torch.bfloat16).to(where),
                "scalar": torch.tensor(float(version)).to(where),
            }
            metrics = await manager.sync(weights.items(), version)
            rate = round(metrics["perf/weight_sync_gb_per_s"].value, 2)
    finally:
        await engine.close()
    return rate


class _Receiver:
    """The receiving process, as the manager of the sync sees it. It serves no requests, so it need not pause."""

    name = "receiver"
    ranks = 1

    def __init__(self, process: RequestProcess) -> None:
        self._process = process

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def stop(self, reason: str) -> None: ...

    async def receive_weights(self, offer: Mapping[str, Any]) -> Sequence[WeightReceipt]:
        return [await asyncio.to_thread(self._take, offer)]

    def _take(self, offer: Mapping[str, Any]) -> WeightReceipt:
        self._process.request(json.dumps({"offer": offer}))
        replies = self._process.replies(time.monotonic() + SYNC_S)
        if not replies:
            raise ChildLost(f"the receiving process did not reply within {SYNC_S:g} s")
        if "error" in replies[0]:
            raise RuntimeError(replies[0]["error"])
        return WeightReceipt(self.name, **replies[0])


def main() -> None:
    """The receiving process: takes the weights of each offer, and replies with the digest of what it then holds."""
    loop = RequestLoop()
    requests = loop.requests()
    token = next(requests).body["token"]
    load_plugins()
    current_platform().set_device(0)
    loop.loaded({})
    for request in requests:
        try:
            loop.reply(request.batch, _received(request.body["offer"], token))
        except Exception as error:  # noqa: BLE001  reported as the reason
            loop.reply(request.batch, {"error": reason(error)[:LONGEST]})


def _received(offer: Mapping[str, Any], token: str) -> dict[str, Any]:
    with receive(offer, 0, token) as delivery:
        held = dict(delivery)
    digest = digest_tensors(held.items(), delivery.method)
    return {"version": delivery.version, "digest": digest, "tensors": delivery.tensors, "bytes": delivery.bytes}


if __name__ == "__main__":
    main()
