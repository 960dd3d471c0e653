"""Real servers tell which experts each token went to: those that the model itself chooses."""

import asyncio
import secrets

import numpy as np
import pytest
import torch

from hone.cli.recipe import load_recipe
from hone.models.attention.packed import packed
from hone.models.loading import load_language_model
from hone.models.routing import Routers, Routing, mixture_layers, watched
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.base import ServerSpec
from hone.rollout.settings import RolloutConfig
from hone.trainers.run.launch import run_policy
from hone.types import GenerationRequest, SamplingParams
from tests.trainers.tiny import BASE, metrics, recipe

NEEDS_TRITON = "vLLM 0.32 tells experts by its Model Runner V2 only, which needs Triton"
BACKENDS = [
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.vllm,
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_TRITON),
        ],
    ),
    pytest.param("sglang", marks=pytest.mark.sglang),
]

PROMPTS = ((5, 6, 7, 8, 9), (30, 31, 32), tuple(range(20, 60)), (5, 6, 7, 8, 9))
SMALL = {
    "vllm": {"kv_cache_memory_bytes": 2**26, "max_model_len": 128},
    "sglang": {"max_total_tokens": 8192, "max_running_requests": 64},
}
BUILD = BuildConfig(
    architecture="qwen3_moe",
    hidden_size=64,
    layers=3,
    heads=2,
    mlp_size=64,
    max_positions=128,
    tie_embeddings=False,  # SGLang does not tie this architecture's head when it reads files
    options={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "initializer_range": 0.2,
        "norm_topk_prob": True,
    },
)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory, backend):
    """One with a dense layer between, for vLLM: SGLang makes a mixture of every layer of a Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("mixture")
    dense = {"mlp_only_layers": [1]} if backend == "vllm" else {}
    source = ModelConfig(build=BUILD.model_copy(update={"options": {**BUILD.options, **dense}}))
    model = load_language_model(source).eval()
    model.save_pretrained(folder / "model")
    load_tokenizer(source).save_pretrained(folder / "model")
    return model, folder


@pytest.fixture(scope="module")
def server(backend, model, real_python, runner):
    """One that serves the weights in the folder."""
    mixture, folder = model
    settings = RolloutConfig(
        backend=backend, python=str(real_python(backend)), engine=SMALL[backend], start_timeout_s=280
    )
    layers = mixture_layers(mixture.config)
    assert layers == ((0, 2) if backend == "vllm" else (0, 1, 2))
    token = secrets.token_hex(16)
    spec = ServerSpec(settings, str(folder / "model"), "float32", 7, folder, token, frozen=True, routed_layers=layers)
    server = ROLLOUT_ENGINES.get(backend)(spec)
    runner.run(server.start())
    yield server
    runner.run(server.close())


def test_its_experts_are_those_of_the_model(server, model, runner, push):
    """Of the weights in the folder, then of those that a sync brought."""
    check(server, model, runner)
    with torch.no_grad():
        for tensor in model[0].state_dict().values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
    push(server, list(model[0].state_dict().items()), 1)
    check(server, model, runner)


def check(server, model, runner):
    """Ask for a few answers, and compare their experts and log-probs with the model's."""

    async def ask():
        sampling = [SamplingParams(12 + i, ignore_eos=True, seed=i, routed_experts=True) for i in range(len(PROMPTS))]
        asked = (server.generate(GenerationRequest(f"r{i}", prompt, sampling[i])) for i, prompt in enumerate(PROMPTS))
        first = await asyncio.gather(*asked)
        again = await server.generate(
            GenerationRequest("again", PROMPTS[2], sampling[2])
        )  # its prompt comes from the prefix cache
        plain = await server.generate(GenerationRequest("plain", PROMPTS[0], SamplingParams(3)))
        return [*first, again], plain

    routers = Routers.find(model[0])
    completions, plain = runner.run(asyncio.wait_for(ask(), 300))
    assert plain.routed_experts is None
    for prompt, one in zip((*PROMPTS, PROMPTS[2]), completions, strict=True):
        ids = torch.tensor(prompt + one.token_ids)
        routing = Routing(routers)
        with torch.no_grad(), watched(routing), packed(torch.tensor([0, len(ids)])):
            logits = model[0](ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False).logits[0]
        own = np.sort(routing.choices().numpy(), -1)[:-1]
        assert one.routed_experts.shape == own.shape == (len(ids) - 1, len(server._spec.routed_layers), 2)
        assert np.array_equal(np.sort(one.routed_experts, -1), own)
        expected = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])
        torch.testing.assert_close(torch.tensor(one.logprobs), expected[len(prompt) - 1 :, 0], rtol=0, atol=1e-4)


def test_a_run_trains_on_the_experts_that_the_server_chose(tmp_path, real_python, backend):
    changes = {
        "run": {**BASE["run"], "steps": 2},
        "model": {"build": BUILD.model_dump(exclude_unset=True)},
        "actor": {**BASE["actor"], "moe": {"routing_replay": "rollout"}},
        "rollout": {
            "backend": backend,
            "python": str(real_python(backend)),
            "engine": SMALL[backend],
            "start_timeout_s": 280,
            "sampling": {"max_response_tokens": 12},
        },
    }
    run_policy(load_recipe(recipe(tmp_path / "run", changes)))
    steps = [line for line in metrics(tmp_path / "run" / "run") if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["train/routes_replaced"] == 0  # as the trainer chooses, in float32
        assert line["correction/max_abs_difference"] < 1e-4
