"""The platform's table, versions and options. Nothing here ran on such a device."""

import pytest

from hone.platforms import PLATFORMS
from hone.platforms.facts import FACTS, facts_of
from hone_ascend import platform as ascend
from hone_ascend.platform import AscendPlatform, parsed


def test_every_fact_has_a_source():
    facts = facts_of(PLATFORMS.get("ascend")())
    assert [fact.name for fact in facts] == list(FACTS)
    assert [fact.name for fact in facts if not fact.source] == []
    assert set(AscendPlatform.sources) <= set(FACTS)


def test_the_facts():
    npu = AscendPlatform()
    assert (npu.device, npu.vendor, npu.collectives(), npu.ray_resource) == (
        "npu",
        "huawei",
        "cpu:gloo,npu:hccl",
        "NPU",
    )
    assert npu.visible_devices_variable == "ASCEND_RT_VISIBLE_DEVICES"
    assert npu.rollout_options("sglang", 1) == {"device": "npu", "attention_backend": "ascend"}
    assert npu.rollout_options("vllm", 2) == {}
    assert npu.why_unavailable() == "the package torch_npu is not installed"
    assert npu.never_run


def test_versions_of_the_driver_are_ordered():
    order = ["24.1.0", "25.0.RC1", "25.2.3", "25.3.RC1", "25.3.rc2", "25.3", "25.5.1"]
    assert sorted(order, key=parsed) == order
    assert parsed("8.3.RC1") == (8, 3, 0, 1)


@pytest.mark.parametrize(
    ("driver", "toolkit", "reason"),
    [
        ("25.3.rc1", "8.3.RC1", ""),
        ("25.5.0", "8.5.0", ""),
        ("25.2.0", "8.3.RC1", "the driver has version 25.2.0, and sharing device memory needs 25.3.RC1 or newer"),
        (
            "25.3.rc1",
            "8.2.RC1",
            "the CANN toolkit has version 8.2.RC1, and sharing device memory needs 8.3.RC1 or newer",
        ),
        ("", "8.3.RC1", "the version of the driver is unknown, and sharing device memory needs 25.3.RC1 or newer"),
    ],
)
def test_old_drivers_share_no_device_memory(monkeypatch, tmp_path, driver, toolkit, reason):
    """The weight sync then uses shared host memory."""
    monkeypatch.setattr(ascend, "DRIVER", tmp_path / "version.info")
    if driver:
        (tmp_path / "version.info").write_text(f"Version={driver}\nascendhal_version=7.35.23\n")
    monkeypatch.setenv(ascend.TOOLKIT_VARIABLE, str(tmp_path))
    monkeypatch.setattr(ascend.platform, "machine", lambda: "aarch64")
    (tmp_path / "aarch64-linux").mkdir()
    (tmp_path / "aarch64-linux" / "ascend_toolkit_install.info").write_text(
        f"package_name=toolkit\nversion={toolkit}\n"
    )
    assert AscendPlatform().why_no_ipc() == reason


def test_devices_are_named_by_their_number_on_the_machine(monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,6")
    assert AscendPlatform().device_uuids() == ["npu-4", "npu-6"]
