"""Every rule speaks for the figures that it is made for, and is silent about a healthy run."""

import json
import math
import random
import re

import pytest
import yaml

from hone.cli.main import main
from hone.diagnosis.evidence import read_evidence
from hone.diagnosis.rules import RULES, findings
from hone.diagnosis.trends import Curve, Point, correlation
from hone.types import merge_metrics
from hone.workers.pace import shares_of

STEPS = 20


def rising(first, last):
    return [first + (last - first) * step / (STEPS - 1) for step in range(STEPS)]


def flat(value):
    return [value] * STEPS


HEALTHY = {
    "perf/tokens_per_s": flat(1000.0),
    "perf/step_s": flat(10.0),
    "perf/generate_s": flat(6.0),
    "perf/driver_fraction": flat(0.02),
    "perf/driver_s": flat(0.2),
    "perf/rollout_utilisation": flat(0.9),
    "reward/mean": rising(0.1, 0.8),
    "reward/max": flat(1.0),
    "reward/min": flat(0.0),
    "reward/format": rising(0.5, 0.9),
    "reward/scored": flat(64.0),
    "reward/failed": flat(0.0),
    "rollout/truncated_fraction": flat(0.05),
    "rollout/response_length": rising(100.0, 160.0),
    "rollout/zero_variance_fraction": flat(0.3),
    "rollout/epoch": flat(0.0),
    "rollout/replicas_serving": flat(2.0),
    "rollout/trajectories": flat(64.0),
    "train/entropy": rising(1.2, 0.7),
    "train/reference_kl": rising(0.001, 0.1),
    "train/grad_norm": flat(0.5),
    "train/skipped_steps": flat(0.0),
    "correction/mean_abs_difference": flat(0.004),
    "schedule/staleness": flat(0.7),
    "eval/test/reward": rising(0.1, 0.7),
}
SETTINGS = {
    "actor": {"max_tokens_per_microbatch": 16384},
    "rollout": {"backend": "builtin", "sampling": {"max_response_tokens": 512, "top_p": 0.9}},
    "asynchrony": {"staleness": 2},
    "update": {"samples_per_prompt": 8},
}


def run_folder(folder, metrics, failure="", settings=SETTINGS):
    """A run folder as a run leaves it."""
    rows = [{"step": step + 1, **{name: values[step] for name, values in metrics.items()}} for step in range(STEPS)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if failure:
        (folder / "failure.txt").write_text(failure)
    return folder


@pytest.fixture(autouse=True)
def _without_the_disk_of_this_machine(monkeypatch):
    monkeypatch.setattr("hone.diagnosis.machine.FULL_DISK", 0.0)  # test_provoked.py fills one


def titles(folder):
    return {found.title: found for found in findings(read_evidence(folder))}


def test_a_healthy_run_has_no_finding(tmp_path):
    assert titles(run_folder(tmp_path, HEALTHY)) == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x00\xff\n{\n", "2 lines of metrics.jsonl could not be read"),
        (b"\x00\xff\xfe", "metrics.jsonl has 3 bytes, but no whole line"),
    ],
)
def test_metrics_that_cannot_be_read_are_judged_by_no_rule(content, says, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert main(["diagnose", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "nothing was judged" in said
    assert says in said


def test_findings_are_printed_with_the_number_of_lines_that_were_unreadable(tmp_path, capsys):
    folder = run_folder(tmp_path, HEALTHY)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    (folder / "run.json").write_bytes(b"\xff")
    assert main(["diagnose", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "1 lines of metrics.jsonl could not be read" in said.err
    assert "run.json is not a JSON object" in said.err
    (folder / "config.yaml").write_text("[]")
    assert main(["diagnose", str(folder)]) == 2
    assert "config.yaml should hold the settings of a run" in capsys.readouterr().err
    for name in ("metrics.jsonl", "run.json", "config.yaml"):
        (folder / name).write_text("{}" if name == "run.json" else "")
    assert main(["diagnose", str(folder)]) == 0
    assert "0 logged steps; nothing was judged" in capsys.readouterr().out


SLOWER = [1000.0] * 12 + [400.0] * 8
CASES = {
    "throughput fell": (
        {"perf/tokens_per_s": SLOWER, "perf/generate_s": [6.0] * 12 + [20.0] * 8},
        "before step 13, 400 since; perf/generate_s grew from 6 to 20 s",
    ),
    "a rollout server failed": (
        {"rollout/replica_restarts": [0.0] * 5 + [2.0] + [0.0] * 14},
        "2 restarts, the first in step 6",
    ),
    "the trainer waits for answers": ({"perf/trainer_wait_s": flat(7.0)}, "70% of a step"),
    "rollout servers idle": ({"perf/rollout_utilisation": flat(0.2)}, "20% of the time"),
    "the driver takes a large share of a step": (
        {"perf/driver_fraction": flat(0.4), "perf/driver_s": flat(4.0)},
        "40% of",
    ),
    "rewards fail": (
        {"reward/failed": flat(16.0), "reward/timeouts": flat(3.0)},
        "160 of 800 answers of the last 10 steps, 30",
    ),
    "every reward is 0": ({"reward/max": flat(0.0), "reward/mean": flat(0.0)}, "0 in the last 10 steps"),
    "answers grow to the limit": (
        {"rollout/truncated_fraction": rising(0.0, 0.9), "rollout/response_length": rising(190, 500)},
        "reach 512 tokens",
    ),
    "answers are cut at the limit": ({"rollout/truncated_fraction": flat(0.8)}, "80% of the answers reach 512 tokens"),
    "answers grow several times": ({"rollout/response_length": rising(30, 150)}, "39 -> 141 tokens"),
    "a rollout replica is slow": (
        {"perf/slowest_replica_speed": flat(0.3), "perf/slowest_replica": flat(1.0)},
        "replica 1 generates at 30% of the speed",
    ),
    "a rank is slow": (
        {
            "perf/train/rank_speed/0": [0.6, 1.4] * (STEPS // 2),
            "perf/train/rank_speed/1": [0.4] * 10 + [math.nan] * 10,  # of a run that had more ranks when it began
            "perf/train/rank_speed/2": flat(0.6),
            "perf/train/rank_speed/3": [0.9] * 8 + [0.4] * 12,
        },
        "rank 3 of the trained model computes at 40% of the speed of the others since step 9",
    ),
    "one part of the reward dominates": (
        {"rollout/reward_spread/right": flat(0.4), "rollout/reward_spread/format": flat(0.01)},
        "right, of 2 parts, makes 98% of the spread",
    ),
    "answers shrink": ({"rollout/response_length": rising(200.0, 10.0)}, "tokens"),
    "groups without variance": ({"rollout/zero_variance_fraction": flat(0.9)}, "90% of the groups"),
    "the data repeat": ({"rollout/epoch": rising(0.0, 9.0)}, "pass 10"),
    "many prompts are too long": ({"rollout/prompts_too_long": flat(90.0)}, "90 prompts were left out, about 160"),
    "entropy collapse": ({"train/entropy": rising(1.2, 0.01)}, "train/entropy"),
    "entropy explosion": ({"train/entropy": rising(0.5, 6.0)}, "train/entropy"),
    "the KL to the reference blew up": ({"train/reference_kl": rising(0.01, 4.0)}, "train/reference_kl"),
    "gradient spikes": ({"train/grad_norm": [0.5] * 8 + [9.0, 0.5, 0.5] * 4}, "in steps 9, 12, 15, 18"),
    "the gradient is 0": ({"train/grad_norm": [0.5] * 10 + [0.0] * 10}, "0 in the last 10 steps"),
    "the gap between rollout and trainer grows": (
        {"correction/mean_abs_difference": rising(0.004, 0.2)},
        "correction/mean_abs_difference",
    ),
    "rollout and trainer disagree": ({"correction/mean_abs_difference": flat(0.3)}, "0.3 -> 0.3"),
    "a part of the reward falls while the reward rises": ({"reward/format": rising(0.9, 0.2)}, "reward/format 0.8"),
    "held-out scores fall while the reward rises": (
        {"eval/test/reward": [*rising(0.1, 0.7)[:10], *rising(0.7, 0.2)[10:]]},
        "eval/test/reward",
    ),
    "tokens are as old as allowed": ({"schedule/staleness": flat(1.95)}, "1.95 of at most 2"),
}


@pytest.mark.parametrize("title", CASES)
def test_a_sick_run_has_this_finding_alone(title, tmp_path):
    metrics, figure = CASES[title]
    found = titles(run_folder(tmp_path, {**HEALTHY, **metrics}))
    assert set(found) == {title}
    assert figure in found[title].seen
    assert found[title].tries


def test_every_rule_is_tried():
    """Apart from the three that read how a run ended, and the one about the disk: none of them reads metrics."""
    twice = 2  # titles of one rule: answers that grow or are cut, a gap that grows or is there
    assert len(CASES) - twice == len(RULES) - 4


def simulated(folder, true_speeds, seed, minibatches=16):
    """Findings of a run in which each speed that is measured is the true one with a noise of 20 %."""
    drawn, steps = random.Random(seed), []
    for _ in range(STEPS):
        measured = [[(speed * drawn.gauss(1, 0.2), 1.0) for speed in true_speeds] for _ in range(minibatches)]
        steps.append(merge_metrics(*map(shares_of, measured)))
    metrics = {name: [step[name].value for step in steps] for name in steps[0]}
    folder.mkdir()
    return titles(run_folder(folder, HEALTHY | metrics))


def test_sixteen_noisy_mini_batches_in_a_step_name_the_slow_rank_and_no_other(tmp_path):
    for seed in range(5):
        assert simulated(tmp_path / f"healthy{seed}", [1.0] * 8, seed) == {}
        (found,) = simulated(tmp_path / f"slow{seed}", [1.0] * 5 + [0.5] + [1.0] * 2, seed).values()
        assert re.match(r"rank 5 of the trained model computes at (49|5\d)% ", found.seen)


def test_a_slow_group_of_ranks_that_share_their_layers_is_found_by_one_of_them(tmp_path):
    (found,) = simulated(tmp_path / "slow", [1.0] * 6 + [0.5] * 2, seed=1).values()
    assert re.match(r"rank [67] of the trained model", found.seen)


LEARNT = {"reward/mean": [*rising(0.1, 1.9)[:10], *flat(0.99)[:10]], "train/entropy": rising(1.2, 0.01)}


def test_a_task_that_is_learnt_is_no_collapse(tmp_path):
    """Answers as long as the task allows, and a gradient that is 0 in most steps, are no faults there."""
    norms = {"train/grad_norm": [0.5] * 10 + [0.01, 0.01, 0.02, 0.4] * 2 + [0.01, 0.4]}
    (found,) = titles(
        run_folder(tmp_path, HEALTHY | LEARNT | norms | {"rollout/truncated_fraction": flat(1.0)})
    ).values()
    assert (found.title, found.weight, found.tries[1]) == ("entropy collapse", "note", "harder prompts")
    assert found.meaning.startswith("The policy is certain, and nearly all answers are right")


NO_FAULTS = {
    "one reward and a penalty of the algorithm": (
        {"rollout/reward_spread/right": flat(0.4), "rollout/reward_spread/overlong_penalty": flat(0.01)},
        {},
    ),
    "a critic needs no variance within groups": (
        {"rollout/zero_variance_fraction": flat(1.0)},
        {"algorithm": {"advantage": {"name": "gae"}}},
    ),
    "one held-out score below the best": ({"eval/test/reward": [*rising(0.1, 0.7)[:19], 0.3]}, {}),
    "held-out scores that have recovered half of a fall": ({"eval/test/reward": [*[0.9] * 17, 0.3, 0.6, 0.62]}, {}),
    "held-out scores that rise again": ({"eval/test/reward": [0.9, 0.2, *rising(0.2, 0.8)[2:]]}, {}),
    "a machine that was busy for five steps": ({"perf/tokens_per_s": [1000.0] * 15 + [300.0] * 5}, {}),
    "first steps without old weights": ({"correction/mean_abs_difference": [0.0] * 3 + [0.06] * 17}, {}),
}


@pytest.mark.parametrize("what", NO_FAULTS)
def test_no_finding_for(what, tmp_path):
    metrics, settings = NO_FAULTS[what]
    assert titles(run_folder(tmp_path, HEALTHY | metrics, settings=SETTINGS | settings)) == {}


@pytest.mark.parametrize("end", [[0.9, 0.7, 0.5, 0.4, 0.3, 0.31], [0.9, 0.7, 0.5, 0.3, 0.2, 0.21]])
def test_held_out_scores_that_fell_far_and_rise_a_little_have_fallen(end, tmp_path):
    folder = run_folder(tmp_path, HEALTHY | {"eval/test/reward": [*rising(0.1, 0.8)[:14], *end]})
    (found,) = titles(folder).values()
    assert found.seen.startswith(f"eval/test/reward 0.9 at step 15, {end[-1]} at step 20")


def test_a_model_that_was_best_before_training_has_no_checkpoint(tmp_path):
    folder = run_folder(tmp_path, HEALTHY | {"eval/test/reward": rising(0.7, 0.2)})
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/test/reward": 0.9}\n' + lines)
    assert (
        titles(folder)["held-out scores fall while the reward rises"].tries[0].startswith("the model before training")
    )


def test_replicas_that_join_have_not_failed(tmp_path):
    joined = {"rollout/replicas_serving": [1.0] * 5 + [2.0] * (STEPS - 5)}
    assert titles(run_folder(tmp_path, HEALTHY | joined)) == {}
    left = {"rollout/replicas_serving": [1.0] * 5 + [2.0] * 5 + [1.0] * (STEPS - 10)}
    (found,) = titles(run_folder(tmp_path, HEALTHY | left)).values()
    assert found.seen == "1 of 2 replicas served from step 11"


def test_parts_of_a_reward_may_have_dots_and_a_speed_no_number(tmp_path):
    spreads = {"rollout/reward_spread/v1.5": flat(0.5), "rollout/reward_spread/form": flat(0.4)}
    weights = {"v1.5": {"reward": "math", "weight": 0.01}, "form": {"reward": "math"}}
    settings = SETTINGS | {"reward": {"components": weights}}
    folder = run_folder(tmp_path, HEALTHY | spreads | {"perf/slowest_replica_speed": flat(0.1)}, settings=settings)
    (found,) = titles(folder).values()
    assert found.seen.startswith("form, of 2 parts, makes 99%")


def test_throughput_that_fell_names_the_phase_and_the_replica_and_rank_that_are_slow(tmp_path):
    slow = {"perf/slowest_replica_speed": flat(0.3), "perf/slowest_replica": flat(1.0)}
    slow |= {"perf/train/rank_speed/2": flat(0.2)}
    phase = {"perf/tokens_per_s": SLOWER, "perf/generate_s": [6.0] * 12 + [20.0] * 8}
    seen = titles(run_folder(tmp_path, HEALTHY | slow | phase))["throughput fell"].seen
    assert "before step 13" in seen
    assert "perf/generate_s grew from 6 to 20 s; replica 1 generates at 30% of the speed" in seen
    assert seen.endswith("; rank 2 of the trained model computes at 20% of the speed of the others since step 1")


def test_a_trainer_and_servers_that_both_wait_are_one_finding(tmp_path):
    waiting = {"perf/trainer_wait_s": flat(7.0), "perf/rollout_utilisation": flat(0.2)}
    (found,) = titles(run_folder(tmp_path, HEALTHY | waiting)).values()
    assert found.title == "the trainer waits for answers"
    assert found.meaning.startswith("Neither side works")


def test_one_answer_to_a_prompt_has_no_variance_to_miss(tmp_path):
    metrics = {**HEALTHY, "rollout/zero_variance_fraction": flat(1.0)}
    settings = {**SETTINGS, "update": {"samples_per_prompt": 1}}
    assert titles(run_folder(tmp_path, metrics, settings=settings)) == {}


def test_a_run_that_ended_says_why(tmp_path):
    text = "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nin phase backward\n"
    found = titles(run_folder(tmp_path, HEALTHY, failure=text))["out of memory in backward"]
    assert found.seen == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert found.tries[:2] == ("actor.max_tokens_per_microbatch=8192", "actor.activation_checkpointing=true")
    held = "memory of this process: 900 MiB, at most 950 MiB, of 1,000 MiB"
    (tmp_path / "prediction.json").write_text('{"memory": {"backward": 3}}')  # somebody has changed it
    found = titles(run_folder(tmp_path, HEALTHY, failure=f"{text}{held}\n"))["out of memory in backward"]
    assert found.seen == f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; {held}"
    ray = SETTINGS | {"runtime": {"backend": {"name": "ray"}}}  # the ranks are other processes
    found = titles(run_folder(tmp_path, HEALTHY, failure=f"{text}{held}\n", settings=ray))
    assert "of this process" not in found["out of memory in backward"].seen
    found = titles(run_folder(tmp_path, HEALTHY, failure="Traceback ...\nValueError: no such row"))
    assert found["the run ended in an error"].seen == "ValueError: no such row"


GAPS = {
    "the sampling support": ({}, {"rollout": {"sampling": {"top_k": 20}}}),
    "the weights": ({"correction/probe_max_abs_difference": flat(0.4)}, {}),
    "the router": ({"train/routes_replaced": flat(0.1)}, {}),
    "the step's own updates, because each of its 4": (
        {},
        {"update": {"epochs": 2, "minibatches": 2}, "algorithm": {"correction": {"old": "rollout"}}},
    ),
    "old weights": ({}, {"asynchrony": {"staleness": 1}}),
    "tokenisation or the end token": ({"correction/max_abs_difference": flat(17.0)}, {}),
    "precision": ({}, {"actor": {"compute_dtype": "float32"}, "rollout": {"builtin": {"dtype": "bfloat16"}}}),
    "a gap is precision or the kernels": ({}, {}),
}


@pytest.mark.parametrize("cause", GAPS)
def test_the_cause_of_a_gap_is_looked_for(cause, tmp_path):
    metrics, settings = GAPS[cause]
    metrics = {**HEALTHY, "correction/mean_abs_difference": flat(0.3), **metrics}
    assert cause in titles(run_folder(tmp_path, metrics, settings=settings))["rollout and trainer disagree"].meaning


def test_curves():
    curve = Curve(Point(step, float(value)) for step, value in enumerate([5, 1, 2, 3, 4, 9, 9, 9]))
    assert (curve.beginning(), curve.end()) == (2.0, 9.0)
    assert curve.since([value > 3 for _, value in curve]) == 4
    assert correlation(curve, Curve(Point(step, -value) for step, value in curve)) == pytest.approx(-1.0)
    assert correlation(curve, Curve(Point(step, 1.0) for step, _ in curve)) == 0.0


def test_the_command_prints_findings_and_json(tmp_path, capsys):
    run_folder(tmp_path, {**HEALTHY, "train/entropy": rising(1.2, 0.01)})
    assert main(["diagnose", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "20 logged steps; 1 of" in out
    assert "entropy collapse" in out
    assert "clip_high" in out
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == ["train/entropy"]
    assert main(["diagnose", str(tmp_path / "none")]) == 2
