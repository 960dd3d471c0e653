"""The reward `code`: tests of both kinds, what a policy tries, and what is nobody's answer."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.processes.supervisor import descendants, processes
from hone.rewards.code import Code, last_block
from hone.rewards.rubric import Rubric
from hone.rewards.settings import RewardConfig
from hone.sandboxes.base import SandboxLost, SandboxRefused
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup
from tests.sandboxes.available import skip_without

SUMS = [{"stdin": "1 2", "stdout": "3\n"}, {"stdin": "5 5", "stdout": "10"}, {"stdin": "0 7", "stdout": "7"}]
ADDS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(2, 2) == 4", "assert add(-1, 1) == 0"]
RIGHT = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module", autouse=True)
def _with_a_sandbox():
    skip_without("landlock")


class Scorer:
    """One reward for each set of options, in one event loop, as in a reward process."""

    def __init__(self, runner):
        self.runner = runner
        self.rewards = {}

    def reward(self, **options) -> Code:
        key = json.dumps(options)
        self.rewards[key] = self.rewards.get(key) or Code(**{"sandbox": "landlock", "program": "whole", **options})
        return self.rewards[key]

    def __call__(self, source, tests, row=None, **options):
        return self.wait(self.reward(**options)(source, tests, row or {}))

    def wait(self, awaitable):
        async def waiting():
            return await awaitable

        return self.runner.run(waiting())


@pytest.fixture(scope="module")
def score():
    with asyncio.Runner() as runner:
        made = Scorer(runner)
        yield made
        for reward in made.rewards.values():
            made.wait(reward.host.close())


@pytest.mark.parametrize(
    ("source", "tests", "passed"),
    [
        (RIGHT, SUMS, 3),
        ("print(3)", SUMS, 1),
        ("print(sum(map(int, sys.stdin.read().split())))", SUMS, 0),  # without `import sys`
        ("def add(a, b):\n    return sys.intern('') or a + b", ADDS, 0),
        ("print(3", SUMS, 0),
        (RIGHT, json.dumps(SUMS), 3),
        (RIGHT, {"inputs": ["1 2", ["5 5"], "0 7"], "outputs": ["3", ["10"], "8"]}, 2),
        ("add = lambda a, b: a + b", ADDS, 4),
        ("add = lambda a, b: a * b", ADDS, 2),  # 0 * 0 and 2 * 2
        ("def add(a, b):\n    raise ValueError", ADDS, 0),
        ("import sys\nadd = lambda a, b: a + b\nsys.exit(0)", ADDS, 0),
        ("import os\nos._exit(0)", ADDS, 0),
        ("print('passed 0')\nprint('word 0')\nadd = None", ADDS, 0),
        ("add = lambda a, b: a + b\nimport builtins\nbuiltins.print = lambda *a, **k: None", ADDS, 0),
    ],
)
def test_the_share_of_tests_that_pass(score, source, tests, passed):
    count = len(tests) if isinstance(tests, list) else 3
    found = score(source, tests, credit="share")
    assert found["passed"] == found["reward"] == passed / count
    assert score(source, tests)["reward"] == float(passed == count)


DEEP = "def depth(n):\n    return 0 if n == 0 else 1 + depth(n - 1)\n"


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        (f"{DEEP}print(depth(20_000))", [{"stdin": "", "stdout": "20000"}]),
        (DEEP, ["assert depth(20_000) == 20_000"]),
        ("print(len(str(7 ** 10_000)))", [{"stdin": "", "stdout": "8451"}]),
        ("def power(n):\n    return 7 ** n", ["assert len(str(power(10_000))) == 8451"]),
    ],
)
def test_deep_recursion_and_long_numbers_are_no_failures(score, source, tests):
    assert score(source, tests)["reward"] == 1.0


def test_the_last_python_block_is_the_program(score):
    text = f"No:\n```python\nprint(0)\n```\nBetter:\n```py\n{RIGHT}\n```\nRun it:\n```bash\npython x.py\n```\n"
    assert last_block(text) == f"{RIGHT}\n"
    assert last_block("```python\nprint(1)") is None  # cut off
    assert last_block("~~~\nprint('```')\n~~~\n") == "print('```')\n"
    assert score(text, SUMS, program="fenced")["reward"] == 1.0
    assert score(RIGHT, SUMS, program="fenced") == {"reward": 0.0, "passed": 0.0, "program": 0.0, "late": 0.0}


def test_what_the_policy_causes_is_a_value(score):
    slow = score("while True: pass", SUMS, timeout_s=0.2)
    assert (slow["reward"], slow["late"]) == (0.0, 1.0)
    assert score("while True: pass", ADDS, timeout_s=0.2)["late"] == 1.0
    assert score("while True: pass", SUMS, timeout_s=30.0, answer_timeout_s=0.3)["late"] == 1.0
    assert score("x = b'x' * (1 << 30)", SUMS, memory_mb=128)["reward"] == 0.0


@pytest.mark.parametrize("tests", [None, [], "[1", [3], [{"stdin": ""}], [" "], {"a": 1}])
def test_tests_that_nobody_can_read_are_an_error(score, tests):
    with pytest.raises(ValueError, match="the ground truth"):
        score(RIGHT, tests)


def test_a_lost_sandbox_is_no_value(score):
    reward = score.reward(timeout_s=300.0)

    async def lose():
        task = asyncio.ensure_future(reward("while True: pass", SUMS, {}))
        async with asyncio.timeout(60):
            while len(reward.host.process_ids) < 3:
                await asyncio.sleep(0.01)
        os.kill(reward.host.process_ids[1], signal.SIGKILL)
        return await task

    with pytest.raises(SandboxLost):
        score.wait(lose())
    assert score(RIGHT, SUMS, timeout_s=300.0)["reward"] == 1.0


def test_settings_that_cannot_work_are_refused_by_the_constructor():
    with pytest.raises(SandboxRefused, match="needs the url"):
        Code(sandbox="sandbox_fusion")
    with pytest.raises(SandboxRefused, match="has no url"):
        Code(sandbox="landlock", url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="memory_mb should be above 0, found 0"):
        Code(memory_mb=0)


def group_of(*programs):
    prompt = Prompt("p", (1,), (), SUMS, "d")
    answers = [f"```python\n{text}\n```\n" for text in programs]
    return TrajectoryGroup(
        prompt,
        tuple(
            Trajectory("p", n, (1, 2), 1, (0, 1), (0.0, 0.0), (-1, 0), one, StopReason.STOP)
            for n, one in enumerate(answers)
        ),
    )


def rubric(**options) -> Rubric:
    parts = {"tests": {"reward": "code", "options": {"sandbox": "landlock", "credit": "share", **options}}}
    return Rubric(RewardConfig(components=parts, workers=1))


async def forked() -> list[int]:
    """The warm parent, an attendant and its program: three processes with one command line, each child of the last.

    So are the supervisor's stand-in, the supervisor, and the warm parent before it begins.
    """
    async with asyncio.timeout(60):
        while True:
            below = set(descendants(os.getpid()))
            parents = {pid: parent for pid, parent, _ in processes() if pid in below}
            for program, attendant in parents.items():
                found = [parents.get(attendant, 0), attendant, program]
                line, *others = {command_line(pid) for pid in found}
                if not others and b"hone.sandboxes.warm" in line and b"supervisor.py" not in line:
                    return found
            await asyncio.sleep(0.01)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_of_a_group_only_the_answer_fails_whose_sandbox_is_killed():
    async def play():
        scorer = rubric(timeout_s=300.0, answer_timeout_s=300.0)
        await scorer.start()
        try:
            task = asyncio.create_task(scorer.score(group_of("while True: pass", RIGHT, "print(3)")))
            found = await forked()
            os.kill(found[1], signal.SIGKILL)
            return await task, found
        finally:
            await scorer.close()

    scored, found = asyncio.run(play())
    assert [one.status for one in scored.trajectories] == [Status.REWARD_FAILED, Status.OK, Status.OK]
    assert [one.reward for one in scored.trajectories[1:]] == [1.0, 1 / 3]
    assert scored.trajectories[2].components["tests/program"] == 1.0
    assert "SandboxLost" in scored.trajectories[0].error
    assert not set(found) & {pid for pid, _, _ in processes()}


def test_a_sandbox_that_does_not_work_here_is_an_error_at_the_start():
    async def start():
        scorer = rubric(url="http://127.0.0.1:1")
        try:
            await scorer.start()
        finally:
            await scorer.close()

    with pytest.raises(ConfigError, match="landlock runs on this machine and has no url"):
        asyncio.run(start())
