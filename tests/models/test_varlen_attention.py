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
from tests.models.flash_on_cpu import flash_on_cpu


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
    """Torch's own registry of versions, with one whose kernels compute on a CPU."""
    torch_attention = torch.nn.attention
    kernels = []

    class Written:
        def __init__(self):
            self.context = flash_on_cpu()
            self.forwards = self.context.__enter__()
            kernels.append(self)

        def remove(self):
            self.context.__exit__(None, None, None)

    torch_attention.register_flash_attention_impl("written", register_fn=Written)
    monkeypatch.setenv(varlen.FLASH_VARIABLE, "written")
    varlen.has_kernel.cache_clear()
    q, k, v = inputs(300, torch.bfloat16, sinks=False)
    try:
        for _ in range(2):
            attend(q, k, v, packing_of([300], [None]), Scoring(0.3))
        assert torch_attention.current_flash_attention_impl() == "written"
        assert [one.forwards for one in kernels] == [[300, 300]]  # activated once, used twice
    finally:
        torch_attention.restore_flash_attention_impl()
        torch_attention._registry._FLASH_ATTENTION_IMPLS.pop("written")
        varlen.has_kernel.cache_clear()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FA5", r"HONE_FLASH_ATTENTION=FA5: torch \S+ knows FA3, FA4"),
        ("FA3", r"HONE_FLASH_ATTENTION=FA3: its kernels cannot be loaded \(No module named 'flash_attn_interface'\)"),
    ],
)
def test_a_version_that_is_not_here_is_one_error(name, problem, monkeypatch):
    monkeypatch.setenv(varlen.FLASH_VARIABLE, name)
    varlen.has_kernel.cache_clear()
    q, k, v = inputs(8, torch.bfloat16, sinks=False)
    with pytest.raises(ConfigError, match=problem):
        attend(q, k, v, packing_of([8], [None]), Scoring(0.3))
    monkeypatch.delenv(varlen.FLASH_VARIABLE)
    varlen.has_kernel.cache_clear()
