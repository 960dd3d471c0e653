"""A real run with three faults of its settings and its reward: the command finds them in what the run left behind."""

import json

from hone.config import load
from hone.diagnosis.evidence import read_evidence
from hone.diagnosis.rules import findings
from hone.tracking.findings import read_findings
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import recipe

JUDGE = """
def judge(response, ground_truth, row):
    print("read", len(response))
    if len(response) % 2:
        raise RuntimeError("odd")
    return 0.0
"""


def test_faults_of_a_real_run_are_found_told_and_marked(tmp_path, capsys):
    (tmp_path / "judge.py").write_text(JUDGE)
    path = recipe(
        tmp_path,
        {
            "run": {"steps": 11},
            "reward": {"components": {"x": {"reward": f"{tmp_path}/judge.py:judge"}}, "max_failed_fraction": 1.0},
            "rollout": {"sampling": {"max_response_tokens": 3}},
            "evaluation": {},
            "tracking": {"trackers": ["jsonl"]},
        },
    )
    run_policy(load(PolicyRunConfig, path, []))
    found = {one.title: one for one in findings(read_evidence(tmp_path / "run"))}
    assert {"rewards fail", "every reward is 0", "answers are cut at the limit", "the gradient is 0"} <= set(found)
    assert "reach 3 tokens" in found["answers are cut at the limit"].seen
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("finding in step")]
    assert any(line.startswith("finding in step 3: every reward is 0: reward/max is 0 in the last 3") for line in lines)
    marks = [(one["step"], one["title"]) for one in read_findings(tmp_path / "run")]
    assert (3, "every reward is 0") in marks
    assert len(lines) == len(marks) == len(set(marks))
    records = [json.loads(line) for line in rollout_lines(tmp_path / "run" / "rollouts.jsonl.gz")]
    assert all(one["printed"] == {"x": f"read {len(one['response'])}\n"} for one in records)
