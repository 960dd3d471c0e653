"""Code execution: the program in an answer runs in a sandbox, against the tests of its row.

    {"stdin": "1 2", "stdout": "3"}     the program is run with this input, and has to print this
    "assert add(1, 2) == 3"             run after the program, in the same interpreter

The tests are the ground truth: a list, JSON text of one, or the columns `inputs` and `outputs` of APPS and TACO. What
the program does (a wrong answer, a time-out, a memory bomb) is a value; a lost sandbox is a failed reward.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.data.answers import fenced_blocks
from hone.sandboxes.base import DEFAULT, PYTHON, Limits, Ran, Sandbox, SandboxHost
from hone.sandboxes.choice import make_sandboxes

_PYTHON_NAMES = ("", "python", "python3", "py")

# Python's own limits, of 1,000 calls within each other and of 4,300 digits, would fail programs that are right. 50,000
# calls are what LiveCodeBench allows (https://github.com/LiveCodeBench/LiveCodeBench). No name is left behind, because
# a program that lacks `import sys` has to fail. Early versions of Python 3.10 have no limit of digits.
_LIMITS = """
__import__("sys").setrecursionlimit(50_000)
getattr(__import__("sys"), "set_int_max_str_digits", abs)(0)
"""

# Runs the program, then each assertion. A line with the secret word counts only if it is there: a program that ends the
# interpreter, or prints "passed" itself, has not passed.
_ASSERTIONS = (
    _LIMITS
    + """
import json, sys
program, tests, word = json.loads(sys.stdin.read())
names = {"__name__": "answer"}
exec(compile(program, "answer.py", "exec"), names)
for number, test in enumerate(tests):
    try:
        exec(compile(test, "test.py", "exec"), dict(names))
    except Exception as error:
        print(f"test {number}: {type(error).__name__}: {error}", file=sys.stderr)
    else:
        print(f"\\n{word} {number}", flush=True)
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """1 if the program passes all tests (`credit: share`: the share that it passes), else 0.

    `program`: the last fenced Python block of the answer, or the whole answer. `timeout_s` is the deadline of one test
    with input and output, and of all assertions together; `answer_timeout_s` that of all tests, and should be below the
    component's `timeout_s`. `sandbox`, `url`, `image`: see docs/sandboxes.md. The constructor raises SandboxRefused.
    """

    program: Literal["fenced", "whole"] = "fenced"
    credit: Literal["all", "share"] = "all"
    timeout_s: float = 5.0
    answer_timeout_s: float = 20.0
    sandbox: str = "auto"
    url: str = ""
    image: str = ""
    memory_mb: int = DEFAULT.memory_mb
    processes: int = DEFAULT.processes
    host: SandboxHost = field(init=False)  # of this process, with which its sandboxes end

    def __post_init__(self) -> None:
        for name in ("timeout_s", "answer_timeout_s", "memory_mb", "processes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} should be above 0, found {getattr(self, name)}")
        limits = Limits(memory_mb=self.memory_mb, processes=self.processes, at_once=1)
        object.__setattr__(self, "host", make_sandboxes(self.sandbox, limits, self.url, self.image))

    def __call__(self, response: str, ground_truth: Any, row: Mapping[str, Any]) -> Awaitable[dict[str, float]]:
        """Score one answer. Raises SandboxLost, and ValueError for tests that cannot be read.

        This is no coroutine function, so a reward process runs one answer at a time and each has its own deadline.
        """
        source = response if self.program == "whole" else last_block(response)
        deadlines = (self.timeout_s, self.answer_timeout_s)
        return _score(source, _tests(ground_truth, row), self.host, deadlines, whole=self.credit == "all")


def last_block(text: str) -> str | None:
    """The last fenced block of Python in a Markdown text; None if there is none.

    >>> last_block("first\\n```python\\nprint(1)\\n```\\nthen\\n```\\nprint(2)\\n```\\n")
    'print(2)\\n'
    """
    found = [block for language, block in fenced_blocks(text) if language.lower() in _PYTHON_NAMES]
    return found[-1] if found else None


async def _score(
    source: str | None, tests: Sequence[Any], host: SandboxHost, deadlines: tuple[float, float], *, whole: bool
) -> dict[str, float]:
    if source is None:
        return {"reward": 0.0, "passed": 0.0, "program": 0.0, "late": 0.0}
    ends = time.monotonic() + deadlines[1]
    files = {"answer.py": _whole_program(source)}
    pairs = [one for one in tests if not isinstance(one, str)]
    assertions = [one for one in tests if isinstance(one, str)]
    passed = late = 0
    sandbox = host.open()
    try:
        for pair in pairs:
            left = min(deadlines[0], ends - time.monotonic())
            if left <= 0:
                late += 1
                continue
            ran = await sandbox.run(
                [PYTHON, "answer.py"], stdin=str(pair["stdin"]).encode(), files=files, timeout_s=left
            )
            passed += ran.ok and _plain(ran.stdout.decode("utf-8", "replace")) == _plain(str(pair["stdout"]))
            late += ran.limit == "time"
        left = min(deadlines[0], ends - time.monotonic())
        if assertions and left > 0:
            held, ran = await _assert(source, assertions, sandbox, left)
            passed += held
            late += ran.limit == "time"
    finally:
        await asyncio.shield(sandbox.close())
    share = passed / len(tests)
    reward = float(share == 1.0) if whole else share
    return {"reward": reward, "passed": share, "program": 1.0, "late": float(late > 0)}


def _whole_program(source: str) -> bytes:
    """A file that runs the program as `__main__` within `_LIMITS`."""
    return f"{_LIMITS}exec(compile({source!a}, 'answer.py', 'exec'))\n".encode("ascii")


async def _assert(source: str, tests: Sequence[str], sandbox: Sandbox, timeout_s: float) -> tuple[int, Ran]:
    """Return how many assertions hold, all in one run."""
    word = secrets.token_hex(16)
    given = json.dumps([source, list(tests), word]).encode()
    files = {"tests.py": _ASSERTIONS.encode()}
    ran = await sandbox.run([PYTHON, "tests.py"], stdin=given, files=files, timeout_s=timeout_s)
    lines = {line.strip() for line in ran.stdout.decode("utf-8", "replace").splitlines()}
    return sum(f"{word} {number}" in lines for number in range(len(tests))), ran


def _plain(text: str) -> list[str]:
    """Lines without spaces at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests(ground_truth: Any, row: Mapping[str, Any]) -> list[Any]:
    """The tests of a row: texts, and objects with `stdin` and `stdout`. Raises ValueError."""
    found = ground_truth if ground_truth is not None else row
    if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise ValueError(f"the ground truth looks like JSON and is not: {error}") from error
    if isinstance(found, Mapping) and "inputs" in found:
        pairs = zip(found["inputs"], found["outputs"], strict=True)
        found = [{"stdin": _joined(given), "stdout": _joined(printed)} for given, printed in pairs]
    found = [found] if isinstance(found, str) or (isinstance(found, Mapping) and "stdin" in found) else found
    if not isinstance(found, list) or not found:
        raise ValueError(f"the ground truth should be a list of tests, found {found!r:.80}")
    for number, one in enumerate(found):
        pair = isinstance(one, Mapping) and {"stdin", "stdout"} <= one.keys()
        if not pair and not (isinstance(one, str) and one.strip()):
            raise ValueError(
                f"test {number} of the ground truth should be text with assertions, or an object with stdin and "
                f"stdout, found {one!r:.80}"
            )
    return found


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
