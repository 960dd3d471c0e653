"""Real servers say how likely they find tokens: as the plain forward, and as a teacher of a distillation run."""

import asyncio

import pytest
import torch

from hone.cli.recipe import load_recipe
from hone.models.settings import BuildConfig, ModelConfig
from hone.trainers.run.launch import run_policy
from hone.trainers.run.run_model import local_model
from tests.rollout.conftest import REAL
from tests.trainers.tiny import BASE, metrics, recipe

BACKENDS = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
SEQUENCES = [tuple(range(10, 10 + n)) for n in (2, 25, 7, 18, 7)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_scores_with_the_weights_of_its_folder(backend, real_adapter, runner, tiny, forward):
    server = real_adapter(backend, lora={"frozen": True})
    model = tiny(REAL[backend].model)

    async def ask():
        await server.start()
        try:
            plain = await asyncio.gather(*(server.score(f"p{i}", one) for i, one in enumerate(SEQUENCES)))
            top = await asyncio.gather(*(server.score(f"t{i}", one, 5) for i, one in enumerate(SEQUENCES)))
            with pytest.raises(ValueError, match="vocabulary"):
                await server.score("wrong", (1, 10**6))
            return plain, top
        finally:
            await server.close()

    plain, top = runner.run(ask())
    for sequence, scored, more in zip(SEQUENCES, plain, top, strict=True):
        expected = forward(model, sequence)[:-1].log_softmax(-1)
        sampled = expected.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        for one in (scored, more):
            assert one.logprobs[0] == 0.0
            torch.testing.assert_close(torch.tensor(one.logprobs[1:]), sampled, atol=1e-4, rtol=0)
        assert scored.top_ids == ()
        assert more.top_ids[0] == ()
        likely, ids = expected.topk(5)
        assert torch.tensor(more.top_ids[1:]).tolist() == ids.tolist()
        torch.testing.assert_close(torch.tensor(more.top_logprobs[1:]), likely, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_servers_view_is_that_of_a_training_engine(backend, real_python, tmp_path):
    wide = {**BASE["model"]["build"], "hidden_size": 64, "head_size": 32, "kv_heads": 2, "max_positions": 64, "seed": 6}
    path = str(local_model(ModelConfig(build=BuildConfig(**wide)), tmp_path / "teacher").path)
    served = {
        "served_by": "rollout",
        "rollout": {
            "backend": backend,
            "python": str(real_python(backend)),
            "engine": REAL[backend].small,
            "start_timeout_s": REAL[backend].start_timeout_s,
        },
    }

    def first_step(name, **teacher):
        section = {"teachers": {"t": {"model": {"path": path}, **teacher}}, "loss": {"name": "forward_top_k", "k": 3}}
        short = {"run": {"steps": 1}, "evaluation": {}, "kind": "distill", "distillation": section}
        run = run_policy(load_recipe(recipe(tmp_path / name, short), kind="distill"))
        return metrics(run)[1]

    expected, found = first_step("engine"), first_step("served", **served)
    for name in ("train/teacher_kl", "train/distillation_loss", "train/grad_norm"):
        assert abs(expected[name]) > 1e-3
        assert found[name] == pytest.approx(expected[name], abs=1e-4)
    assert (tmp_path / "served" / "run" / "teachers" / "t" / "servers" / f"{backend}-0.log").is_file()
