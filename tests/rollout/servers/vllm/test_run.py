"""A whole run on the real vLLM, in the middle of which vLLM's engine dies."""

import os
import signal
from pathlib import Path

import pytest

from hone.cli.recipe import load_recipe
from hone.rollout.servers.vllm import VllmServer
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import BASE, metrics, recipe

pytestmark = pytest.mark.vllm

BUILD = {"hidden_size": 64, "layers": 2, "heads": 2, "mlp_size": 96, "max_positions": 128, "characters": "abcd"}
STEPS = 3


def kill_engine(server):
    """SIGKILL to the process that computes; vLLM's API server, another one, outlives it for a moment."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in server.connection.process.process_ids()}
    (engine,) = [pid for pid, name in names.items() if "EngineCor" in name]
    os.kill(engine, signal.SIGKILL)


@pytest.mark.ci
def test_a_run_trains_on_what_the_trainer_computes_too_and_outlives_a_death(tmp_path, real_python, monkeypatch):
    changes = {
        "run": {**BASE["run"], "steps": STEPS},
        "model": {"build": BUILD},
        "rollout": {
            "backend": "vllm",
            "python": str(real_python("vllm")),
            "engine": {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 64},
            "start_timeout_s": 280,
            "sampling": {"max_response_tokens": 24},
        },
        "weights": {"verify": "probe", "timeout_s": 120},
    }
    path = recipe(tmp_path / "vllm", changes)
    killed = []
    generate = VllmServer.generate

    async def with_a_death(server, request, *asked):
        if not killed and len(server._requests.ids) == 10 and server.weight_version == 1:
            killed.append(request.id)
            kill_engine(server)  # at once: a little later, on a busy machine, they may all be done
        return await generate(server, request, *asked)

    monkeypatch.setattr(VllmServer, "generate", with_a_death)
    run_policy(load_recipe(path))
    steps = [line for line in metrics(tmp_path / "vllm" / "run") if line["step"]]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["correction/max_abs_difference"] < 1e-4, "of any token that was trained on"
        assert line["correction/probe_max_abs_difference"] < 1e-4
        assert line["weights/version"] == line["step"]
        assert line["train/grad_norm"] > 1e-3, "so the next step's weights are others"
    assert killed
    assert [line["rollout/replica_restarts"] for line in steps] == [0, 1, 0]
    assert steps[1]["rollout/requests_resent"] > 0
