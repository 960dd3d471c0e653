"""Weights, optimizer state and gradients move between the verbs (`offload`), and nothing else changes.

On a CPU there is nowhere to move to, so engines here copy everything to new memory instead, and free the old one: a
view that stayed behind would have other values.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from hone.data.packing import select
from hone_megatron.engine import MegatronEngine
from hone_megatron.moving import relocate
from tests.engines.contract.cases import (
    Mesh,
    make_batch,
    make_engine,
    own_part,
    policy,
    save_model,
    scores,
    train,
    weights,
)
from tests.ranks import run_ranks

OFFLOAD = {"offload": True}
CASES = {
    "float32": ("qwen3", {}),
    "bfloat16": ("qwen3", {"compute_dtype": "bfloat16"}),
    "adapter": ("qwen3", {"lora": {"rank": 4}, "compute_dtype": "bfloat16"}),
    "experts": ("gpt_oss", {}),
    "inference": ("qwen3", {"total_steps": 0, "compute_dtype": "bfloat16"}),
}


class Moving(MegatronEngine):
    """Moves on a CPU too."""

    def to(self, device, *, model=True, optimizer=True, grad=True):
        if model:
            old = {one.untyped_storage().data_ptr(): one.data for part in self._parts for one in part.parameters()}
        self._move(device, model=model, optimizer=optimizer, grad=grad)
        if model:
            new = {one.untyped_storage().data_ptr() for part in self._parts for one in part.parameters()}
            assert not new & old.keys()
            for one in old.values():
                one.fill_(float("nan"))
            for parameter in (one for part in self._parts for one in part.parameters()):
                here = parameter.data  # another dtype makes torch replace what another device does: see `keep_hooks`
                parameter.data = here.to(torch.float64)
                parameter.data = here
        if grad and self.trained:
            held = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in self.weights._memory)
            self.gradient_bytes = [*getattr(self, "gradient_bytes", ()), held]


def moving(mesh, folder, **settings):
    made = make_engine(Mesh("megatron", mesh.world, mesh.parallel, OFFLOAD), folder, **settings)
    engine = Moving(made.spec, "cpu")
    engine.initialize()
    return engine


def use(engine, saved):
    """What an engine makes of two steps, half a step in each of two calls, a checkpoint, and scores."""
    found = {**scores(engine)}
    if engine.trained:
        train(engine, range(2))
        engine.save_checkpoint(Path(saved))
        batch = make_batch(2)
        mine = own_part(engine, batch)
        for part in (mine[::2], mine[1::2]):
            engine.forward_backward(select(batch, part), policy)
        with engine.train_mode():
            engine.optimizer_step()
        with engine.train_mode():
            engine.train_batch(select(batch, mine), policy)
            engine.forward_backward(select(make_batch(4), own_part(engine, make_batch(4))), policy)
        with engine.train_mode():  # the gradients of that call have been away
            engine.optimizer_step()
        found |= {f"after {key}": one for key, one in scores(engine).items()}
        found |= {f"weight {key}": one for key, one in weights(engine).items()}
        engine.load_checkpoint(Path(saved))
        train(engine, [3])
    elif engine.adapter is None:
        found |= {f"before {key}": one for key, one in weights(engine).items()}
    return found | {f"last {key}": one for key, one in (scores(engine) | weights(engine)).items()}


def compare(mesh, folders, saved):
    for name, (model, settings) in CASES.items():
        wanted = use(make_engine(mesh, folders[model], **settings), saved)
        engine = moving(mesh, folders[model], **settings)
        found = use(engine, saved)
        assert found.keys() == wanted.keys()
        assert [key for key, one in found.items() if not torch.equal(one, wanted[key])] == [], name
        if engine.trained:
            away, back, *_ = engine.gradient_bytes
            assert away == 0 < back, "zero gradients should take no memory while the engine is idle"
            assert engine.memory_needs().kept == 0
            masters = sum(one.nbytes for one in engine.weights.masters.values())
            assert engine.memory_needs().training >= back + 2 * masters  # and Adam's moments
            assert make_engine(mesh, folders[model], **settings).memory_needs().training == 0


@pytest.mark.slow
def test_offload_changes_where_weights_are_and_nothing_else(tmp_path):
    folders = {name: save_model(name, tmp_path / name) for name in ("qwen3", "gpt_oss")}
    saved = tmp_path / "saved"
    saved.mkdir()
    run_ranks(2, compare, Mesh("megatron", 2), folders, str(saved))


def test_views_of_one_memory_stay_views_of_one_memory():
    whole = torch.arange(12.0)
    matrix, column = whole[2:8].view(2, 3), whole[3:8:3]
    parameter, alone = torch.nn.Parameter(matrix), torch.ones(3, dtype=torch.bfloat16)
    before = whole.untyped_storage().data_ptr()
    relocate([whole, matrix, column, parameter, alone], "cpu")
    assert whole.untyped_storage().data_ptr() != before
    assert column.tolist() == [3, 6]
    whole[3] = -1
    assert matrix.tolist() == parameter.tolist() == [[2, -1, 4], [5, 6, 7]]
    assert column.tolist() == [-1, 6]
    assert alone.tolist() == [1, 1, 1]


def refuse(folder):
    engine = make_engine(Mesh("megatron", 1, more=OFFLOAD), folder)
    with pytest.raises(ValueError, match="the megatron engine computes on cpu and moves to cpu only, not to cuda"):
        engine.to("cuda")


@pytest.mark.slow
def test_another_device_is_an_error(tmp_path):
    run_ranks(1, refuse, save_model("qwen3", tmp_path))
