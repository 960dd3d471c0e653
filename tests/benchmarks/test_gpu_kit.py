"""The GPU kit's stages end by themselves, and each leaves a line that says what happened."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainers.tiny import recipe

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
    stage = kit.Stage("tests", python("print('a.py::x[cpu-a b] PASSED [ 50%]'); print('a.py::y FAILED')"), 60)
    line = kit.run_stage("tests", lambda: replace(stage, figures=kit.count_tests), tmp_path)
    assert line["ok"]
    assert line["figures"] == {"passed": 1, "failed": 1, "failures": ["a.py::y"]}
    assert line["tail"] == ["a.py::x[cpu-a b] PASSED [ 50%]", "a.py::y FAILED"]
    assert (tmp_path / "output.log").read_text().endswith("\na.py::x[cpu-a b] PASSED [ 50%]\na.py::y FAILED\n")


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


def test_checks_of_the_conformance_report_are_counted(kit):
    results = [
        {"section": "device", "name": "streams", "status": "absent", "reason": "one queue"},
        {"section": "device", "name": "memory facts", "status": "works", "reason": ""},
        {"section": "engines", "name": "fsdp2: log-probs", "status": "fails", "reason": "the difference is 2"},
    ]
    found = kit.count_checks("a warning\n" + json.dumps({"format": 1, "results": results}, indent=1) + "\nmore")
    counts = {"absent": 1, "works": 1, "fails": 1}
    assert found == {**counts, "failures": {"engines: fsdp2: log-probs": "the difference is 2"}}
    assert kit.count_checks("Killed") == {}


def test_figures_of_a_run_leave_out_its_first_steps(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "card", lambda: "NVIDIA H100 80GB HBM3")
    seconds = {1: 9.0, 2: 9.0, 3: 1.0, 4: 3.0}
    rows = [
        {"step": step, "perf/step_s": s, "perf/tokens_per_s": 100.0, "perf/backward_s": 0.5}
        for step, s in seconds.items()
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = kit.step_figures(tmp_path, 10**9, "")
    assert figures["perf/step_s"] == 2.0
    assert figures["mfu"] == pytest.approx(100 * 2.0 / 0.5 * 6e9 / 989e12), "of the update alone"


def test_a_peak_is_that_of_the_card(kit):
    assert kit.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert kit.peak_flops("NVIDIA H200") == kit.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert kit.peak_flops("") is None
    assert kit.peak_flops("NVIDIA A100-SXM4-80GB") is None


def test_plans_hold_stages_that_exist(kit, tmp_path):
    names = list(kit.Kit(tmp_path, ["0.6b", "1.7b", "4b"]).stages())
    for plan in kit.PLANS.values():
        assert [given for given in plan if not any(n == given or n.startswith(f"{given}-") for n in names)] == []


def test_tests_run_together_and_what_is_measured_alone(kit, tmp_path):
    """The two stages of tests wait for each other; the stage before them has ended when they begin."""
    meet = "import pathlib, sys, time; here, there, before = map(pathlib.Path, sys.argv[1:]); assert before.exists()"
    meet += "; here.touch()\nend = time.monotonic() + 30\nwhile not there.exists(): assert time.monotonic() < end"
    a, b, before = (str(tmp_path / name) for name in ("a", "b", "before"))
    commands = {
        "alone": python(f"import pathlib, time; time.sleep(0.2); pathlib.Path({before!r}).touch()"),
        "tests-a": [*python(meet), a, b, before],
        "tests-b": [*python(meet), b, a, before],
    }
    makers = {name: (lambda name=name: kit.Stage(name, commands[name], 60)) for name in commands}
    if len(os.sched_getaffinity(0)) < 2 * kit.TEST_CORES:
        kit.TEST_CORES = 1
    lines = list(kit.run_in_turn(list(commands), makers, tmp_path))
    assert [(line["stage"], line["ok"]) for line in lines] == [("alone", True), ("tests-a", True), ("tests-b", True)]


def test_an_unknown_stage_is_refused_by_name(tmp_path):
    command = [sys.executable, str(STAGES), "--out", str(tmp_path), "docter"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no stage docter; there are doctor, conformance, tests-models-attention" in done.stderr


def test_every_file_with_tests_for_a_device_has_a_stage(kit):
    needs_more = {"tests/rollout/servers/test_expert_routes.py"}  # vLLM on a GPU
    wanted = re.compile(r"mark\.gpu\b|\beach_device\b")
    found = {str(p.relative_to(ROOT)) for p in ROOT.glob("tests/**/test_*.py") if wanted.search(p.read_text("utf-8"))}
    assert found - {"tests/benchmarks/test_gpu_kit.py"} - needs_more == set(kit.TESTS)


def test_a_rehearsal_has_every_stage_but_those_of_triton_and_graphs(kit, tmp_path):
    real, small = kit.Kit(tmp_path, ["tiny"]).stages(), kit.Kit(tmp_path, ["tiny"], rehearse=True).stages()
    assert [name for name in real if name not in small] == ["tests-engines-triton_scores", "ungraphed-tiny"]
    assert [name for name in real if not name.startswith("tests-")] == [
        *(
            "doctor",
            "conformance",
            "weight-sync",
            "head",
            "sft-tiny",
            "grpo-tiny",
            "decode-tiny",
            "profile-tiny",
            "trl-tiny",
        ),
        *("sleep-tiny", "offload-tiny", "qlora-tiny", "long-tiny", "ungraphed-tiny", "hybrid", "quickstart", "reverse"),
    ]
    assert {"--device", "cpu"} <= set(small["weight-sync"]().command)
    large = kit.Kit(tmp_path, ["0.6b", "4b"]).stages()
    assert [name for name in large if name.endswith("b")] == [
        *("sft-0.6b", "sft-4b", "grpo-0.6b", "decode-0.6b", "profile-0.6b", "trl-0.6b"),
        *("sleep-0.6b", "offload-4b", "qlora-4b", "long-0.6b", "ungraphed-0.6b"),
    ]


@pytest.mark.parametrize(("file", "first"), [("gpu_kit/beside_trl.py", []), ("side_hone.py", ["grpo_step", "bf16"])])
def test_keys_may_follow_options(file, first, monkeypatch):
    """As stages.py and beside_trl.py pass them; Python before 3.12.7 refuses that with `parse_args`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("parsed", ROOT / "benchmarks" / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    args = module.arguments([*first, "folder", "--max-tokens", "8", "actor.max_tokens_per_microbatch=16384", "a.b=1"])
    assert (args.max_tokens, args.overrides) == (8, ["actor.max_tokens_per_microbatch=16384", "a.b=1"])


@pytest.mark.slow
def test_a_measured_run_saves_nothing(tmp_path):
    """Neither a checkpoint, at the begin or at the end, nor an export."""
    command = [sys.executable, str(ROOT / "benchmarks" / "unsaved.py"), "train", str(recipe(tmp_path)), "run.steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "run" / "export").exists()
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_a_trace_becomes_a_table_of_its_kernels(kit, tmp_path):
    rows = [("kernel", "gemm", 3000), ("kernel", "gemm", 1000), ("gpu_memcpy", "copy", 1000), ("cpu_op", "mm", 9000)]
    events = [{"ph": "X", "cat": kind, "name": name, "dur": dur} for kind, name, dur in rows]
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "step-3.json").write_text(json.dumps({"traceEvents": [{"ph": "M"}, *events]}))
    found = kit.profile_figures(tmp_path, 3, "")
    assert found["device_ms"] == 5.0
    assert [" ".join(line.split()) for line in found["kernels"]] == ["4.00 ms 80.0% 2 x gemm", "1.00 ms 20.0% 1 x copy"]
    assert kit.profile_figures(tmp_path, 4, "") == {}
