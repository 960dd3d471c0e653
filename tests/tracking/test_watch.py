"""The input of `hone watch`: run folders that grow, shrink and appear, and every rollout of them."""

import gzip
import json
import math
import shutil

import pytest

from hone.config import ConfigError
from hone.tracking.report.columns import MetricsFile, thinned
from hone.tracking.watch.index import Query, RolloutIndex
from hone.tracking.watch.runs import Told, Watched, names_of


def line(record):
    return json.dumps(record).encode() + b"\n"


def rollout(step, prompt=0, sample=0, **changes):
    return {
        "step": step, "set": None, "prompt_id": f"p/{prompt}", "draw": step, "sample": sample, "role": "",
        "status": "ok", "stop_reason": "stop", "reward": 0.5, "components": {"right": 0.5}, "error": "",
        "printed": {"right": "<i>compared</i>"}, "advantages": -1.0 if sample == 0 else 0.0 if sample == 1 else 1.0,
        "question": f"what is {prompt}?", "prompt": f"<|system|>be kind<|user|>what is {prompt}?",
        "response": f"It is {step}.", "ground_truth": 1, "response_length": 2, "turns": 1, "conversation": [],
        "weight_versions": [[step - 1, 2]], "prompt_token_ids": [1], "token_ids": [1, 2], "tokens": ["It", " is"],
        "rollout_logprobs": [-0.5, None], "logprob_gap": [1e-5, -3e-5], **changes,
    }  # fmt: skip


def member(*records):
    return gzip.compress(b"".join(map(line, records)), mtime=0)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_bytes(b"".join(line({"step": step, "reward/mean": step / 8}) for step in range(4)))
    (path / "config.yaml").write_text("run: {dir: runs/run}\nactor: {optimizer: {lr: 0.001}}\n")
    return path


# ------------------------------------------------------------------------------------------------------- metrics


def test_a_file_of_metrics_is_read_as_it_grows_and_anew_when_it_shrinks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line({"step": 1, "a": 1.5, "b": "NaN"}) + line({"step": 2, "a": 2, "c": 1}) + b'{"step": 3, "a"')
    file = MetricsFile(path)
    assert file.read() is False
    with path.open("ab") as rest:
        rest.write(b': 3.5}\nnot json\n{"step": 4, "a": null, "b": [1]}\n')
    file.read()
    found = {name: (list(column.steps), list(column.values)) for name, column in file.columns.items() if name != "b"}
    assert found == {"a": ([1, 2, 3], [1.5, 2.0, 3.5]), "c": ([2], [1.0])}
    assert math.isnan(file.columns["b"].values[0])
    assert (file.columns.last_step, file.columns.broken, file.columns.not_finite) == (4, 1, 1)
    # back to the checkpoint of step 1, and on to a file that is longer than before
    path.write_bytes(line({"step": 1, "a": 1.5}) + b"".join(line({"step": step, "a": -step}) for step in range(2, 9)))
    while file.read():
        pass
    assert list(file.columns["a"].values) == [1.5, *(-float(step) for step in range(2, 9))]
    assert set(file.columns) == {"a"}


def test_a_file_is_read_in_parts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line({"step": step, "a": step}) for step in range(100)))
    file, parts = MetricsFile(path), 1
    while file.read(most=200):
        parts += 1
    assert parts >= 5
    assert list(file.columns["a"].steps) == list(range(100))


def test_lines_with_different_metrics_keep_the_order_of_their_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b"".join(line({"step": i, "a": i, **({"eval/x/reward": i} if i % 5 == 0 else {})}) for i in range(50))
    )
    file = MetricsFile(path)
    file.read()
    assert list(file.columns["a"].steps) == list(range(50))
    assert list(file.columns["eval/x/reward"].values) == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0]
    assert file.columns.rows()[10] == {"step": 10, "a": 10.0, "eval/x/reward": 10.0}


def test_a_thinned_curve_keeps_its_extremes_and_what_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = [math.sin(i / 40) for i in range(3000)]
    values[777], values[1501], values[2222] = 9.0, -9.0, "Infinity"
    path.write_bytes(b"".join(line({"step": i, "a": value}) for i, value in enumerate(values)))
    file = MetricsFile(path)
    file.read()
    kept = dict(thinned(file.columns["a"], 100))
    assert len(kept) <= 104
    assert (kept[777], kept[1501], kept[2222]) == (9.0, -9.0, math.inf)
    assert {0, 2999} <= set(kept)


# ---------------------------------------------------------------------------------------------------------- runs


def test_a_page_is_sent_what_changed_and_no_more(folder):
    watched, told = Watched([folder]), Told({})
    assert watched.look() is True
    first = watched.news(told)
    (row,) = first["runs"]
    assert (row["name"], row["step"], row["state"]) == ("run", 3, "in progress")
    assert row["figures"][0]["last"] == "0.375"
    assert [chart["title"] for chart in first["charts"]] == ["Reward"]
    assert watched.look() is False
    assert watched.news(told) == {}
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line({"step": 4, "reward/mean": 0.25}))
    assert watched.look() is True
    news = watched.news(told)
    assert set(news) == {"runs"}, "the charts are the same"
    assert news["runs"][0]["figures"][0] == {
        "title": "reward", "about": row["figures"][0]["about"], "last": "0.250", "best": "best: 0.375 at step 3",
    }  # fmt: skip
    curves = watched.runs[0].curves("Headlines", watched.section("Headlines"), 100)
    assert curves["series"]["reward/mean"]["values"] == [0.0, 0.125, 0.25, 0.375, 0.25]


def test_a_folder_of_runs_is_watched_and_new_runs_join(folder):
    second = folder.parent / "second"
    watched, told = Watched([folder.parent]), Told({})
    watched.look()
    assert len(watched.news(told)["runs"]) == 1
    shutil.copytree(folder, second)
    (second / "config.yaml").write_text("run: {dir: runs/second}\nactor: {optimizer: {lr: 0.002}}\nnew: [1, 2]\n")
    watched.look()
    news = watched.news(told)
    assert [row["name"] for row in news["runs"]] == ["second"]
    # the run folder differs in every run, and says nothing
    assert news["differing"] == [("actor.optimizer.lr", ["0.001", "0.002"]), ("new", [None, "[1, 2]"])]
    assert names_of([folder, folder.parent / "b" / "run"]) == [f"{folder.parent.name}/run", "b/run"]


def test_a_run_that_is_removed_or_has_odd_values_hides_no_other(folder):
    """Odd files in one folder hide no other run; a failure is shown without a new metric."""
    odd = folder.parent / "odd"
    shutil.copytree(folder, odd)
    (odd / "config.yaml").write_text("a: 2024-13-45\n")
    huge = {"step": 9, "reward/mean": 10**400, "perf/step_s": 1e300}
    (odd / "metrics.jsonl").write_bytes(line({"step": 10**23, "reward/mean": 1.0}) + line(huge))
    watched, told = Watched([folder, odd]), Told({})
    watched.look()
    assert {row["name"]: row["step"] for row in watched.news(told)["runs"]} == {"run": 3, "odd": 9}
    (folder / "failure.txt").write_text("Traceback\nValueError: bad\n")
    assert watched.look() is True
    shutil.rmtree(odd)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line({"step": 4, "reward/mean": 0.25}))
    watched.look()
    assert {row["name"]: row["step"] for row in watched.news(told)["runs"]}["run"] == 4


def test_a_curve_whose_sum_is_too_large_is_thinned_all_the_same(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line({"step": i, "a": 1e308}) for i in range(3000)))
    file = MetricsFile(path)
    file.read()
    assert {value for _, value in thinned(file.columns["a"], 100)} == {1e308}


def test_a_place_without_runs_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no run folder .*nowhere"):
        Watched([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no metrics\.jsonl, .* and no folder in it has"):
        Watched([tmp_path])


# ------------------------------------------------------------------------------------------------------ rollouts


@pytest.fixture
def index(tmp_path):
    path = tmp_path / "rollouts.jsonl.gz"
    parts = [
        member(*(rollout(step, prompt, sample, reward=sample / 2) for prompt in range(2) for sample in range(3)))
        for step in range(1, 5)
    ]
    parts.insert(0, member(rollout(0, 7, set="test", reward=0.0), rollout(0, 8, set="test", response=" ")))
    parts.append(member(rollout(4, 7, set="test", reward=1.0, response="ÜBER"), rollout(4, 8, set="test")))
    path.write_bytes(b"".join(parts))
    return RolloutIndex(path)


def test_rollouts_are_filtered_sorted_and_paged(index):
    every = index.find(Query())
    assert (every["matched"], every["units"], every["all"], every["indexed"]) == (28, 28, 28, True)
    assert every["facets"] == {"steps": [0, 1, 2, 3, 4], "sets": ["test", "training"], "statuses": ["ok"]}
    assert index.find(Query(step="2"))["matched"] == 6
    assert index.find(Query(place="test"))["matched"] == 4
    assert index.find(Query(step="2", place="test"))["matched"] == 0
    by_reward = index.find(Query(sort="reward", count=3, first=24))
    assert [row["reward"] for row in by_reward["rows"]] == [0.0, 0.0, 0.0]
    assert [row["step"] for row in index.find(Query(count=2))["rows"]] == [4, 4]
    assert [row["step"] for row in index.find(Query(down=False, count=3))["rows"]] == [0, 0, 1]
    relative = index.find(Query(sort="relative", count=1))["rows"][0]
    assert (relative["mean"], relative["relative"], relative["members"]) == (0.5, 0.5, 3)
    assert relative["worst"] == 3e-5
    assert [row["advantage"] for row in index.find(Query(sort="advantage", count=9))["rows"]] == [1.0] * 8 + [0.0]


def test_answers_to_one_prompt_are_together(index):
    found = index.find(Query(grouped=True, place="training", count=2, first=1))
    assert found["units"] == 8
    assert [row["id"] for row in found["rows"]] == [f"p/{prompt} #{i}" for prompt in (1, 0) for i in range(3)]
    assert [row["step"] for row in found["rows"]] == [4] * 3 + [3] * 3
    assert {row["question"] for row in found["rows"]} == {"what is 1?", "what is 0?"}


def test_text_is_found_in_questions_and_answers_of_every_step(index):
    assert [row["response"] for row in index.find(Query(text="über"))["rows"]] == ["ÜBER"]
    assert index.find(Query(text="is 8?"))["matched"] == 2
    assert index.find(Query(text="BE KIND"))["matched"] == 28
    assert index.find(Query(text="%"))["matched"] == 0, "it is text, not a pattern"
    assert index.find(Query(step="1' OR '1'='1"))["matched"] == 0


def test_a_rollout_is_read_with_its_group_and_tokens(index):
    (number,) = [row["number"] for row in index.find(Query(step="3", grouped=True))["rows"]][4:5]
    group = index.group(number)
    assert [row["id"] for row in group] == ["p/1 #0", "p/1 #1", "p/1 #2"]
    assert group[1]["number"] == number
    assert (group[1]["advantage"], group[1]["printed"]) == (0.0, {"right": "<i>compared</i>"})
    assert (group[1]["tokens"], group[1]["gap"]) == (["It", " is"], [1e-5, -3e-5])
    assert index.group(999) == []


def test_new_rollouts_appear_and_a_run_that_went_back_is_read_anew(index):
    path = index._path
    before = path.read_bytes()
    index.find(Query())
    part = member(rollout(5, status="truncated"))
    with path.open("ab") as file:
        file.write(part[:20])  # the rest is being written
    assert index.find(Query())["all"] == 28
    with path.open("ab") as file:
        file.write(part[20:])
    found = index.find(Query(status="truncated"))
    assert (found["all"], found["matched"], found["rows"][0]["step"]) == (29, 1, 5)
    assert found["rows"][0]["number"] == 28
    path.write_bytes(before[: len(before) // 3])
    assert index.find(Query())["all"] < 28


def test_a_damaged_place_and_lines_without_a_step_are_left_out(tmp_path):
    path = tmp_path / "rollouts.jsonl.gz"
    odd = {**rollout(1), "ground_truth": {"a": 1, "weight_versions": 2}, "response": "odd"}  # a mark within a value
    path.write_bytes(member(rollout(1), {"no": "step"}, odd) + b"no gzip at all")
    index = RolloutIndex(path)
    found = index.find(Query(down=False))
    assert [(row["number"], row["response"]) for row in found["rows"]] == [(0, "It is 1."), (2, "odd")]
    assert "is damaged after byte" in index.note


def test_odd_rollouts_are_left_out_and_a_removed_file_has_none(tmp_path):
    path = tmp_path / "rollouts.jsonl.gz"
    strange = [rollout(1, sample=[1]), rollout(1, reward=10**400), rollout(2**70), rollout(1, logprob_gap=[10**400])]
    path.write_bytes(member(rollout(1), *strange, rollout(2)))
    index = RolloutIndex(path)
    assert [row["number"] for row in index.find(Query(down=False))["rows"]] == [0, 5]
    path.unlink()
    assert index.group(0) == []
    assert index.of_evaluations() == []
    assert index.find(Query())["all"] == 0


def test_lines_of_the_first_and_the_last_evaluation(index):
    lines = [json.loads(text) for text in index.of_evaluations()]
    assert [(one["step"], one["prompt_id"]) for one in lines] == [(0, "p/7"), (0, "p/8"), (4, "p/7"), (4, "p/8")]


def test_a_run_without_rollouts_has_an_empty_table(tmp_path):
    found = RolloutIndex(tmp_path / "rollouts.jsonl.gz").find(Query(grouped=True))
    assert (found["rows"], found["all"], found["indexed"]) == ([], 0, True)
