"""A device type that torch did not know, brought by a vendor's package: hone trains and generates on it unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.tiny import recipe

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = HERE / "fake_npu"


def run(*command, **variables):
    path = os.pathsep.join([str(ROOT), str(PACKAGE)])
    plug_in = {"HONE_USE_EXTERNAL_MODULES": "fake_npu", "HONE_PLATFORM": "fake_npu", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": path, **plug_in, **variables}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def found():
    done = run(HERE / "on_fake_npu.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_fsdp2_trains_on_it_as_on_the_cpu(found):
    assert found["platform"] == "fake_npu"
    on_cpu, on_device = found["losses"]
    assert on_device == pytest.approx(on_cpu, rel=1e-6)
    assert found["gap"] < 1e-5  # of any weight, after two steps of AdamW at 3e-3
    assert found["inferred_on"] == "cpu"


def test_its_masters_are_on_the_device_and_move(found):
    """Weights that the optimizer updates must be those that the forward uses: once they stayed in host memory."""
    least, devices = found["bfloat16"]
    assert devices == ["npu:0"]
    assert least > 1e-5
    assert found["tied"]


def test_a_step_waits_for_the_device_twice(found):
    """For the table of metrics, and for the gradient norm, which decides whether to step."""
    waits = found["stepping"]
    assert sum(waits.values()) == 4, waits
    assert {name.partition(":")[0] for name in waits} == {"tolist engines/engine.py", "item engines/fsdp2/weights.py"}
    assert found["built"] <= 15  # the probes of a model, at start-up


def test_servers_share_the_device_of_the_trainer(found):
    key = "rollout.engine.gpu_memory_utilization"
    assert found["shares"] == {
        "one": [0.5, 1, key],
        "two on one device": [0.5, 2, key],
        "of two devices": [0.5, 1, key],
        "beside it": None,
        "elsewhere": None,
    }
    assert found["needed"]["total"] == 2**34
    assert found["needed"]["kept"] == 2 * found["needed"]["training"] > 0  # AdamW's two moments; one gradient


def test_tensors_of_host_and_device_do_not_mix(found):
    assert found["refused"].startswith(
        "aten.add.Tensor: expected all tensors on npu:0, found a host tensor of shape (3,)"
    )


def test_the_conformance_kit_finds_what_the_device_lacks(found):
    """Its tensors are Python wrappers: their storages cannot be resized, which sleep at level 2 does to free them."""
    results = {name: (status, reason) for name, status, reason in found["conformance"]}
    assert results["packed attention in bfloat16, forward and backward"] == ("works", "")
    assert results["soft-capped attention with sinks in bfloat16, forward and backward"] == ("works", "")
    assert results["checksum of weights equals the CPU's"] == ("works", "")
    new = "builtin: answers after an update come from the new weights alone, also for prompts that were cached"
    assert results[new] == ("works", "")
    wrong = {name: said for name, said in results.items() if said[0] != "works"}
    assert wrong.pop("limit a process to device 0") == ("absent", "the platform has no variable for visible devices")
    status, reason = wrong.pop(
        "builtin: asleep at level 2 the weights are gone, and nothing is served before they were sent again"
    )
    assert status == "fails"
    assert "resize_() on an invalid python storage" in reason
    assert wrong == {}


def test_a_whole_run_trains_generates_and_syncs_on_it(tmp_path):
    done = run("-m", "hone", "train", recipe(tmp_path), "run.steps=2", "evaluation.every_steps=0")
    assert done.returncode == 0, done.stderr
    assert "on fake_npu (fake NPU in host memory)" in done.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
