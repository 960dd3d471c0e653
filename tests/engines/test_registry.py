"""Which engine class is chosen for a model type, backend, device and vendor."""

from types import SimpleNamespace

import pytest

from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.registry import EngineRegistry, Package, _EngineRegistry
from hone.engines.settings import EngineConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.registry import CannotLoad, UnknownName

PLATFORM = SimpleNamespace(device="cuda", vendor="nvidia")


@pytest.fixture
def registry():
    made = _EngineRegistry()
    for device, vendor in (("*", "*"), ("npu", "*"), ("npu", "acme")):
        made.register(model_type="language_model", backend="b", device=device, vendor=vendor)(
            type(f"On_{device}_{vendor}", (), {"__init__": lambda self, spec, device: setattr(self, "device", device)})
        )
    return made


@pytest.mark.parametrize(
    ("device", "vendor", "chosen"),
    [("cpu", "x", "On_*_*"), ("npu", "x", "On_npu_*"), ("npu", "acme", "On_npu_acme"), ("cuda", "acme", "On_*_*")],
)
def test_the_most_specific_class_wins(registry, device, vendor, chosen):
    assert registry.find("language_model", "b", device, vendor).__name__ == chosen


def test_the_environment_overrides_the_platform(registry, monkeypatch):
    spec = SimpleNamespace(model_type="language_model", engine=SimpleNamespace(backend=SimpleNamespace(name="b")))
    assert type(registry.create(spec, PLATFORM)).__name__ == "On_*_*"
    monkeypatch.setenv("HONE_ENGINE_DEVICE", "npu")
    assert type(registry.create(spec, PLATFORM)).__name__ == "On_npu_*"
    monkeypatch.setenv("HONE_ENGINE_VENDOR", "acme")
    engine = registry.create(spec, PLATFORM)
    assert (type(engine).__name__, engine.device) == ("On_npu_acme", "npu")


def test_errors_list_what_there_is(registry):
    with pytest.raises(UnknownName, match=r"^unknown training engine 'c' \(there is: b\)"):
        registry.find("language_model", "c", "cpu", "cpu")
    with pytest.raises(UnknownName, match=r"no engine for model_type=diffusion .*there is: .*vendor=acme"):
        registry.find("diffusion", "b", "cpu", "cpu")
    registry.register(model_type="language_model", backend="broken", target="hone.engines.nothing:Engine")
    with pytest.raises(CannotLoad, match=r"hone\.engines\.nothing"):
        registry.find("language_model", "broken", "cpu", "cpu")
    with pytest.raises(ValueError, match="already registered"):
        registry.register(model_type="language_model", backend="b")(object)


def test_an_engine_without_its_package_says_what_to_type(registry):
    package = Package("no_such_module", "no-such", "pip install no-such==1")
    registry.register(model_type="language_model", backend="absent", target="no_such_module:Engine", package=package)
    with pytest.raises(CannotLoad, match=r"'absent' needs no-such, which is not installed: pip install no-such==1$"):
        registry.find("language_model", "absent", "cpu", "cpu")


def test_the_shipped_engine_serves_both_model_types_on_any_device():
    for model_type in ("language_model", "value_model"):
        assert EngineRegistry.find(model_type, "fsdp2", "npu", "acme") is Fsdp2Engine
    spec = SimpleNamespace(
        model=ModelConfig(build=BuildConfig()),
        engine=EngineConfig(),
        model_type="value_model",
        temperature=1.0,
        total_steps=0,
        follows=False,
    )
    assert EngineRegistry.create(spec, SimpleNamespace(device="cpu", vendor="cpu")).model_type == "value_model"
