"""Flex attention's mask, soft caps and sinks against attention written out.

Its kernels need an accelerator; on a CPU torch runs the same functions without generating code.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from hone.models.attention import flex
from hone.models.attention.packed import Run, Scoring, attend, flex_rows
from hone.platforms.base import current_platform
from tests.models.dense_attention import (
    HEADS,
    PACKINGS,
    SCORINGS,
    dense,
    inputs,
    outputs_and_gradients,
    packing_of,
    visible,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
WINDOWS = [None, 17, 150]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", PACKINGS)
def test_values_equal_attention_written_out(name, scoring, window):
    (lengths, parents), (softcap, sinks) = PACKINGS[name], SCORINGS[scoring]
    q, k, v, *rest = (x.detach() for x in inputs(sum(lengths), torch.float32, sinks, value_size=32))
    asked = Scoring(0.3, window, softcap=softcap, sinks=rest[0] if rest else None)
    out = flex_rows(q, k, v, packing_of(lengths, parents), asked)
    wide = replace(asked, sinks=rest[0].double() if rest else None)
    exact = dense(q.double(), k.double(), v.double(), visible(lengths, parents, window), wide)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    narrow = replace(asked, sinks=rest[0].bfloat16() if rest else None)
    out = flex_rows(q.bfloat16(), k.bfloat16(), v.bfloat16(), packing_of(lengths, parents), narrow)
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).norm() < 0.01 * exact.norm()


def listed(counts, indices):
    """The table of blocks as [blocks, blocks] bool."""
    table = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        table[row, indices[0, 0, row, :count].long()] = True
    return table


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", PACKINGS)
def test_blocks_hold_what_is_visible(name, window):
    """A block in no table is skipped; one of the full blocks is computed without asking the mask."""
    lengths, parents = PACKINGS[name]
    packing, seen = packing_of(lengths, parents), visible(lengths, parents, window)
    total = sum(lengths)
    flex_rows(*(x.detach() for x in inputs(total, torch.float32, False)), packing, Scoring(1.0, window))
    mask = packing.masks[window]
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    assert not (full & partial).any()
    number = len(full)
    padded = torch.nn.functional.pad(seen, (0, -total % 128, 0, -total % 128))
    blocks = padded.view(number, 128, number, 128).transpose(1, 2)
    assert not (blocks.flatten(2).any(-1) & ~(full | partial)).any()
    rows = torch.arange(number * 128).view(number, 1, 128, 1) < total  # queries beyond the row's end do not count
    assert (blocks | ~rows)[full].all()
    if name == "one" and window is None:
        assert full.tolist() == [[False, False, False], [True, False, False], [True, True, False]]
        assert partial.tolist() == torch.eye(3).bool().tolist()
    if name == "mixed" and window == 17:
        assert (full | partial).sum() < number * (number + 1) / 2  # less than without the window


def test_layers_with_one_window_share_a_mask():
    lengths, parents = PACKINGS["prefixes"]
    packing = packing_of(lengths, parents)
    tensors = [x.detach() for x in inputs(sum(lengths), torch.float32, False)]
    with torch.inference_mode():
        flex_rows(*tensors, packing, Scoring(0.3, 17, softcap=2.0))
    first = packing.masks[17]
    assert not first.kv_indices.is_inference()  # a training forward may need it
    flex_rows(*tensors, packing, Scoring(0.3, 17, softcap=2.0))
    flex_rows(*tensors, packing, Scoring(0.3, softcap=2.0))
    assert packing.masks[17] is first
    assert set(packing.masks) == {17, None}
    longer = replace(packing, lengths=(*packing.lengths, 2), runs=(*packing.runs, Run(1, 2)))
    assert longer.masks == {}  # another row, another mask


@pytest.mark.slow
def test_what_it_compiles_serves_every_packing(monkeypatch):
    """New lengths, windows and prefixes reuse the traced graph: compiling takes longer than a step."""
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend=count, dynamic=True, fullgraph=True)
    monkeypatch.setattr(flex, "flex_attention", compiled)  # `_compiled`, with a backend that runs on a CPU
    for name in ("prefixes", "mixed", "one"):
        lengths, parents = PACKINGS[name]
        for window in WINDOWS:
            *tensors, sinks = (x.detach() for x in inputs(sum(lengths), torch.float32, True))
            packing, asked = packing_of(lengths, parents), Scoring(0.3, window, softcap=2.0, sinks=sinks)
            out = flex_rows(*tensors, packing, asked)
            torch.testing.assert_close(out, attend(*tensors, packing, asked), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def test_a_cpu_has_no_kernel():
    q = torch.zeros(1, 4, 8, 32, dtype=torch.bfloat16)
    assert not flex.fits(q, q)


@pytest.mark.gpu
@pytest.mark.skipif("flex" not in current_platform().attention_kernels, reason="no flex attention on this device")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_the_kernel_is_as_close_as_tiles(scoring, window):
    (lengths, parents), (softcap, sinks) = PACKINGS["prefixes"], SCORINGS[scoring]
    packing, total = packing_of(lengths, parents), sum(lengths)
    narrow = inputs(total, torch.bfloat16, sinks, size=64, value_size=64)
    upstream = torch.randn(1, HEADS, total, 64).bfloat16()
    seen = visible(lengths, parents, window)
    wide = [x.detach().double().requires_grad_() for x in narrow]
    exact = outputs_and_gradients(lambda *given: dense(*given[:3], seen, given[3]), wide, upstream, softcap, window)
    tiles = outputs_and_gradients(
        lambda q, k, v, asked: attend(q, k, v, packing, asked), narrow, upstream, softcap, window
    )
    device = current_platform().device
    there = [x.detach().to(device).requires_grad_() for x in narrow]
    placed = packing_of(lengths, parents, there[0].device)
    assert flex.fits(there[0], there[2])
    found = outputs_and_gradients(
        lambda q, k, v, asked: attend(q, k, v, placed, asked), there, upstream.to(device), softcap, window
    )
    for one, other, expected in zip(found, tiles, exact, strict=True):
        error, allowed = ((x.double().cpu() - expected).norm() / expected.norm() for x in (one, other))
        assert error < 2 * allowed + 0.01


@pytest.mark.slow
def test_a_process_may_have_many_kernels():
    """A process with several models may need more than eight, which is torch's limit; the ninth ended the run."""
    packing = packing_of(*PACKINGS[next(iter(PACKINGS))])
    mask = flex.block_mask(*flex.ranges(packing.runs, None, torch.device("cpu")))
    q, k = torch.randn(1, 4, packing.num_tokens, 32), torch.randn(1, 2, packing.num_tokens, 32)
    torch._dynamo.reset()
    for softcap in range(10, 22):
        bend = flex._capped(float(softcap))
        found = flex._compiled("eager")(q, k, k, bend, mask, 0.2, True)
        torch.testing.assert_close(found, flex_attention(q, k, k, bend, mask, 0.2, True))


def test_the_soft_cap_is_a_number_in_what_is_compiled():
    """Lengths are dynamic there, and torch would make a tensor of every other number too: no kernel can read it."""
    found = []

    def backend(graph, _):
        found.extend(part.code for name, part in graph.named_modules() if name.startswith("score_mod"))
        return graph.forward

    packing = packing_of(*PACKINGS[next(iter(PACKINGS))])
    tokens = packing.num_tokens
    mask = flex.block_mask(*flex.ranges(packing.runs, None, torch.device("cpu")))
    q, k = torch.randn(1, 4, tokens, 32), torch.randn(1, 2, tokens, 32)
    flex._compiled(backend)(q, k, k, flex._capped(30.0), mask, 0.2, True)
    assert len(found) == 1
    assert "30.0 * tanh" in found[0]
    assert "item" not in found[0]
