"""Whatever a person gets wrong: one clear line, the right exit code, and nothing that was trained is lost."""

import errno
import json

import pytest

from hone import full_disk
from hone.algorithms.algorithm import Algorithm
from hone.cli.main import main
from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.trainers.policy.annotators import Stage
from hone.trainers.policy.checks import TokenBudgets, check_policy_run, check_settings
from hone.trainers.run.checkpoints import CheckpointStore
from tests.trainers.tiny import BASE, PPO, metrics, recipe


def hone(capfd, *arguments):
    """(exit code, what was said on standard error in one piece)."""
    capfd.readouterr()
    code = main(["train", *map(str, arguments)])
    return code, capfd.readouterr().err


def errors(text):
    return [line for line in text.splitlines() if line.startswith("error:")]


def rows(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def long_prompt(tmp_path):
    return rows(tmp_path, {"prompt": "abcd" * 5, "ground_truth": ""})


def with_data(path, **settings):
    return {"data": {"train": {"path": str(path), **settings}}}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: with_data(tmp / "none.jsonl"), "none.jsonl"),
        (lambda tmp: with_data(rows(tmp, {"question": "ab", "answer": "ba"})), "question"),
        (lambda tmp: with_data(rows(tmp)), "no rows"),
        (lambda tmp: with_data(long_prompt(tmp), max_prompt_tokens=8), "longer than"),
        (lambda tmp: {"model": {"path": "no-such/model/here"}}, "error: model.path: no folder no-such/model/here"),
        (lambda tmp: {"algorithm": {"advantage": "gae"}, "critic": {"model": {"path": "no/such/critic"}}},
         "error: critic.model.path: no folder no/such/critic"),
        (lambda tmp: {"algorithm": {"kl": {"coef": 0.1}}, "reference": {"model": {"path": "no/such/reference"}}},
         "error: reference.model.path: no folder no/such/reference"),
        (lambda tmp: {"model": {"build": {"architecture": "qwen33"}}}, "did you mean 'qwen3'"),
        (lambda tmp: {"reward": {"components": {"x": {"reward": "exact_matsch"}}}}, "did you mean 'exact_match'"),
        (lambda tmp: {"reward": {"components": {"x": {"reward": "json:no_such"}}}}, "no_such"),
        (lambda tmp: {"reward": {"components": {}}},
         "error: reward.components: name at least one; the environment chat gives no reward"),
        (lambda tmp: {"reward": {"components": {"x": {"reward": "exact_match", "weight": 0}}}},
         "error: reward.components: every weight is 0, so every reward is 0, and the policy learns nothing; "
         "set reward.components.x.weight=1"),
        (lambda tmp: {"reward": {"components": {"x": {"reward": "exact_match", "weight": 0}}},
                      "algorithm": {"preset": "dapo"}},
         "error: reward.components: every weight is 0, so algorithm.dynamic_sampling, which compares rewards, drops "
         "every group; set algorithm.dynamic_sampling.metric=x, or reward.components.x.weight=1"),
        (lambda tmp: {"algorithm": {"advantage": "gae"}}, "needs a critic; add the section"),
        (lambda tmp: {"algorithm": {"preset": "vapo"}},
         "critic: algorithm.advantage gae needs a critic; add the section `critic: {}`, on the command line critic={} "
         "(preset vapo sets algorithm.advantage)"),
        (lambda tmp: {"algorithm": {"preset": "dapo"}, "update": {"prompts_per_step": 2, "samples_per_prompt": 1}},
         "set it to 2 or more, or algorithm.dynamic_sampling=null (preset dapo sets algorithm.dynamic_sampling)"),
        (lambda tmp: {"algorithm": {"preset": "rloo", "loss": {"clip_low": 0.1}}},
         "and algorithm.loss is reinforce: set algorithm.loss=cispo too (preset rloo sets algorithm.loss)"),
        (lambda tmp: {"algorithm": {"preset": "decoupled_ppo"}, "rollout": {"sampling": {"top_p": 0.9}}},
         "(preset decoupled_ppo sets algorithm.correction.weights)"),
        (lambda tmp: {"algorithm": {"preset": "prime"}},
         "algorithm prime: needs process_rewards, which no part of this run produces"),
        (lambda tmp: {"critic": {"engine": {}}}, "critic: algorithm.advantage grpo has no critic; remove"),
        (lambda tmp: {"algorithm": {"advantage": "grppo"}}, "did you mean 'grpo'"),
        (lambda tmp: {"tracking": {"trackers": ["jsnol"]}}, "did you mean 'jsonl'"),
        (lambda tmp: {"update": {"prompts_per_step": 2, "minibatches": 3}}, "update.minibatches = 3 is more than"),
        (lambda tmp: {"update": {"prompts_per_step": 2, "samples_per_prompt": 1},
                      "algorithm": {"dynamic_sampling": {}}},
         "update.samples_per_prompt = 1: algorithm.dynamic_sampling drops every group without variance"),
        (lambda tmp: {"algorithm": {"correction": {"old": "rollout"}}, "rollout": {"sampling": {"top_p": 0.9}}},
         "set rollout.sampling.top_p=1, or algorithm.correction.old=trainer"),
        (lambda tmp: {"algorithm": {"correction": {"weights": "token", "rejections": [{"high": 2.0}]}},
                      "rollout": {"sampling": {"top_k": 2}}},
         "top_k=0, or algorithm.correction.weights=null algorithm.correction.rejections=[]"),
        (lambda tmp: {"algorithm": {"correction": {"rejections": [{"high": 2.0}]}},
                      "rollout": {"sampling": {"min_p": 0.1}}},
         "algorithm.correction.rejections with rollout.sampling.min_p: the rollout"),
        (lambda tmp: {"algorithm": {"correction": {"old": "rollout"}},
                      "episode": {"env": {"name": "agent", "program": "a.py:b", "client_sampling": True}}},
         "set episode.env.client_sampling=false, or algorithm.correction.old=trainer"),
        (lambda tmp: {"actor": {"max_tokens_per_microbatch": 5}},
         "less than the longest sequence of 9 tokens: prompt train/"),
        (lambda tmp: {"rollout": {"builtin": {"process": "separate"}}, "runtime": {"stall_timeout_s": 600}},
         "runtime.stall_timeout_s = 600 should be more than weights.timeout_s = 600, because"),
        (lambda tmp: {"rollout": {"builtin": {"process": "separate"}},
                      "runtime": {"backend": {"name": "ray", "devices": 2}, "collective_timeout_s": 200}},
         "runtime.collective_timeout_s = 200 should be more than 200, a third of weights.timeout_s = 600: so long"),
        (lambda tmp: {"rollout": {"backend": "biultin"}}, "unknown rollout engine 'biultin'; did you mean 'builtin'"),
    ],
)  # fmt: skip
def test_a_wrong_run_file_is_one_line_and_exit_code_2(tmp_path, capfd, make, message):
    code, said = hone(capfd, recipe(tmp_path, make(tmp_path)))
    assert code == 2, said
    (line,) = errors(said)
    assert message in line, line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("updat.epochs=2", "did you mean 'update'"),
        ("evaluation.sampling.top_k=5", "temperature is 0 (greedy), so top_k, top_p and min_p have no effect"),
        ("evaluation.samples=4", "samples = 4 with greedy sampling"),
        ("rollout.sampling={temperature: 0, min_p: 0.1}", "so top_k, top_p and min_p have no effect"),
        ("rollout.sampling.temperature=0", "temperature = 0 (greedy) with update.samples_per_prompt = 4: all answers"),
        ("algorithm.dynamic_sampling.metric=shore", "algorithm.dynamic_sampling.metric 'shore'; did you mean 'share'"),
        ("evaluation.vote_pattern='[a]'", "vote_pattern: a single answer has no vote"),
        ("evaluation.vote_pattern='(a'", "vote_pattern: '(a' is no regular expression: missing )"),
        ("update.epoch=2", "did you mean 'update.epochs'"),
        ("update.epochs=many", "update.epochs"),
        ("run.steps=0", "run.steps"),
        ("actor.optimizer.name=AdmW", "error: actor.optimizer.name: unknown optimizer 'AdmW'; did you mean 'AdamW'"),
        ("actor.parallel.tensor=2", "did you mean 'actor.backend.parallel'"),
        ("actor.backend.parallel.tensor=2", "actor.backend.parallel.tensor = 2 does not divide 1 ranks"),
        ("reference.model.path=somewhere", "reference: algorithm.kl.coef is 0"),
        (
            "actor.max_tokens_per_microbatch=3",
            "actor.max_tokens_per_microbatch = 3 is less than the longest sequence of 4",
        ),
        ("algorithm.kl.kind=k1", "no part of this run uses these keys: algorithm.kl.kind"),
    ],
)
def test_a_wrong_override_is_one_line_and_exit_code_2(tmp_path, capfd, override, message):
    code, said = hone(capfd, recipe(tmp_path), override)
    assert code == 2, said
    (line,) = errors(said)
    assert message in line, line


NOT_HERE = {"reference": {"model": {"path": "not/here"}}, "algorithm": {"kl": {"coef": 0.1}}}
TEACHER = {"distillation": {"teachers": {"one": {"model": {"path": "not/here"}}}}}


@pytest.mark.parametrize(
    ("changes", "override", "message"),
    [
        ({}, "", "python is no Python that runs"),  # nothing is wrong but this: a server was to be started
        ({}, "algorithm.kl.kind=k1", "no part of this run uses these keys: algorithm.kl.kind"),
        ({}, "actor.backend.parallel.tensor=2", "tensor = 2 does not divide 1 ranks"),
        ({}, "actor.lora={targets: [q_prj]}", "unknown layer"),
        ({}, "actor.optimizer.name=AdmW", "did you mean 'AdamW'"),
        ({}, "actor.schedule={name: cosine, warmup_steps: 6}",
         "warmup_steps=6 leaves no step for the cosine decay, because the run has 6 optimizer steps; set "
         "actor.schedule.warmup_steps=0 and actor.schedule.warmup_fraction=0.1, or train for more steps"),
        ({}, "evaluation.sets.held_out.max_prompt_tokens=1", "longer than max_prompt_tokens=1"),
        ({}, "evaluation.sets.held_out.columns={prompt: promt}", "did you mean 'prompt'"),
        ({}, "episode.env=shell", "episode.env.parser: "),
        (NOT_HERE, "", "'not/here' is not a local folder"),
        (TEACHER, "", "'not/here' is not a local folder"),
    ],
)  # fmt: skip
def test_settings_are_checked_before_a_server_is_started(tmp_path, capfd, changes, override, message):
    """vLLM takes most of a minute to start. Its Python here leaves a file when it is called."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexit 1\n")
    python.chmod(0o755)
    rollout = {"backend": "vllm", "python": str(python), "sampling": {"max_response_tokens": 3}}
    model = {"build": {**BASE["model"]["build"], "hidden_size": 128}}  # heads of 64, which vLLM's CPU build has
    code, said = hone(
        capfd, recipe(tmp_path, {"rollout": rollout, "model": model}, changes), *([override] if override else [])
    )
    assert code == 2, said
    (line,) = errors(said)
    assert message in line, line
    assert (tmp_path / "called").exists() is (not override and not changes)


def test_a_missing_run_file_is_one_line_and_exit_code_2(tmp_path, capfd):
    recipe(tmp_path)
    code, said = hone(capfd, tmp_path / "recip.yaml")
    assert code == 2
    assert "recip.yaml" in errors(said)[0]


REWARDS = """
import asyncio
def fails(response, ground_truth, row): raise RuntimeError("the judge is out")
def nan(response, ground_truth, row): return float("nan")
async def never(response, ground_truth, row): await asyncio.sleep(3600)
def mostly(response, ground_truth, row):
    if response.startswith("a"): raise RuntimeError("I do not judge a")
    return 1.0 + len(set(response))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "message"), [("fails", "the judge is out"), ("nan", "nan"), ("never", "0.2 s")])
def test_a_reward_that_never_works_ends_the_run_with_its_reason(tmp_path, capfd, name, message):
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    component = {"reward": f"{tmp_path}/rewards.py:{name}", "timeout_s": 0.2}
    path = recipe(tmp_path, {"reward": {"components": {"x": component}, "workers": 2}, "evaluation": {}})
    code, said = hone(capfd, path)
    assert code == 1, said
    assert "no answer of 4 groups can be trained on: 16 reward_failed" in errors(said)[0]
    assert message in errors(said)[0]
    assert str(tmp_path / "run") in said  # where the run is


def test_a_reward_that_fails_at_times_is_counted_and_never_a_zero(tmp_path, capfd):
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    component = {"reward": f"{tmp_path}/rewards.py:mostly"}
    code, said = hone(capfd, recipe(tmp_path, {"reward": {"components": {"x": component}}, "evaluation": {}}))
    assert code == 0, said
    steps = metrics(tmp_path / "run")[1:]
    assert sum(step["rollout/status/reward_failed"] for step in steps) > 0
    assert all(step["reward/min"] >= 1.0 for step in steps)  # what was judged has at least 1


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(tmp_path, capfd, monkeypatch):
    written = []
    real = CheckpointStore.begin

    def begin(self, step, parts, *rest):
        def full(folder):
            raise OSError(errno.ENOSPC, "No space left on device")

        written.append(step)
        return real(self, step, {**parts, "actor": full} if step >= 4 else parts, *rest)

    monkeypatch.setattr(CheckpointStore, "begin", begin)
    monkeypatch.setattr(full_disk, "PATIENCE_S", 0.5)
    path = recipe(tmp_path)
    code, said = hone(capfd, path)
    assert code == 1, said
    assert "No space left on device; earlier ones stand" in errors(said)[0]
    assert sorted(f.name for f in (tmp_path / "run" / "checkpoints").iterdir())[-1] < "step_00000004"
    monkeypatch.setattr(CheckpointStore, "begin", real)
    code, said = hone(capfd, path)
    assert code == 0, said
    assert [m["step"] for m in metrics(tmp_path / "run")] == list(range(7))


@pytest.mark.slow
def test_a_truncated_checkpoint_is_named_with_the_way_out(tmp_path, capfd):
    path = recipe(tmp_path)
    assert hone(capfd, path)[0] == 0
    folder = tmp_path / "run" / "checkpoints" / "step_00000006"
    victim = next((folder / "actor").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-7])
    code, said = hone(capfd, path, "run.steps=8")
    assert code == 1
    assert f"checkpoint {folder} is damaged: actor/{victim.name}" in errors(said)[0]
    assert "remove it to continue from step_00000004" in errors(said)[0]
    import shutil

    shutil.rmtree(folder)
    assert hone(capfd, path, "run.steps=8")[0] == 0
    assert [m["step"] for m in metrics(tmp_path / "run")] == list(range(9))


@pytest.mark.slow
def test_a_broken_plug_in_is_named_and_does_not_stop_the_run(tmp_path):
    import os
    import subprocess
    import sys

    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('half installed')", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HONE_USE_EXTERNAL_MODULES": "broken_plugin"}
    command = [sys.executable, "-m", "hone", "train", str(recipe(tmp_path)), "run.steps=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "warning: plug-in broken_plugin failed to load: RuntimeError: half installed" in done.stderr


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ({"preset": "dapo", "dynamic_sampling": {"metric": "x"}}, {}),
        ({"preset": "dapo", "dynamic_sampling": None}, {}),
        ({"preset": "prime", "dynamic_sampling": {"metric": "x"}}, {"process_reward": {"outcome": "x"}}),
        ({"advantage": {"name": "gdpo", "weights": {"x": 1.0}}}, {}),
        ({"loss": "sft"}, {}),
    ],
)
def test_a_run_that_learns_from_something_else_needs_no_weight(tmp_path, algorithm, more):
    reward = {"components": {"x": {"reward": "exact_match", "weight": 0}}}
    file = recipe(tmp_path, {"reward": reward, "algorithm": algorithm, "evaluation": {}, **more})
    config = load_recipe(file, []).config
    check_settings(config)
    if more:  # rewards that are all 0 teach the process reward model nothing
        config = config.model_copy(
            update={"process_reward": config.process_reward.model_copy(update={"outcome": "reward"})}
        )
        with pytest.raises(ConfigError, match="every reward is 0, and the policy learns nothing"):
            check_settings(config)


def test_the_budget_of_a_reward_model_is_held_against_the_longest_sequence(tmp_path):
    model = {"components": {"x": {"model": {"path": "m", "max_tokens_per_batch": 3}}}}
    config = load_recipe(recipe(tmp_path, {"reward": model})).config
    with pytest.raises(ConfigError, match=r"reward.components.x.model.max_tokens_per_batch = 3 .* of 5 tokens: it \+"):
        TokenBudgets(config).check(2, "it")


def test_a_limit_that_fills_the_context_of_the_model_is_refused(tmp_path, capfd):
    path = recipe(tmp_path, {"rollout": {"sampling": {"max_response_tokens": 32}}})
    code, said = hone(capfd, path)
    assert code == 2, said
    wanted = "rollout.sampling.max_response_tokens=32 leaves no room for a prompt: the model's context is 32 tokens"
    assert wanted in errors(said)[0]


def test_limits_of_prompt_and_answer_are_held_against_every_budget(tmp_path):
    long = {"data": {"train": {"path": "never/read.jsonl", "max_prompt_tokens": 62}}}
    critic = {**PPO, "critic": {"engine": {"max_tokens_per_microbatch": 64}}}
    stages = [Stage("critic", frozenset({"values", "old_logprobs", "ref_logprobs"}), frozenset())]
    said = r"critic.engine.max_tokens_per_microbatch = 64 .* 65 tokens: data.train.max_prompt_tokens \(62\) \+ .* \(3\)"
    config = load_recipe(recipe(tmp_path, long, critic)).config
    algorithm = Algorithm(config.algorithm, 4, 3)
    with pytest.raises(ConfigError, match=said):
        check_policy_run(config, algorithm, stages)
    within = {"rollout": {"sampling": {"max_response_tokens": 3}, "builtin": {"max_sequence_tokens": 64}}}
    config = load_recipe(recipe(tmp_path, long, critic, within)).config
    check_policy_run(config, algorithm, stages)


def test_evaluation_settings_without_a_set_are_refused(tmp_path, capfd):
    path = recipe(tmp_path, {"evaluation": {"score": "eval/held_out/share"}})
    code, said = hone(capfd, path)
    assert code == 2, said
    assert "evaluation.score" in errors(said)[0] or "score: eval/held_out/share" in errors(said)[0]
    path = recipe(tmp_path, {"evaluation": {"samples": 4}})
    code, said = hone(capfd, path)
    assert code == 2, said
    assert "evaluation.samples" in errors(said)[0]
