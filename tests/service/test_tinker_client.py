"""The real client of the protocol, in an environment of its own, against `hone serve`."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from hone.service.disk.keys import add_key
from hone.service.disk.registry import REGISTRY_FILE, Registry
from tests.docs.blocks import read_blocks

PROGRAM = Path(__file__).with_name("tinker_client.py")
TENANTS = Path(__file__).with_name("tinker_tenants.py")
PYTHON = Path(__file__).parents[2] / ".venv-tinker/bin/python"

pytestmark = pytest.mark.tinker


def run(server, program, *arguments, timeout_s=300):
    """The output of a program that uses the real client."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} does not exist: make .venv-tinker installs it")
    there = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**there, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, program, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def sums(tokens):
    """The losses that the program asks for, by hand: -sum over (log-prob, its distance to the old one, advantage)."""

    def clipped(ratio, advantage, low=0.8, high=1.2):
        return min(ratio * advantage, min(max(ratio, low), high) * advantage)

    sequence = math.exp(sum(apart for _, apart, _ in tokens[1:]) / (len(tokens) - 1))
    terms = [
        lambda logprob, apart, advantage: math.exp(apart) * advantage,
        lambda logprob, apart, advantage: clipped(math.exp(apart), advantage),
        lambda logprob, apart, advantage: min(max(math.exp(apart), 0.8), 1.2) * logprob * advantage,
        lambda logprob, apart, advantage: logprob * advantage - 0.025 * apart**2,
        lambda logprob, apart, advantage: clipped(sequence, advantage),
        lambda logprob, apart, advantage: logprob * advantage - 0.25 * apart**2,
        lambda logprob, apart, advantage: clipped(math.exp(apart), advantage, 0.7, 1.1),
    ]
    return [-sum(term(*one) for one in tokens) for term in terms]


def test_the_real_client_trains_samples_saves_and_is_refused(server):
    found = json.loads(run(server, PROGRAM))
    assert found["models"] == ["tiny"]
    assert found["info"] == ["tiny", True, 4]
    assert found["losses"][-1] < found["losses"][0]
    assert found["chunks"][0] == 2500
    assert found["gap"] < 1e-5
    assert found["samples"] == [5, 5, 5]
    first, nothing, same = found["target"]
    assert (first, nothing) == (pytest.approx(same, abs=1e-6), 0.0)
    assert found["alternatives"] == [len(found["ids"]) - 1, 2]
    tokens = list(zip(found["logprobs"], found["apart"], found["advantages"], strict=True))
    assert found["sums"] == pytest.approx(sums(tokens), rel=1e-4)
    assert found["layers"] == [
        [["k_proj", "o_proj", "q_proj", "v_proj"], [True, False, False]],
        [["down_proj", "gate_proj", "up_proj"], [False, True, False]],
    ]
    assert "the unembedding alone, which gets no adapter here" in found["unembedding"]
    one = found["chunks"][1]
    assert found["sparse"] == [True, pytest.approx(one, rel=1e-4)]
    assert found["custom"][0] == pytest.approx(found["custom"][1], rel=1e-4)
    assert found["custom"][2] == 2.0
    assert found["loaded"][0] == pytest.approx(found["loaded"][1], rel=1e-6)
    assert found["greedy"] == [4, "length"]
    assert found["computed"] == len(found["ids"])
    lost, step, missing = found["refused"]
    assert "choose importance_sampling or cispo" in lost
    assert "no step was made" in step
    assert "lacks advantages" in missing
    assert found["checkpoints"] == ["weights/state", "sampler_weights/named"]
    assert found["left"] == ["sampler_weights/named"]
    assert found["runs"] == 4  # the adapter of the unembedding alone is none


def test_the_first_minutes_of_the_page_run(server, tmp_path):
    """The block of docs/serve.md, as it is there."""
    (block,) = [one for one in read_blocks("docs/serve.md") if one.language == "python"]
    program = tmp_path / "first_minutes.py"
    program.write_text(block.text)
    *steps, answer = run(server, program).splitlines()
    losses = [float(line.split("'loss:sum': ")[1].split("}")[0]) for line in steps]
    assert losses[2] < losses[0]
    assert len(json.loads(answer)) == 8


def test_eight_tenants_of_different_ranks_end_with_the_bits_of_running_alone(server):
    registry = Registry(server.folder / "run" / REGISTRY_FILE)
    keys = [add_key(registry, f"tenant-{number}") for number in range(8)]
    registry.close()
    found = json.loads(run(server, TENANTS, *keys))
    assert found["together"] == found["alone"]
    ends = [json.dumps(one) for one in found["alone"]]
    assert len(set(ends)) == 8
