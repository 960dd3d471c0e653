"""On-policy distillation: whole runs, with figures computed by plain transformers from what was sampled."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.models.settings import BuildConfig, ModelConfig
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.run.launch import run_policy
from hone.trainers.run.run_model import local_model
from tests.trainers.tiny import BASE, metrics, recipe

ROWS = """
import random
def rows(seed, size, teachers=("a", "b")):
    rng = random.Random(seed)
    for number in range(size):
        text = "".join(rng.choices("abcd", k=3))
        yield {"prompt": text, "ground_truth": text[::-1], "judge": teachers[number % len(teachers)]}
"""
SHORT = {"run": {"steps": 1}, "evaluation": {}, "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"}}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Folders of two models with random weights: the student's architecture, and a wider one."""
    folder = tmp_path_factory.mktemp("teachers")
    build = BASE["model"]["build"]
    sizes = {"a": {**build, "seed": 5}, "b": {**build, "seed": 6, "hidden_size": 48, "heads": 4}}
    return {
        name: str(local_model(ModelConfig(build=BuildConfig(**size)), folder / name).path)
        for name, size in sizes.items()
    }


def section(teachers, *names, **settings):
    return {"distillation": {"teachers": {name: {"model": {"path": teachers[name]}} for name in names}, **settings}}


def train(folder, *changes, kind="distill"):
    """The run folder, its metrics from step 0 on, and the trajectories of its training steps."""
    change = {"kind": kind} if kind == "distill" else {}
    run = run_policy(load_recipe(recipe(folder, SHORT, change, *changes), kind=kind))
    lines = list(rollout_lines(run / "rollouts.jsonl.gz"))
    return run, metrics(run), [json.loads(line) for line in lines]


def distributions(path, one):
    """log p of a model before each generated token of a trajectory, [tokens, V]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    ids = one["prompt_token_ids"] + one["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logits[len(one["prompt_token_ids"]) - 1 : -1]


def of_sampled(path, one):
    return distributions(path, one).gather(1, torch.tensor(one["token_ids"])[:, None])[:, 0]


def mean_over_tokens(rollouts, value):
    found = [value(one) for one in rollouts]
    return (sum(part.sum() for part in found) / sum(len(part) for part in found)).item()


# ------------------------------------------------------------------------------------------------------- the figures


def test_the_teachers_view_is_that_of_plain_transformers(tmp_path, teachers):
    run, steps, rollouts = train(tmp_path, section(teachers, "b", coef=2.0))
    gap = mean_over_tokens(rollouts, lambda one: of_sampled(run / "model", one) - of_sampled(teachers["b"], one))
    assert abs(gap) > 1e-3
    assert steps[1]["train/teacher_kl"] == pytest.approx(gap, abs=1e-5)
    assert steps[1]["train/distillation_loss"] == pytest.approx(gap, abs=1e-5)
    assert steps[1]["train/loss"] == pytest.approx(2 * gap, abs=1e-5)  # the task itself counts nothing
    assert steps[1]["train/policy_loss"] == 0.0
    assert steps[1]["reward/mean"] > 0.0


@pytest.mark.slow
def test_a_rollout_engine_teaches_as_a_training_engine_does(tmp_path, teachers):
    _, expected, _ = train(tmp_path / "engine", section(teachers, "b"))
    served = section(teachers, "b")
    served["distillation"]["teachers"]["b"]["served_by"] = "rollout"
    _, steps, _ = train(tmp_path / "rollout", served)
    assert steps[1]["train/teacher_kl"] == pytest.approx(expected[1]["train/teacher_kl"], abs=1e-6)
    assert steps[1]["train/grad_norm"] == pytest.approx(expected[1]["train/grad_norm"], rel=1e-4)
    served["distillation"]["loss"] = "forward_top_k"
    with pytest.raises(ConfigError, match=r"teachers\.b\.served_by: the built-in rollout engine scores sampled tokens"):
        train(tmp_path / "top_k", served)


def test_a_server_is_not_asked_at_another_temperature(tmp_path, teachers):
    served = section(teachers, "b")
    served["distillation"]["teachers"]["b"] |= {"served_by": "rollout", "rollout": {"backend": "vllm"}}
    warm = {"rollout": {"sampling": {"max_response_tokens": 3, "temperature": 0.7}}}
    with pytest.raises(ConfigError, match=r"teachers\.b\.rollout\.backend: vllm .* at temperature 1, and .* is 0\.7"):
        train(tmp_path, served, warm)


@pytest.mark.slow
def test_a_teachers_own_engine_has_its_own_settings(tmp_path, teachers):
    """The generic forward in float64 gives what the training engine gives; keys that nothing reads are an error."""
    _, expected, _ = train(tmp_path / "engine", section(teachers, "b"))
    served = section(teachers, "b")
    mine = {"served_by": "rollout", "rollout": {"builtin": {"execution": "generic"}}}
    served["distillation"]["teachers"]["b"] |= mine
    _, steps, _ = train(tmp_path / "rollout", served)
    assert steps[1]["train/teacher_kl"] == pytest.approx(expected[1]["train/teacher_kl"], abs=1e-6)
    mine["rollout"]["sampling"] = {"top_k": 3}
    served["distillation"]["teachers"]["b"] |= mine
    with pytest.raises(
        ConfigError, match=r"no part of this run uses these keys: distillation\.teachers\.b\.rollout\.sampling"
    ):
        train(tmp_path / "wrong", served)


@pytest.mark.parametrize("name", ["forward_top_k", pytest.param("reverse_top_k", marks=pytest.mark.slow)])
def test_top_k_is_that_of_plain_transformers(tmp_path, teachers, name):
    run, steps, rollouts = train(tmp_path, section(teachers, "a", loss={"name": name, "k": 3}))

    def divergence(one):
        theirs, ours = distributions(teachers["a"], one), distributions(run / "model", one)
        top = theirs.topk(3)
        p, q = top.values.exp(), ours.gather(1, top.indices).exp()
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
        if name == "reverse_top_k":
            p, q = q, p
        return (p * (p / q).log()).sum(-1)

    expected = mean_over_tokens(rollouts, divergence)
    assert steps[1]["train/distillation_loss"] == pytest.approx(expected, rel=1e-3)
    assert steps[1]["train/loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_each_row_is_judged_by_the_teacher_that_it_names(tmp_path, teachers):
    change = data(tmp_path, "a", "b")
    run, steps, rollouts = train(tmp_path, change, section(teachers, "a", "b", teacher_field="judge"))
    named = {one["prompt_id"]: "ab"[int(one["prompt_id"].partition("/")[2]) % 2] for one in rollouts}
    assert set(named.values()) == {"a", "b"}
    gap = mean_over_tokens(
        rollouts,
        lambda one: of_sampled(run / "model", one) - of_sampled(teachers[named[one["prompt_id"]]], one),
    )
    assert steps[1]["train/teacher_kl"] == pytest.approx(gap, abs=1e-5)


@pytest.mark.slow
def test_in_the_reward_the_estimator_sees_it(tmp_path, teachers):
    algorithm = {"advantage": {"name": "reinforce_pp", "gamma": 0.0}, "loss": "reinforce"}
    change = section(teachers, "a", where="in_reward", loss={"kind": "k1"})
    run, steps, rollouts = train(tmp_path, change, {"algorithm": algorithm})
    # The whitened negative log-ratio of each token is its advantage; the loss is the mean of -A lp.
    lp = torch.cat([of_sampled(run / "model", one) for one in rollouts])
    rewards = torch.cat([of_sampled(teachers["a"], one) for one in rollouts]) - lp
    advantages = (rewards - rewards.mean()) / rewards.std()
    assert steps[1]["train/loss"] == pytest.approx((-advantages * lp).mean().item(), abs=1e-4)
    assert steps[1]["train/teacher_kl"] == pytest.approx(-rewards.mean().item(), abs=1e-5)


def test_in_the_advantage_beside_the_task(tmp_path, teachers):
    plain = {"algorithm": {"advantage": "rloo", "loss": "reinforce"}}
    change = section(teachers, "a", where="in_advantage", coef=0.5)
    run, steps, rollouts = train(tmp_path, change, plain, kind="rl")  # of `hone train`: the task counts in full
    groups = {}
    for one in rollouts:
        groups.setdefault(one["draw"], []).append(one["reward"])

    def loss(one):
        rewards = groups[one["draw"]]
        lp = of_sampled(run / "model", one)
        task = (one["reward"] * len(rewards) - sum(rewards)) / (len(rewards) - 1)
        return -(task - 0.5 * (lp - of_sampled(teachers["a"], one))) * lp

    assert steps[1]["train/loss"] == pytest.approx(mean_over_tokens(rollouts, loss), abs=1e-4)


def test_the_student_comes_nearer_to_its_teacher(tmp_path, teachers):
    """The top-k loss has little noise: it falls, and a policy without teacher stays where it was."""
    fast = {"actor": {"compute_dtype": "float32", "optimizer": {"lr": 1e-2}}, "run": {"steps": 20}}
    _, steps, _ = train(tmp_path, section(teachers, "a", loss={"name": "forward_top_k", "k": 8}), fast)
    losses = [step["train/distillation_loss"] for step in steps[1:]]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_two_halves_equal_the_whole(tmp_path, teachers):
    change = section(teachers, "a", "b", teacher_field="judge", loss={"name": "reverse_top_k", "k": 2}, task_coef=1.0)
    shape = {"kind": "distill", "run": {"steps": 4}}
    whole, halves = (
        recipe(tmp_path / name, SHORT, shape, change, data(tmp_path, "a", "b")) for name in ("whole", "halves")
    )
    run_policy(load_recipe(whole))
    run_policy(load_recipe(halves, ["run.steps=2"]))
    run_policy(load_recipe(halves))
    assert metrics(tmp_path / "whole" / "run") == metrics(tmp_path / "halves" / "run")


# ---------------------------------------------------------------------------------------------------------- refusals


def data(folder, *names):
    """A data section whose rows name their teacher in the column `judge`."""
    folder.mkdir(parents=True, exist_ok=True)
    task = folder / "judged.py"
    task.write_text(ROWS, encoding="utf-8")
    options = {"teachers": list(names)}
    source = {"name": "python", "function": f"{task}:rows", "size": 64, "seed": 1, "options": options}
    return {"data": {"train": {"source": source}}}


def test_a_row_that_names_no_teacher_is_named_with_the_nearest(tmp_path, teachers):
    both = {"distillation": {"teacher_field": "judge", "teachers": {}}}
    for name, folder in (("algebra", "a"), ("geometry", "b")):
        both["distillation"]["teachers"][name] = {"model": {"path": teachers[folder]}}
    with pytest.raises(ValueError, match=r"prompt train/\d+, field judge: .*algebr'.*did you mean 'algebra'"):
        train(tmp_path, data(tmp_path, "algebr"), both)


def test_a_column_that_is_not_there_is_named(tmp_path, teachers):
    with pytest.raises(ValueError, match=r"distillation.teacher_field.*'judges'.*did you mean 'judge'"):
        train(tmp_path, data(tmp_path, "a"), section(teachers, "a", teacher_field="judges"))


def test_several_teachers_need_a_column(tmp_path, teachers):
    with pytest.raises(ConfigError, match="teacher_field should name the column that chooses among a, b"):
        train(tmp_path, section(teachers, "a", "b"))


def test_a_teacher_with_other_tokens_is_refused(tmp_path, teachers):
    other = BuildConfig(**{**BASE["model"]["build"], "characters": "abce"})
    path = local_model(ModelConfig(build=other), tmp_path / "other").path
    change = {"distillation": {"teachers": {"x": {"model": {"path": str(path)}}}}}
    with pytest.raises(ConfigError, match=r"distillation.teachers.x: its tokens are not the policy's: 2 differ.*'d'"):
        train(tmp_path, change)


def test_a_distillation_without_teachers_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="distillation"):
        train(tmp_path)
