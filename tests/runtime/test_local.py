"""The local runtime over real ranks: one trainer's calls give on every rank what one process gives."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stderr
from io import StringIO

import pytest
import torch
from safetensors.torch import load_file

from hone.cli.main import main
from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.platforms.cpu import CpuPlatform
from hone.platforms.cuda import CudaPlatform
from hone.runtime import ranks
from hone.runtime.base import RankLost
from hone.runtime.local import LocalWorkerGroup
from hone.trainers.exports.checkpoint import export_checkpoint
from hone.trainers.supervised.trainer import SupervisedTrainer
from hone.workers.train import TrainSpec, TrainWorker
from tests.engines.spread import make_batch, policy
from tests.ranks import run_ranks
from tests.runtime.workers import SQUARE, LongRows, Spec

MODEL = ModelConfig(build=BuildConfig(hidden_size=32, layers=1, heads=4, kv_heads=2, mlp_size=48, max_positions=64))
ENGINE = EngineConfig(compute_dtype="float32", max_tokens_per_microbatch=24, optimizer=OptimizerConfig(lr=1e-3))


def phase(name):
    return nullcontext()


def work():
    """Two steps on whole batches, then outputs for batches with many, and with fewer sequences than ranks."""
    group = LocalWorkerGroup("actor", TrainWorker(TrainSpec(MODEL, ENGINE, total_steps=10)), phase)
    group.call("initialize")
    metrics = [group.call("train_batch", make_batch(seed), policy) for seed in range(2)]
    batch = make_batch(5)
    output = group.call("infer_batch", batch, frozenset({"entropy", "sum_pi_squared"}))
    paired = group.call("infer_batch", batch.with_(group_index=torch.zeros_like(batch.group_index)))
    return {
        "metrics": [{name: metric.value for name, metric in one.items()} for one in metrics],
        "logprobs": output.logprobs,
        "entropy": output.entropy,
        "squared": output.extras["sum_pi_squared"],
        "paired": paired.logprobs,
    }


def dealt_out():
    """The rank that each sequence of a batch went to."""
    group = LocalWorkerGroup("actor", LongRows(Spec()), phase)
    batch = pack_samples([Sample(tuple(range(2, 2 + n)), (0,) + (1,) * (n - 1)) for n in SQUARE])
    output = group.call("infer_batch", batch)
    return {"ranks": [int(one[0]) for one in output.extras["rank"].split(SQUARE)]}


@pytest.mark.slow
def test_batches_are_dealt_out_with_attentions_square():
    """By tokens, the sequences of 8 and 11 tokens would go to one rank; see `test_split.py`."""
    assert [rank["ranks"] for rank in run_ranks(2, dealt_out)] == [[0, 0, 0, 1, 1]] * 2


@pytest.mark.slow
def test_every_rank_gets_the_results_of_one_process():
    alone = work()
    for rank in run_ranks(2, work):
        for mine, theirs in zip(rank["metrics"], alone["metrics"], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(mine[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5) for name in theirs)
        for name in ("logprobs", "entropy", "squared", "paired"):
            torch.testing.assert_close(rank[name], alone[name], atol=1e-5, rtol=1e-5)


class Worker:
    """Fails, ends or sleeps on one rank while the other waits for it."""

    is_output_rank = True
    data_parallel_size = 2

    @property
    def data_parallel_rank(self):
        return ranks.rank()

    def meet(self, how):
        if ranks.rank() == 1:
            if how == "sleeps":
                time.sleep(6)
            os._exit(0)
        return {}


def lose_a_rank(how):
    group = LocalWorkerGroup("critic", Worker(), phase)
    began = time.monotonic()
    try:
        group.call("meet", how)
    except RankLost as error:
        return {"alone": True, "error": str(error), "seconds": time.monotonic() - began}
    return {"alone": True}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "sleeps"])
def test_a_lost_rank_ends_the_others_in_bounded_time(how):
    first, _ = run_ranks(2, lose_a_rank, how, timeout_s={"ends": 60, "sleeps": 2}[how])
    assert "rank 0 of 2 gave up in meet of role critic: another rank has ended" in first["error"]
    assert first["seconds"] < 30


@pytest.mark.slow
def test_ranks_agree_and_exchange():
    for found in run_ranks(2, agree):
        assert found == {"agreed": 1, "bytes": ["0", "11"], "first": [True, False]}


def agree():
    first = [bool(one[0]) for one in ranks.exchange(bytes([ranks.is_first()]))]
    payload = ["0", "11"][ranks.rank()].encode()
    told = [one.decode() for one in ranks.exchange(payload)]
    return {"agreed": ranks.agree(ranks.rank()), "bytes": told, "first": first}


# ------------------------------------------------------------------------------------------------------ whole runs

RUN = """
kind: sft
run: {{dir: {dir}, steps: {steps}, seed: 0}}
model:
  build: {{hidden_size: 32, layers: 1, heads: 4, kv_heads: 2, mlp_size: 48, max_positions: 64, characters: {letters}}}
data: {{train: {{source: {{name: python, function: "{task}:rows", size: 64, seed: 1}}}}}}
samples_per_step: 6
actor:
  backend: {{parallel: {parallel}}}
  compute_dtype: float32
  max_tokens_per_microbatch: 64
  optimizer: {{lr: 3.0e-3}}
evaluation: {{sets: {{held_out: {{source: {{name: python, function: "{task}:rows", size: 3, seed: 2}}}}}}}}
checkpoint: {{every_steps: 2, keep: 1}}
tracking: {{trackers: [jsonl]}}
runtime: {{threads: 1, collective_timeout_s: 60}}
"""
TASK = """
import random
def rows(seed, size):
    rng = random.Random(seed)
    for _ in range(size):
        word = "".join(rng.choices("abcdefghij", k=rng.randint(2, 9)))
        yield {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "task.py").write_text(TASK)

    def write(name, steps=3, parallel="{}"):
        path = tmp_path / f"{name}-{steps}.yaml"
        task, letters = tmp_path / "task.py", '" abcdefghij"'
        path.write_text(RUN.format(dir=tmp_path / name, steps=steps, task=task, letters=letters, parallel=parallel))
        return path

    return write


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [{key: value for key, value in row.items() if key.startswith(("train/", "eval/"))} for row in rows(folder)]


def assert_same_record(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5) for name in theirs)


def run_command(*arguments):
    return {"code": main(list(arguments))}


@pytest.mark.slow
def test_a_run_over_two_ranks_is_cut_and_continued_with_other_numbers_of_ranks(recipe, tmp_path):
    """Steps 1 to 2 on two ranks, to 4 on one, to 6 on two with another mesh: the record is that of one process.

    The two ranks trace their second step, which changes nothing.
    """
    assert main(["sft", str(recipe("alone", 6))]) == 0
    traced = run_ranks(2, run_command, "sft", str(recipe("spread", 2)), "profile.steps=2")
    assert [one["code"] for one in traced] == [0, 0]
    traces = sorted((tmp_path / "spread" / "profile").iterdir())
    assert [path.name for path in traces] == ["step-2-rank-0.json", "step-2-rank-1.json"]
    for path in traces:
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert {"train_batch of actor", "aten::mm"} <= names
    assert main(["sft", str(recipe("spread", 4))]) == 0
    last = recipe("spread", 6, "{tensor: 2}")
    assert [one["code"] for one in run_ranks(2, run_command, "sft", str(last))] == [0, 0]
    alone, spread = losses(tmp_path / "alone"), losses(tmp_path / "spread")
    for row in (*alone, *spread):  # the shorter runs measured their own ends
        row.pop("eval/held_out/loss", None)
    assert_same_record(spread, alone)
    assert (tmp_path / "spread" / "report.html").is_file()
    export_checkpoint(tmp_path / "spread", tmp_path / "exported")
    one, other = (
        load_file(path / "model.safetensors") for path in (tmp_path / "exported", tmp_path / "spread" / "export")
    )
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert len(list((tmp_path / "spread" / "checkpoints" / "step_00000006" / "actor").glob("*.safetensors"))) == 4


def interrupt_one(*arguments):
    """A run in which only the last rank gets a signal, in the middle of step 2."""
    whole = SupervisedTrainer.step

    def step(self, number):
        if number == 2 and not ranks.is_first():
            os.kill(os.getpid(), signal.SIGINT)
        whole(self, number)

    SupervisedTrainer.step = step
    return run_command(*arguments)


@pytest.mark.slow
def test_ranks_stop_together(recipe, tmp_path):
    run = recipe("stopped")
    assert [one["code"] for one in run_ranks(2, interrupt_one, "sft", str(run))] == [130, 130]
    assert max(path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step_*")) == "step_00000002"
    assert [row["step"] for row in rows(tmp_path / "stopped")] == [0, 1, 2]


def refused(*arguments):
    with redirect_stderr(StringIO()) as said:
        return run_command(*arguments) | {"said": said.getvalue()}


@pytest.mark.slow
def test_ray_under_torchrun_is_refused(recipe):
    for found in run_ranks(2, refused, "sft", str(recipe("refused")), "runtime.backend=ray"):
        assert found["code"] == 2
        assert "runtime.backend: ray starts its own ranks" in found["said"]


def test_platforms_name_their_collectives():
    assert CpuPlatform().collectives() == "gloo"
    assert CudaPlatform().collectives() == "cpu:gloo,cuda:nccl"


RANK = """
import signal, time
from hone.runtime import ranks
signal.signal(signal.SIGTERM, lambda *_: print("stopped", flush=True))
ranks.join(60)
print("joined", flush=True)
signal.alarm(60)
signal.pause()
time.sleep(1.2)  # a second signal would stop a run at once
"""
LAUNCHER = """
import subprocess, sys, threading, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
for _ in range(8):  # as torchrun has: the kernel gives a child to one after the other
    threading.Thread(target=time.sleep, args=(120,), daemon=True).start()
time.sleep(120)
"""


def test_a_rank_stops_when_torchrun_is_killed():
    under_torchrun = {**os.environ, "TORCHELASTIC_RUN_ID": "a"}
    command = [sys.executable, "-c", LAUNCHER, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=under_torchrun) as launcher:
        try:
            assert launcher.stdout.readline() == "joined\n"
        finally:
            launcher.kill()
        assert launcher.stdout.read() == "stopped\n"


@pytest.mark.slow
def test_torchrun_gives_the_record_of_one_process(recipe, tmp_path):
    assert main(["sft", str(recipe("alone"))]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hone"]
    done = subprocess.run([*command, "sft", str(recipe("spread"))], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report:") == 1  # one rank speaks
    assert_same_record(losses(tmp_path / "spread"), losses(tmp_path / "alone"))
