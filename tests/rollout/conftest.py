"""Tiny models of several architectures, and what transformers itself says about a sequence."""

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.base import ServerSpec
from hone.rollout.settings import RolloutConfig

VOCABULARY = 104  # that of the tokenizer in `tokenizer`
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PER_LAYER = {  # what tokens bring into each layer
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_wide": lambda: Qwen3Config(
        **{**SIZES, "head_dim": 32}, tie_word_embeddings=True
    ),  # vLLM's smallest on a CPU
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_plain": lambda: LlamaConfig(**SIZES),
    "llama_yarn": lambda: LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen3_moe_wide": lambda: Qwen3MoeConfig(**{**SIZES, "head_dim": 32}, **{**EXPERTS, "moe_intermediate_size": 64}),
    "mistral_window": lambda: MistralConfig(**SIZES, sliding_window=8),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=8, attn_logit_softcapping=0.5),  # alternating windows
    "gpt_oss": lambda: GptOssConfig(  # attention sinks
        **SIZES,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "llama4": lambda: Llama4TextConfig(  # chunks in one layer, and a temperature by position in the other
        **SIZES,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=24,
        floor_scale=4,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
    "gemma4": lambda: Gemma4TextConfig(  # layers of two shapes; the last two read the keys of the first two
        **{**SIZES, **PER_LAYER, "num_hidden_layers": 4},
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=16,
        num_kv_shared_layers=2,
    ),
    "diffllama": lambda: DiffLlamaConfig(**SIZES),  # two attentions in a layer
    "deepseek_v32": lambda: DeepseekV32Config(**{**SIZES, **LATENT}),  # an indexer chooses 8 keys
    "gpt2": lambda: GPT2Config(  # learned positions
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
}


def build(kind, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager").eval()
    for parameter in model.parameters():  # norms, biases and sinks off their neutral values, logits well apart
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)


@pytest.fixture(scope="session")
def tiny():
    """`tiny(kind, seed=0, dtype=float32)`: a model; `tiny.config(kind)`: its config alone."""
    build.config = lambda kind: CONFIGS[kind]()
    return build


@pytest.fixture(scope="session")
def forward():
    """`forward(model, token_ids)`: float32 logits of the plain transformers forward, [len(token_ids), V]."""

    def run(model, token_ids):
        with torch.no_grad():
            return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()

    return run


@pytest.fixture(scope="session")
def gap(forward):
    """`gap(model, prompt, completion)`: largest difference from the log-probs of the plain forward."""

    def run(model, prompt, completion, start=0):
        logits = forward(model, (*prompt, *completion.token_ids))[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return float((expected - torch.tensor(completion.logprobs))[start:].abs().max())

    return run


@pytest.fixture(scope="session")
def finish():
    """`finish(coroutine)`: its result; no test waits without end."""
    return lambda coroutine: asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.fixture(scope="session")
def tokenizer():
    from hone.models.settings import BuildConfig
    from hone.models.tokenizer import build_tokenizer

    return build_tokenizer(BuildConfig())


# ------------------------------------------------------------------------------- real engines in processes of their own

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Real:
    """How the tests start one engine."""

    model: str  # of CONFIGS
    start_timeout_s: float
    small: dict  # options of every test server
    shared: dict  # further ones of the server that several tests share


REAL = {
    "vllm": Real(
        "qwen3_wide",
        280,
        {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 64},
        {"logits_processors": ["slow_steps:SlowSteps"]},
    ),
    "sglang": Real("qwen3", 400, {"max_total_tokens": 8192, "max_running_requests": 64}, {}),
}
REAL_ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in REAL]


@pytest.fixture(scope="session")
def runner():
    """One event loop for everything that talks to a server which several tests share."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="session")
def real_python():
    """`real_python(backend)`: the interpreter that has the engine; where there is none, the test skips."""

    def find(backend):
        python = ROOT / f".venv-{backend}" / "bin" / "python"
        if not python.is_file():
            pytest.skip(f"there is no .venv-{backend}: make test-{backend}")
        return python

    return find


@pytest.fixture(scope="session")
def real_adapter(real_python, tiny, tokenizer, tmp_path_factory):
    """`real_adapter(backend, number=0, engine={...}, **rollout)`: an adapter for a tiny model, not started.

    `lora` are fields of the `ServerSpec` that speak of LoRA.
    """

    def make(backend, number=0, engine=(), lora=(), kind="", **rollout):
        real = REAL[backend]
        folder = tmp_path_factory.mktemp(backend)
        tiny(kind or real.model).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        wanted = {"python": str(real_python(backend)), "start_timeout_s": real.start_timeout_s, **rollout}
        config = RolloutConfig(backend=backend, engine={**real.small, **dict(engine)}, **wanted)
        slow = {"PYTHONPATH": str(Path(__file__).parent)}  # for slow_steps.py
        token = secrets.token_hex(16)
        model = str(folder / "model")
        spec = ServerSpec(config, model, "float32", number, folder, token, environment=slow, **dict(lora))
        return ROLLOUT_ENGINES.get(backend)(spec)

    return make


@pytest.fixture(scope="session")
def real_server(real_adapter, runner):
    """`real_server(backend)`: a server without weights, started once; who uses it leaves it awake and not paused."""
    started = {}

    def find(backend):
        if backend not in started:
            started[backend] = real_adapter(backend, engine=REAL[backend].shared)
            runner.run(started[backend].start())
        return started[backend]

    yield find
    for server in started.values():
        runner.run(server.close())
