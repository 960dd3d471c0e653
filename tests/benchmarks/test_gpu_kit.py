"""The GPU kit's stages end by themselves, and each leaves a line that says what happened."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = ROOT / "benchmarks" / "gpu_kit" / "stages.py"


@pytest.fixture(scope="module")
def kit():
    spec = importlib.util.spec_from_file_location("gpu_kit_stages", STAGES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def python(code):
    return [sys.executable, "-c", code]


def test_a_stage_gives_its_figures_and_the_end_of_its_output(kit, tmp_path):
    stage = kit.Stage("tests", python("print('3 passed, 1 failed in 2 s')"), 60, kit.count_tests)
    line = kit.run_stage("tests", lambda: stage, tmp_path)
    assert line["ok"]
    assert line["figures"] == {"passed": 3, "failed": 1}
    assert line["tail"] == ["3 passed, 1 failed in 2 s"]


def test_a_stage_that_fails_keeps_its_output(kit, tmp_path):
    stage = kit.Stage("x", python("print('so far'); raise SystemExit(3)"), 60)
    line = kit.run_stage("x", lambda: stage, tmp_path)
    assert not line["ok"]
    assert line["tail"] == ["so far"]


def test_a_stage_over_its_limit_ends_with_what_it_started(kit, tmp_path):
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    stage = kit.Stage("x", python(f"{child}; print(p.pid, flush=True); time.sleep(600)"), 3)
    line = kit.run_stage("x", lambda: stage, tmp_path)
    assert line["error"] == "stopped after 3 s"
    grandchild = Path(f"/proc/{line['tail'][0]}/stat")
    deadline = time.monotonic() + 30
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        os.sched_yield()


def test_figures_of_a_run_leave_out_its_first_steps(kit, tmp_path):
    seconds = {1: 9.0, 2: 9.0, 3: 1.0, 4: 3.0}
    rows = [{"step": step, "perf/step_s": s, "perf/tokens_per_s": 100.0} for step, s in seconds.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = kit.step_figures(tmp_path, 10**9, "")
    assert figures["perf/step_s"] == 2.0
    assert figures["mfu"] == pytest.approx(100 * 6e9 / kit.H200_BF16_FLOPS)


def test_an_unknown_stage_is_refused_by_name(tmp_path):
    command = [sys.executable, str(STAGES), "--out", str(tmp_path), "docter"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no stage docter; there are doctor, tests" in done.stderr
