"""Quantised optimizer state in other parts than it was stored in."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hone.engines.checkpoint.eight_bit import has_blocks, part_name, recut
from hone.engines.checkpoint.files import OPTIMIZER, CheckpointError, PartsReader, part_file, snapshot
from hone.engines.checkpoint.optimizer_state import optimizer_parts, read_optimizer
from hone.engines.parts import Piece, Whole

bitsandbytes = pytest.importorskip("bitsandbytes", reason="comes with hone-rl[qlora]")

ROWS, COLUMNS = 64, 48


@dataclass(frozen=True)
class Runs:
    """The part of a weight that consists of these runs of its rows and columns."""

    rows: tuple[tuple[int, int], ...] = ((0, ROWS),)
    columns: tuple[tuple[int, int], ...] = ((0, COLUMNS),)
    shape: tuple[int, int] = (ROWS, COLUMNS)
    is_owner: bool = True

    def pieces(self):
        found, row = [], 0
        for first, last in self.rows:
            column = 0
            for left, right in self.columns:
                at = slice(row, row + last - first), slice(column, column + right - left)
                found.append(Piece((first, left), (last - first, right - left), at))
                column += right - left
            row += last - first
        return found

    def local_shape(self):
        return [sum(last - first for first, last in side) for side in (self.rows, self.columns)]

    def of(self, whole):
        """This part of a whole tensor, whose last dimensions are rows and columns."""
        rows = torch.cat([torch.arange(*run) for run in self.rows])
        return whole[..., rows, :][..., torch.cat([torch.arange(*run) for run in self.columns])]


HALVES = [Runs(rows=((0, 40),)), Runs(rows=((40, ROWS),))]
GATE_AND_UP = [Runs(rows=((0, 16), (32, 48))), Runs(rows=((16, 32), (48, 64)))]  # as fused matrices are cut
COLUMN_HALVES = [Runs(columns=((0, 20),)), Runs(columns=((20, COLUMNS),))]
CUTS = {"whole": [Runs()], "rows": HALVES, "fused": GATE_AND_UP, "columns": COLUMN_HALVES}


def stepped(name, shard, gradient, smallest):
    """An optimizer of one part of a weight after one step."""
    weight = nn.Parameter(torch.zeros(shard.local_shape()))
    weight.grad = shard.of(gradient).contiguous()
    optimizer = getattr(bitsandbytes.optim, name)([weight], lr=1e-3, min_8bit_size=smallest)
    optimizer.step()
    return weight, optimizer


def save(folder, name, cut, gradient, smallest=256):
    for rank, shard in enumerate(cut):
        weight, optimizer = stepped(name, shard, gradient, smallest)
        tensors, plain = optimizer_parts(optimizer, [("layer.weight", weight, shard)])
        snapshot(folder / part_file(OPTIMIZER, rank, len(cut)), tensors)()
    return PartsReader(folder, OPTIMIZER, len(cut)), plain


def restored(reader, plain, name, shard, smallest=256):
    """State of a part as `read_optimizer` gives it, and a weight to put it on."""
    weight = nn.Parameter(torch.zeros(shard.local_shape()))
    optimizer = getattr(bitsandbytes.optim, name)([weight], lr=1e-3, min_8bit_size=smallest)
    state = read_optimizer(reader, [("layer.weight", weight, shard)], plain, optimizer)[weight]
    return state, weight, optimizer


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdEMAMix8bit"])
@pytest.mark.parametrize(("stored", "own"), list(itertools.permutations(CUTS, 2)))
def test_values_that_codes_give_exactly_survive_any_cut(stored, own, name, tmp_path):
    """Gradients of 0 and 1 have moments of 0 and one scale, which the codes 0 and 1 give in any block."""
    gradient = torch.randint(0, 2, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0)).float()
    gradient[:, ::12] = gradient[::8] = 1  # each block has a 1
    reader, plain = save(tmp_path, name, CUTS[stored], gradient)
    for shard in CUTS[own]:
        state, weight, optimizer = restored(reader, plain, name, shard)
        _, expected = stepped(name, shard, gradient, 256)
        (fresh,) = expected.state.values()
        assert state.keys() == fresh.keys()
        for key, value in fresh.items():
            same = torch.equal(state[key], value) if torch.is_tensor(value) else state[key] == value
            assert same, key
        optimizer.state[weight].update(state)
        weight.grad = shard.of(gradient).contiguous()
        optimizer.step()


def test_random_moments_are_rounded_once_more(tmp_path):
    from bitsandbytes.functional import dequantize_blockwise

    gradient = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    reader, plain = save(tmp_path, "AdamW8bit", HALVES, gradient)
    state, *_ = restored(reader, plain, "AdamW8bit", Runs())
    found = dequantize_blockwise(state["state1"].view(-1), absmax=state["absmax1"], code=state["qmap1"], blocksize=256)
    gap = (found.view(ROWS, COLUMNS) - 0.1 * gradient).abs()
    steps = state["absmax1"].max() * state["qmap1"].diff().max()  # between neighbouring codes, at most
    assert gap.max() <= steps  # two roundings of half a step
    assert gap.mean() < 0.01 * (0.1 * gradient).abs().max()


@pytest.mark.parametrize(("stored", "own"), [(256, 4096), (4096, 256)])
def test_parts_change_between_float32_and_codes(stored, own, tmp_path):
    gradient = torch.ones(ROWS, COLUMNS)
    reader, plain = save(tmp_path, "AdamW8bit", HALVES, gradient, stored)
    state, *_ = restored(reader, plain, "AdamW8bit", COLUMN_HALVES[0], own)
    _, expected = stepped("AdamW8bit", COLUMN_HALVES[0], gradient, own)
    (fresh,) = expected.state.values()
    assert state["state1"].dtype == (torch.float32 if own == 4096 else torch.uint8)
    assert all(torch.equal(state[key], value) for key, value in fresh.items() if torch.is_tensor(value))


def test_a_part_that_is_missing_is_named(tmp_path):
    reader, _ = save(tmp_path, "AdamW8bit", HALVES[:1], torch.ones(ROWS, COLUMNS))
    optimizer = bitsandbytes.optim.AdamW8bit([nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(CheckpointError, match=r"optimizer-\*.*parts of layer.weight/state1 are missing"):
        recut(reader, list(reader.shapes), Runs(), optimizer)


def test_state_that_is_no_codes_and_scales_is_refused(tmp_path):
    snapshot(tmp_path / part_file(OPTIMIZER, 0, 1), [("layer.weight/unorm_vec", torch.zeros(1), Whole((1,)))])()
    reader = PartsReader(tmp_path, OPTIMIZER, 1)
    with pytest.raises(CheckpointError, match=r"unorm_vec of layer.weight cannot be cut for another mesh"):
        recut(reader, list(reader.shapes), HALVES[0], SimpleNamespace())


def test_blocks_of_a_part_are_found_by_its_name():
    names = [f"layer.weight/state1@{part_name(one)}" for one in GATE_AND_UP]
    assert names[0] == "layer.weight/state1@0,0+16,48;32,0+16,48"
    assert has_blocks(names, part_name(GATE_AND_UP[1]))
    assert not has_blocks(names, part_name(HALVES[0]))
    assert has_blocks([], part_name(HALVES[0]))  # no step was made yet
