"""Weights that a mixture keeps in float32 reach the rollout in float32, when everything else is in bfloat16."""

import asyncio

import pytest
import torch

from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams
from hone.weights.in_process import sync
from hone.workers.rollout import engine_config
from hone.workers.train import TrainSpec, TrainWorker
from tests.families.families import FAMILIES, save

WIDE_WEIGHTS = {  # what each family keeps in float32
    "DeepSeek-V3": ["e_score_correction_bias"],
    "GLM-4-MoE": ["e_score_correction_bias"],
    "ERNIE 4.5 MoE": ["gate.weight", "e_score_correction_bias"],
}
ROUTER_BIAS = 5.4  # neighbours in bfloat16 are 1/32 apart there; the router's scores lie within (0, 1)


@pytest.fixture(params=WIDE_WEIGHTS)
def family(request):
    return request.param


@pytest.fixture
def model(family, tmp_path):
    def shift(name, tensor):
        if "e_score_correction_bias" in name:
            tensor += ROUTER_BIAS

    return ModelConfig(path=str(save(FAMILIES[family], tmp_path / "model", change=shift)))


def test_a_rollout_in_bfloat16_holds_them_as_the_trainer_does_and_samples_alike(model, family):
    trainer = TrainWorker(TrainSpec(model, EngineConfig(compute_dtype="bfloat16")))
    trainer.initialize()
    rollout = BuiltinEngine(BuiltinSettings(max_sequence_tokens=64), engine_config(model, "bfloat16"))

    async def sample():
        await sync(trainer.weights(torch.bfloat16), rollout.update_weights, 0)  # raises if a digest differs
        asked = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
        return [await rollout.generate(GenerationRequest(str(i), (10 + i, 11, 12, 13), asked)) for i in range(4)]

    sampled = asyncio.run(sample())
    masters = dict(trainer.engine.get_per_tensor_param()[0])
    wide = {name: one for name, one in rollout.weights().items() if one.dtype == torch.float32}
    expected = {name for name in masters if any(part in name for part in WIDE_WEIGHTS[family])}
    assert wide.keys() == expected != set()
    assert all(torch.equal(wide[name], masters[name]) for name in wide)
    assert {one.dtype for name, one in rollout.weights().items() if name not in wide} == {torch.bfloat16}

    samples = [
        Sample((10 + i, 11, 12, 13, *one.token_ids), (0,) * 4 + (1,) * len(one.token_ids))
        for i, one in enumerate(sampled)
    ]
    batch = pack_samples(samples)
    theirs = torch.tensor([logprob for one in sampled for logprob in one.logprobs])
    gap = (trainer.infer_batch(batch).logprobs[batch.loss_mask] - theirs).abs().mean()
    assert gap < 0.03
