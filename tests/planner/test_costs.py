"""Lengths and costs: as the user writes them, from recorded answers, and fitted to the metrics of a run."""

import gzip
import json
from random import Random

import pytest

from hone.config import ConfigError
from hone.planner.costs import fitted, non_negative
from hone.planner.lengths import parse_lengths, recorded


def drawn(text, count=4000, longest=10_000):
    lengths, random = parse_lengths(text, longest), Random(1)
    return [lengths.draw(random) for _ in range(count)]


def test_lengths_have_the_distribution_that_they_name():
    assert set(drawn("constant:7")) == {7}
    assert set(drawn("uniform:2:5")) == {2, 3, 4, 5}
    assert sum(drawn("lognormal:100:0.5")) / 4000 == pytest.approx(100, rel=0.03)
    assert max(drawn("lognormal:100:2", longest=300)) == 300


def test_recorded_lengths_are_those_of_training_answers(tmp_path):
    lines = [{"step": 0, "set": "held_out", "response_length": 99}]
    lines += [{"step": 1, "set": None, "response_length": length} for length in (3, 4)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rollouts.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert set(drawn(str(tmp_path))) == {3, 4}
    assert set(drawn(str(tmp_path / "rollouts.jsonl.gz"))) == {3, 4}


@pytest.mark.parametrize(
    ("sample", "longest", "mean", "scaled"), [((3, 4), 100, 7.0, {6, 8}), ((2, 10), 10, 8.0, {6, 10})]
)
def test_recorded_lengths_are_a_sample_that_is_scaled_to_the_mean_of_all(tmp_path, sample, longest, mean, scaled):
    """What is cut at the longest does not grow, so 2 grows to 6."""
    text = "".join(json.dumps({"step": 1, "set": None, "response_length": length}) + "\n" for length in sample)
    (tmp_path / "rollouts.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    found, random = recorded(tmp_path, longest, mean), Random(1)
    assert {found.draw(random) for _ in range(50)} == scaled


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("constant", "expected constant:N"),
        ("uniform:5:2", "LOW is above HIGH"),
        ("uniform:5", "expected uniform:LOW:HIGH"),
        ("lognormal:100:-1", "expected lognormal:MEAN:SIGMA"),
        ("normal:1", "no such file"),
    ],
)
def test_other_lengths_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_lengths(text, 10)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\n", "line 1 is not JSON .*name another run, or give --lengths constant:N"),
        (b'{"step": 1}\n', "response_length should be a number of tokens, found None"),
    ],
)
def test_a_file_that_no_run_wrote_is_refused_as_lengths_and_as_costs(content, says, tmp_path):
    file = tmp_path / "rollouts.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        parse_lengths(str(file), 10)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 1 is not JSON .*; name the folder of another run"):
        fitted(tmp_path, 1)


def test_weights_below_0_are_not_found():
    """The free fit would be 4 and -1. A constant c alone minimises the sum of (c / v - 1)^2 for v = 1, 2, 3."""
    best = (1 + 1 / 2 + 1 / 3) / (1 + 1 / 4 + 1 / 9)
    assert non_negative([[1, 1, 1], [3, 2, 1]], [1, 2, 3]) == pytest.approx([best, 0])


def metrics(tmp_path, counts_steps=False, **others):
    """The metrics of 12 steps of which each part of the time is known.

    With `counts_steps`, answers began at different times, so the engines took more decode steps than the longest one.
    """
    lines = []
    for step in range(1, 13):
        longest, tokens, prefilled = 50 + 7 * (step % 4), 800 + 90 * (step % 3), 100 + 11 * (step % 5)
        generate, train = 0.01 * longest + 0.0002 * (tokens + prefilled) / 2, 0.5 + 0.0001 * (tokens + 160)
        if counts_steps:  # tokens / batch size = decode steps of both engines
            others = {**others, "rollout/batch_size": tokens / (2 * longest)}
        whole = generate + train + 0.25 + 0.125
        lines.append(
            {
                "step": step,
                "perf/generate_s": generate,
                "perf/reward_s": 0.25,
                "perf/weight_sync_s": 0.125,
                "perf/step_s": whole,
                "perf/tokens_per_s": (tokens + 160) / whole,
                "rollout/response_length_max": longest - 40 if counts_steps else longest,
                "rollout/tokens": tokens,
                "rollout/prefill_tokens": prefilled,
                "rollout/trajectories": 16,
                **others,
            }
        )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize("counts_steps", [False, True])
def test_the_costs_of_a_run_are_found_again(tmp_path, counts_steps):
    found = fitted(metrics(tmp_path, counts_steps), replicas=2)
    assert found.prompt_tokens == 10
    assert found.response_tokens == pytest.approx((4 * 800 + 3 * 890 + 3 * 980) / 10 / 16)
    assert found.costs.decode_s == pytest.approx(0.01)
    assert found.costs.decode_row_s == pytest.approx(0.0002)
    assert found.costs.prefill_token_s == pytest.approx(0.0002)
    assert found.costs.train_step_s == pytest.approx(0.5)
    assert found.costs.train_token_s == pytest.approx(0.0001)
    assert (found.costs.reward_s, found.costs.send_s, found.costs.copy_s) == (0.25, 0.125, 0)


def test_a_run_that_says_too_little_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no metrics"):
        fitted(tmp_path, 1)
    with pytest.raises(ConfigError, match="asynchronous"):
        fitted(metrics(tmp_path, **{"perf/trainer_wait_s": 1.0}), 1)
    lines = (metrics(tmp_path) / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:5]))
    with pytest.raises(ConfigError, match="found 3 steps"):
        fitted(tmp_path, 1)
