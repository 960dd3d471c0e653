"""Adapters by hand: of a matrix that every tensor rank has whole, with two layers in it, and of some experts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from hone_megatron.adapters import AdaptedLinear, Target
from hone_megatron.modules.expert_adapters import ExpertAdapter
from hone_megatron.modules.experts import in_groups, one_by_one
from hone_megatron.names import Box


def _target(name, rows, first):
    """A layer of 4 outputs and 5 inputs, of which the matrix has some rows."""
    peft = SimpleNamespace(disable_adapters=False, scaling={"default": 3.0})
    layer = SimpleNamespace(module=peft, tensor=lambda adapter, part: f"{name}.{part}.{adapter}.weight")
    height = rows[1] - rows[0]
    return Target(layer, "model.", [Box(f"model.{name}.weight", (4, 5), (first, 0), (height, 5), rows, True)])


def test_rows_of_each_layer_get_its_own_adapter():
    base = nn.Linear(5, 6, bias=False)
    targets = [_target("k_proj", (4, 6), 2), _target("q_proj", (0, 3), 1)]
    adapted = AdaptedLinear(base, targets, 2, SimpleNamespace(sequence_parallel=True, params_dtype=torch.float32))
    for weight in (*adapted.lora_A, *adapted.lora_B):
        nn.init.normal_(weight)
        assert weight.sequence_parallel, "each tensor rank has the gradient of its own tokens"
    x = torch.randn(7, 1, 5)
    (k_in, q_in), (k_out, q_out) = adapted.lora_A, adapted.lora_B
    wanted = base.weight.detach().clone()
    wanted[4:6] += 3 * k_out @ k_in
    wanted[0:3] += 3 * q_out @ q_in
    torch.testing.assert_close(adapted(x), x @ wanted.T)
    for target in targets:
        target.layer.module.disable_adapters = True
    assert torch.equal(adapted(x), base(x))
    for is_first in (True, False):
        table = adapted.boxes(is_first)
        assert table[q_in] == [Box("model.q_proj.lora_A.default.weight", (2, 5), (0, 0), (2, 5), (0, 2), is_first)]
        assert table[q_out] == [Box("model.q_proj.lora_B.default.weight", (4, 2), (1, 0), (3, 2), (0, 3), is_first)]


EXPERTS, INPUTS, OUTPUTS = 5, 16, 24  # this rank has experts 2 and 3
CUTS = {  # which inputs and which outputs of each expert this rank has
    "whole": ([(0, 16)], [(0, 24)]),
    "gate and up": ([(0, 16)], [(4, 4), (16, 4)]),
    "inputs": ([(8, 8)], [(0, 24)]),
}


def _boxes(cut, turned):
    """Boxes of a weight of experts, as a mesh cuts it: [experts, out, in], or turned."""
    (columns,), rows = CUTS[cut]
    boxes, at = [], 0
    for expert in (2, 3):
        for row in rows:
            sides, whole = [row, columns], [OUTPUTS, INPUTS]
            (offset, shape), sizes = zip(*sides[:: -1 if turned else 1], strict=True), whole[:: -1 if turned else 1]
            boxes.append(
                Box("weight", (EXPERTS, *sizes), (expert, *offset), (1, *shape), (at, at + shape[0]), is_owner=True)
            )
            at += shape[0]
    return boxes


def _on_experts(cut, turned, rank, dtype, is_first=True):
    peft = SimpleNamespace(disable_adapters=False, scaling={"default": 3.0})
    layer = SimpleNamespace(
        module=peft, tensor=lambda _, part: f"experts.{part}.weight", shape=SimpleNamespace(turned=turned)
    )
    ranks = SimpleNamespace(expert_tensor_rank=0 if is_first else 1, sizes=SimpleNamespace(expert_tensor=1))
    config = SimpleNamespace(params_dtype=dtype)
    return ExpertAdapter(layer, "model.", _boxes(cut, turned), rank, config, ranks), layer.module


@pytest.mark.parametrize(
    ("rank", "dtype", "product"),
    [(4, torch.float32, in_groups), (3, torch.float32, one_by_one), (8, torch.bfloat16, in_groups)],
    ids=["grouped", "one by one", "bfloat16"],
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_experts_get_their_part_of_what_peft_keeps_for_all(cut, turned, rank, dtype, product):
    torch.manual_seed(0)
    adapter, peft = _on_experts(cut, turned, rank, dtype)
    whole = {
        "model.experts.lora_A.weight": torch.randn(EXPERTS * rank, INPUTS).to(dtype),
        "model.experts.lora_B.weight": torch.randn(OUTPUTS, rank * EXPERTS).to(dtype),
    }
    for parameter, boxes in adapter.boxes().items():
        assert boxes[0].rows[0] == 0
        assert boxes[-1].rows[1] == len(parameter)
        for box in boxes:
            assert box.whole == whole[box.name].shape
            (row, column), (height, width) = box.offset, box.shape
            with torch.no_grad():
                parameter[slice(*box.rows)] = whole[box.name][row : row + height, column : column + width]
    ((first, columns),), rows = CUTS[cut]
    tokens, counts = torch.randn(5, columns).to(dtype), torch.tensor([2, 3])
    out = torch.randn(5, sum(height for _, height in rows)).to(dtype)
    a, b = (one.float() for one in whole.values())
    mine = torch.cat([torch.arange(row, row + height) for row, height in rows])
    wanted = []
    for token, expert in zip(tokens.float(), (2, 2, 3, 3, 3), strict=True):
        a_of, b_of = a[expert * rank : (expert + 1) * rank], b[:, expert::EXPERTS]
        wanted.append(3 * b_of[mine] @ (a_of[:, first : first + columns] @ token))
    found = adapter(out, tokens, counts)
    assert found.dtype == dtype
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.5}
    torch.testing.assert_close(found.float(), out.float() + torch.stack(wanted), **close)
    assert adapter._product is product
    peft.disable_adapters = True
    assert torch.equal(adapter(out, tokens, counts), out)


def test_what_ranks_that_share_experts_all_hold_is_written_by_the_first():
    owns = {}
    for cut in CUTS:
        for is_first in (True, False):
            adapter, _ = _on_experts(cut, False, 2, torch.float32, is_first)
            owns[cut, is_first] = [boxes[0].is_owner for boxes in adapter.boxes().values()]  # of A, of B
    assert owns == {
        ("whole", True): [True, True],
        ("whole", False): [False, False],
        ("gate and up", True): [True, True],
        ("gate and up", False): [False, True],
        ("inputs", True): [True, True],
        ("inputs", False): [True, False],
    }
