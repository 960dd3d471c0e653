"""Blending whole weights into an engine: hand-computed values in one process and on meshes, and its checkpoint."""

import pytest
import torch

from hone.engines.checkpoint.files import CheckpointError
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.models.settings import BuildConfig, ModelConfig
from tests.engines.conftest import BUILD
from tests.engines.spread import Case, make_engine
from tests.ranks import run_ranks

MOE = {"architecture": "qwen3_moe"}
CASES = [
    Case(),
    Case(parallel={"tensor": 2}),
    Case(**MOE, parallel={"expert": 2}),
    Case("gpt2", parallel={"replicate": 2}),  # its head is tied to its embeddings
    Case(offload=True),
]


def weights(engine: Fsdp2Engine):
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def blend_cases(cases, folder):
    """The weights before and after a quarter of the way to 1.0, and after the checkpoint of that was loaded."""
    found = {}
    for number, case in enumerate(cases):
        engine = make_engine(case, follows=True)
        before = weights(engine)
        engine.blend({name: torch.ones_like(one) for name, one in before.items()}, 0.25)
        after = weights(engine)
        there = folder / str(number)
        there.mkdir(exist_ok=True)
        engine.save_checkpoint(there)
        engine.ranks.meet()
        other = make_engine(case, follows=True)
        other.load_checkpoint(there)
        for kind, one in (("before", before), ("after", after), ("loaded", weights(other))):
            found |= {f"{number}/{kind}/{name}": tensor for name, tensor in one.items()}
    return found


def assert_blended(found):
    befores = {name: one for name, one in found.items() if "/before/" in name}
    assert befores
    for name, before in befores.items():
        after = found[name.replace("/before/", "/after/")]
        torch.testing.assert_close(after, 0.25 + 0.75 * before, rtol=1e-6, atol=1e-7, msg=name)
        assert torch.equal(found[name.replace("/before/", "/loaded/")], after), name


def test_every_weight_is_blended_in_one_process(tmp_path):
    assert_blended(blend_cases([Case(), Case(**MOE), Case("gpt2"), Case(offload=True)], tmp_path))


@pytest.mark.slow
def test_every_weight_is_blended_on_a_mesh(tmp_path):
    for found in run_ranks(2, blend_cases, CASES, tmp_path):
        assert_blended(found)


def test_a_name_or_a_shape_that_the_model_has_not_is_an_error(make_engine):
    engine = make_engine(total_steps=0, follows=True)
    with pytest.raises(ValueError, match="the model has no weight lm_tail, which is to be blended"):
        engine.blend({"lm_tail": torch.zeros(1)}, 0.5)
    with pytest.raises(ValueError, match=r"model.norm.weight is \[32\], .* is \[3\]"):
        engine.blend({"model.norm.weight": torch.zeros(3)}, 0.5)


def test_a_trained_model_does_not_take_the_checkpoint_of_one_that_follows(make_engine, tmp_path):
    engine = make_engine(total_steps=0, follows=True)
    engine.save_checkpoint(tmp_path)
    trained = make_engine(model=ModelConfig(build=BuildConfig(**{**BUILD.model_dump(exclude_unset=True), "seed": 3})))
    with pytest.raises(CheckpointError, match="was written with no optimizer, this run's optimizer is AdamW"):
        trained.load_checkpoint(tmp_path)
