"""Checks before SGLang is started. tests/rollout/servers/test_options.py has the checks of every server."""

import pytest

from hone.config import ConfigError
from hone.types import GenerationRequest, SamplingParams
from hone_sglang.server import ACCELERATOR_DEFAULTS, SglangServer


def test_sglangs_speculation_on_a_cpu_is_refused(adapter_of):
    with pytest.raises(ConfigError, match=r"speculative_algorithm=NGRAM: on a CPU .* no sample of the policy"):
        adapter_of("sglang", {"speculative-algorithm": "NGRAM"})


def test_sglangs_expert_parallel_on_a_cpu_is_refused(adapter_of):
    with pytest.raises(
        ConfigError, match=r"engine\.ep_size: on a CPU .* experts that a rank does not have; leave it out"
    ):
        adapter_of("sglang", {"ep-size": 2})
    assert adapter_of("sglang", {"attn_dp_size": 2}, tensor_parallel=2).ranks == 2


def test_sglang_says_when_it_was_started_without_what_a_json_schema_needs(adapter_of, tmp_path):
    wanted = SamplingParams(max_tokens=1, json_schema="{}")

    def refusal(**engine):
        with pytest.raises(ValueError, match="wants an answer that follows a JSON schema, and sglang-0") as found:
            adapter_of("sglang", engine)._limits.check(GenerationRequest("r", (9,), wanted))
        return str(found.value)

    assert "started without a tokenizer" in refusal()
    (tmp_path / "model/tokenizer.json").write_text("{}")
    adapter_of("sglang")._limits.check(GenerationRequest("r", (9,), wanted))
    assert "started with rollout.engine.grammar_backend=none" in refusal(grammar_backend="none")


def test_it_says_what_it_takes_of_a_device():
    assert ACCELERATOR_DEFAULTS[SglangServer.memory_option] == 0.5
