"""The contract of a sandbox: a program gets its files and its input, stays within its limits, and leaves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import ClassVar, TypeVar

from hone.sandboxes.base import Limits, Ran, Sandbox, SandboxHost
from hone.testing.contract import Absent, Contract, require

T = TypeVar("T")
Play = Callable[[SandboxHost], Awaitable[T]]
RUN_S = 30.0  # deadline of a program that should not need it
LIMITS = Limits(memory_mb=256, processes=16, output_kb=64, disk_mb=8, at_once=2)


class SandboxContract(Contract):
    """Contract of `hone.sandboxes.base`, with real programs."""

    keeps_files: ClassVar[bool] = True  # whether files of a program are there for the next one in the same sandbox

    async def make(self, limits: Limits) -> SandboxHost:
        """Return a host of sandboxes with these limits. It runs on the event loop of the check that uses it."""
        raise NotImplementedError

    def test_a_program_gets_files_and_input_and_gives_files_and_output(self) -> None:
        """Arguments, input and files go in; status, both outputs and the wanted files come out."""
        source = (
            b"import sys\nn = int(input())\nopen('out/x', 'w').write(open('data/in').read() * n)\n"
            b"print(sys.argv[1:])\nsys.stderr.write('to stderr\\n')\nsys.exit(3)"
        )

        async def play(host: SandboxHost) -> Ran:
            return await _opened(
                host,
                lambda sandbox: sandbox.run(
                    ["python", "main.py", "a", "b c"],
                    stdin=b"3\n",
                    files={"main.py": source, "data/in": b"ab", "out/none": b""},
                    wanted=["out/x", "never", "out"],
                    timeout_s=RUN_S,
                ),
            )

        ran = self._play(play)
        require(ran.status == 3 and not ran.ok, f"the program ends with status 3, found {ran}")
        require((ran.stdout, ran.stderr) == (b"['a', 'b c']\n", b"to stderr\n"), f"its outputs are wrong: {ran}")
        require(
            dict(ran.files) == {"out/x": b"ababab"}, f"wanted were out/x, never, and a folder; found {dict(ran.files)}"
        )

    def test_what_a_program_does_wrong_is_its_result(self) -> None:
        """An exception, a signal and a missing command are results with a status, not failures of the sandbox."""

        async def play(host: SandboxHost) -> list[Ran]:
            programs = ("1 / 0", "import os; os.kill(os.getpid(), 11)", "import sys; sys.exit(-1)")
            ran = [await _python(host, one) for one in programs]
            ran.append(
                await _opened(host, lambda sandbox: sandbox.run(["bash", "-c", "no-such-command"], timeout_s=RUN_S))
            )
            return ran

        raised, signalled, left, missing = self._play(play)
        require(raised.status == 1 and b"ZeroDivisionError" in raised.stderr, f"1 / 0 gave {raised}")
        require(signalled.status != 0 and not signalled.ok, f"a program that a signal ended gave {signalled}")
        require(left.status == 255, f"sys.exit(-1) gave {left}, expected status 255")
        require(missing.status == 127, f"a command that does not exist gave {missing}, expected status 127")

    def test_a_sandbox_keeps_its_files_and_shares_none(self) -> None:
        """Files stay for the next program in the same sandbox, also in a closed folder; another sandbox has none."""

        async def play(host: SandboxHost) -> tuple[Ran, Ran, Ran]:
            sandbox = host.open()
            first = await sandbox.run(["bash", "-c", "echo 5 > number; chmod 0 ."], timeout_s=RUN_S)
            second = await sandbox.run(["bash", "-c", "cat number"], timeout_s=RUN_S)
            other = await _opened(host, lambda new: new.run(["bash", "-c", "cat number"], timeout_s=RUN_S))
            await sandbox.close()
            return first, second, other

        first, second, other = self._play(play)
        require(first.ok, f"a program that writes a file gave {first}")
        require(not other.ok, f"a file of one sandbox was in another one: {other}")
        if not self.keeps_files:
            raise Absent("every program of this sandbox has a folder of its own")
        require(second.stdout == b"5\n", f"the file that a program wrote was not there for the next one: {second}")

    def test_a_late_program_is_ended_with_everything_that_it_started(self) -> None:
        """At its deadline a program ends with limit "time", and the run returns soon afterwards."""

        async def play(host: SandboxHost) -> tuple[Ran, float]:
            await _python(host, "")  # whatever has to start first
            began = time.monotonic()
            late = await _opened(
                host, lambda sandbox: sandbox.run(["bash", "-c", "sleep 300 & sleep 300"], timeout_s=0.5)
            )
            return late, time.monotonic() - began

        late, seconds = self._play(play)
        require(late.limit == "time" and not late.ok, f"a program that slept for 300 s gave {late} after 0.5 s")
        require(seconds < RUN_S, f"the run returned {seconds:.1f} s after it began, its deadline was 0.5 s")

    def test_output_beyond_the_limit_ends_the_program(self) -> None:
        """A program that prints 20 MB ends with limit "output", and no more than the limit is kept."""
        ran = self._play(lambda host: _python(host, "for _ in range(20_000): print('x' * 1000)"))
        require(ran.limit == "output", f"a program that printed 20 MB gave limit {ran.limit!r}")
        require(len(ran.stdout) <= LIMITS.output_kb << 10, f"{len(ran.stdout)} bytes are kept of {LIMITS.output_kb} KB")

    def test_programs_run_side_by_side(self) -> None:
        """More programs than seats all end, each with its own result."""

        async def play(host: SandboxHost) -> list[Ran]:
            return list(await asyncio.gather(*(_python(host, f"print({number})") for number in range(6))))

        found = [ran.stdout for ran in self._play(play)]
        require(found == [b"%d\n" % number for number in range(6)], f"six programs printed {found}")

    def test_bad_requests_are_errors_of_the_caller(self) -> None:
        """A path that leaves the working folder, and an empty command line, raise ValueError."""

        async def refused(host: SandboxHost, argv: list[str], path: str) -> bool:
            try:
                await _opened(host, lambda sandbox: sandbox.run(argv, files={path: b""}, timeout_s=RUN_S))
            except ValueError:
                return True
            return False

        async def play(host: SandboxHost) -> list[str]:
            paths = ["../x", "/etc/passwd", "a/../../x", ""]
            taken = [path for path in paths if not await refused(host, ["python", "-c", ""], path)]
            return [*taken, *([] if await refused(host, [], "x") else ["an empty command line"])]

        taken = self._play(play)
        require(not taken, f"the sandbox ran a program with {taken}")

    def _play(self, play: Play[T]) -> T:
        """Run `await play(host)`, and close the host."""

        async def run() -> T:
            host = await self.make(LIMITS)
            try:
                return await play(host)
            finally:
                await host.close()

        return self.wait(run())


async def _opened(host: SandboxHost, use: Callable[[Sandbox], Awaitable[T]]) -> T:
    sandbox = host.open()
    try:
        return await use(sandbox)
    finally:
        await sandbox.close()


async def _python(host: SandboxHost, source: str) -> Ran:
    files = {"main.py": source.encode()}
    return await _opened(host, lambda sandbox: sandbox.run(["python", "main.py"], files=files, timeout_s=RUN_S))
