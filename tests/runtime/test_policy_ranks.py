"""Runs that generate, over two ranks: the first one plays, all learn, and the record is that of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from io import StringIO

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hone.cli.main import main
from hone.models.settings import BuildConfig, ModelConfig
from hone.runtime import ranks
from hone.runtime.base import RankLost
from hone.runtime.codec import decode, encode
from hone.runtime.lead import Lead
from hone.runtime.local import LocalWorkerGroup
from hone.trainers.own_model import local_model
from hone.trainers.playing import Player
from hone.types import Batch, Completion, Metric, ModelOutput, Status, StopReason, Trajectory, TrajectoryGroup
from tests.ranks import run_ranks
from tests.trainers.tiny import BASE, PPO, metrics, recipe

LIMIT = "runtime.collective_timeout_s=60"


def start(command, path, *overrides):
    """How a command ends, and what it says."""
    with redirect_stderr(StringIO()) as said:
        try:
            code = main([command, str(path), LIMIT, *overrides])
        except SystemExit as error:
            code = error.code
    return {"code": code, "said": said.getvalue()}


def start_all(runs):
    return {str(number): start(*run)["code"] for number, run in enumerate(runs)}


def assert_same_record(one, other):
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        assert mine.keys() == theirs.keys()
        learned = [name for name in theirs if not name.startswith("rollout/")]  # a server's batches depend on the time
        assert {n: mine[n] for n in learned} == pytest.approx({n: theirs[n] for n in learned}, abs=2e-5, rel=1e-4)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "model"
    return str(local_model(ModelConfig(build=BuildConfig(**{**BASE["model"]["build"], "seed": 5})), folder).path)


def runs(folder, teacher):
    """A distillation, its teacher asked through a rollout engine; and PPO with a warm start and a server process."""
    distillation = {"teachers": {"a": {"model": {"path": teacher}, "served_by": "rollout"}}, "task_coef": 0.5}
    rows = {"source": {"name": "python", "function": f"{folder / 'rl' / 'task.py'}:rows", "size": 64, "seed": 1}}
    warm = {"data": {"train": {**rows, "answer_template": "{{ ground_truth }}"}}, "steps": 2, "samples_per_step": 4}
    warm["engine"] = {"compute_dtype": "float32", "max_tokens_per_microbatch": 64}
    rollout = {**BASE["rollout"], "builtin": {"process": "separate", "execution": "generic"}}
    extra = {"warm_start": warm, "rollout": rollout, "run": {"steps": 3}}
    return [
        ("distill", recipe(folder / "distill", {"kind": "distill", "distillation": distillation, "run": {"steps": 3}})),
        ("train", recipe(folder / "rl", PPO, extra)),
    ]


def test_two_ranks_learn_what_one_process_learns(tmp_path, teacher):
    assert set(start_all(runs(tmp_path / "alone", teacher)).values()) == {0}
    for codes in run_ranks(2, start_all, runs(tmp_path / "spread", teacher)):
        assert set(codes.values()) == {0}
    for name in ("distill", "rl"):
        alone, spread = (tmp_path / kind / name / "run" for kind in ("alone", "spread"))
        assert_same_record(spread, alone)
        one, other = (load_file(run / "export" / "model.safetensors") for run in (spread, alone))
        for key, weight in one.items():
            torch.testing.assert_close(other[key], weight, rtol=1e-4, atol=1e-4)
        asked = [json.loads(line)["token_ids"] for line in (spread / "rollouts.jsonl").read_text().splitlines()]
        expected = [json.loads(line)["token_ids"] for line in (alone / "rollouts.jsonl").read_text().splitlines()]
        assert asked == expected


def test_a_spread_run_is_continued_by_one_process_and_back(tmp_path):
    whole = recipe(tmp_path / "whole", {"run": {"steps": 6}})
    assert start("train", whole)["code"] == 0
    cut = recipe(tmp_path / "cut", {"run": {"steps": 6}})
    assert [one["code"] for one in run_ranks(2, start, "train", cut, "run.steps=2")] == [0, 0]
    assert start("train", cut, "run.steps=4")["code"] == 0
    assert [one["code"] for one in run_ranks(2, start, "train", cut)] == [0, 0]
    kept = [row for row in metrics(tmp_path / "cut" / "run") if row["step"] in (1, 2, 3, 4, 5)]
    for mine, theirs in zip(kept, metrics(tmp_path / "whole" / "run")[1:6], strict=True):
        same = [name for name in theirs if not name.startswith("eval/")]  # shorter runs measure their own ends
        assert all(mine[name] == pytest.approx(theirs[name], abs=2e-5, rel=1e-4) for name in same)


# --------------------------------------------------------------------------------------------------- ends of all kinds


def interrupted(path):
    """A signal for the rank that only listens, while the first one generates."""
    whole = Player.play

    def play(self, prompts, asked):
        if self._plays == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        self._plays += 1
        return whole(self, prompts, asked)

    Player._plays = 0
    Player.play = play
    return start("train", path)


def test_ranks_stop_together_after_a_signal_while_generating(tmp_path):
    path = recipe(tmp_path, {"run": {"steps": 6}})
    assert [one["code"] for one in run_ranks(2, interrupted, path)] == [130, 130]
    assert metrics(tmp_path / "run")[-1]["step"] == 2
    assert (tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json").is_file()


def fail_while_generating(path):
    def play(self, prompts, asked):
        raise RuntimeError("no room to play")

    Player.play = play
    began = time.monotonic()
    return {**start("train", path), "seconds": time.monotonic() - began}


def test_an_error_of_the_first_rank_ends_all(tmp_path):
    found = run_ranks(2, fail_while_generating, recipe(tmp_path))
    assert [one["code"] for one in found] == [1, 1]
    assert max(one["seconds"] for one in found) < 30
    assert "no room to play" in found[0]["said"]
    assert "rank 1 of 2 gave up: the first rank failed, and has said why" in found[1]["said"]


def end_while_first_generates(path):
    whole = Player.play

    def play(self, prompts, asked):
        time.sleep(3)
        return whole(self, prompts, asked)

    Player.play = play
    if not ranks.is_first():
        signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
        signal.alarm(8)
    began = time.monotonic()
    return {**start("train", path, "run.steps=1000"), "alone": True, "seconds": time.monotonic() - began}


def test_a_rank_that_ends_while_the_first_generates_ends_it(tmp_path):
    first, other = run_ranks(2, end_while_first_generates, recipe(tmp_path))
    assert other is None
    assert first["code"] == 1
    assert first["seconds"] < 30
    assert "another rank has ended" in first["said"]


def test_torchrun_distills(tmp_path, teacher):
    settings = {
        "kind": "distill",
        "distillation": {"teachers": {"a": {"model": {"path": teacher}}}},
        "run": {"steps": 2},
    }
    assert start("distill", recipe(tmp_path / "alone", settings))["code"] == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hone"]
    spread = recipe(tmp_path / "spread", settings)
    done = subprocess.run([*command, "distill", str(spread)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report:") == 1  # one rank speaks
    assert_same_record(tmp_path / "spread" / "run", tmp_path / "alone" / "run")


def test_ray_under_torchrun_is_refused(tmp_path):
    found = run_ranks(2, start, "train", recipe(tmp_path), "runtime.backend=ray")
    assert [one["code"] for one in found] == [2, 2]
    assert all("runtime.backend: ray starts its own ranks" in one["said"] for one in found)


# ------------------------------------------------------------------------------------------------------ the two parts


class Worker:
    """Answers with what it was asked, and streams numbers that all ranks agree on."""

    is_output_rank = True
    data_parallel_size = 2

    @property
    def data_parallel_rank(self):
        return ranks.rank()

    def infer_batch(self, batch, needs):
        return ModelOutput(logprobs=batch.token_ids.float() * 2)

    def weights(self, dtype):
        for number in range(4):
            yield f"w{number}", torch.tensor(ranks.agree(number + ranks.rank()), dtype=dtype)


def led():
    """The first rank works: long enough for signs of life, with a call, a stream cut short and a whole one."""
    group = LocalWorkerGroup.place("actor", lambda spec: Worker(), None, None, lambda name: _nothing())
    lead = Lead()

    def work():
        time.sleep(2.5)
        batch = Batch(
            token_ids=torch.arange(6),
            position_ids=torch.tensor([0, 1, 2, 0, 1, 2]),
            loss_mask=torch.ones(6, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 3, 6]),
            group_index=torch.tensor([0, 1]),
            episode_index=torch.tensor([0, 1]),
        )
        doubled = group.call("infer_batch", batch, frozenset({"entropy"})).logprobs
        cut = group.call("weights", torch.float32)
        first = next(cut)[1]
        group.call("weights", torch.float32)  # nothing of it is taken
        dropped = group.call("weights", torch.float32)
        next(dropped)
        del dropped
        whole = [float(one) for _, one in group.call("weights", torch.bfloat16)]
        return {"doubled": doubled, "first": float(first), "whole": whole}

    found = lead.run(work)
    return {"doubled": found["doubled"], "first": found["first"], "whole": found["whole"], "after": ranks.agree(7)}


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


def test_the_first_rank_leads():
    for found in run_ranks(2, led, timeout_s=2):
        assert found["doubled"].tolist() == [0, 2, 4, 6, 8, 10]
        assert found["first"] == 1.0
        assert found["whole"] == [1.0, 2.0, 3.0, 4.0]
        assert found["after"] == 7


def led_into_an_error():
    def work():
        raise ValueError("a stone in the way")

    try:
        Lead().run(work)
    except (ValueError, RankLost) as error:
        return {"error": str(error), "after": ranks.agree(3)}
    return {}


def test_who_follows_hears_of_an_error_at_once():
    first, second = run_ranks(2, led_into_an_error)
    assert first["error"] == "a stone in the way"
    assert "rank 1 of 2 gave up: the first rank failed" in second["error"]
    assert first["after"] == second["after"] == 3


def test_what_ranks_tell_each_other_comes_back_as_it_was():
    trajectory = Trajectory(
        prompt_id="a/1",
        sample=0,
        token_ids=tuple(range(40)),
        prompt_length=2,
        loss_mask=(0, 1) * 20,
        rollout_logprobs=tuple(-0.1 * one for one in range(40)),
        weight_versions=(-1,) * 40,
        response="å\n",
        stop_reason=StopReason.STOP,
        status=Status.TRUNCATED,
        reward=float("inf"),
        components={"a": 1.0},
    )
    values = {
        "group": [TrajectoryGroup(None, (trajectory,), greedy=trajectory)],
        "completion": Completion("r", (1,), (0.1 + 0.2,), (3,), StopReason.LENGTH),
        "metrics": {"x": Metric.mean(0.1, 3)},
        "plain": [None, True, 2**70, "text", ("a", ()), frozenset({"b", "a"}), b"\0\1", b"", torch.bfloat16],
        3: {"nested": [[1], ["list", 2], ["noun", "Trajectory", {}]]},
    }
    assert decode(encode(values)) == values
    tensors = decode(encode([torch.arange(3), np.ones((2, 2), np.int16), torch.zeros(0)]))
    assert torch.equal(tensors[0], torch.arange(3))
    assert tensors[1].dtype == np.int16
    assert tensors[1].tolist() == [[1, 1], [1, 1]]
    assert tensors[2].shape == (0,)


def test_only_known_kinds_are_told():
    with pytest.raises(TypeError, match="a value of type object cannot be told to other ranks"):
        encode([object()])
    harmful = encode(["enum", "x"]).replace(b'["list", ["enum", "x"]]', b'["noun", "TYPE_CHECKING", {}]')
    size = (len(harmful) - 8).to_bytes(8, "big")
    with pytest.raises(ValueError, match=r"is not a noun of hone\.types"):
        decode(size + harmful[8:])
