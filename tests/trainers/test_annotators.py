"""The ordered list of what adds fields to a batch, and the start-up checks that read it."""

import pytest
import torch

from hone.algorithms.distillation.losses import TEACHER_INDEX
from hone.config import ConfigError
from hone.data.packing import pack
from hone.trainers.policy.annotators import OldLogprobs, ReferenceLogprobs, Stage, Values, check_stages
from hone.trainers.policy.teachers import TeacherChoice
from hone.types import ModelOutput, Prompt, StopReason, Trajectory, TrajectoryGroup

COLLECTED = frozenset({"rewards"})


def stage(name, provides=(), needs=()):
    return Stage(name, frozenset(provides), frozenset(needs))


def test_a_stage_reads_what_earlier_ones_fill():
    stages = [stage("reference", ["ref_logprobs"]), stage("process_reward", ["process_rewards"], ["ref_logprobs"])]
    assert check_stages(stages, COLLECTED) == {"rewards", "ref_logprobs", "process_rewards"}
    with pytest.raises(ConfigError, match="process_reward: needs ref_logprobs, which no earlier part"):
        check_stages(stages[::-1], COLLECTED)


class Model:
    """Answers every forward with one number."""

    def __init__(self, number):
        self.number = number

    def infer_batch(self, batch, needs=frozenset()):
        told = torch.full((batch.num_tokens,), self.number)
        extras = dict.fromkeys(needs, told[:, None])
        return ModelOutput(logprobs=told, values=told, extras=extras)


def group(number, source):
    prompt = Prompt(f"a/{number}", (5,), (), None, source, row={"level": source})
    one = Trajectory(f"a/{number}", 0, (5, 6, 7), 1, (0, 1, 1), (0.0, -1.0, -2.0), (-1, 3, 4), "x", StopReason.STOP)
    return TrajectoryGroup(prompt, (one,))


def test_each_adds_its_fields_and_keeps_the_others():
    batch = pack([group(0, "easy"), group(1, "hard")])
    assert batch.weight_versions.tolist() == [-1, 3, 4, -1, 3, 4]
    for annotate in (
        OldLogprobs(Model(-1.0), frozenset({"sum_pi_squared"})),
        Values(Model(2.0)),
        ReferenceLogprobs(Model(-3.0), frozenset({"states"})),
    ):
        batch = annotate(batch)
    assert (batch.old_logprobs[0], batch.values[0], batch.ref_logprobs[0]) == (-1, 2, -3)
    assert (batch.sum_pi_squared[0], batch.reference_states[0]) == (-1, -3)


def test_the_teacher_of_a_sequence_is_one_number_for_it():
    groups = [group(0, "easy"), group(1, "hard")]
    batch = TeacherChoice("level", ["hard", "easy"]).assign(pack(groups), groups)
    assert TEACHER_INDEX.of(batch).tolist() == [1, 0]
