"""`hone doctor` on this very machine, and with things that are broken."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hone.cli.doctor import _show, examine
from hone.cli.finding import Finding
from hone.cli.main import main
from hone.engines.registry import EngineRegistry, Package

ROOT = Path(__file__).resolve().parents[2]


def findings(full=False) -> dict[tuple[str, str], list]:
    found: dict[tuple[str, str], list] = {}
    for finding in examine(full):
        found.setdefault((finding.section, finding.name), []).append(finding)
    return found


def test_it_says_what_is_installed_and_what_is_not():
    found = findings()
    assert found["software", "torch"][0].detail == torch.__version__
    assert found["software", "Python"][0].ok
    assert found["optional packages", "reasoning-gym"][0].ok is not None
    for (section, _), lines in found.items():
        for line in lines:
            assert line.detail or section == "parts"
            assert "\n" not in line.detail


def test_it_works_from_a_folder_that_was_never_installed(monkeypatch):
    monkeypatch.setattr("hone.cli.doctor.DISTRIBUTION", "hone-that-nobody-installed")
    found = [one for one in examine(full=False) if one.section == "optional packages"]
    assert [(one.ok, one.detail) for one in found] == [(None, "runs from a folder, so its extras are not known")]


def test_the_cpu_is_always_a_platform():
    found = findings()
    assert found["platforms", "cpu"][0].ok
    cuda = found["platforms", "cuda"][0]
    assert cuda.ok is torch.cuda.is_available()
    assert cuda.detail


def test_every_kind_of_part_is_examined():
    kinds = {name for section, name in findings(full=True) if section == "parts"}
    assert {"advantages", "losses", "sources", "rewards", "engines", "rollout", "trackers"} <= kinds


def test_without_full_parts_are_named_and_not_tried():
    found = findings()
    assert found["parts", "not examined"][0].detail == "whether each part can be imported here: hone doctor --full"
    assert found["parts", "rollout"][0] == Finding("parts", "rollout", None, "builtin, sglang, tinker, vllm")
    assert not any(line.ok is not None for (section, _), lines in found.items() if section == "parts" for line in lines)


def test_it_imports_torch_and_nothing_else_that_takes_seconds():
    """So that it answers in a few seconds; `hone doctor --full` imports the rest."""
    run = "import sys; from hone.cli.main import main; main(['doctor', '--json'])"
    heavy = ("transformers", "peft", "datasets", "pyarrow", "ray", "reasoning_gym", "torch._dynamo")
    code = f"{run}; sys.exit(' '.join(name for name in {heavy} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_it_prints_every_section_and_succeeds(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line.strip() for line in lines if not line.startswith(" ")]
    assert headings == [
        "machine",
        "software",
        "optional packages",
        "platforms",
        "sandboxes",
        "training engines",
        "rollout servers",
        "parts",
        "plug-ins",
    ]


def test_the_other_package_of_this_name_is_noticed(tmp_path, monkeypatch):
    """`pip install hone` installs a program of others over the module and the command of this one."""
    assert ("software", "another hone") not in findings()
    metadata = tmp_path / "hone-0.4.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: hone\nVersion: 0.4.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = findings()["software", "another hone"]
    assert finding.ok is False
    assert finding.detail.startswith("0.4.2: the package 'hone' of PyPI is another program")
    assert "uninstall 'hone' and 'hone-rl', and install this one again" in finding.detail


def test_a_server_is_there_if_its_environment_has_its_package(tmp_path, monkeypatch):
    """It said yes to both where neither was installed."""
    monkeypatch.chdir(tmp_path)
    for backend in ("vllm", "sglang"):
        python = tmp_path / f".venv-{backend}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("")
    (tmp_path / ".venv-vllm" / "lib" / "python3.12" / "site-packages" / "vllm").mkdir(parents=True)
    found = findings()
    assert found["rollout servers", "vllm"] == [Finding("rollout servers", "vllm", True, f"{tmp_path}/.venv-vllm")]
    missing = f"{tmp_path}/.venv-sglang has no sglang"
    assert found["rollout servers", "sglang"] == [Finding("rollout servers", "sglang", False, missing)]


def test_an_engine_without_its_package_says_what_to_type(monkeypatch):
    package = Package("no_such_module", "no-such", "pip install no-such==1")
    monkeypatch.setitem(EngineRegistry.packages, "fsdp2", package)
    found = findings()
    missing = "no-such is not installed; to add it: pip install no-such==1"
    assert found["training engines", "fsdp2"] == [Finding("training engines", "fsdp2", False, missing)]
    monkeypatch.delitem(EngineRegistry.packages, "fsdp2")
    assert findings()["training engines", "fsdp2"][0].ok


def test_a_long_line_goes_on_below(capsys, monkeypatch):
    """The name of the processor was cut."""
    monkeypatch.setenv("COLUMNS", "60")
    name = "Intel(R) Xeon(R) Platinum 8592+ with 128 of its 256 cores available to this process"
    _show([Finding("machine", "processor", None, name), Finding("machine", "avx2", True, "fp32 kernels")])
    words = capsys.readouterr().out.split()
    assert words == ["machine", "processor", *name.split(), "avx2", "yes", "fp32", "kernels"]


@pytest.mark.slow
def test_broken_parts_and_plugins_are_named_with_their_reason(tmp_path):
    (tmp_path / "odd_plugin.py").write_text(
        "from hone.rewards import REWARDS\nREWARDS.register('theirs', 'package_that_is_not_there:fn')\n"
    )
    (tmp_path / "dead_plugin.py").write_text("raise RuntimeError('driver too old')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "HONE_USE_EXTERNAL_MODULES": "odd_plugin,dead_plugin", "COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, "-m", "hone", "doctor", "--full"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0
    assert "reward 'theirs' (package_that_is_not_there:fn) cannot be loaded: No module named" in done.stdout
    assert "RuntimeError: driver too old" in done.stdout
    assert done.stderr == "warning: plug-in dead_plugin failed to load: RuntimeError: driver too old\n"


def test_a_run_file_is_shown_with_its_engine_its_server_and_its_model(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", str(ROOT / "recipes/quickstart/grpo.yaml"), "rollout.backend=vllm"]) == 0
    shown = capsys.readouterr().out
    sections = [line for line in shown.splitlines() if line and not line.startswith(" ")]
    assert [one.strip() for one in sections] == [
        "machine",
        "platforms",
        "sandboxes",
        "training engines",
        "rollout servers",
        "model",
        "features",
        "memory in training",
        "memory in rollout",
        "data and rewards",
    ]
    assert re.search(r"training engines\s+fsdp2 .*\s+rollout servers\s+vllm ", shown)
    assert "596.54 k" in shown


def test_a_run_file_is_shown_with_its_ray_and_the_interpreter_that_it_names(capsys, monkeypatch, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("COLUMNS", "300")
    run = [str(ROOT / "recipes/quickstart/grpo.yaml"), "rollout.backend=vllm"]
    cluster = ["runtime.backend=ray", "runtime.backend.nodes=4", "runtime.backend.devices=8"]
    assert main(["doctor", *run, *cluster, f"rollout.python={tmp_path / 'python'}"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"rollout servers\s+vllm +no +rollout.python: there is no interpreter {tmp_path}/python;", shown)
    assert re.search(r"runtime\s+ray +yes +ray [\d.]+; the run asks for 4 node\(s\) with 8 device\(s\) each", shown)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho broken\n", encoding="utf-8")
    program.chmod(0o755)
    assert main(["doctor", *run, f"rollout.python={program}"]) == 0
    shown = capsys.readouterr().out
    assert f"rollout.python: {program} is no Python that runs" in shown
    assert "ray status" not in shown


def test_a_folder_is_no_run_file(capsys):
    assert main(["doctor", str(ROOT / "recipes")]) == 2
    assert "no run file" in capsys.readouterr().err
