"""The real vLLM tells which experts each token went to: those that the model itself chooses."""

import asyncio
import secrets

import numpy as np
import pytest
import torch

from hone.models.attention import packed
from hone.models.loading import load_language_model
from hone.models.routing import Routers, Routing, mixture_layers, watched
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.rollout.base import ServerSpec
from hone.rollout.settings import RolloutConfig
from hone.rollout.vllm import VllmServer
from hone.types import SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="vLLM 0.32 tells experts by its Model Runner V2 only, which needs Triton"
    ),
]

PROMPTS = ((5, 6, 7, 8, 9), (30, 31, 32), tuple(range(20, 60)), (5, 6, 7, 8, 9))
SMALL = {"kv_cache_memory_bytes": 2**26, "max_model_len": 128}
BUILD = BuildConfig(
    architecture="qwen3_moe",
    hidden_size=64,
    layers=3,
    heads=2,
    mlp_size=64,
    max_positions=128,
    options={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "initializer_range": 0.2,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    source = ModelConfig(build=BUILD)
    model = load_language_model(source).eval()
    model.save_pretrained(folder / "model")
    load_tokenizer(source).save_pretrained(folder / "model")
    return model, folder


@pytest.fixture(scope="module")
def server(model, real_python, runner):
    """One that serves the weights in the folder, so that this test needs no sync."""
    mixture, folder = model
    settings = RolloutConfig(backend="vllm", python=str(real_python("vllm")), engine=SMALL)
    layers = mixture_layers(mixture.config)
    assert layers == (0, 2)
    token = secrets.token_hex(16)
    spec = ServerSpec(settings, str(folder / "model"), "float32", 7, folder, token, frozen=True, routed_layers=layers)
    server = VllmServer(spec)
    runner.run(server.start())
    yield server
    runner.run(server.close())


def test_its_experts_are_those_of_the_model(server, model, runner):
    async def ask():
        sampling = [SamplingParams(12 + i, ignore_eos=True, seed=i, routed_experts=True) for i in range(len(PROMPTS))]
        asked = (server.generate(f"r{i}", prompt, sampling[i]) for i, prompt in enumerate(PROMPTS))
        first = await asyncio.gather(*asked)
        again = await server.generate("again", PROMPTS[2], sampling[2])  # its prompt comes from the prefix cache
        plain = await server.generate("plain", PROMPTS[0], SamplingParams(3))
        return [*first, again], plain

    routers = Routers.find(model[0])
    completions, plain = runner.run(asyncio.wait_for(ask(), 300))
    assert plain.routed_experts is None
    for prompt, one in zip((*PROMPTS, PROMPTS[2]), completions, strict=True):
        ids = torch.tensor(prompt + one.token_ids)
        routing = Routing(routers)
        with torch.no_grad(), watched(routing), packed(torch.tensor([0, len(ids)])):
            model[0](ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False)
        own = np.sort(routing.choices().numpy(), -1)[:-1]
        assert one.routed_experts.shape == own.shape == (len(ids) - 1, 2, 2)
        assert np.array_equal(np.sort(one.routed_experts, -1), own)
