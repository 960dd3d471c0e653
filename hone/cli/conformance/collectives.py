"""Section `collectives`: two processes, the platform's backend for its devices, gloo for host memory."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.cli.conformance.record import LONGEST, Recorder
from hone.platforms.base import PlatformBase, current_platform
from hone.plugins import load_plugins
from hone.processes.request_loop import RequestLoop
from hone.processes.request_process import ChildLost, ChildSpec, RequestProcess
from hone.registry import reason
from hone.testing.contract import Absent, require

PROGRAM = "hone.cli.conformance.collectives"
WORLD = 2
START_S = 120.0
DEADLINE_S = 120.0
MEET_S = 60.0  # for the ranks to find each other, and for one collective
ELEMENTS = 1 << 20


def collectives(record: Recorder) -> None:
    """Start the ranks, and record what rank 0 and rank 1 found of each operation."""
    platform = current_platform()
    found: list[list[dict[str, Any]]] = []
    with record.check(f"two ranks join a group ({_backends(platform)})"):
        found = _of_ranks()
    for ours in zip(*found, strict=True):
        with record.check(ours[0]["name"]) as figures:
            figures |= ours[0]["figures"]
            for rank, one in enumerate(ours):
                require(not one["reason"], f"rank {rank}: {one['reason']}")
    if platform.device != "cpu" and not _has_devices(platform):
        with record.check(f"collectives of {platform.collectives_backend}, {platform.device}"):
            raise Absent(f"{WORLD} ranks need a device each, and there is {platform.device_count()}")


def _has_devices(platform: PlatformBase) -> bool:
    """Return whether each rank gets a device of its own."""
    return platform.device != "cpu" and platform.device_count() >= WORLD


def _backends(platform: PlatformBase) -> str:
    return platform.collectives() if _has_devices(platform) else "gloo"


def _of_ranks() -> list[list[dict[str, Any]]]:
    """Return each rank's result. Raises ChildLost for a rank that died, RuntimeError for one that could not join."""
    ranks: list[RequestProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks.extend(  # one by one, so that those that started are killed if the next does not
                RequestProcess(ChildSpec(f"rank {rank}", PROGRAM, {"GLOO_SOCKET_IFNAME": "lo"}))
                for rank in range(WORLD)
            )
            for process in ranks:
                process.hello({}, START_S)
            for rank, process in enumerate(ranks):
                process.request(json.dumps({"rank": rank, "folder": folder}))
            deadline = time.monotonic() + DEADLINE_S
            return [_reply_of(rank, process, deadline) for rank, process in enumerate(ranks)]
        finally:
            for process in ranks:
                process.kill()


def _reply_of(rank: int, process: RequestProcess, deadline: float) -> list[dict[str, Any]]:
    replies = process.replies(deadline)
    if not replies:
        raise ChildLost(f"rank {rank} did not reply within {DEADLINE_S:g} s")
    if "error" in replies[0]:
        raise RuntimeError(f"rank {rank}: {replies[0]['error']}")
    found: list[dict[str, Any]] = replies[0]["found"]
    return found


def _sum(own: Tensor) -> Tensor:
    dist.all_reduce(own)
    return own


def _from_first(own: Tensor) -> Tensor:
    dist.broadcast(own, 0)
    return own


def _everything(own: Tensor) -> Tensor:
    whole = own.new_empty(WORLD * len(own))
    dist.all_gather_into_tensor(whole, own)
    return whole


def _own_part_of_sum(own: Tensor) -> Tensor:
    part = own.new_empty(len(own) // WORLD)
    dist.reduce_scatter_tensor(part, own)
    return part


def _exchanged(own: Tensor) -> Tensor:
    found = torch.empty_like(own)
    dist.all_to_all_single(found, own)
    return found


OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    # name -> (what each rank does with rank + 1 everywhere, the mean that results on every rank)
    "all-reduce": (_sum, 3.0),
    "broadcast": (_from_first, 1.0),
    "all-gather": (_everything, 1.5),
    "reduce-scatter": (_own_part_of_sum, 3.0),
    "all-to-all": (_exchanged, 1.5),
}


def main() -> None:
    """One of the ranks: join, run each operation on host memory and on the device, reply with what resulted."""
    loop = RequestLoop()
    requests = loop.requests()
    next(requests)
    load_plugins()
    loop.loaded({})
    for request in requests:
        try:
            found = _run_rank(request.body["rank"], Path(request.body["folder"]))
        except Exception as error:  # noqa: BLE001  reported as the reason
            loop.reply(request.batch, {"error": reason(error)[:LONGEST]})
        else:
            loop.reply(request.batch, {"found": found})


def _run_rank(rank: int, folder: Path) -> list[dict[str, Any]]:
    platform = current_platform()
    places = {"gloo, host memory": torch.device("cpu")}
    if _has_devices(platform):
        platform.set_device(rank)
        places[f"{platform.collectives_backend}, {platform.device}"] = platform.torch_device(rank)
    limit = timedelta(seconds=MEET_S)
    meeting = (folder / "store").as_uri()
    dist.init_process_group(_backends(platform), meeting, rank=rank, world_size=WORLD, timeout=limit)
    found = [
        {"name": f"{name} ({place})", **_measured(operation, mean, rank, device)}
        for place, device in places.items()
        for name, (operation, mean) in OPERATIONS.items()
    ]
    dist.destroy_process_group()
    return found


def _measured(operation: Callable[[Tensor], Tensor], mean: float, rank: int, device: torch.device) -> dict[str, Any]:
    own = torch.full((ELEMENTS,), rank + 1.0, device=device)
    try:
        found = float(operation(own.clone()).mean())
        started = time.perf_counter()
        last = operation(own.clone())
        float(last[-1])  # wait for the device
    except Exception as error:  # noqa: BLE001  reported as the reason
        return {"reason": reason(error)[:LONGEST], "figures": {}}
    rate = own.nbytes / (time.perf_counter() - started) / 1e9
    problem = "" if abs(found - mean) < 1e-6 else f"the mean is {found}, and should be {mean}"
    return {"reason": problem, "figures": {"GB/s": round(rate, 2)}}


if __name__ == "__main__":
    main()
