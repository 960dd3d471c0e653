"""The patches of SGLang: what they do, and whether SGLang still needs them."""

import os
import subprocess
import sys

import pytest
import torch

from hone_sglang.cpu_patches import ABSENT, Unpinned, install_stand_ins, murmur_hash32


@pytest.fixture(scope="module")
def sglang_python(real_python):
    return real_python("sglang")


@pytest.fixture
def absent():
    """The name of a library that is not installed; what was imported of it is forgotten afterwards."""
    name = "no_such_kernels"
    before = list(sys.meta_path)
    yield name
    sys.meta_path[:] = before
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_what_is_absent_can_be_imported_and_named_and_not_called(absent):
    assert install_stand_ins([absent, "torch"]) == [absent]
    scope = {}
    exec(f"from {absent}.ops.inner import kernel, Mode\nimport {absent}.more", scope)
    assert scope["Mode"].FAST is not None
    with pytest.raises(RuntimeError, match=r"no_such_kernels\.ops\.inner\.kernel is not installed"):
        scope["kernel"](1)


def test_nothing_is_put_in_place_without_a_cpu_server():
    assert not any(type(finder).__name__ == "_StandIns" for finder in sys.meta_path)


def reference(data):
    """MurmurHash3_x86_32 with seed 0 of whole blocks, in Python's own integers."""
    h = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_random_bits_are_murmurs():
    assert reference(b"test") == 0xBA6BD213  # a published value
    seeds, positions, columns = [0, 5, 2**63 - 1], [0, 77, 2**31], [0, 1, 103]
    found = murmur_hash32(torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns))
    assert found.dtype == torch.uint32
    for row, seed, position in zip(found.tolist(), seeds, positions, strict=True):
        blocks = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
        assert row == [reference(blocks + column.to_bytes(4, "little")) for column in columns]


def source(python, path):
    (found,) = python.parents[1].glob(f"lib/python*/site-packages/sglang/srt/{path}")
    return found.read_text()


@pytest.mark.sglang
@pytest.mark.parametrize("name", ABSENT)
def test_a_stand_in_is_still_needed(sglang_python, name):
    """Fails when the environment has the library, or when it is time to ask whether SGLang still imports it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
    assert subprocess.run([sglang_python, "-c", code], env={"PATH": os.environ["PATH"]}, timeout=60).returncode == 0
    places = {
        "torchvision": "multimodal/internvl_utils.py",
        "torchaudio": "models/midashenglm.py",
        "sgl_kernel": "layers/activation.py",
    }
    assert f"{name}" in source(sglang_python, places[name])


@pytest.mark.sglang
def test_seeds_are_still_read_in_deterministic_mode_only(sglang_python):
    wanted = "enable_deterministic = get_exec().deterministic.enable_deterministic_inference"
    assert wanted in source(sglang_python, "sampling/sampling_batch_info.py")


@pytest.mark.sglang
def test_min_p_still_excludes_seeds(sglang_python):
    text = source(sglang_python, "layers/sampler.py")
    assert "With sampling seed, multinomial_with_seed will provide wrong results" in text


@pytest.mark.sglang
def test_stop_ids_are_still_forgotten_with_ignore_eos(sglang_python):
    text = source(sglang_python, "managers/schedule_batch.py").partition("def _check_token_based_finish")[2]
    assert "if self.sampling_params.ignore_eos:\n            return False\n" in text[:300]


@pytest.mark.sglang
def test_adapters_are_still_scaled_alike_whatever_their_configuration_says(sglang_python):
    text = source(sglang_python, "lora/lora.py")
    assert "self.scaling: float = self.config.lora_alpha / self.config.r\n" in text
    assert not any(word in text for word in ("rslora", "alpha_pattern", "rank_pattern"))


@pytest.mark.sglang
@pytest.mark.parametrize("path", ["lora/layers.py", "lora/backend/torch_backend.py"])
def test_adapters_still_want_pinned_memory_on_a_cpu_too(sglang_python, path):
    assert "pin_memory=True" in source(sglang_python, path)


def test_pinned_memory_is_left_out_and_nothing_else():
    torch_here = Unpinned()
    assert torch_here.tensor([1, 2], dtype=torch.int32, device="cpu", pin_memory=True).tolist() == [1, 2]
    assert torch_here.empty((2, 3), pin_memory=True).shape == (2, 3)
    assert torch_here.cat is torch.cat
    with torch.device("meta"):  # torch's own factories are as they were
        assert torch.empty(3).device.type == "meta"


@pytest.mark.sglang
@pytest.mark.parametrize("name", ["SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"])
def test_dumps_before_its_end_can_still_be_switched_off(sglang_python, name):
    assert f"{name} = EnvBool(True)" in source(sglang_python, "environ.py")
