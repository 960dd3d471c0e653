"""Several LoRA adapters at once on the real vLLM: the policy's own, and others that a request names."""

import asyncio

import pytest

from hone.config import ConfigError
from hone.rollout.adapters import AdapterFiles, AdapterKind
from hone.rollout.vllm import VllmServer
from hone.types import SamplingParams
from hone.weights.base import Adapter
from tests.rollout.peft_adapters import adapt

pytestmark = pytest.mark.vllm

LINEAR = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
PROMPTS = [(9, 10, 11), (50,), tuple(range(20, 44))]


@pytest.fixture(scope="module")
def named(tiny, tmp_path_factory):
    """Name -> (PEFT's model, the folder that it wrote)."""
    found = {}
    for seed, (name, rank) in enumerate((("left", 4), ("right", 12))):
        model, _, _ = adapt(tiny("qwen3_wide"), seed, r=rank, target_modules=LINEAR)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        found[name] = model, AdapterFiles.at(str(folder))
    return found


@pytest.fixture(scope="module")
def server(real_adapter, runner, named):
    lora = {"adapter": AdapterKind(4), "adapters": {name: files for name, (_, files) in named.items()}}
    server = real_adapter("vllm", 2, lora=lora)
    runner.run(server.start())
    yield server
    runner.run(server.close())


def test_each_request_is_answered_by_the_adapter_that_it_names(server, named, tiny, push, finish, gap):
    base = tiny("qwen3_wide")
    models = {name: model for name, (model, _) in named.items()}

    async def ask():
        asked = [(name, prompt) for prompt in PROMPTS for name in ("", *named)]
        sampling = [SamplingParams(12, ignore_eos=True, seed=i, adapter=name) for i, (name, _) in enumerate(asked)]
        requests = [
            server.generate(f"r{i}", prompt, wanted)
            for i, ((_, prompt), wanted) in enumerate(zip(asked, sampling, strict=True))
        ]
        return [(*one, done) for one, done in zip(asked, await asyncio.gather(*requests), strict=True)]

    def check(policy, version):
        for name, prompt, completion in finish(ask()):
            assert gap(policy if not name else models[name], prompt, completion) < 1e-4
            assert set(completion.weight_versions) == {version}
            if len(prompt) > 1:
                others = [model for other, model in models.items() if other != name]
                assert all(gap(model, prompt, completion) > 0.02 for model in others), "they are told apart"

    assert server._options["max_lora_rank"] == 16, "room for the largest of them"
    assert server._options["max_loras"] == 4, "vLLM computes the base with the last slot: it has to be empty"
    push(server, list(base.state_dict().items()), 1)
    check(base, 1)
    for version, seed in ((2, 7), (3, 8)):  # the policy's adapter comes and changes; the others stay
        policy, tensors, config = adapt(tiny("qwen3_wide"), seed, target_modules=LINEAR)
        push(server, list(tensors.items()), version, Adapter("policy", config))
        check(policy, version)
    push(server, list(base.state_dict().items()), 4)
    check(base, 4)
    with pytest.raises(ValueError, match=r"adapter 'lfet'.*left"):
        finish(server.generate("x", PROMPTS[0], SamplingParams(4, adapter="lfet")))


def test_what_vllm_cannot_take_is_known_before_it_starts(named, real_adapter, tiny, tmp_path):
    assert VllmServer.unfit_for_adapter(AdapterKind(512)) == ""
    assert "ranks up to 512" in VllmServer.unfit_for_adapter(AdapterKind(513))
    assert "DoRA" in VllmServer.unfit_for_adapter(AdapterKind(4, dora=True))
    assert "whole" in VllmServer.unfit_for_adapter(AdapterKind(4, whole_modules=True))
    model, _, _ = adapt(tiny("qwen3_wide"), 0, target_modules=["q_proj"], use_dora=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter judge \(.*\): vLLM has no DoRA"):
        real_adapter("vllm", 3, lora={"adapters": {"judge": AdapterFiles.at(str(tmp_path))}})
