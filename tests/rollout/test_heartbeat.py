"""When a server counts as hung: by what it says of itself, in time that this event loop ran."""

import asyncio

import pytest

from hone.processes.descriptors import OutOfDescriptors
from hone.rollout.base import ReplicaLost
from hone.rollout.heartbeat import Heartbeat
from hone.rollout.servers.vllm import tokens_of

SILENT = "it gave no sign of life for 4 s"
STUCK = "it has requests, and computed no token for 4 s"


class Server:
    """Answers with one number after another; an error is raised, and `...` is never answered."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def beat(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is ...:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def first_finding(server, is_busy=True, seconds=12):
    """(when it was found hung, why), listening once a second; None if never."""

    async def story():
        heartbeat = Heartbeat(server, 4.0)
        try:
            for second in range(seconds):
                if why := heartbeat.listen(1.0, is_busy):
                    return second, why
                for _ in range(3):
                    await asyncio.sleep(0)
            return None
        finally:
            heartbeat.end()

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("answers", "is_busy", "found"),
    [
        ([...], True, (4, SILENT)),
        ([...], False, (4, SILENT)),
        ([7, ...], True, (4, SILENT)),  # it answered once, in the first second
        ([7], True, (5, STUCK)),
        ([7], False, None),
        ([None], True, None),
        (list(range(20)), True, None),
        ([ReplicaLost("no connection")], True, (4, SILENT)),
        ([TimeoutError()], True, (4, SILENT)),
        ([OutOfDescriptors("none is free")], True, None),
    ],
)
def test_who_counts_as_hung_and_when(answers, is_busy, found):
    got = first_finding(Server(*answers), is_busy)
    assert (got and got[1]) == (found and found[1])
    assert got is None or abs(got[0] - found[0]) <= 1


def test_vllms_tokens_are_those_of_prompts_and_completions_of_every_engine():
    page = """# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="m"} 120.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 1.5e+03
vllm:generation_tokens_total{engine="0",model_name="m"} 30.0
vllm:num_requests_running{engine="0",model_name="m"} 4.0
"""
    assert tokens_of(page) == 1650
    assert tokens_of("# nothing is counted\n") is None
