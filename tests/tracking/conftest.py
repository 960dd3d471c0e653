"""What the tests of tracking share: trajectories, and run folders that are written line by line."""

import json

import pytest

from hone.tracking.trackers.jsonl import rollout_lines
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup, TurnSpan

WORDS = ["", "Sort", ":", " 3", " 1", "\n", "</script>", "é", "<|end|>"]


def decode(ids):
    return "".join(WORDS[i] for i in ids)


@pytest.fixture
def group():
    """Makes a group of trajectories with two prompt tokens and the given answers (tuples of token ids)."""

    def make(*answers, status=Status.OK, prompt_id="sort/1", draw=4):
        prompt = Prompt(prompt_id, (1, 2), ({"role": "user", "content": "Sort:"},), [1, 3], "sort", draw=draw)
        trajectories = tuple(
            Trajectory(
                prompt_id=prompt_id,
                sample=sample,
                token_ids=(1, 2, *answer),
                prompt_length=2,
                loss_mask=(0, 0, *(1 for _ in answer)),
                rollout_logprobs=(0.0, 0.0, *(-0.5 * (i + 1) for i in range(len(answer)))),
                weight_versions=(-1, -1, *(7 if i < 2 else 8 for i in range(len(answer)))),
                response=decode(answer),
                stop_reason=StopReason.STOP,
                status=status,
                reward=0.25 * sample,
                components={"exact_match": float(sample)},
                spans=(TurnSpan(2, 2 + len(answer)),),
            )
            for sample, answer in enumerate(answers)
        )
        return TrajectoryGroup(prompt, trajectories)

    return make


@pytest.fixture
def lines():
    """Reads a file of JSON lines, compressed or not."""
    return lambda path: [json.loads(line) for line in rollout_lines(path)]
