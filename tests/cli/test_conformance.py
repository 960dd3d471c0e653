"""`hone doctor --conformance`: its report, and devices that give wrong numbers, raise and crash."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from hone.cli.conformance import kernels
from hone.cli.conformance.kit import run
from hone.cli.conformance.record import Recorder
from hone.testing import Absent

BREAKING = """
    import os

    from hone.platforms.base import PlatformRegistry
    from hone.platforms.cpu import CpuPlatform


    @PlatformRegistry.register(platform="breaking")
    class BreakingPlatform(CpuPlatform):
        vendor = "tests"
        priority = -1

        def memory(self, index=0):
            raise OSError("no counter of memory")

        def rng_state(self):
            print("the driver is lost", flush=True)
            os.abort()
"""


def test_a_check_works_fails_or_is_absent():
    results = []
    record = Recorder("section", results.append)
    with record.check("one") as figures:
        figures["GB/s"] = 2.5
    with record.check("two"):
        raise ValueError("wrong\nin two lines")
    with record.check("three"):
        raise Absent("there is no second device")
    assert [(one.name, one.status, one.reason, one.figures) for one in results] == [
        ("one", "works", "", {"GB/s": 2.5}),
        ("two", "fails", "ValueError: wrong in two lines", {}),
        ("three", "absent", "there is no second device", {}),
    ]


def test_results_are_compared_with_a_tolerance_of_the_dtype():
    expected = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert kernels._gap(torch.tensor([1.0, -4.04]), expected, "float16") == pytest.approx(0.01)
    with pytest.raises(RuntimeError, match=r"differ from the CPU's in float64 by 0\.01, allowed are 0\.0001"):
        kernels._gap(torch.tensor([1.0, -4.04]), expected, "float32")
    with pytest.raises(RuntimeError, match="by nan"):
        kernels._gap(torch.tensor([1.0, float("nan")]), expected, "float32")


def test_a_crash_of_the_driver_ends_its_section_only(tmp_path, monkeypatch):
    (tmp_path / "breaking_device.py").write_text(textwrap.dedent(BREAKING), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # the sections' processes get this process's path
    monkeypatch.setenv("HONE_USE_EXTERNAL_MODULES", "breaking_device")
    results = list(run("breaking", ["device"]))
    assert [(one.name, one.status) for one in results[:4]] == [
        ("find the devices", "works"),
        ("memory facts", "fails"),
        ("copy to the device and back", "works"),
        ("streams", "absent"),
    ]
    assert results[1].reason == "OSError: no counter of memory"
    assert (results[4].name, results[4].status) == ("end of the section, after 'streams'", "fails")
    assert "ended with" in results[4].reason
    assert "the driver is lost" in results[4].reason
    assert len(results) == 5


def doctor(*options, **variables):
    command = [sys.executable, "-m", "hone", "doctor", *options]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.slow
def test_a_platform_that_is_not_here_is_one_error():
    done = doctor("--conformance", HONE_PLATFORM="rocm")
    assert done.returncode != 0
    assert "HONE_PLATFORM=rocm: platform 'rocm' is not available: " in done.stderr


@pytest.mark.slow
def test_everything_works_on_the_cpu():
    done = doctor("--conformance", "--json", HONE_PLATFORM="cpu")
    report = json.loads(done.stdout)
    assert (report["format"], report["platform"], report["never_run"]) == (1, "cpu", "")
    assert [one for one in report["results"] if one["status"] == "fails"] == []
    assert done.returncode == 0
    sections = list(dict.fromkeys(one["section"] for one in report["results"]))
    assert sections == ["device", "kernels", "collectives", "weight sync", "engines", "rollouts"]
    assert [one["name"] for one in report["results"] if one["status"] == "absent"] == [
        "streams",
        "limit a process to device 0",
    ]
    assert {fact["fact"]: fact["value"] for fact in report["facts"]}["collectives_backend"] == "gloo"
