"""Programs started per second in each local sandbox, compared with a plain subprocess without protection.

    python benchmarks/sandboxes.py --seconds 5 --at-once 2

Each program prints one number. `python` runs a file in the interpreter that the sandbox has started already, or starts
one where the sandbox cannot keep it; `true` is a program of the system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable

from hone.sandboxes.base import Limits, SandboxRefused
from hone.sandboxes.choice import make_sandboxes

PROGRAM = b"print(42)"
COMMANDS = {"python": ["python", "main.py"], "true": ["true"]}


async def rate(run: Callable[[], Awaitable[None]], seconds: float, at_once: int) -> float:
    """Runs per second of `at_once` loops."""
    ends = time.monotonic() + seconds
    done = 0

    async def loop() -> None:
        nonlocal done
        while time.monotonic() < ends:
            await run()
            done += 1

    began = time.monotonic()
    await asyncio.gather(*(loop() for _ in range(at_once)))
    return done / (time.monotonic() - began)


async def plain(seconds: float, at_once: int) -> dict[str, float]:
    """A subprocess with the rights of its parent."""
    found = {}
    for name, command in {"python": [sys.executable, "-I", "-c", PROGRAM.decode()], "true": ["true"]}.items():

        async def run(command: list[str] = command) -> None:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
            await process.communicate()

        found[name] = await rate(run, seconds, at_once)
    return found


async def sandboxed(backend: str, seconds: float, at_once: int) -> dict[str, float]:
    """One sandbox for each loop."""
    host = make_sandboxes(backend, Limits(at_once=at_once))
    found = {}
    try:
        await host.start()
        for name, command in COMMANDS.items():
            free = [host.open() for _ in range(at_once)]

            async def run(command: list[str] = command, free: list = free) -> None:
                sandbox = free.pop()
                ran = await sandbox.run(command, files={"main.py": PROGRAM}, timeout_s=60.0)
                assert ran.ok, ran
                free.append(sandbox)

            await run()
            found[name] = await rate(run, seconds, at_once)
            for sandbox in free:
                await sandbox.close()
    finally:
        await host.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    results: dict[str, object] = {"plain": asyncio.run(plain(given.seconds, given.at_once))}
    for backend in ("landlock", "bubblewrap"):
        try:
            results[backend] = asyncio.run(sandboxed(backend, given.seconds, given.at_once))
        except SandboxRefused as error:
            results[backend] = str(error)
    print(json.dumps({"user": os.geteuid(), "load": os.getloadavg()[0], "starts_per_second": results}, indent=1))


if __name__ == "__main__":
    main()
