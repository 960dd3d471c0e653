"""What is checked before a server is started, and what its engine's own parser is left to check."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hone.config import ConfigError
from hone.models.errors import ModelError
from hone.processes.child import ServerFailed
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.base import ReplicaLost, ServerSpec
from hone.rollout.servers.engine import command_arguments
from hone.rollout.servers.host import Site
from hone.rollout.servers.shape import ServerMachines
from hone.rollout.servers.vllm_kernels import head_sizes
from hone.rollout.settings import RolloutConfig
from hone.types import GenerationRequest, SamplingParams
from tests.families.types import tiny_config


@dataclass(frozen=True)
class Expected:
    """How one engine's command line should be."""

    defaults: set
    changes: dict  # of these, in `rollout.engine`
    changed: set
    gone: tuple  # beginnings of flags that the changes leave out
    always: set  # with tensor_parallel=2
    reserved: dict  # option -> words of the refusal
    install: str


EXPECTED = {
    "vllm": Expected(
        {"--load-format=dummy", "--enforce-eager", "--dtype=bfloat16", "--block-size=32"},
        {"load_format": "auto", "enforce-eager": False, "dtype": "float16", "block_size": None},
        {"--load-format=auto", "--no-enforce-eager", "--dtype=float16"},
        ("--block-size",),
        {
            "--logprobs-mode=processed_logprobs",
            "--middleware=hone.workers.inside.vllm.ControlGuard",
            "--tensor-parallel-size=2",
            '--weight-transfer-config={"backend": "hone"}',
        },
        {
            "tensor_parallel_size": "rollout.tensor_parallel",
            "trust-remote-code": "model.trust_remote_code",
            "nnodes": "runtime.backend",
            "data-parallel-rank": "set data_parallel_size",
            "distributed_executor_backend": "hone starts the ranks",
            "logprobs_mode": "processed_logprobs",
            "middleware": "hone puts its own",
            "host": "only hone",
        },
        r"pip install vllm==0",
    ),
    "sglang": Expected(
        {"--load-format=dummy", "--dtype=bfloat16", "--disable-overlap-schedule"},
        {"load-format": "auto", "dtype": "float16", "disable_overlap_schedule": False, "max_total_tokens": None},
        {"--load-format=auto", "--dtype=float16"},
        ("--disable-overlap", "--max-total", "--no-"),
        {"--tp-size=2", "--sampling-backend=pytorch", "--weight-version=-1"},
        {
            "tp-size": "rollout.tensor_parallel",
            "dp_size": "set attn_dp_size",
            "pp_size": "one after the other",
            "nnodes": "runtime.backend",
            "trust_remote_code": "model.trust_remote_code",
            "enable_custom_logit_processor": "unpickle",
            "quantization": "without quantising them",
            "tokenizer_worker_num": "one server process",
            "port": "only for hone",
        },
        r"pip install sglang==0",
    ),
}
RESERVED = [(backend, *one) for backend, expected in EXPECTED.items() for one in expected.reserved.items()]


@pytest.fixture(params=sorted(EXPECTED))
def backend(request):
    return request.param


@pytest.fixture
def expected(backend):
    return EXPECTED[backend]


@pytest.fixture
def adapter_of(tmp_path, tiny):
    """`adapter_of(backend, engine={...}, trust=False, **rollout)`, with an interpreter that is only a file."""
    (tmp_path / "python").touch()
    tiny("qwen3_wide").save_pretrained(tmp_path / "model")

    def make(backend, engine=(), trust=False, **rollout):
        config = RolloutConfig(backend=backend, engine=dict(engine), **{"python": str(tmp_path / "python"), **rollout})
        spec = ServerSpec(config, str(tmp_path / "model"), "bfloat16", 0, tmp_path, "secret", trust_remote_code=trust)
        return ROLLOUT_ENGINES.get(backend)(spec)

    return make


@pytest.fixture
def adapter(adapter_of, backend):
    return lambda engine=(), trust=False, **rollout: adapter_of(backend, engine, trust, **rollout)


def command(server):
    return server._launch(Site(Path("folder"), "python"))[0]


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


@pytest.mark.parametrize(("sizes", "found"), [({"head_dim": 16}, 16), ({"head_dim": 48}, 48), ({"head_dim": 32}, None)])
def test_vllm_on_a_cpu_refuses_head_sizes_that_its_attention_lacks(adapter_of, tiny, tmp_path, sizes, found):
    """hidden_size 32 with 4 heads is 8 numbers in each, if a configuration says nothing else."""
    assert head_sizes(tiny.config("gpt2")) == {8}
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **sizes}))
    if found is None:
        adapter_of("vllm")
        return
    said = rf"on a CPU, vLLM supports .*32, 64, .*, 512, and .*model \(model.path\) has {found} .*backend=builtin"
    with pytest.raises(ConfigError, match=said):
        adapter_of("vllm")
    adapter_of("sglang")


@pytest.mark.parametrize(("kind", "without"), [("falcon_h1", True), ("qwen3", False)])
def test_vllm_on_a_cpu_caches_no_prefixes_where_layers_carry_a_state(adapter_of, tmp_path, kind, without):
    tiny_config(kind, {"head_dim": 32, "mamba_d_state": 16}).save_pretrained(tmp_path / "model")  # 96 channels
    assert ("--no-enable-prefix-caching" in command(adapter_of("vllm"))) is without


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("qwen3_next", "with layers that carry a state, which .*model .model.path. has: set rollout.backend=builtin"),
        ("deepseek_v32", "with sparse attention with an indexer, which "),
        ("gemma3_text", ""),
    ],
)
def test_sglang_on_a_cpu_refuses_layers_that_it_was_not_run_with(adapter_of, tmp_path, kind, said):
    tiny_config(kind).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        adapter_of("sglang")


@pytest.mark.parametrize("tuned", [True, False])
def test_vllm_scales_llama_4s_queries_as_its_config_says(adapter_of, tmp_path, tuned):
    config = tiny_config("llama4_text", {"head_dim": 32, "attn_temperature_tuning": tuned})
    config.save_pretrained(tmp_path / "model")
    found = [one for one in command(adapter_of("vllm")) if one.startswith("--override-generation-config")]
    assert [json.loads(one.partition("=")[2]) for one in found] == [{"attn_temperature_tuning": tuned}]


def test_hones_defaults_can_each_be_overridden(adapter, expected):
    assert expected.defaults <= set(command(adapter()))
    changed = command(adapter(expected.changes))
    assert expected.changed <= set(changed)
    assert not any(argument.startswith(expected.gone) for argument in changed)


def test_what_the_trainer_relies_on_is_always_there(adapter, expected):
    found = command(adapter(tensor_parallel=2))
    assert expected.always <= set(found)
    assert "secret" not in " ".join(found)


@pytest.mark.parametrize(("backend", "option", "says"), RESERVED)
def test_options_that_hone_sets_itself_are_refused(adapter_of, backend, option, says):
    with pytest.raises(ConfigError, match=f"rollout.engine.{option} .*{says}"):
        adapter_of(backend, {option: "1"})


def test_the_dtype_is_the_options_or_the_trainers(adapter):
    assert adapter().dtype is torch.bfloat16
    assert adapter({"dtype": "float32"}).dtype is torch.float32
    with pytest.raises(ConfigError, match=r"rollout\.engine\.dtype should be a dtype"):
        adapter({"dtype": "half of it"})


def test_a_missing_environment_says_how_to_make_one(adapter, backend, expected, tmp_path, monkeypatch):
    how = rf"`make \.venv-{backend}` .*{expected.install}"
    with pytest.raises(ConfigError, match=rf"there is no interpreter .*nowhere; {how}"):
        adapter(python="nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hone.rollout.servers.engine.hone.__file__", str(tmp_path / "hone" / "__init__.py"))
    with pytest.raises(ConfigError, match=rf"\.venv-{backend} is not there: {how}"):
        adapter(python="")


def test_a_model_with_code_of_its_own_is_refused_unless_allowed(adapter, tmp_path):
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"comes with Python code .*model.trust_remote_code"):
        adapter()
    assert "--trust-remote-code" in command(adapter(trust=True))


def test_a_tokenizer_with_code_of_its_own_is_refused(adapter, tmp_path):
    theirs = {"auto_map": {"AutoTokenizer": ["theirs.T", None]}}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(theirs))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        adapter()


def test_a_model_without_a_tokenizer_is_served_without_one(adapter, tmp_path):
    assert "--skip-tokenizer-init" in command(adapter())
    (tmp_path / "model/tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in command(adapter())


def test_every_rank_of_vllm_receives_weights(adapter_of, tiny, tmp_path):
    server = adapter_of("vllm", {"pipeline-parallel-size": 3}, tensor_parallel=2)
    assert server.ranks == 6
    assert "--pipeline-parallel-size=3" in command(server)
    said = r"data_parallel_size = 2: .* has no experts, .* set rollout.replicas"
    with pytest.raises(ConfigError, match=said):
        adapter_of("vllm", {"data_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"rollout\.engine\.pipeline_parallel_size should be a whole .*, found '2'"):
        adapter_of("vllm", {"pipeline_parallel_size": "2"})
    with pytest.raises(ConfigError, match=r"enable_expert_parallel: on a CPU, .* segmentation fault"):
        adapter_of("vllm", {"enable_expert_parallel": True})
    tiny("qwen3_moe_wide").save_pretrained(tmp_path / "model")
    assert adapter_of("vllm", {"data_parallel_size": 2}, tensor_parallel=2).ranks == 4


def test_vllm_on_several_machines_has_workers_only_on_all_but_the_first(adapter_of):
    server = adapter_of("vllm", tensor_parallel=2)
    machines = "10.0.0.1", "10.0.0.2"
    launched = [server._launch(Site(Path("folder"), "python", ServerMachines(machines, n, 7000))) for n in range(2)]
    for number, (arguments, environment) in enumerate(launched):
        assert {"--nnodes=2", f"--node-rank={number}", "--master-addr=10.0.0.1", "--master-port=7000"} <= {*arguments}
        assert "--distributed-executor-backend=mp" in arguments
        assert environment["VLLM_HOST_IP"] == machines[number]
    modules = [arguments[2] for arguments, _ in launched]
    assert modules == ["hone.workers.inside.vllm_server", "hone.workers.inside.vllm_follower"]
    assert ["--headless" in arguments for arguments, _ in launched] == [False, True]
    assert "VLLM_HOST_IP" not in server._launch(Site(Path("folder"), "python"))[1]


def test_constructing_starts_nothing(adapter):
    server = adapter()
    assert not server.alive
    assert server.weight_version == -1


REFUSED = [
    pytest.param("vllm", {"no_such_option": 3}, r"^[\w.]+: error: unrecognized arguments: --no-such-option=3"),
    pytest.param("vllm", {"speculative_config": {"method": "no_such_way"}}, r"no_such_way"),
    pytest.param("vllm", {"quantization": "no_such_bits"}, r"no_such_bits"),
    pytest.param("sglang", {"no_such_option": 3}, r"unrecognized arguments: --no-such-option=3"),
    pytest.param("sglang", {"schedule_policy": "no_such_order"}, r"no_such_order"),
]


@pytest.mark.parametrize(
    ("backend", "engine", "says"),
    [pytest.param(*one.values, marks=getattr(pytest.mark, one.values[0])) for one in REFUSED],
)
def test_the_engines_own_parser_refuses_with_its_message(real_adapter, finish, backend, engine, says):
    server = real_adapter(backend, 7, engine=engine)
    with pytest.raises(ServerFailed, match=says):
        finish(server.start())
    assert not server.alive


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_server_that_is_closed_is_lost_to_requests_with_a_seat(backend, adapter_of):
    """The router sends such a request to another replica; any other error would end the run."""

    async def ask(server):
        await server.close()
        with pytest.raises(ReplicaLost, match="cannot generate: it was closed"):
            await server.generate(GenerationRequest("r", (5, 6), SamplingParams(max_tokens=1)))
        with pytest.raises(ReplicaLost, match="cannot generate: it was closed"):
            await server.score("r", (5, 6))

    asyncio.run(ask(adapter_of(backend)))
