"""The contract of a platform, probing, and the choice between platforms."""

import os
import subprocess
import sys

import pytest
import torch

from hone.config import ConfigError
from hone.platforms import PLATFORMS
from hone.platforms import cpu as cpu_platform
from hone.platforms import cuda as cuda_platform
from hone.platforms.base import (
    PlatformBase,
    PlatformRegistry,
    compute_dtype,
    current_platform,
    use_deterministic_kernels,
    why_compute_dtype,
    why_no_triton,
)
from hone.platforms.cpu import CpuPlatform
from hone.platforms.cuda import CudaPlatform
from hone.platforms.rocm import RocmPlatform
from hone.registry import Registry


@pytest.fixture
def platforms(monkeypatch):
    """A registry of its own for a test that adds platforms; it begins with the CPU."""
    registry = Registry("platform", {"cpu": "hone.platforms.cpu:CpuPlatform"})
    monkeypatch.setattr("hone.platforms.base.PLATFORMS", registry)
    return registry


def make(name, why="", priority=10, **attributes):
    body = {"device": "xpu", "vendor": name, "collectives_backend": "gloo", "visible_devices_variable": "TOY_DEVICES"}
    body |= {"priority": priority, "why_unavailable": lambda self: why} | attributes
    return PlatformRegistry.register(platform=name)(type(name.title(), (PlatformBase,), body))


def test_the_cpu_gives_back_what_the_c_library_keeps():
    """As after a load: much was freed, but something that came later is still held."""
    cpu = CpuPlatform()
    pieces = [torch.ones(8 << 10) for _ in range(6000)]  # 32 KiB each, 190 MiB
    last, full = pieces[-1], cpu.memory().reserved
    pieces.clear()
    cpu.empty_cache()
    assert full - cpu.memory().reserved > 150 * 2**20
    assert last.sum() == 8 << 10


ROUNDS = """
import resource, torch
from hone.platforms.host_memory import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10 << 20)  # 40 MiB, 10,240 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
keep_freed()
torch.ones(10 << 20)
print(plain, faults())
"""


def test_freed_memory_is_used_again_when_told_so():
    found = subprocess.run([sys.executable, "-c", ROUNDS], capture_output=True, text=True, timeout=120, check=True)
    plain, kept = map(int, found.stdout.split())
    assert plain > 20 * 10_000, "the system cleared every page every time"
    assert kept < plain / 2


STEPS = """
import torch
from hone.machine import resident
from hone.platforms.host_memory import StepMemory, keep_freed

keep_freed()
memory = StepMemory()
for megabytes in (400, 400, 800, 800):
    arrays = [torch.ones(1 << 20) for _ in range(megabytes // 4)]
    kept = torch.ones(1)  # beyond the arrays, which glibc would otherwise cut off the end of the heap
    del arrays
    memory.step_ended()
    print(resident()[0] >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps freed memory")
def test_freed_memory_is_kept_between_steps_until_the_process_has_grown():
    found = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, check=True)
    first, second, third, fourth = map(int, found.stdout.split())
    assert abs(second - first) < 100  # the same memory again
    assert third < first - 300  # it had grown by 400 MiB, and all that was freed is given back
    assert fourth > third + 600  # what steps need now is what they may keep


def test_the_cpu_is_always_available():
    cpu = CpuPlatform()
    assert cpu.why_unavailable() == ""
    assert (cpu.name, cpu.device, cpu.collectives_backend, cpu.ray_resource) == ("cpu", "cpu", "gloo", "CPU")
    assert not cpu.supports_ipc
    assert cpu.device_count() == 1
    assert cpu.torch_device() == torch.device("cpu")
    assert "cores" in cpu.device_name()
    assert cpu.visible_devices([0]) == {}
    assert cpu.rollout_environment([0]) == {"OMP_NUM_THREADS": "1"}
    cpu.synchronize()
    cpu.empty_cache()
    cpu.set_device(0)
    with cpu.stream(cpu.new_stream()):
        torch.ones(1)
    with pytest.raises(ValueError, match="index 0, found 1"):
        cpu.set_device(1)


def test_cpu_memory_facts_are_bytes_of_this_machine():
    before = CpuPlatform().memory()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = CpuPlatform().memory()
    assert 2**28 < after.free <= after.total < 2**50
    assert 60 * 2**20 < after.allocated - before.allocated < 200 * 2**20
    assert after.peak >= after.allocated - 2**20
    del block


def test_random_state_can_be_taken_and_put_back():
    cpu = CpuPlatform()
    cpu.seed(3)
    state = cpu.rng_state()
    first = torch.rand(4)
    second = torch.rand(4)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.rand(4), second)  # the state that was taken did not move on with the generator
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    cpu.seed(3)
    assert torch.equal(torch.rand(4), first)
    cpu.set_rng_state({**state, "cuda:0": state["cpu"]})  # of a run that goes on without its GPU
    assert torch.equal(torch.rand(4), first)


class FakeDevices:
    """Two devices, as torch's module for a device type presents them: the generators and the memory."""

    def __init__(self):
        self.generators = [torch.Generator(), torch.Generator()]

    def device_count(self):
        return 2

    def manual_seed_all(self, seed):
        for index, generator in enumerate(self.generators):
            generator.manual_seed(seed + index)

    def get_rng_state(self, index):
        return self.generators[index].get_state()

    def set_rng_state(self, state, index):
        self.generators[index].set_state(state)

    def mem_get_info(self, index):
        return 10 + index, 100

    def memory_allocated(self, index):
        return 40

    def memory_reserved(self, index):
        return 50

    def max_memory_allocated(self, index):
        return 60


def test_the_defaults_go_through_torchs_module_of_the_device(platforms):
    devices = FakeDevices()
    toy = make("toy", _module=devices)()
    assert toy.name == "toy"
    assert toy.torch_device(1) == torch.device("xpu:1")
    memory = toy.memory(1)
    assert (memory.free, memory.total, memory.allocated, memory.reserved, memory.peak) == (11, 100, 40, 50, 60)
    toy.seed(5)
    state = toy.rng_state()
    assert sorted(state) == ["cpu", "xpu:0", "xpu:1"]
    first = [torch.rand(2, generator=generator) for generator in devices.generators]
    toy.set_rng_state(state)
    assert all(torch.equal(torch.rand(2, generator=g), f) for g, f in zip(devices.generators, first, strict=True))
    toy.seed(6)
    toy.set_rng_state({name: state[name] for name in ("cpu", "xpu:1")} | {"xpu:7": state["xpu:0"]})  # other devices now
    zero, one = (torch.rand(2, generator=generator) for generator in devices.generators)
    assert torch.equal(one, first[1])
    assert not torch.equal(zero, first[0])


def test_a_trainer_numbers_gpus_as_its_servers_do(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # so that it is as before when the test ends
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    CudaPlatform().why_unavailable()  # asked before anything uses a device
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("variables", "shares"),
    [
        ({}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: true"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "pinned:True"}, True),
    ],
)
def test_memory_of_expandable_segments_is_not_shared(monkeypatch, variables, shares):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (CudaPlatform().why_no_ipc() == "") == shares


def test_a_peer_that_a_weight_sync_loses_does_not_end_the_process(monkeypatch):
    """NCCL's watchdog does, unless the group was made with another handling of errors."""
    made = []

    class Group:
        class Options:
            pass

        def __init__(self, store, rank, world, options):
            made.append((rank, world, options._timeout.total_seconds(), os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    for before in (None, "3"):
        if before is None:
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        else:
            monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
        CudaPlatform().device_group(None, 0, 2, 30.0)
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
    assert made == [(0, 2, 30.0, "2")] * 2


def test_visible_devices_are_numbered_as_this_process_sees_them(monkeypatch):
    cuda = CudaPlatform()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda.visible_devices([0, 2]) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab,6")
    assert cuda.visible_devices([2, 1]) == {"CUDA_VISIBLE_DEVICES": "6,GPU-ab"}
    assert cuda.rollout_environment([0]) == {"CUDA_VISIBLE_DEVICES": "4", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")  # as the user has it
    assert cuda.rollout_environment([0])["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    with pytest.raises(ValueError, match="device 3 was asked for, but CUDA_VISIBLE_DEVICES=4,GPU-ab,6 shows 3"):
        cuda.visible_devices([3])
    assert RocmPlatform().visible_devices([1]) == {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("hip", "cuda", "usable", "nvidia", "amd"),
    [
        (None, None, False, "built without CUDA", "built without ROCm"),
        (None, "13.0", False, "no usable NVIDIA GPU", "built without ROCm"),
        (None, "13.0", True, "", "built without ROCm"),
        ("7.1", None, False, "built for ROCm 7.1", "no usable AMD GPU"),
        ("7.1", None, True, "built for ROCm 7.1", ""),
    ],
)
def test_the_build_of_torch_tells_nvidia_from_amd(monkeypatch, hip, cuda, usable, nvidia, amd):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    for platform, reason in ((CudaPlatform(), nvidia), (RocmPlatform(), amd)):
        assert reason in platform.why_unavailable()
        assert bool(platform.why_unavailable()) == bool(reason)


def test_the_available_platform_of_highest_priority_is_taken(platforms):
    make("absent", why="no such card here", priority=90)
    assert PlatformRegistry.choose().name == "cpu"
    make("modest", priority=5)
    assert PlatformRegistry.choose().name == "modest"
    make("strong", priority=20)
    assert PlatformRegistry.choose().name == "strong"
    assert PlatformRegistry.choose("modest").name == "modest"
    make("equal", priority=20)
    with pytest.raises(ConfigError, match="several platforms are available here: equal, strong; set HONE_PLATFORM"):
        PlatformRegistry.choose()


def test_a_wrong_name_lists_what_there_is_and_why_not(platforms):
    def breaks(self):
        raise OSError("driver speaks another version")

    make("absent", why="no such card here")
    make("broken", why_unavailable=breaks)
    platforms.register("lost", "no_such_module:Platform")
    with pytest.raises(ConfigError) as unavailable:
        PlatformRegistry.choose("absent")
    with pytest.raises(ConfigError) as unknown:
        PlatformRegistry.choose("absnt")
    assert "HONE_PLATFORM=absent: platform 'absent' is not available: no such card here" in str(unavailable.value)
    assert "unknown platform 'absnt'; did you mean 'absent'?" in str(unknown.value)
    for message in (str(unavailable.value), str(unknown.value)):
        assert "cpu: available" in message
        assert "broken: its probe failed: OSError: driver speaks another version" in message
        assert "lost: platform 'lost' (no_such_module:Platform) cannot be loaded" in message
        assert "\n" not in message
    assert PlatformRegistry.probe()["cpu"] == ""
    assert PlatformRegistry.choose().name == "cpu"  # what is broken stops nobody else


def test_what_is_registered_is_checked(platforms):
    with pytest.raises(TypeError, match="is not a subclass of PlatformBase"):
        PlatformRegistry.register(platform="toy")(dict)
    with pytest.raises(TypeError, match="does not set device, vendor"):
        PlatformRegistry.register(platform="toy")(type("Bare", (PlatformBase,), {}))
    make("toy")
    with pytest.raises(ValueError, match="'toy' is already registered"):
        make("toy")


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("HONE_PLATFORM", "cpu")
    assert current_platform().name == "cpu"
    assert current_platform() is current_platform()
    monkeypatch.setenv("HONE_PLATFORM", "gpu")
    with pytest.raises(ConfigError, match="HONE_PLATFORM=gpu: unknown platform 'gpu'"):
        current_platform()
    monkeypatch.delenv("HONE_PLATFORM")
    assert current_platform().why_unavailable() == ""
    assert {"cpu", "cuda", "rocm"} <= set(PLATFORMS)


@pytest.mark.gpu
def test_a_real_gpu():
    platform = next((p for p in (CudaPlatform(), RocmPlatform()) if not p.why_unavailable()), None)
    if platform is None:
        pytest.skip(CudaPlatform().why_unavailable())
    device = platform.torch_device(0)
    platform.set_device(0)
    platform.seed(7)
    state = platform.rng_state()
    with platform.stream(platform.new_stream()):
        first = torch.rand(1 << 20, device=device)
    platform.synchronize()
    memory = platform.memory()
    assert memory.peak >= memory.allocated >= 4 << 20
    assert memory.reserved >= memory.allocated
    assert memory.free < memory.total
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(1 << 20, device=device), first)
    platform.empty_cache()
    assert platform.device_name()


@pytest.mark.parametrize(
    ("flags", "native"),
    [("fma avx2 avx512f", False), ("avx512f avx512_bf16", True), ("amx_tile amx_bf16", True), ("asimd bf16", True)],
)
def test_a_processor_multiplies_bfloat16_by_what_its_flags_say(flags, native):
    assert (cpu_platform.lacking_bfloat16(flags.split()) == "") is native


def test_a_processor_s_flags_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_platform, "CPUINFO", tmp_path / "cpuinfo")
    assert "multiplied as float32" in CpuPlatform().why_bfloat16_is_slow()  # a system that says nothing
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Nice 1\nflags\t\t: fma amx_bf16\n")
    assert CpuPlatform().why_bfloat16_is_slow() == ""
    assert CpuPlatform().device_name().startswith("Nice 1, ")


def test_gpus_multiply_bfloat16_since_ampere():
    assert [cuda_platform.lacking_bfloat16(one) for one in ((8, 0), (9, 0))] == ["", ""]
    assert cuda_platform.lacking_bfloat16((7, 5)) == (
        "this GPU has compute capability 7.5, and bfloat16 needs 8.0 (Ampere)"
    )


def test_triton_kernels_run_where_triton_compiles_them(platforms, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("HONE_TRITON", raising=False)
    assert why_no_triton(CpuPlatform()) == (
        "Triton compiles no kernels for cpu (TRITON_INTERPRET=1 interprets them, for tests)"
    )
    make("young", compiles_triton=True)
    make("old", compiles_triton=True, why_bfloat16_is_slow=lambda self: "bfloat16 needs 8.0")
    young, old = PlatformRegistry.choose("young"), PlatformRegistry.choose("old")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_no_triton(young).startswith("triton is not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "triton")
    assert why_no_triton(young) == ""
    assert why_no_triton(old) == "bfloat16 needs 8.0, as does Triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (why_no_triton(old), why_no_triton(CpuPlatform())) == ("", "")
    monkeypatch.setenv("HONE_TRITON", "0")
    assert why_no_triton(young) == "HONE_TRITON=0"


@pytest.mark.parametrize(
    ("slow", "chosen", "found", "why"),
    [
        ("", "auto", "bfloat16", "auto: fast multiplies bfloat16 natively here"),
        ("it is old", "auto", "float32", "auto: it is old"),
        ("it is old", "bfloat16", "bfloat16", "as set"),
        ("", "float32", "float32", "as set"),
        ("", "float64", "float64", "as set"),
    ],
)
def test_auto_is_the_dtype_that_the_devices_multiply_fastest(platforms, slow, chosen, found, why):
    platform = make("fast", why_bfloat16_is_slow=lambda self: slow) and PlatformRegistry.choose("fast")
    assert (compute_dtype(chosen, platform), why_compute_dtype(chosen, platform)) == (found, why)


@pytest.mark.parametrize("platform", [CpuPlatform(), CudaPlatform()], ids=["cpu", "cuda"])
def test_deterministic_kernels_come_with_the_variable_that_products_need(platform, monkeypatch):
    """Without it, torch refuses every product on an NVIDIA GPU."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("hone.platforms.base.current_platform", lambda: platform)
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    found = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", "")
    assert found == (":4096:8" if platform.device == "cuda" else "")
