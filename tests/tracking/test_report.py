"""The report as a file: what is in it for any state of a run folder, and that nothing can break out of it."""

import gzip
import json
import math
import os
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from hone.config import ConfigError
from hone.tracking.base import RunInfo
from hone.tracking.facts import RUN_FILE
from hone.tracking.hub import Tracking
from hone.tracking.report import rows as report_rows
from hone.tracking.report import rundata
from hone.tracking.report.answers import read_beside
from hone.tracking.report.build import REPORT_FILE, build_report
from hone.tracking.report.charts import charts, step_phases
from hone.tracking.report.rundata import curves, read_run
from hone.tracking.settings import TrackingConfig

NODE = shutil.which("node")
EVIL = "</script><script>window.evil = 1</script><img src=x onerror=alert(1)> & \u2028"


def embedded(page):
    """The data inside a page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)
    return json.loads(text)


def write_metrics(folder, steps):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def rollout(step, **changes):
    base = {
        "step": step, "set": None, "prompt_id": "sort/1", "sample": 0, "status": "ok", "stop_reason": "stop",
        "reward": 1.0, "components": {"exact_match": 1.0}, "error": "", "prompt": "Sort: 3 1", "response": "1 3",
        "ground_truth": "1 3", "response_length": 2, "weight_versions": [[step - 1, 2]], "tokens": ["1", " 3"],
        "rollout_logprobs": [-0.5, -0.25], "logprob_gap": [1e-5, None],
    }  # fmt: skip
    return {**base, **changes}


def packed(text):
    return gzip.compress(text.encode(), mtime=0)


def write_rollouts(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "rollouts.jsonl.gz").write_bytes(packed("".join(json.dumps(record) + "\n" for record in records)))


def build(folder):
    path = build_report(folder)
    assert path == folder / REPORT_FILE
    page = path.read_text(encoding="utf-8")
    assert "@@" not in page
    return page


def test_a_page_loads_nothing_and_carries_its_data(tmp_path):
    write_metrics(tmp_path, [{"step": 0, "eval/test/exact_match": 0.1}, {"step": 1, "reward/mean": 0.3}])
    page = build(tmp_path)
    assert not re.findall(r"(?:src|href)=\"(?!#)|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
    assert "default-src 'none'" in page
    (run,) = embedded(page)["runs"]
    assert run["series"]["reward/mean"] == {"axis": 1, "values": [0.3]}
    assert run["axes"] == [[0], [1]]


def test_text_from_models_and_data_sets_cannot_leave_its_place(tmp_path):
    write_metrics(tmp_path, [{"step": 1, f"reward/{EVIL}": 0.5}])
    write_rollouts(tmp_path, [rollout(1, prompt=EVIL, response=EVIL, tokens=[EVIL], status=EVIL, error=EVIL)])
    (tmp_path / "config.yaml").write_text(f"model:\n  path: '{EVIL}'\n")
    (tmp_path / "run.json").write_text(json.dumps({"outcome": EVIL, "platform": EVIL}))
    page = build(tmp_path)
    assert page.count("<script>") == 2
    assert page.count("</script>") == 3
    assert "<img" not in page
    assert embedded(page)["rollouts"][0]["response"] == EVIL


@pytest.mark.parametrize("present", ["metrics.jsonl", "config.yaml", "run.json"])
def test_a_folder_with_little_in_it_has_a_page(tmp_path, present):
    content = {"metrics.jsonl": '{"step": 0}\n', "config.yaml": "run:\n  seed: 5\n", "run.json": "{}"}
    (tmp_path / present).write_text(content[present])
    page = build(tmp_path)
    missing = [name for name in (*content, "rollouts.jsonl.gz") if name != present]
    assert all(f"There is no {name}" in page for name in missing)
    assert (">Seed</dt><dd>5</dd>" in page) is (present == "config.yaml")


def evaluated(step, number, response, reward, **changes):
    prompt = {"prompt_id": f"held_out/{number}", "question": f"Sort {number}", "prompt": f"<|im_start|>Sort {number}"}
    return rollout(step, set="held_out", response=response, reward=reward, **{**prompt, **changes})


def test_answers_to_the_same_prompts_are_beside_each_other(tmp_path):
    write_metrics(tmp_path, [{"step": 0}])
    first = [evaluated(0, 1, EVIL, 0.0), evaluated(0, 2, "  ", None), evaluated(0, 3, "3", 0.5)]
    middle = [evaluated(4, 1, "never shown", 0.0), rollout(5, response="of training")]
    last = [evaluated(9, 2, "2 4", 0.25), evaluated(9, 1, "1 3", 1.0), evaluated(9, 1, "second sample", 1.0, sample=1)]
    write_rollouts(tmp_path, first + middle + last)
    (found,) = read_beside(tmp_path, most=5)
    assert (found.set, found.steps, [prompt for prompt, _, _ in found.rows]) == (
        "held_out",
        (0, 9),
        ["Sort 1", "Sort 2"],
    )
    page = build(tmp_path)
    section = page[page.index('id="beside"') : page.index('<section id="rollouts"')]
    text = re.sub(' title=".*?"', "", section)
    assert "<th>before training</th><th>after step 9</th>" in text
    assert '<td class="asked">Sort 2</td><td>(empty) <span class="badge">not scored</span></td><td>2 4 ' in text
    assert "never shown" not in section
    assert "second sample" not in section
    assert "<script>" not in section


def test_a_run_with_one_evaluation_has_nothing_beside_it(tmp_path):
    write_metrics(tmp_path, [{"step": 0}])
    write_rollouts(tmp_path, [evaluated(0, 1, "1", 0.0)])
    assert read_beside(tmp_path, most=5) == []
    assert 'id="beside"' not in build(tmp_path)


def test_a_failed_run_shows_cause_traceback_and_next_command_first(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "reward/mean": 0.5}])
    (tmp_path / "config.yaml").write_text("kind: reward_model\nrun: {dir: runs/a}\n")
    (tmp_path / "run.json").write_text(json.dumps({"outcome": f"failed: OSError: {EVIL}"}))
    (tmp_path / "failure.txt").write_text(f"Traceback (most recent call last):\n  line\nOSError: {EVIL}\n")
    page = build(tmp_path)
    shown = page[page.index('<section class="failure">') : page.index('<section class="tiles"')]
    assert "<p>OSError: &lt;/script&gt;" in shown
    assert "<code>hone reward-model runs/a/config.yaml</code>" in shown
    assert "<pre>Traceback (most recent call last):" in shown
    assert "<img" not in shown
    assert 'class="badge bad">failed: OSError' in page


def test_a_failure_before_the_first_step_has_a_page_and_an_old_one_is_forgotten(tmp_path):
    (tmp_path / "config.yaml").write_text("kind: rl\nrun: {dir: runs/a}\n")
    (tmp_path / "failure.txt").write_text("Traceback (most recent call last):\nModelLost: gone\n")
    page = build(tmp_path)
    assert "<p>ModelLost: gone</p>" in page
    assert 'class="badge bad">failed</span>' in page
    (tmp_path / "run.json").write_text(json.dumps({"outcome": "finished"}))
    at = (tmp_path / "failure.txt").stat().st_mtime + 10
    os.utime(tmp_path / "run.json", (at, at))
    assert '<section class="failure">' not in build(tmp_path)


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no run folder .*nowhere"):
        build_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no metrics\.jsonl, config\.yaml or run\.json"):
        build_report(tmp_path)


def test_a_run_that_is_still_written_and_damaged_lines(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "train/kl": "NaN"}, {"step": 2, "train/kl": "Infinity"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[1]\nnot json\n{"step": 3, "train/kl": 0.5}\n{"step": 4, "tra')
    write_rollouts(tmp_path, [rollout(1, reward="NaN", components={"part": "Infinity"}), {"step": 1}])
    with (tmp_path / "rollouts.jsonl.gz").open("ab") as file:
        file.write(packed('oops\n{"step": 2, "respo'))
    (tmp_path / "config.yaml").write_text("a: [1\n")
    (tmp_path / "run.json").write_text("[]")
    (tmp_path / "findings.jsonl").write_text('[1]\n{"step": 3, "metrics": []}\n{"step": 4, "met')
    page = build(tmp_path)
    assert "in progress" in page
    assert "1 lines of findings.jsonl could not be read and were skipped." in page
    assert "2 lines of metrics.jsonl could not be read and were skipped." in page
    assert "1 lines of rollouts.jsonl.gz could not be read and were skipped." in page
    assert "2 values are not finite (NaN or infinite); the charts mark them" in page
    assert "run.json is not a JSON object" in page
    data = embedded(page)
    assert data["runs"][0]["series"]["train/kl"]["values"] == ["NaN", "Infinity", 0.5]
    assert [row["response"] for row in data["rollouts"]] == ["1 3", ""]
    assert (data["rollouts"][0]["reward"], data["rollouts"][0]["components"]) == ("NaN", {"part": "Infinity"})


def test_a_page_has_the_rollouts_before_a_damaged_place(tmp_path):
    write_metrics(tmp_path, [{"step": 1}])
    write_rollouts(tmp_path, [rollout(1, response="whole")])
    with (tmp_path / "rollouts.jsonl.gz").open("ab") as file:
        end = file.tell()
        file.write(b"no gzip at all")
    page = build(tmp_path)
    assert f"rollouts.jsonl.gz is damaged after byte {end} " in page
    assert "This page has rollouts from before that place." in page
    assert [row["response"] for row in embedded(page)["rollouts"]] == ["whole"]


def test_what_became_of_the_run_is_said(tmp_path):
    write_metrics(tmp_path, [{"step": 5}])
    for facts, said in (
        ({"total_steps": 5}, "finished"),
        ({"total_steps": 9}, "in progress"),
        ({"total_steps": 9, "outcome": "interrupted"}, "interrupted"),
        ({"total_steps": 9, "outcome": "failed: OSError: disk"}, "failed: OSError: disk"),
    ):
        (tmp_path / "run.json").write_text(json.dumps(facts))
        assert re.search(rf'class="badge [a-z]*">{said}<', build(tmp_path))


def test_headlines_say_where_a_run_began_and_where_it_is(tmp_path):
    steps = [{"step": i, "reward/mean": i / 4, "rollout/response_length": 20.0 - i, "perf/step_s": 2.0,
              "perf/driver_s": 0.05, "perf/tokens_per_s": 1000.0 + i} for i in range(1, 4)]  # fmt: skip
    for step, loss in zip(steps, (0.1, 0.0, -0.3), strict=True):
        step |= {"train/loss": loss, "train/policy_loss": loss}
    steps[0] |= {"eval/a/exact_match": 0.5, "eval/b/exact_match": 0.25}
    steps[2] |= {"eval/a/exact_match": 0.25, "eval/b/exact_match": 0.75}
    write_metrics(tmp_path, steps)
    page = build(tmp_path)
    tiles = dict(re.findall(r'<div class="what"[^>]*>([^<]*)</div><div class="value">(.*?)</div></div>', page))
    tiles = {title: re.sub(r"<[^>]*>", " ", text).split() for title, text in tiles.items()}
    assert tiles["Reward"] == ["0.750", "+0.500", "from", "0.250"]
    assert tiles["A exact match"] == ["0.250", "−0.250", "from", "0.500", "at", "step", "3"]
    assert tiles["B exact match"] == ["0.750", "+0.500", "from", "0.250", "at", "step", "3"]
    assert tiles["Response length"] == ["17.0", "−2.0", "from", "19.0"]
    assert not {"Policy loss", "Loss"} & set(tiles)  # neither says whether the policy is better
    assert re.findall(r'<b( class="down")?>([^<]*)</b> from', page) == [
        (' class="down"', "−0.250"), ("", "+0.500"), ("", "+0.500"),
    ]  # a length has no good direction, and no colour  # fmt: skip
    assert tiles["Time"][:2] == ["6", "s"]
    assert tiles["Tokens per second"] == ["1,002", "driver", "overhead", "2.5", "%"]


def test_every_metric_is_in_one_chart():
    names = [
        "reward/mean", "reward/max", "reward/format", "eval/a/exact_match", "eval/b/exact_match", "eval/a/best@4",
        "eval/b/best@4", "rollout/response_length", "rollout/status/ok", "rollout/status/env_failed", "train/kl",
        "train/entropy", "train/grad_norm", "train/lr", "correction/kl", "correction/k3", "critic/value_loss",
        "weights/bytes", "perf/step_s", "perf/generate_s", "perf/reward_s", "perf/pack_s", "perf/driver_s",
        "perf/evaluate_s", "perf/save_checkpoint_s", "perf/driver_fraction", "perf/weight_sync_gb_per_s", "mine", "x/y",
        "schedule/staleness", "schedule/staleness_0", "schedule/staleness_2", "schedule/staleness_max",
        "perf/rollout_utilisation", "perf/trainer_utilisation", "perf/trainer_wait_s", "perf/rollout_idle_s",
    ]  # fmt: skip
    made = charts(names)
    placed = [name for chart in made for name in chart.series]
    assert sorted(placed) == sorted(names)
    by_title = {chart.title: chart for chart in made}
    assert by_title["Exact match, held out"].series == {"eval/a/exact_match": "a", "eval/b/exact_match": "b"}
    assert by_title["best@4"].series == {"eval/a/best@4": "a", "eval/b/best@4": "b"}
    assert by_title["status"].series == {"rollout/status/env_failed": "env_failed", "rollout/status/ok": "ok"}
    assert by_title["Time of a step by phase"].series == {
        "perf/generate_s": "generate", "perf/trainer_wait_s": "trainer wait", "perf/reward_s": "reward",
        "perf/pack_s": "pack",
    }  # fmt: skip
    assert by_title["Trained tokens by age of their weights"].series == {
        "schedule/staleness_0": "0 updates old", "schedule/staleness_2": "2 updates old",
    }  # fmt: skip
    assert by_title["Utilisation"].series == {
        "perf/trainer_utilisation": "trainer", "perf/rollout_utilisation": "rollout",
    }  # fmt: skip
    titles = [chart.title for chart in made]
    assert titles.index("Utilisation") == titles.index("Trained tokens by age of their weights") + 1
    assert {chart.section for chart in made if {"mine", "x/y"} & set(chart.series)} == {"Other"}
    assert step_phases(["perf/generate_s"]) == []


@pytest.mark.skipif(NODE is None, reason="no Node.js is installed, which runs the page's functions without a browser")
def test_the_marks_of_an_axis_have_different_labels():
    """As the page makes them; `1e-6` stood four times where a learning rate changed little."""
    ranges = [[9.6e-7, 1.04e-6], [1e-6, 1.2e-6], [2.3012, 2.3019], [-0.0004, 0.0002], [12_340, 12_390], [3e9, 3.1e9]]
    script = """
      const label = ([low, high]) => {
        const marks = ticks(low, high, 5);
        return marks.map((value) => tickText(value, marks[1] - marks[0]));
      };
      console.log(JSON.stringify(%s.map(label)));
    """
    code = files("hone.tracking.report").joinpath("page", "charts.js").read_text(encoding="utf-8")
    done = subprocess.run(
        [NODE, "-"], input=code + script % json.dumps(ranges), capture_output=True, text=True, check=True, timeout=60
    )
    labels = json.loads(done.stdout)
    assert [found for found in labels if len(found) < 2 or len(set(found)) < len(found)] == []
    for (low, high), found in zip(ranges, labels, strict=True):
        units = {"k": 1e3, "M": 1e6, "G": 1e9, "": 1}
        parts = [re.fullmatch(r"([-\d.]+(?:e[-\d]+)?)([kMG]?)", one.replace("−", "-")).groups() for one in found]
        values = [float(number) * units[unit] for number, unit in parts]
        assert all(low - 1e-9 * abs(low) <= value <= high + 1e-9 * abs(high) for value in values)


def test_started_and_ended_are_the_run_s(tmp_path):
    """They were equal in every run. A continued run began when its first launch did."""
    write_metrics(tmp_path, [{"step": 1}])
    facts = tmp_path / RUN_FILE
    for step, began in ((0, None), (1, "2026-01-02T03:04:05+00:00")):
        hub = Tracking(TrackingConfig(trackers=["jsonl"]), RunInfo(tmp_path, total_steps=9))
        hub.begin(step)
        running = json.loads(facts.read_text())
        assert running["started"] == (began or running["started"])
        assert running["ended"] is None
        hub.close("interrupted")
        assert json.loads(facts.read_text())["started"] == running["started"]
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "started": "2026-01-02T03:04:05+00:00"}))
    shown = dict(re.findall(r">(Started|Ended)</dt><dd>(.*?)</dd>", build(tmp_path)))
    assert shown["Started"] == "2026-01-02T03:04:05+00:00"
    assert shown["Ended"] == json.loads(facts.read_text())["ended"] > shown["Started"]


def test_a_policy_s_loss_is_no_headline():
    """It is near 0 by construction, and no measure of success; a supervised loss is one."""
    names = ["train/loss", "train/policy_loss", "train/kl"]
    sections = {name: chart.section for chart in charts(names) for name in chart.series}
    assert sections == {"train/policy_loss": "Training", "train/kl": "Headlines", "train/loss": "Training"}
    assert {chart.section for chart in charts(["train/loss"])} == {"Headlines"}


def test_a_long_curve_keeps_its_extremes(tmp_path):
    steps = [{"step": i, "train/kl": math.sin(i / 50)} for i in range(6001)]
    steps[1234]["train/kl"] = 77.0
    steps[4321]["train/kl"] = -77.0
    steps[3000]["train/kl"] = "NaN"
    write_metrics(tmp_path, steps)
    axes, series = curves(read_run(tmp_path))
    values = series["train/kl"]["values"]
    assert len(values) <= rundata.MAX_POINTS + 4
    assert series["train/kl"]["of"] == 6001
    kept = dict(zip(axes[series["train/kl"]["axis"]], values, strict=True))
    assert (kept[1234], kept[4321], kept[3000]) == (77.0, -77.0, "NaN")
    assert {0, 6000} <= set(kept)


def test_more_rollouts_than_a_page_holds_are_thinned_to_whole_groups_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(rundata, "MAX_ROWS", 40)
    write_metrics(tmp_path, [{"step": 1}])
    write_rollouts(tmp_path, [
        rollout(step, prompt_id=f"sort/{prompt}", sample=sample)
        for step in range(20) for prompt in range(1 if step < 10 else 30) for sample in range(1 if step < 10 else 2)
    ])  # fmt: skip
    page = build(tmp_path)
    rows = embedded(page)["rollouts"]
    assert "This page has 40 of 610 rollouts: whole groups, spread evenly over the steps" in page
    counts = [sum(row["step"] == step for row in rows) for step in range(20)]
    assert counts == [1] * 10 + [4] * 5 + [2] * 5
    groups = {row["id"].split()[0] for row in rows if row["step"] == 10}
    assert len(groups) == 2
    assert all(row["id"].split()[0] in groups for row in rows if row["step"] == 10)


def test_the_time_of_a_step_is_that_of_all_its_phases_in_a_long_run(tmp_path):
    """Its curves are thinned one by one; the chart of phases is averaged from all steps."""
    phases = {"perf/generate_s": 2.0, "perf/backward_s": 1.0, "perf/step_s": 4.0}
    jitter = [
        {name: value * (1 + 0.1 * math.sin(i * len(name))) for name, value in phases.items()} for i in range(6000)
    ]
    steps = [{"step": i, **one, "perf/step_s": 4.0} for i, one in enumerate(jitter)]
    for step in steps[::2]:
        step["perf/weight_sync_s"] = 1.0  # in every other step
    write_metrics(tmp_path, steps)
    found = embedded(build(tmp_path))["runs"][0]["phases"]
    assert len(found["steps"]) == rundata.MAX_COLUMNS
    assert set(found["bands"]) == {"perf/generate_s", "perf/backward_s", "perf/weight_sync_s"}
    assert {round(value, 2) for value in found["bands"]["perf/weight_sync_s"]} == {0.5}
    assert all(0.4 < rest < 0.6 for rest in found["rest"])


def test_long_rollouts_are_cut_and_big_ones_are_fewer(tmp_path, monkeypatch):
    for module in (rundata, report_rows):
        monkeypatch.setattr(module, "MAX_TOKENS", 100)
    monkeypatch.setattr(rundata, "MAX_BYTES", 100_000)
    big = {"tokens": ["x"] * 5000, "rollout_logprobs": [-1.0] * 5000, "logprob_gap": None, "prompt": "p" * 30_000}
    write_metrics(tmp_path, [{"step": 1}])
    write_rollouts(tmp_path, [rollout(step, **big) for step in range(60)])
    rows = embedded(build(tmp_path))["rollouts"]
    assert 15 <= len(rows) <= 100_000 // (100 * 45)
    assert (len(rows[0]["tokens"]), len(rows[0]["logprobs"]), rows[0]["hidden"]) == (100, 100, 4900)
    assert rows[0]["prompt"].endswith("... (10,000 more characters)")


def test_a_run_inside_the_run_is_pointed_at(tmp_path):
    write_metrics(tmp_path, [{"step": 1}])
    write_metrics(tmp_path / "warm_start", [{"step": 1}])
    assert "warm_start/ is a separate run with its own page" in build(tmp_path)
