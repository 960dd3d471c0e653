"""Whatever a person gets wrong: one clear line, the right exit code, and nothing that was trained is lost."""

import errno
import json

import pytest

from hone.cli.main import main
from hone.trainers.checkpoints import CheckpointStore
from tests.trainers.tiny import metrics, recipe


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
        (lambda tmp: {"model": {"path": "no-such/model/here"}}, "no folder no-such/model/here"),
        (lambda tmp: {"model": {"build": {"architecture": "qwen33"}}}, "did you mean 'qwen3'"),
        (lambda tmp: {"reward": {"components": {"x": {"reward": "exact_matsch"}}}}, "did you mean 'exact_match'"),
        (lambda tmp: {"reward": {"components": {"x": {"reward": "json:no_such"}}}}, "no_such"),
        (lambda tmp: {"algorithm": {"advantage": "gae"}}, "needs a critic; add the section"),
        (lambda tmp: {"critic": {"engine": {}}}, "critic: algorithm.advantage grpo has no critic; remove"),
        (lambda tmp: {"algorithm": {"advantage": "grppo"}}, "did you mean 'grpo'"),
        (lambda tmp: {"tracking": {"trackers": ["jsnol"]}}, "did you mean 'jsonl'"),
        (lambda tmp: {"update": {"prompts_per_step": 2, "minibatches": 3}}, "update.minibatches = 3 is more than"),
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
        ("update.epoch=2", "did you mean 'update.epochs'"),
        ("update.epochs=many", "update.epochs"),
        ("run.steps=0", "run.steps"),
        ("reference.path=somewhere", "reference: algorithm.kl.coef is 0"),
    ],
)
def test_a_wrong_override_is_one_line_and_exit_code_2(tmp_path, capfd, override, message):
    code, said = hone(capfd, recipe(tmp_path), override)
    assert code == 2, said
    (line,) = errors(said)
    assert message in line, line


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


@pytest.mark.parametrize(("name", "message"), [("fails", "the judge is out"), ("nan", "nan"), ("never", "0.2 s")])
def test_a_reward_that_never_works_ends_the_run_with_its_reason(tmp_path, capfd, name, message):
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    component = {"reward": f"{tmp_path}/rewards.py:{name}", "timeout_s": 0.2}
    path = recipe(tmp_path, {"reward": {"components": {"x": component}, "workers": 2}, "evaluation": {}})
    code, said = hone(capfd, path)
    assert code == 1, said
    assert "nothing to train on in 4 groups: 16 reward_failed" in errors(said)[0]
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


def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(tmp_path, capfd, monkeypatch):
    written = []
    real = CheckpointStore.begin

    def begin(self, step, parts, *rest):
        def full(folder):
            raise OSError(errno.ENOSPC, "No space left on device")

        written.append(step)
        return real(self, step, {**parts, "actor": full} if step >= 4 else parts, *rest)

    monkeypatch.setattr(CheckpointStore, "begin", begin)
    path = recipe(tmp_path)
    code, said = hone(capfd, path)
    assert code == 1, said
    assert "No space left on device; earlier ones stand" in errors(said)[0]
    assert sorted(f.name for f in (tmp_path / "run" / "checkpoints").iterdir())[-1] == "step_00000002"
    monkeypatch.setattr(CheckpointStore, "begin", real)
    code, said = hone(capfd, path)
    assert code == 0, said
    assert [m["step"] for m in metrics(tmp_path / "run")] == list(range(7))


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
