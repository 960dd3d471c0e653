"""ROCm and Ascend: their tables, versions and options. Nothing here ran on such a device."""

import pytest
import torch

from hone.config import ConfigError
from hone.platforms import PLATFORMS, ascend
from hone.platforms.ascend import AscendPlatform, parsed
from hone.platforms.facts import FACTS, facts_of
from hone.platforms.rocm import RocmPlatform
from hone.rollout.settings import RolloutConfig
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.workers import rollout


@pytest.mark.parametrize("name", list(PLATFORMS))
def test_every_fact_of_a_platform_has_a_source(name):
    platform = PLATFORMS.get(name)()
    assert [fact.name for fact in facts_of(platform)] == list(FACTS)
    assert [fact.name for fact in facts_of(platform) if not fact.source] == []
    assert set(platform.sources) <= set(FACTS)


def test_the_vendors_facts():
    rocm, npu = RocmPlatform(), AscendPlatform()
    assert (rocm.device, rocm.vendor, rocm.collectives()) == ("cuda", "amd", "cpu:gloo,cuda:nccl")
    assert rocm.architectures == ("gfx942", "gfx950")
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
    assert rocm.never_run
    assert npu.never_run


@pytest.mark.parametrize(
    ("hip", "nodes", "options"),
    [
        ("7.1.25424", 1, {}),
        ("7.1.25424", 2, {"max_cudagraph_capture_size": 64}),
        ("6.4.43482", 1, {"enable_sleep_mode": False}),
        ("6.4.43482", 4, {"enable_sleep_mode": False, "max_cudagraph_capture_size": 64}),
    ],
)
def test_vllm_on_rocm(monkeypatch, hip, nodes, options):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert RocmPlatform().rollout_options("vllm", nodes) == options
    assert RocmPlatform().rollout_options("sglang", nodes) == {}


def test_a_server_that_cannot_sleep_is_an_error_only_if_it_is_to(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(rollout, "current_platform", RocmPlatform)
    settings = {
        level: RolloutConfig(backend="vllm", sleep_while_training=level) for level in ("auto", "none", "level_2")
    }
    assert rollout._sleep_level(settings["auto"], 2) == 0
    assert rollout._sleep_level(settings["none"], 2) == 0
    with pytest.raises(
        ConfigError, match=r"level_2: vLLM's sleep mode needs ROCm 7 or newer, .* built for 6\.4\.1; set"
    ):
        rollout._sleep_level(settings["level_2"], 2)
    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    assert rollout._sleep_level(settings["auto"], 2) == 2


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


def test_servers_know_on_how_many_machines_the_run_may_place_them():
    ray = RaySettings(nodes=2, pools={"rollout": {"nodes": 3, "devices": 1}})
    assert rollout._machines(RuntimeConfig(backend=ray)) == 3
    assert rollout._machines(RuntimeConfig()) == 1
    assert rollout._machines(None) == 1
