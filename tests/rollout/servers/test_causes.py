"""A server that dies while it starts: the error says why, from its log, and names the log.

The logs are those of vLLM 0.32.0 on a CPU, without lines of level INFO: a model with heads of 16 numbers that was asked
for tokens, too little memory, a context above the model's, and a file of weights that is not one.
"""

import sys
from pathlib import Path

import pytest

from hone.processes.child import ServerFailed
from hone.rollout.base import ServerSpec
from hone.rollout.servers.builtin import BuiltinServer
from hone.rollout.servers.connection import ServerConnection, first_error
from hone.rollout.settings import BuiltinSettings, RolloutConfig

LOGS = Path(__file__).with_name("logs")
DIES = "import sys; print(open(sys.argv[1]).read(), end=''); sys.exit(1)"

CAUSES = {
    "vllm_head_size": "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0",
    "vllm_memory": "ValueError: Available memory on node 0 (12.28/16.96 GiB) on startup is less than desired",
    "vllm_option": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: Value error, User-specified "
        "max_model_len (100000) is greater than the derived max_model_len (max_position_embeddings=128.0"
    ),
    "vllm_weights": "MemoryError",
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_the_first_line_of_the_error(name, tmp_path, finish):
    assert {path.stem for path in LOGS.iterdir()} == set(CAUSES)
    connection = ServerConnection(ServerSpec(RolloutConfig(), "model", "float32", 0, tmp_path, "token"), "/health")

    async def story():
        await connection.start(lambda site: ([sys.executable, "-c", DIES, str(LOGS / f"{name}.txt")], {}), 30.0)

    with pytest.raises(ServerFailed) as caught:
        finish(story())
    first, second = str(caught.value).splitlines()[:2]
    assert first.startswith(CAUSES[name])
    log = tmp_path / f"{connection.name}.log"
    assert second == (f"server {connection.name} ended with exit status 1 while it started; the last lines of {log}:")
    assert log.read_text() == (LOGS / f"{name}.txt").read_text()


def test_the_cause_is_found_far_above_the_last_lines():
    frames = "".join(f'(Worker pid=7) ERROR [x.py:1]   File "x.py", line {n}, in call\n' for n in range(1_500))
    log = f"(Worker pid=7) ERROR [x.py:1] KeyError: 'lm_head'\n{frames}RuntimeError: it failed. See root cause above.\n"
    assert first_error(log) == "KeyError: 'lm_head'\n"
    assert first_error("RuntimeError: it failed. See stack trace for root cause.\n") == ""
    inspected = "subprocess.CalledProcessError: Command '[...]' returned non-zero exit status 1.\n"
    inspected += "RuntimeError: Error raised in subprocess:\nModuleNotFoundError: No module named 'torchvision'\n"
    assert first_error(inspected) == "ModuleNotFoundError: No module named 'torchvision'\n"
    assert first_error("INFO: no Error here\n  raise ValueError(\n") == ""


@pytest.mark.slow
def test_the_built_in_server_with_a_broken_model_says_what_is_broken(tmp_path, finish, tiny, tokenizer):
    tiny("qwen3").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{broken")
    settings = RolloutConfig(builtin=BuiltinSettings(process="separate"))
    server = BuiltinServer(ServerSpec(settings, str(tmp_path / "model"), "float32", 0, tmp_path, "token"))
    with pytest.raises(ServerFailed) as caught:
        finish(server.start())
    first, second = str(caught.value).splitlines()[:2]
    assert "Error: " in first or "Exception: " in first
    assert f"the last lines of {tmp_path / server.name}.log:" in second
