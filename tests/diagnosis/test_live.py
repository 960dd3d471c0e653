"""Rules during a run: each finding is printed when it begins and kept for the charts, at little cost."""

import json

import pytest

from hone.diagnosis import live
from hone.diagnosis.live import LiveRules
from hone.tracking.findings import read_findings
from hone.tracking.report.build import build_report
from tests.diagnosis.test_rules import HEALTHY, SETTINGS, run_folder

CALM = {name: values[0] for name, values in HEALTHY.items()}


@pytest.fixture
def run(tmp_path):
    """A folder with settings and no metrics yet, rules that look at it, and what they said."""
    (tmp_path / "config.yaml").write_text(json.dumps(SETTINGS))
    said = []
    return tmp_path, LiveRules(tmp_path, said.append), said


def steps(rules, first, last, **changes):
    for step in range(first, last + 1):
        rules.look({"step": step, **CALM, **{name.replace("__", "/"): value for name, value in changes.items()}})


def test_a_finding_is_told_once_when_it_begins_and_again_after_it_has_ended(run):
    folder, rules, said = run
    steps(rules, 1, 12)
    assert said == []
    steps(rules, 13, 24, rollout__zero_variance_fraction=1.0)
    (line,) = said
    assert line.startswith("finding in step 18: groups without variance: 100% of the groups"), line
    assert "try algorithm.dynamic_sampling={}" in line
    assert line.endswith(f"More: hone diagnose {folder}")
    steps(rules, 25, 45)
    assert len(said) == 1
    steps(rules, 46, 58, rollout__zero_variance_fraction=1.0)
    assert [one["step"] for one in read_findings(folder)] == [18, 51]
    assert len(said) == 2


def test_a_finding_near_its_limit_is_not_told_again_and_again(run):
    _, rules, said = run
    for step in range(1, 40):
        steps(rules, step, step, rollout__truncated_fraction=0.31 if step % 2 else 0.29)
    assert [line.split(":")[1] for line in said] == [" answers are cut at the limit"]


def test_a_continued_run_knows_what_was_told_and_forgets_later_steps(run):
    folder, rules, _ = run
    steps(rules, 1, 12, rollout__zero_variance_fraction=1.0)
    steps(rules, 13, 19, rollout__zero_variance_fraction=1.0, rollout__truncated_fraction=1.0)
    assert [one["title"] for one in read_findings(folder)] == [
        "groups without variance",
        "answers are cut at the limit",
    ]
    # back to the checkpoint of step 10, with the metrics of these steps
    rows = [{"step": step, **CALM, "rollout/zero_variance_fraction": 1.0} for step in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    again = []
    steps(LiveRules(folder, again.append), 11, 16, rollout__zero_variance_fraction=1.0)
    assert again == []
    assert [one["title"] for one in read_findings(folder)] == ["groups without variance"]


def test_a_rule_that_fails_is_left_out_and_ends_no_run(run, monkeypatch):
    folder, _, said = run

    def broken(run):
        raise ZeroDivisionError("by zero")
        yield

    monkeypatch.setattr(live, "RULES", (broken, *live.RULES))
    rules = LiveRules(folder, said.append)
    steps(rules, 1, 8, rollout__zero_variance_fraction=1.0)
    assert said[0] == "warning: the rule broken failed, and looks no more: ZeroDivisionError: by zero"
    assert len(said) == 2


def test_the_time_of_all_looks_is_linear_in_the_steps_and_old_steps_are_left_out(run, monkeypatch):
    folder, _, said = run
    monkeypatch.setattr(live, "LONGEST", 300)
    rules, looks = LiveRules(folder, said.append), []
    monkeypatch.setattr(rules, "_rules", [lambda run: looks.append(len(run.curve("reward/mean"))) or ()])
    steps(rules, 1, 2000)
    assert max(looks) <= 600
    assert min(looks[20:]) >= 19
    assert sum(looks) < 25 * 2000, "points that rules have read, of 2,000 steps"


def test_the_report_marks_the_charts_of_a_finding(run):
    folder, rules, _ = run
    steps(rules, 1, 12, rollout__zero_variance_fraction=1.0)
    run_folder(folder, HEALTHY)
    page = build_report(folder).read_text()
    assert "<b>step 3: groups without variance</b> 100% of the groups of the last 3 steps." in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    (mark,) = data["runs"][0]["marks"]
    assert (mark["step"], mark["metrics"]) == (3, ["rollout/zero_variance_fraction"])


def test_settings_that_cannot_be_read_end_no_run(run):
    folder, rules, said = run
    (folder / "config.yaml").write_text("actor: [")
    steps(rules, 1, 8, rollout__zero_variance_fraction=1.0)
    assert said[0].startswith(f"warning: the rules do not see the settings: {folder / 'config.yaml'} is not valid")
    assert [line.split(":")[1] for line in said[1:]] == [" groups without variance"]
