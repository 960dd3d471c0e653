"""What is checked before SGLang is started, and what its own parser is left to check."""

import json
from pathlib import Path

import pytest
import torch

from hone.config import ConfigError
from hone.models.errors import ModelError
from hone.rollout.base import ServerSpec
from hone.rollout.server import ServerFailed
from hone.rollout.settings import RolloutConfig
from hone.rollout.sglang import SglangServer, _generate_body
from hone.types import SamplingParams


@pytest.fixture
def adapter(tmp_path, tiny):
    """`adapter(engine={...}, trust=False, **rollout)`, with an interpreter that is only a file."""
    (tmp_path / "python").touch()
    tiny("qwen3").save_pretrained(tmp_path / "model")

    def make(engine=(), trust=False, **rollout):
        config = RolloutConfig(backend="sglang", engine=dict(engine), **{"python": str(tmp_path / "python"), **rollout})
        model = str(tmp_path / "model")
        return SglangServer(ServerSpec(config, model, "bfloat16", 0, tmp_path, "secret", trust_remote_code=trust))

    return make


def command(server):
    return server._command(Path("folder"))


def test_hones_defaults_can_each_be_overridden(adapter):
    plain = command(adapter())
    assert {"--load-format=dummy", "--dtype=bfloat16", "--disable-overlap-schedule"} <= set(plain)
    given = {"load-format": "auto", "dtype": "float16", "disable_overlap_schedule": False, "max_total_tokens": None}
    changed = command(adapter(given))
    assert {"--load-format=auto", "--dtype=float16"} <= set(changed)
    assert not any(flag.startswith(("--disable-overlap", "--max-total", "--no-")) for flag in changed)


def test_what_the_trainer_relies_on_is_always_there(adapter):
    found = command(adapter(tensor_parallel=2))
    assert {"--tp-size=2", "--sampling-backend=pytorch", "--weight-version=-1"} <= set(found)
    assert "secret" not in " ".join(found)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("tp-size", "rollout.tensor_parallel"),
        ("trust_remote_code", "model.trust_remote_code"),
        ("enable_custom_logit_processor", "unpickle"),
        ("tokenizer_worker_num", "one server process"),
        ("port", "only for hone"),
    ],
)
def test_options_that_hone_sets_itself_are_refused(adapter, option, says):
    with pytest.raises(ConfigError, match=f"rollout.engine.{option.replace('-', '_')} .*{says}"):
        adapter({option: "1"})


def test_the_dtype_is_the_options_or_the_trainers(adapter):
    assert adapter().dtype is torch.bfloat16
    assert adapter({"dtype": "float32"}).dtype is torch.float32
    with pytest.raises(ConfigError, match=r"rollout\.engine\.dtype should be a dtype"):
        adapter({"dtype": "half of it"})


def test_a_missing_environment_says_how_to_make_one(adapter):
    with pytest.raises(ConfigError, match=r"there is no interpreter .*nowhere; `make test-sglang` .*sglang==0"):
        adapter(python="nowhere")


def test_a_model_with_code_of_its_own_is_refused_unless_allowed(adapter, tmp_path):
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"Python code of its own .*model.trust_remote_code"):
        adapter()
    assert "--trust-remote-code" in command(adapter(trust=True))


def test_a_model_without_a_tokenizer_is_served_without_one(adapter, tmp_path):
    assert "--skip-tokenizer-init" in command(adapter())
    (tmp_path / "model/tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in command(adapter())


def test_filters_ask_for_logprobs_of_what_they_leave():
    plain = _generate_body("r", (1, 2), SamplingParams(max_tokens=9, seed=2**63 + 5), 8)
    assert "return_sampling_mask" not in plain
    assert plain["sampling_params"]["max_new_tokens"] == 6
    assert plain["sampling_params"]["sampling_seed"] == 5
    assert plain["sampling_params"]["top_k"] == -1
    assert _generate_body("r", (1,), SamplingParams(max_tokens=1, top_p=0.9), 8)["return_sampling_mask"]
    greedy = _generate_body("r", (1,), SamplingParams(max_tokens=1, temperature=0.0, top_k=3), 8)
    assert "return_sampling_mask" not in greedy


def test_constructing_starts_nothing(adapter):
    server = adapter()
    assert not server.alive
    assert server.weight_version == -1


@pytest.mark.sglang
def test_an_unknown_option_is_refused_by_sglangs_own_parser(sglang_adapter, finish):
    server = sglang_adapter(7, engine={"no_such_option": 3})
    with pytest.raises(ServerFailed, match=r"unrecognized arguments: --no-such-option=3"):
        finish(server.start())
    assert not server.alive
