"""The RMS norm that takes the place of transformers' own: the same formula, and only where it was that."""

from types import MethodType

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from hone.models.numerics.fused_norm import by_torch, fuse_norms
from hone.platforms.base import current_platform

USUAL = [LlamaRMSNorm, MistralRMSNorm, Phi3RMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm]


def run(norm, x, upstream):
    out = norm(x)
    return out, *torch.autograd.grad(out, (x, norm.weight), upstream)


@pytest.mark.parametrize("cls", USUAL)
def test_the_usual_norms_are_recognised(cls):
    """Fails when transformers rewrites its norm: then the replacement is no longer in use, or no longer needed."""
    assert fuse_norms(torch.nn.Sequential(cls(4), cls(4))) == 2


@pytest.mark.parametrize(
    "way",
    ["written", pytest.param("by torch", id="by torch on a cpu"), pytest.param("accelerator", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("shape", [(1, 7, 16), (1, 5, 3, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float64, 0.0)])
def test_values_and_gradients_equal_those_of_transformers(shape, dtype, tolerance, way):
    """In float64 it is transformers' own. `by torch` is what accelerators run, here on the CPU."""
    device = current_platform().device if way == "accelerator" else "cpu"
    if way == "accelerator" and device == "cpu":
        pytest.skip("there is no accelerator here")
    theirs, ours = (Qwen3RMSNorm(16).to(device, dtype) for _ in range(2))
    with torch.no_grad():
        for norm in (theirs, ours):
            norm.weight.copy_(torch.linspace(0.5, 2, 16))
    assert fuse_norms(ours) == 1
    if way == "by torch" and dtype != torch.float64:
        ours.forward = MethodType(by_torch, ours)
    x = (3 * torch.randn(shape)).to(device, dtype).requires_grad_()
    upstream = torch.randn(shape).to(device, dtype).transpose(1, -2).contiguous().transpose(1, -2)
    for one, other in zip(run(ours, x, upstream), run(theirs, x, upstream), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max()))


def test_it_is_the_formula():
    norm = Qwen3RMSNorm(2, eps=0.0)
    fuse_norms(norm)
    x = torch.tensor([[3.0, 4.0]], requires_grad=True)  # root mean square: sqrt(12.5)
    torch.testing.assert_close(norm(x), torch.tensor([[3.0, 4.0]]) / 12.5**0.5)
    assert torch.autograd.gradcheck(
        lambda y: norm(y.float()).double(), (x.detach().double().requires_grad_(),), eps=1e-3, atol=1e-3, nondet_tol=0
    )


def test_another_formula_and_other_models_are_left_alone():
    assert fuse_norms(torch.nn.Sequential(Gemma2RMSNorm(4), torch.nn.LayerNorm(4), torch.nn.RMSNorm(4))) == 0
    one, other = LlamaRMSNorm(4), LlamaRMSNorm(4)
    fuse_norms(one)
    assert other.forward.__func__ is LlamaRMSNorm.forward
