"""Packed attention by FlashAttention: what hone passes to its kernels, against attention written out.

The kernels exist for GPUs alone; here the same calls reach `flash_on_cpu`, which also checks what they require.
"""

import pytest
import torch

from hone.config import ConfigError
from hone.models.attention import varlen
from hone.models.attention.packed import Scoring, attend
from hone.platforms.base import current_platform
from tests.models.dense_attention import PACKINGS, dense, inputs, outputs_and_gradients, packing_of, visible
from tests.models.flash_on_cpu import flash_on_cpu, version_on_cpu


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu":
        with flash_on_cpu() as forwards:
            yield "cpu"
        assert forwards, "another kernel was chosen"
        return
    platform = current_platform()
    if not varlen.has_kernel(platform.device):
        pytest.skip(f"torch has no FlashAttention for {platform.name}")
    yield platform.device


@pytest.mark.parametrize("window", [None, 17, 150])
@pytest.mark.parametrize("name", PACKINGS)
def test_values_and_gradients_equal_attention_written_out(name, window, device):
    lengths, parents = PACKINGS[name]
    tokens = inputs(sum(lengths), torch.bfloat16, sinks=False)
    upstream = torch.randn(1, tokens[0].shape[1], sum(lengths), 16)
    placed = [x.detach().to(device).requires_grad_() for x in tokens]
    packing = packing_of(lengths, parents, device)
    found = outputs_and_gradients(
        lambda q, k, v, scoring: attend(q, k, v, packing, scoring), placed, upstream.to(device), None, window
    )
    seen = visible(lengths, parents, window)
    exact = outputs_and_gradients(
        lambda q, k, v, scoring: dense(q, k, v, seen, scoring),
        [x.detach().double().requires_grad_() for x in tokens],
        upstream,
        None,
        window,
    )
    for one, right in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert one.shape == right.shape
        assert (one.cpu().double() - right).norm() < 0.01 * right.norm()


def test_another_version_is_chosen_by_the_environment(monkeypatch):
    q, k, v = inputs(300, torch.bfloat16, sinks=False)
    with version_on_cpu(monkeypatch, "FA4") as activated:
        for _ in range(2):
            attend(q, k, v, packing_of([300], [None]), Scoring(0.3))
        assert torch.nn.attention.current_flash_attention_impl() == "FA4"
        assert [[one["max_k"] for one in forwards] for forwards in activated] == [[300, 300]]  # once, and used twice


@pytest.mark.skipif(not varlen.PAGES, reason="this torch's varlen_attn reads no pages")
@pytest.mark.parametrize(
    ("name", "capability", "reads"), [("FA3", 9, True), ("FA4", 9, False), ("FA4", 10, True), ("other", 9, False)]
)
def test_which_versions_read_a_cache(name, capability, reads, monkeypatch):
    """Version 4 reads pages on Blackwell only; of another, nothing is known."""
    with version_on_cpu(monkeypatch, name):
        monkeypatch.setattr(varlen, "_capability", lambda device: capability)
        assert varlen.has_kernel("cpu")
        assert varlen.reads_caches(torch.device("cpu"), torch.bfloat16) is reads
    with flash_on_cpu():  # as version 2
        assert not varlen.reads_caches(torch.device("cpu"), torch.bfloat16)


@pytest.mark.skipif(not varlen.PAGES, reason="this torch's varlen_attn reads no pages")
def test_a_kernel_that_reads_a_cache_wrongly_is_found_before_it_is_used(monkeypatch):
    """As version 2 did: rows after the first were not written."""
    right = varlen.attend_cached
    first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.bfloat16)[:, None, None]
    monkeypatch.setattr(varlen, "attend_cached", lambda *args: right(*args) * first)
    problem = r"FlashAttention \(FA3\) over a KV cache differs .*Run without HONE_FLASH_ATTENTION"
    with version_on_cpu(monkeypatch, "FA3"):
        assert varlen.has_kernel("cpu")
        with pytest.raises(RuntimeError, match=problem):
            varlen.reads_caches(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "capability", "problem"),
    [
        ("FA5", 9, r"HONE_FLASH_ATTENTION=FA5: torch \S+ knows FA3, FA4"),
        ("FA3", 8, r"HONE_FLASH_ATTENTION=FA3 needs compute capability 9\.x; this device has 8\.x"),
        (
            "FA3",
            9,
            r"HONE_FLASH_ATTENTION=FA3: its kernels cannot be loaded \(No module named 'flash_attn_interface'\)",
        ),
    ],
)
def test_a_version_that_cannot_be_used_is_one_error(name, capability, problem, monkeypatch):
    monkeypatch.setenv(varlen.FLASH_VARIABLE, name)
    monkeypatch.setattr(varlen, "_capability", lambda device: capability)
    varlen.has_kernel.cache_clear()
    q, k, v = inputs(8, torch.bfloat16, sinks=False)
    with pytest.raises(ConfigError, match=problem):
        attend(q, k, v, packing_of([8], [None]), Scoring(0.3))
    monkeypatch.delenv(varlen.FLASH_VARIABLE)
    varlen.has_kernel.cache_clear()


def test_a_cpu_beside_gpus_needs_no_version(monkeypatch):
    monkeypatch.setenv(varlen.FLASH_VARIABLE, "FA3")
    varlen.has_kernel.cache_clear()
    assert not varlen.has_kernel("cpu")
    monkeypatch.delenv(varlen.FLASH_VARIABLE)
    varlen.has_kernel.cache_clear()
