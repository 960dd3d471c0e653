"""The engine for Huawei's NPUs: chosen for that platform, with MindSpeed's patches before megatron-core's import.

MindSpeed and torch_npu are packages of a few lines here: neither runs without an NPU.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hone.engines.registry import EngineRegistry
from hone.registry import CannotLoad

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[3]
TORCH_NPU = """
import types, torch
torch.utils.rename_privateuse1_backend("npu")
module = types.ModuleType("npu")
module.is_available = lambda: True
torch._register_device_module("npu", module)
npu_fusion_attention = None  # imported by transformers
"""
ADAPTOR = """
import sys
seen = {"arguments": sys.argv[1:], "late": [name for name in sys.modules if name.startswith("megatron.core")]}
def repatch(settings):
    seen["settings"] = settings
"""
PROGRAM = """
import json, sys
from types import SimpleNamespace
from hone_megatron.settings import MegatronSettings
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig
from hone.models.settings import BuildConfig, ModelConfig

cls = EngineRegistry.find("language_model", "megatron", "npu", "huawei")
config = EngineConfig(compute_dtype="float32", backend=MegatronSettings())
model = ModelConfig(build=BuildConfig(hidden_size=32, layers=1, heads=2, kv_heads=2, mlp_size=48))
spec = SimpleNamespace(model=model, engine=config, model_type="language_model", temperature=1.0, total_steps=0)
engine = cls(SimpleNamespace(**vars(spec), reference=None, follows=False), "cpu")
engine.initialize()
adaptor = sys.modules["mindspeed.megatron_adaptor"]
print(json.dumps({"class": cls.__name__, "names": len(dict(engine.get_per_tensor_param()[0])), **adaptor.seen}))
"""


def run(folder, program):
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "ASCEND_TOOLKIT_HOME": str(folder / "cann")}
    return subprocess.run(
        [sys.executable, "-c", program, "grpo.yaml", "--resume"],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def machine(tmp_path):
    """A folder with CANN's version and both packages."""
    version = tmp_path / "cann" / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    files = {
        version: "version=9.0.0\n",
        tmp_path / "torch_npu" / "__init__.py": TORCH_NPU,
        tmp_path / "mindspeed" / "__init__.py": "",
        tmp_path / "mindspeed" / "megatron_adaptor.py": ADAPTOR,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_error_names_everything_that_is_missing_and_how_to_install_it():
    with pytest.raises(CannotLoad) as error:
        EngineRegistry.find("language_model", "megatron", "npu", "huawei")
    for wanted in ("lacks CANN", "ASCEND_TOOLKIT_HOME", "torch_npu (pip install", "clone -b core_r0.16.0"):
        assert wanted in str(error.value)
    assert "megatron-core==" not in str(error.value), "it is installed"
    assert EngineRegistry.find("language_model", "megatron", "npu", "acme").__name__ == "MegatronEngine"


@pytest.mark.slow
def test_mindspeed_patches_megatron_before_its_import(machine):
    done = run(machine, PROGRAM)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["class"] == "MindSpeedEngine"
    assert found["arguments"] == ["--optimization-level", "0"], "it read the command line of hone"
    assert found["late"] == []
    assert found["settings"]["tensor_model_parallel_size"] == 1
    assert "context_parallel_size" not in found["settings"]
    assert found["names"] == 14


@pytest.mark.slow
def test_megatron_that_was_imported_first_is_an_error(machine):
    done = run(machine, "import megatron.core.parallel_state" + PROGRAM)
    assert "was imported before MindSpeed could patch it" in done.stderr
