"""`hone serve MODEL rollout.backend=vllm`: OpenAI's client gets the answers that the built-in engine gives."""

import os
import signal
import subprocess
import sys

import openai
import pytest

import hone
from tests.trainers.letters import letter_model

pytestmark = pytest.mark.vllm

BUILD = {"hidden_size": 64, "layers": 2, "heads": 2, "mlp_size": 96, "max_positions": 128, "characters": "abcd"}
KEY = "a1" * 12
TOKENS = 12


def test_a_finished_model_is_served_by_vllm(tmp_path, real_python):
    model = letter_model(tmp_path / "export", BUILD, seed=0)
    keys = [
        *("rollout.backend=vllm", f"rollout.python={real_python('vllm')}", "rollout.start_timeout_s=280"),
        "rollout.engine={kv_cache_memory_bytes: 67108864, max_num_seqs: 8}",
    ]
    command = [sys.executable, "-m", "hone", "serve", str(model), "--port", "0", *keys]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HONE_SERVE_KEY": KEY})
    try:
        url = served.stdout.readline().split()[-1]  # when vLLM is ready
        http = openai.DefaultHttpxClient(verify=False, trust_env=False)
        with openai.OpenAI(base_url=url, api_key=KEY, timeout=60, max_retries=0, http_client=http) as client:
            asked = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": TOKENS}
            prompts = ["abc", "dda"]
            wanted = hone.generate(model, prompts, temperature=0.0, max_response_tokens=TOKENS)
            for prompt, (answer,) in zip(prompts, wanted, strict=True):
                found = client.chat.completions.create(**asked, messages=[{"role": "user", "content": prompt}])
                assert found.choices[0].message.content == answer
                assert found.usage.completion_tokens == TOKENS
            assert wanted[0] != wanted[1]
    finally:
        served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0
        served.stdout.close()
