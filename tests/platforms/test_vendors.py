"""Tables of facts of all platforms, and ROCm's options. Nothing here ran on such a device."""

import pytest
import torch

from hone.config import ConfigError
from hone.platforms import PLATFORMS
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


def test_the_facts_of_rocm():
    rocm = RocmPlatform()
    assert (rocm.device, rocm.vendor, rocm.collectives()) == ("cuda", "amd", "cpu:gloo,cuda:nccl")
    assert rocm.architectures == ("gfx942", "gfx950")
    assert rocm.never_run


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


def test_servers_know_on_how_many_machines_the_run_may_place_them():
    ray = RaySettings(nodes=2, pools={"rollout": {"nodes": 3, "devices": 1}})
    assert rollout._machines(RuntimeConfig(backend=ray)) == 3
    assert rollout._machines(RuntimeConfig()) == 1
    assert rollout._machines(None) == 1
