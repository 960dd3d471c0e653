"""Asynchronous training with the real vLLM: new weights arrive while answers are being written."""

from dataclasses import replace
from pathlib import Path

import pytest

from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.registry import Entry
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.servers.vllm import VllmServer
from hone.schedule.journal import JOURNAL, read_journal
from hone.trainers.run.launch import run_policy
from tests.rollout.servers.vllm.test_run import BUILD, kill_engine
from tests.trainers.test_asynchronous import AHEAD
from tests.trainers.test_replay import logprobs, spans
from tests.trainers.tiny import metrics, recipe

pytestmark = pytest.mark.vllm

STEPS = 6
IMPORTED = {"PYTHONPATH": str(Path(__file__).parents[2])}  # has slow_steps.py
ENGINE = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 64, "logits_processors": ["slow_steps:SlowSteps"]}


class Slow(VllmServer):
    """vLLM with longer steps, so that weights arrive while it generates."""

    def __init__(self, spec):
        super().__init__(replace(spec, environment=IMPORTED))


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    monkeypatch.setitem(ROLLOUT_ENGINES._entries, "vllm", Entry(Slow))


@pytest.fixture
def train(tmp_path, real_python):
    """`train(mode, **rollout)`: the folder of a run that trained every draw once, in order, and within the bound."""

    def run(mode, **rollout):
        changes = {
            **AHEAD,
            "run": {**AHEAD["run"], "steps": STEPS},
            "model": {"build": BUILD},
            "rollout": {
                "backend": "vllm",
                "python": str(real_python("vllm")),
                "engine": ENGINE,
                "start_timeout_s": 280,
                "sampling": {"max_response_tokens": 64},
                **rollout,
            },
            "weights": {"timeout_s": 120},
            "asynchrony": {"staleness": 1, "new_weights": mode},
            "evaluation": {},
            "checkpoint": {"every_steps": 1, "keep": STEPS + 1},  # the weights of every version
        }
        folder = run_policy(load_recipe(recipe(tmp_path, changes)))
        records = list(read_journal(folder / JOURNAL))
        assert [number for record in records for number in record["admitted"]] == list(range(4 * STEPS))
        assert [record["taken"] for record in records] == [[*range(n, n + 4)] for n in range(0, 4 * STEPS, 4)]
        assert not any(record["dropped"] for record in records)
        assert max(line["schedule/staleness_max"] for line in metrics(folder)[1:]) == 1
        return folder

    return run


def worst(run, folder):
    """The largest difference of a token's log-prob from a forward with the weights of the token's version."""
    return max(abs(sampled - own) for sampled, own, _ in logprobs(run, folder, STEPS))


def test_answers_go_on_under_new_weights_with_the_logprobs_of_these(train, tmp_path):
    run = train("recompute")
    assert any(len(one) > 1 for one in spans(run)), "no answer was under way when weights arrived"
    assert worst(run, tmp_path / "models") < 1e-4


def test_answers_end_under_their_weights_although_one_of_two_servers_dies(train, tmp_path, monkeypatch):
    killed = []
    generate = VllmServer.generate

    async def with_a_death(server, request, *asked):
        if not killed and len(server._requests.ids) >= 4 and server.weight_version >= 2:
            killed.append(server.name)
            kill_engine(server)
        return await generate(server, request, *asked)

    monkeypatch.setattr(VllmServer, "generate", with_a_death)
    run = train("finish", replicas=2, max_restarts=0)
    assert killed
    assert sum(line["rollout/requests_resent"] for line in metrics(run)[1:]) > 0
    assert {len(one) for one in spans(run)} == {1}
    assert worst(run, tmp_path / "models") < 1e-4


def test_the_old_cache_is_refused(train):
    with pytest.raises(ConfigError, match=r"keep_cache, but rollout.backend=vllm does not keep .* set recompute, or"):
        train("keep_cache")
