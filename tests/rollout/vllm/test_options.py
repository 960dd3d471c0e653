"""What is checked before vLLM is started, and what its own parser is left to check."""

import json
from pathlib import Path

import pytest
import torch

from hone.config import ConfigError
from hone.models.errors import ModelError
from hone.rollout.base import ServerSpec
from hone.rollout.engine_options import command_arguments
from hone.rollout.server import ServerFailed
from hone.rollout.settings import RolloutConfig
from hone.rollout.vllm import VllmServer


@pytest.fixture
def adapter(tmp_path, tiny):
    """`adapter(engine={...}, trust=False, **rollout)`, with an interpreter that is only a file."""
    (tmp_path / "python").touch()
    tiny("qwen3").save_pretrained(tmp_path / "model")

    def make(engine=(), trust=False, **rollout):
        config = RolloutConfig(backend="vllm", engine=dict(engine), **{"python": str(tmp_path / "python"), **rollout})
        model = str(tmp_path / "model")
        return VllmServer(ServerSpec(config, model, "bfloat16", 0, tmp_path, "token", trust_remote_code=trust))

    return make


def test_options_are_written_as_a_command_line_has_them():
    options = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "cudagraph_capture_sizes": [1, 2, 4],
        "gpu_memory_utilization": 0.3,
        "quantization": "fp8",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "max_model_len": None,
    }
    assert command_arguments(options) == [
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--cudagraph-capture-sizes",
        "1",
        "2",
        "4",
        "--gpu-memory-utilization=0.3",
        "--quantization=fp8",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 2}',
    ]


def arguments(server):
    return server._arguments(Path("folder"))


def test_hones_defaults_can_each_be_overridden(adapter):
    plain = arguments(adapter())
    assert {"--load-format=dummy", "--enforce-eager", "--dtype=bfloat16", "--block-size=32"} <= set(plain)
    given = {"load_format": "auto", "enforce-eager": False, "dtype": "float16", "block_size": None}
    changed = arguments(adapter(given))
    assert {"--load-format=auto", "--no-enforce-eager", "--dtype=float16"} <= set(changed)
    assert not any(argument.startswith("--block-size") for argument in changed)


def test_what_the_trainer_relies_on_is_always_there(adapter):
    found = arguments(adapter(tensor_parallel=2))
    weight_transfer = next(a for a in found if a.startswith("--weight-transfer-config="))
    assert json.loads(weight_transfer.partition("=")[2]) == {"backend": "hone"}
    assert {
        "--logprobs-mode=processed_logprobs",
        "--middleware=hone.workers.vllm.ControlGuard",
        "--tensor-parallel-size=2",
    } <= set(found)
    assert not any("token" in argument for argument in found if not argument.startswith("--"))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("tensor_parallel_size", "rollout.tensor_parallel"),
        ("trust-remote-code", "model.trust_remote_code"),
        ("logprobs_mode", "processed_logprobs"),
        ("middleware", "hone puts its own"),
        ("host", "only hone"),
    ],
)
def test_options_that_hone_sets_itself_are_refused(adapter, option, says):
    with pytest.raises(ConfigError, match=f"rollout.engine.{option} .*{says}"):
        adapter({option: "1"})


def test_the_dtype_is_the_options_or_the_trainers(adapter):
    assert adapter().dtype is torch.bfloat16
    assert adapter({"dtype": "float32"}).dtype is torch.float32
    with pytest.raises(ConfigError, match=r"rollout\.engine\.dtype should be a dtype"):
        adapter({"dtype": "half of it"})


def test_a_missing_environment_says_how_to_make_one(adapter, tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"there is no interpreter .*nowhere; `make .venv-vllm` .*pip install vllm==0"
    ):
        adapter(python="nowhere")


def test_a_model_with_code_of_its_own_is_refused_unless_allowed(adapter, tmp_path):
    config = json.loads((tmp_path / "model/config.json").read_text()) if (tmp_path / "model").exists() else {}
    config["auto_map"] = {"AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"Python code of its own .*model.trust_remote_code"):
        adapter()
    assert "--trust-remote-code" in arguments(adapter(trust=True))


def test_a_tokenizer_with_code_of_its_own_is_refused(adapter, tmp_path):
    (tmp_path / "model/tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["theirs.T", None]}})
    )
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        adapter()


def test_a_model_without_a_tokenizer_is_served_without_one(adapter, tmp_path):
    assert "--skip-tokenizer-init" in arguments(adapter())
    (tmp_path / "model/tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in arguments(adapter())


def test_constructing_starts_nothing(adapter):
    server = adapter()
    assert not server.alive
    assert server.weight_version == -1


@pytest.mark.vllm
def test_an_unknown_option_is_refused_by_vllms_own_parser(vllm_adapter, runner):
    server = vllm_adapter(7, engine={"no_such_option": 3})
    with pytest.raises(ServerFailed, match=r"^[\w.]+: error: unrecognized arguments: --no-such-option=3"):
        runner.run(server.start())
    assert not server.alive
