"""Real servers say how likely they find tokens: as the plain forward, and as a teacher of a distillation run.

Comparisons with the plain forward: vllm/test_speculative.py and plugins/sglang/tests/test_scores.py.

Their replies to a request that was aborted are given by a small stand-in for the connection.
"""

import asyncio
from dataclasses import replace

import pytest
import torch

from hone.cli.recipe import load_recipe
from hone.models.settings import BuildConfig, ModelConfig
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.base import ScoreAborted, ServerSpec
from hone.rollout.settings import RolloutConfig
from hone.trainers.run.launch import run_policy
from hone.trainers.run.run_model import local_model
from tests.rollout.conftest import REAL
from tests.trainers.tiny import BASE, metrics, recipe

BACKENDS = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
SEQUENCES = [tuple(range(10, 10 + n)) for n in (2, 25, 7, 18, 7)]


def check_scores(server, model, runner, forward):
    """The server scores as the model's forward does, with and without the most likely tokens."""

    async def ask():
        plain = await asyncio.gather(*(server.score(f"p{i}", one) for i, one in enumerate(SEQUENCES)))
        top = await asyncio.gather(*(server.score(f"t{i}", one, 5) for i, one in enumerate(SEQUENCES)))
        with pytest.raises(ValueError, match="vocabulary"):
            await server.score("wrong", (1, 10**6))
        return plain, top

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


ABORTED = {
    "vllm": {"choices": [{"token_ids": [], "finish_reason": "abort"}], "prompt_logprobs": None},
    "sglang": {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "input_token_logprobs": []}},
}


class Aborting:
    """A connection to a server that answers a request when it is aborted."""

    alive = True

    def __init__(self, reply):
        self._reply = reply
        self._aborted = asyncio.Event()

    async def post(self, path, body=None, timeout_s=60.0):
        if "abort" in path:
            self._aborted.set()
        if "generate" not in path:
            return {}
        await self._aborted.wait()
        if isinstance(self._reply, ValueError):
            raise self._reply
        return self._reply


@pytest.fixture
def unstarted(tiny, tokenizer, tmp_path):
    """`unstarted(backend)`: an adapter with the weights of its folder, whose interpreter is only a file."""
    (tmp_path / "python").touch()
    tiny("qwen3_wide").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def make(backend):
        config = RolloutConfig(backend=backend, python=str(tmp_path / "python"))
        spec = ServerSpec(config, str(tmp_path / "model"), "float32", 0, tmp_path, "secret", frozen=True)
        server = ROLLOUT_ENGINES.get(backend)(spec)
        server._limits = replace(server._limits, longest=128)
        return server

    return make


@pytest.mark.parametrize("backend", sorted(REAL))
def test_a_scoring_that_a_server_aborts_is_waited_for_and_no_result(backend, unstarted, finish):
    server = unstarted(backend)

    async def abort(how):
        server.connection = Aborting(ABORTED[backend])
        scoring = asyncio.create_task(server.score("p", SEQUENCES[1]))
        await asyncio.sleep(0)
        await how()
        assert scoring.done(), "the abort ends when the scoring has ended"
        await scoring

    with pytest.raises(ScoreAborted, match=f"request 'p' was aborted at {backend}-0"):
        finish(abort(server.abort_all))
    with pytest.raises(RuntimeError, match=f"request 'p': rollout replica {backend}-0 lost its weights: .*mixed"):
        finish(abort(lambda: stop(server)))


async def stop(server):
    server._state.stop("mixed")
    await server.abort_all()


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
