"""Products of experts: torch's grouped one where the platform has it, and the same numbers one by one."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from hone.platforms.cpu import CpuPlatform
from hone.platforms.cuda import CudaPlatform
from hone_megatron.modules.experts import Experts, in_groups, one_by_one, product_for


class OldGpu(CudaPlatform):
    def why_bfloat16_is_slow(self):
        return "Volta"


class NewGpu(CudaPlatform):
    def why_bfloat16_is_slow(self):
        return ""


@pytest.mark.parametrize(
    ("dtype", "sizes", "platform", "wanted"),
    [
        (torch.float32, (32, 12), CpuPlatform, in_groups),
        (torch.bfloat16, (32, 24), CpuPlatform, in_groups),
        (torch.bfloat16, (32, 12), CpuPlatform, one_by_one),  # rows of 24 bytes
        (torch.float64, (32, 12), CpuPlatform, one_by_one),
        (torch.bfloat16, (32, 24), NewGpu, in_groups),
        (torch.bfloat16, (32, 24), OldGpu, one_by_one),
        (torch.float32, (32, 12), NewGpu, one_by_one),
    ],
)
def test_the_product_is_chosen_by_dtype_sizes_and_device(dtype, sizes, platform, wanted):
    assert product_for(dtype, sizes, platform()) is wanted


def _gradients(product, tokens, matrices, counts, expands):
    tokens, matrices = (one.detach().clone().requires_grad_() for one in (tokens, matrices))
    out = product(tokens, matrices.transpose(1, 2), counts)
    (out.sum() if expands else (out * out.detach().cos()).sum()).backward()
    return out.detach(), tokens.grad, matrices.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "expands"), [((4, 0, 7), False), ((0, 0, 5), True), ((0, 0, 0), False)])
def test_both_products_are_equal(dtype, counts, expands):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(counts), 16, generator=generator).to(dtype)
    matrices = torch.randn(3, 24, 16, generator=generator).to(dtype)
    found, wanted = (
        _gradients(product, tokens, matrices, torch.tensor(counts), expands) for product in (in_groups, one_by_one)
    )
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert found[2][1].count_nonzero() == 0, "no token went to the second expert"


def _experts(shared, dtype=torch.float64):
    config = SimpleNamespace(
        hidden_size=4, moe_ffn_hidden_size=6, expert_tensor_parallel_size=shared, params_dtype=dtype
    )
    return Experts(2, config)


def test_parts_of_experts_add_up_to_the_experts():
    """Two experts of 6 features: as formulas, on one rank, and on two ranks with 3 features each."""
    torch.manual_seed(0)
    gate, up, down = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((6, 4), (6, 4), (4, 6)))
    tokens, weights = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    counts = torch.tensor([2, 3])
    wanted = torch.stack(
        [
            weights[i] * (down[e] @ (F.silu(gate[e] @ tokens[i]) * (up[e] @ tokens[i])))
            for i, e in enumerate((0, 0, 1, 1, 1))
        ]
    )
    total = {}
    for shared in (1, 2):
        total[shared] = torch.zeros(5, 4, dtype=torch.float64)
        for rank in range(shared):
            mine = slice(rank * 6 // shared, (rank + 1) * 6 // shared)
            experts = _experts(shared)
            with torch.no_grad():
                experts.gate_up_proj.copy_(torch.cat([gate[:, mine], up[:, mine]], 1).flatten(0, 1))
                experts.down_proj.copy_(down[:, :, mine].flatten(0, 1))
                total[shared] += experts(tokens, counts, weights)[0]
            assert all(one.allreduce is False for one in experts.parameters())
        torch.testing.assert_close(total[shared], wanted)
