"""Whole runs: GRPO with every engine, on ranks under Ray, has the figures of one process with `fsdp2`."""

import pytest

from hone.config import load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import metrics, recipe

pytestmark = pytest.mark.slow

STEPS = ["run.steps=2", "model.build.layers=2", "actor.max_tokens_per_microbatch=64", "evaluation.every_steps=0"]
RAY = ["runtime.backend=ray", "runtime.backend.devices=2"]
LORA = ["actor.lora.rank=4", "actor.optimizer.lr=1e-2", "algorithm.kl.coef=0.1"]
MESHES = {
    "pipeline": ["actor.backend.name=megatron", "actor.backend.parallel.pipeline=2"],
    "automodel": ["actor.backend.name=automodel"],
    "veomni": ["actor.backend.name=veomni"],
    "torchtitan": ["actor.backend.name=torchtitan", "actor.backend.parallel.tensor=2"],
    "adapter": ["actor.backend.name=megatron", "actor.backend.parallel.tensor=2"],
}


def train(folder, *given):
    run_policy(load(PolicyRunConfig, recipe(folder), [*STEPS, *given]))
    return metrics(folder / "run")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_policy_run_on_two_ranks_is_that_of_one_process(tmp_path, mesh, needs_backend):
    needs_backend(MESHES[mesh][0].partition("=")[2])
    more = LORA if mesh == "adapter" else []
    ranks, alone = train(tmp_path / "ranks", *RAY, *MESHES[mesh], *more), train(tmp_path / "alone", *more)
    assert len(ranks) == len(alone) == 3
    for mine, theirs in zip(ranks, alone, strict=True):
        assert mine.keys() == theirs.keys()
        assert {k: mine[k] for k in theirs} == pytest.approx(theirs, abs=1e-5, rel=1e-5)


EXPERTS = [
    "model.build.architecture=qwen3_moe",
    "model.build.options={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16}",
    "actor.moe={routing_replay: rollout, router_aux_loss_coef: 0.01}",
]


def test_a_run_that_replays_the_experts_of_its_rollout_is_that_of_one_process(tmp_path, needs_backend):
    needs_backend("megatron")
    stages = ["actor.backend.name=megatron", "actor.backend.parallel.pipeline=2"]
    ranks, alone = train(tmp_path / "ranks", *RAY, *stages, *EXPERTS), train(tmp_path / "alone", *EXPERTS)
    assert "train/routes_replaced" in alone[1]
    for mine, theirs in zip(ranks, alone, strict=True):
        assert mine.keys() == theirs.keys()
        assert {k: mine[k] for k in theirs} == pytest.approx(theirs, abs=1e-5, rel=1e-5)
