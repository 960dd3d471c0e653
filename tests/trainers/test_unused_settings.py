"""Every setting that a plain run does not use is refused by its key, and the tables below name all of them."""

import json
import re

import pytest
import yaml

from hone.config import Config, ConfigError, load, sections
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run import launch
from hone.trainers.supervised.settings import PreferenceRunConfig, RewardModelRunConfig, SupervisedRunConfig
from tests.trainers.preference_task import settings_of
from tests.trainers.test_supervised import sft_recipe
from tests.trainers.tiny import metrics, recipe, reinforce

BUILT = {"model.revision": "main", "model.trust_remote_code": True}
NO_HELD_OUT = {"checkpoint.keep_best": False, "evaluation.every_steps": 2}
ONE_SET = {"data.train.weight": 2.0, "data.train.too_long": "error", "data.train.path": "rows.jsonl"}
EVERY_KIND = {**BUILT, **NO_HELD_OUT, **ONE_SET}

SUPERVISED = {
    **EVERY_KIND,
    "data.train.max_prompt_tokens": 20,
    "data.train.ground_truth_template": "{{ prompt }}",
    "tracking.rollouts_per_step": 3,
}
PAIRS = {**SUPERVISED, "data.train.answer_template": "{{ chosen }}"}
VALUES = {**PAIRS, "actor.logprob_chunk_tokens": 7, "actor.head_dtype": "float32"}  # of a model without logits
NO_REFERENCE = {"reference.logprobs": "live", "reference.model": None}

# Built-in engine in the trainer's process, environment `chat`, no KL, no critic.
POLICY = {
    **EVERY_KIND,
    "algorithm.value_loss.clip": 0.5,
    "data.train.answer_template": "{{ prompt }}",
    "data.train.max_sample_tokens": 20,
    "episode.max_turns": 2,
    "evaluation.samples": 2,
    "evaluation.sampling": None,
    "evaluation.vote_pattern": "a",
    "evaluation.score": None,  # refused earlier, by a message of its own
    "rollout.addresses": None,  # refused earlier, too
    "rollout.engine": {"enforce_eager": True},
    "rollout.max_restarts": 1,
    "rollout.python": "python3",
    "rollout.request_timeout_s": 5.0,
    "rollout.requests_per_replica": 5,
    "rollout.start_timeout_s": 5.0,
    "rollout.tensor_parallel": 2,
    "weights.bucket_mib": 5,
    "weights.timeout_s": 5.0,
}


def policy(folder):
    return PolicyRunConfig, recipe(folder, {"evaluation": {}}), launch.run_policy


def fine_tuning(folder):
    return SupervisedRunConfig, sft_recipe(folder, evaluation={}), launch.run_supervised


def preferences(folder, kind, loss, cls, run):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings_of(folder, kind, loss, evaluation={})), encoding="utf-8")
    return cls, path, run


def prefer(loss):
    return lambda folder: preferences(folder, "prefer", loss, PreferenceRunConfig, launch.run_preference)


def reward_model(loss):
    return lambda folder: preferences(folder, "reward_model", loss, RewardModelRunConfig, launch.run_reward_model)


KINDS = {
    "rl": (policy, POLICY),
    "sft": (fine_tuning, SUPERVISED),
    "dpo": (prefer("dpo"), PAIRS),
    "kto": (prefer("kto"), SUPERVISED),
    "simpo": (prefer("simpo"), {**PAIRS, **NO_REFERENCE}),
    "bradley_terry": (reward_model("bradley_terry"), VALUES),
    "process": (reward_model("process"), VALUES),
}


class AllRead(Exception):
    """Raised where a run would begin to train."""


def not_read(config):
    """Every key of a plain value that no part of the run has read."""
    return {
        f"{section.prefix}{name}"
        for section in sections(config)
        for name in type(section.config).model_fields
        if name not in section.config._reads and not isinstance(section.config.__dict__[name], Config)
    }


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_a_plain_run_does_not_use_is_refused(kind, tmp_path, monkeypatch):
    make, unused = KINDS[kind]
    cls, path, run = make(tmp_path)
    plain, real = load(cls, path), launch.require_all_read

    def check(loaded):
        real(loaded)
        raise AllRead

    monkeypatch.setattr(launch, "require_all_read", check)
    with pytest.raises(AllRead):
        run(plain)
    assert not_read(plain.config) == set(unused)

    chosen = {key: value for key, value in unused.items() if value is not None}
    overrides = [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
    with pytest.raises(ConfigError, match="no part of this run uses these keys") as refused:
        run(load(cls, path, [*overrides, f"run.dir={tmp_path}/other"]))
    assert set(re.findall(r"([\w.]+) \(set by", str(refused.value))) == set(chosen)


LIMITED = 'tracking.trackers=[{"name": "jsonl", "rollouts_max_mib": 5}]'


def test_evaluation_can_be_switched_off_on_the_command_line(tmp_path):
    """The run file still says how often it evaluates, and what counts."""
    run_file = recipe(
        tmp_path,
        {"evaluation": {"every_steps": 1, "samples": 2, "score": "eval/a/x", "sets": {"a": {"path": "none.jsonl"}}}},
    )
    run = reinforce(run_file, "evaluation.sets={}", "run.steps=1")
    assert [name for line in metrics(run) for name in line if name.startswith("eval/")] == []


def test_the_limit_of_rollouts_is_refused_where_none_are_written(tmp_path, monkeypatch):
    cls, path, run = fine_tuning(tmp_path)
    with pytest.raises(ConfigError, match=r"these keys: tracking.trackers.0.rollouts_max_mib \(set by command line\)"):
        run(load(cls, path, [LIMITED]))

    rows = {"source": {"name": "python", "function": f"{tmp_path / 'rl' / 'task.py'}:rows", "size": 64, "seed": 1}}
    warm = {"data": {"train": {**rows, "answer_template": "{{ ground_truth }}"}}, "steps": 2, "samples_per_step": 4}
    loaded = load(PolicyRunConfig, recipe(tmp_path / "rl", {"warm_start": warm}), [LIMITED])
    real = launch.require_all_read

    def check(asked):
        real(asked)  # before the warm start, and it writes rollouts after it
        raise AllRead

    monkeypatch.setattr(launch, "require_all_read", check)
    with pytest.raises(AllRead):
        launch.run_policy(loaded)
