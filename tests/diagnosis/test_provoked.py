"""Rules that are provoked for real: a few tiny runs, each with several faults, and what they said on their way."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

import hone
from hone.cli.main import main
from hone.diagnosis.evidence import read_evidence
from hone.diagnosis.rules import findings
from hone.rollout.builtin.engine import BuiltinEngine
from hone.tracking.findings import read_findings
from hone.tracking.trackers.jsonl import rollout_lines
from hone.weights import in_process
from hone.weights.digests.row_digest import RowDigest
from tests.faults.test_full_disk import fill
from tests.forks import CONTEXT
from tests.trainers.tiny import recipe

TASK = """
import random, re, time

calls = []

def rows(seed, size):
    rng = random.Random(seed)
    for _ in range(size):
        yield {"prompt": "".join(rng.choices("abcd", k=3)), "ground_truth": "a" if seed == 1 else "bcd"}

def plain(response):
    return re.sub("<[^>]*>", "", response)

def wanted(response, ground_truth, row):
    return sum(one in ground_truth for one in plain(response)) / 3

def variety(response, ground_truth, row):
    return len(set(plain(response)) - {"a"}) / 3

def longer(response, ground_truth, row):
    return len(plain(response)) / 10

def shorter(response, ground_truth, row):
    calls.append(1)
    if len(calls) > 16 * 18:
        raise RuntimeError("the judge is away")
    return -len(plain(response)) / 10

def mixed(seed, size):
    rng = random.Random(seed)
    for number in range(size):
        yield {"prompt": "".join(rng.choices("abcd", k=3 if number % 3 else 20)), "ground_truth": "a"}

def spiky(response, ground_truth, row):
    calls.append(1)
    step = (len(calls) - 1) // 16 + 1
    if step > 12:
        time.sleep(0.05)
    return plain(response).count(ground_truth) / 3 * (1000 if step in (8, 10, 12) else 1)
"""


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def built(**changes):
    """The tiny model, changed."""
    model = {"hidden_size": 32, "layers": 1, "heads": 2, "mlp_size": 64, "max_positions": 32, "characters": "abcd"}
    return {"build": {**model, **changes}}


def train(folder, steps, *changes, rewards=("wanted",), rows=64, on_step=None):
    """Train the tiny model; returns what its rules told, by title, and what they find at the end."""
    (folder / "faults.py").write_text(TASK)
    source = {"source": {"name": "python", "function": f"{folder}/faults.py:rows", "size": rows, "seed": 1}}
    parts = {name: {"reward": f"{folder}/faults.py:{name}"} for name in rewards}
    own = {
        "run": {"steps": steps},
        "data": {"train": source},
        "evaluation": {"sets": {}},
        "checkpoint": {"every_steps": 1000},
        "reward": {"components": parts, "workers": 1},
        "tracking": {"trackers": ["jsonl"], "rollouts_per_step": 0},
    }
    path = recipe(folder, own, *changes)
    hone.train(path, on_step=on_step)
    told = {one["title"]: one for one in read_findings(folder / "run")}
    return told, {one.title: one for one in findings(read_evidence(folder / "run"))}


def test_a_policy_that_collapses_on_too_little_data(tmp_path):
    """Steps that are far too large, of four prompts: entropy falls, the KL grows, all answers become the same."""
    far = {
        "algorithm": {"preset": "grpo", "kl": {"kind": "k3", "where": "in_loss", "coef": 1e-6}},
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 0.02}},
    }
    told, found = train(tmp_path, 24, far, rows=4)
    for title in ("entropy collapse", "the KL to the reference blew up", "groups without variance", "the data repeat"):
        assert title in told
    assert told["the data repeat"]["step"] == 5
    assert told["the data repeat"]["seen"] == "pass 6 over the training data at step 5"
    assert "groups without variance" in found


def test_a_reward_that_is_hacked(tmp_path):
    """Its heavy part grows; the other part falls, as do scores on held-out prompts, which want other letters."""
    (tmp_path / "faults.py").write_text(TASK)
    held_out = {"source": {"name": "python", "function": f"{tmp_path}/faults.py:rows", "size": 8, "seed": 2}}
    parts = {"wanted": 10.0, "variety": 0.1}
    greedy = {
        "reward": {
            "components": {
                name: {"reward": f"{tmp_path}/faults.py:{name}", "weight": weight} for name, weight in parts.items()
            },
            "workers": 1,
        },
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 0.01}},
        "evaluation": {"every_steps": 4, "sets": {"other": held_out}, "sampling": {"temperature": 1.0}},
        "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
    }
    told, _ = train(tmp_path, 20, greedy)
    assert told["one part of the reward dominates"]["seen"].startswith("wanted, of 2 parts, makes 9")
    odds = told["a part of the reward falls while the reward rises"]
    assert odds["metrics"] == ["reward/mean", "reward/variety"]
    assert told["held-out scores fall while the reward rises"]["metrics"] == ["eval/other/reward", "reward/mean"]
    # the records have the advantages that were trained on: GRPO's, a reward's distance from its group's mean, scaled
    records = [json.loads(line) for line in rollout_lines(tmp_path / "run" / "rollouts.jsonl.gz")]
    assert all(one["advantages"] is None for one in records if one["set"])
    group = [one for one in records if one["step"] == 1 and not one["set"]][:4]
    rewards, advantages = [one["reward"] for one in group], [one["advantages"] for one in group]
    assert len({one["draw"] for one in group}) == 1
    assert len(set(rewards)) > 1
    scale = (max(advantages) - min(advantages)) / (max(rewards) - min(rewards))
    assert advantages == pytest.approx([scale * (one - sum(rewards) / 4) for one in rewards], abs=1e-5)
    assert scale > 0


def test_answers_that_explode(tmp_path):
    long = {
        "model": built(max_positions=112),
        "rollout": {"sampling": {"max_response_tokens": 96}},
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 0.01}},
    }
    told, _ = train(tmp_path, 20, long, rewards=("longer",))
    assert "answers grow several times" in told
    assert "of the answers reach 96 tokens; length" in told["answers grow to the limit"]["seen"]


def test_answers_that_shrink_long_prompts_and_rewards_that_end_the_run(tmp_path):
    (tmp_path / "faults.py").write_text(TASK)
    mixed = {"source": {"name": "python", "function": f"{tmp_path}/faults.py:mixed", "size": 64, "seed": 1}}
    short = {
        "model": built(max_positions=112, characters=LETTERS),
        "data": {"train": {**mixed, "max_prompt_tokens": 12}},
        "rollout": {"sampling": {"max_response_tokens": 96}},
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 0.01}},
    }
    with pytest.raises(RuntimeError, match="the judge is away"):
        train(tmp_path, 30, short, rewards=("shorter",))
    found = {one.title: one for one in findings(read_evidence(tmp_path / "run"))}
    assert re.fullmatch(r"rollout/response_length (2|3)\d -> \d tokens", found["answers shrink"].seen)
    assert re.fullmatch(r"\d\d prompts were left out, about \d\d were used", found["many prompts are too long"].seen)
    failed = found["the run ended in an error"]  # a program that trains has the traceback itself, and leaves no file
    assert failed.seen.startswith("RewardsFailed: no answer of 4 groups can be trained on")
    assert failed.tries[0] == "read the traceback where the program that trained has printed it"


def test_a_policy_that_turns_to_noise(tmp_path):
    """It begins with sharp choices, and its bonus for entropy is ten times its reward."""
    signs = "".join(chr(code) for code in range(33, 127) if chr(code) not in "<>")
    noisy = {
        "model": built(characters=signs, options={"initializer_range": 1.5}),
        "algorithm": {"preset": "grpo", "entropy_coef": 10.0},
        "actor": {
            "compute_dtype": "float32",
            "optimizer": {"lr": 0.04},
            "schedule": {"name": "constant", "warmup_steps": 12},
        },
    }
    told, _ = train(tmp_path, 90, noisy)
    assert told["entropy explosion"]["metrics"] == ["train/entropy"]


def test_answers_that_are_encoded_anew(tmp_path, monkeypatch):
    """The last token of one answer in sixteen comes back as another one, as from a tokenizer of another version."""
    whole = BuiltinEngine.generate
    answers = []

    async def encoded_anew(self, request):
        answer = await whole(self, request)
        answers.append(answer)
        *kept, last = answer.token_ids
        return replace(answer, token_ids=(*kept, 3 + (last + 1) % 26)) if len(answers) % 16 == 0 else answer

    monkeypatch.setattr(BuiltinEngine, "generate", encoded_anew)
    sharp = {"model": built(characters=LETTERS, options={"initializer_range": 1.5})}
    _, found = train(tmp_path, 7, sharp)
    gap = found["rollout and trainer disagree"]
    assert "Likely, from the metrics and settings: tokenisation or the end token, because single tokens" in gap.meaning


def test_spikes_a_slow_reward_and_another_support(tmp_path):
    """Rewards are a thousand times as large in three steps, and slow from step 13 on; sampling sees three tokens."""
    spiky = {
        "algorithm": {"preset": "dr_grpo"},
        "rollout": {"sampling": {"max_response_tokens": 3, "top_k": 3}},
    }
    told, found = train(tmp_path, 20, spiky, rewards=("spiky",))
    assert told["gradient spikes"]["seen"] == "train/grad_norm above 10 times its usual value in steps 8, 10, 12"
    slow = found["throughput fell"]
    assert re.search(r"before step 1[123]", slow.seen)  # a busy machine makes a step before it slow, too
    assert "perf/reward_s grew" in slow.seen
    gap = found["rollout and trainer disagree"]
    assert "the sampling support, because sampling cuts the vocabulary" in gap.meaning


class Rotten(RowDigest):
    """The digest of received weights; it is right, and then memory of the rollout engine changes."""

    def add_many(self, tensors):
        self.received = list(tensors)
        super().add_many(self.received)

    def hexdigest(self):
        found = super().hexdigest()
        for name, tensor in getattr(self, "received", []):
            if "embed" in name:
                tensor.mul_(1.5)
        return found


def test_weights_that_change_after_a_sync_of_a_model_with_a_router_and_another_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(in_process, "RowDigest", Rotten)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    apart = {
        "model": built(architecture="qwen3_moe", options=experts),
        "rollout": {"builtin": {"dtype": "bfloat16"}, "sampling": {"max_response_tokens": 3}},
        "weights": {"verify": "probe"},
    }
    _, found = train(tmp_path, 7, apart)
    gap = found["rollout and trainer disagree"]
    assert "Likely, from the metrics and settings: the weights, because the probe differs after a sync" in gap.meaning
    assert gap.tries[1:3] == ("actor.moe.routing_replay=rollout", "one dtype on both sides")


def killed_in_step_2(folder):
    def look_and_die(step, metrics):
        if step == 2:
            with (folder / "alive.txt").open("w") as alive, redirect_stdout(alive):
                main(["diagnose", str(folder / "run"), "--json"])
            os.kill(os.getpid(), signal.SIGKILL)

    train(folder, 5, on_step=look_and_die)


def test_a_run_that_is_killed(tmp_path, capsys):
    process = CONTEXT.Process(target=killed_in_step_2, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert "killed" not in (tmp_path / "alive.txt").read_text()
    assert main(["diagnose", str(tmp_path / "run"), "--json"]) == 0
    heaviest = json.loads(capsys.readouterr().out.splitlines()[0])
    assert heaviest["title"] == "the run was killed"
    assert heaviest["seen"].startswith("run.json has no end, the last step is 2, and no process here")


def test_a_disk_that_is_nearly_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=60)
    if mounted.returncode:
        pytest.skip(f"no file system of 64 MiB can be mounted here: {mounted.stderr.strip()}")
    try:
        fill(disk / "zeros", 1_500_000)
        told, _ = train(disk, 1)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=60)
    assert told["the disk is nearly full"]["step"] == 0


LIMITED = """
import resource, sys
from hone.cli.main import main
from hone.trainers.policy.trainer import PolicyTrainer
from hone.trainers.run import roles

roles.keep_freed = lambda: None  # what was freed goes back at once: gradients find no room in it
learn = PolicyTrainer.learn

def limited(self, *arguments):
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + 48 * 2**20, resource.RLIM_INFINITY))
    try:
        learn(self, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

PolicyTrainer.learn = limited
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_run_that_runs_out_of_memory(tmp_path):
    """Gradients and Adam's moments, 180 MB, do not fit: it may have 48 MiB more than before its first update."""
    model = built(hidden_size=640, layers=3, heads=8, mlp_size=1760)
    path = recipe(tmp_path, {"model": model, "evaluation": {"sets": {}}, "run": {"steps": 2}})
    command = [sys.executable, "-c", LIMITED, str(path)]
    freed_at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    done = subprocess.run(command, env=freed_at_once, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    (one,) = [one for one in read_findings(tmp_path / "run") if one["weight"] == "stops"]
    assert one["title"] == "out of memory in backward"
    assert any(words in one["seen"] for words in ("allocate memory", "MemoryError"))
    held, predicted = one["seen"].split("; ")[1:]
    assert re.fullmatch(r"memory of this process: \d+ MiB, at most \d+ MiB, of [\d,]+ MiB", held)
    assert predicted.startswith("resident then, as predicted at launch: process before loading ")
    for part in ("actor optimizer state", "actor weights", "actor gradients"):
        assert f"{part} " in predicted
    assert "out of memory in backward: try actor.max_tokens_per_microbatch=" in done.stderr
