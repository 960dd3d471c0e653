"""LoRA adapters on the real engines: the policy's own, which changes, and others that a request names."""

import asyncio
from dataclasses import replace

import pytest

from hone.config import ConfigError
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.adapters import AdapterFiles, AdapterKind
from hone.types import GenerationRequest, SamplingParams
from hone.weights.base import AdapterTensors
from tests.rollout.conftest import REAL, REAL_ENGINES
from tests.rollout.peft_adapters import adapt
from tests.rollout.syncing import sync_to

LINEAR = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
PROMPTS = [(9, 10, 11), (50,), tuple(range(20, 44))]
ROOM = {"vllm": {"max_lora_rank": 16, "max_loras": 4}, "sglang": {"max_lora_rank": 12, "max_loras_per_batch": 4}}
"""For the largest of three; vLLM computes the base with the last slot, which has to be empty."""


@pytest.fixture(scope="module", params=REAL_ENGINES)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def base(backend, tiny):
    """A new copy of the model on each call: PEFT changes what it is put on."""
    return lambda: tiny(REAL[backend].model)


@pytest.fixture(scope="module")
def named(base, tmp_path_factory):
    """Name -> (PEFT's model, the folder that it wrote)."""
    found = {}
    for seed, (name, rank) in enumerate((("left", 4), ("right", 12))):
        model, _, _ = adapt(base(), seed, r=rank, target_modules=LINEAR)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        found[name] = model, AdapterFiles.at(str(folder))
    return found


@pytest.fixture(scope="module")
def server(backend, real_adapter, runner, named):
    lora = {"adapter": AdapterKind(4, model="qwen3"), "adapters": {name: files for name, (_, files) in named.items()}}
    server = real_adapter(backend, 2, lora=lora)
    runner.run(server.start())
    yield server
    runner.run(server.close())


def test_each_request_is_answered_by_the_adapter_that_it_names(backend, server, named, base, push, finish, gap):
    models = {name: model for name, (model, _) in named.items()}

    async def ask():
        asked = [(name, prompt) for prompt in PROMPTS for name in ("", *named)]
        sampling = [SamplingParams(12, ignore_eos=True, seed=i, adapter=name) for i, (name, _) in enumerate(asked)]
        requests = [
            server.generate(GenerationRequest(f"r{i}", prompt, wanted))
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

    assert {name: server._options[name] for name in ROOM[backend]} == ROOM[backend]
    push(server, list(base().state_dict().items()), 1)
    check(base(), 1)
    for version, seed in ((2, 7), (3, 8)):  # the policy's adapter comes and changes; the others stay
        policy, tensors, config = adapt(base(), seed, target_modules=LINEAR)
        push(server, list(tensors.items()), version, AdapterTensors("policy", config))
        check(policy, version)
    push(server, list(base().state_dict().items()), 4)
    check(base(), 4)
    with pytest.raises(ValueError, match=r"adapter 'lfet'.*left"):
        finish(server.generate(GenerationRequest("x", PROMPTS[0], SamplingParams(4, adapter="lfet"))))


def test_running_requests_go_on_with_the_new_adapter(server, base, push, finish, gap):
    """Also in the middle of a sequence, whose KV of the old adapter is dropped."""
    push(server, list(base().state_dict().items()), 0)
    first, tensors, config = adapt(base(), 1, target_modules=LINEAR)
    push(server, list(tensors.items()), 1, AdapterTensors("policy", config))
    policy, tensors, config = adapt(base(), 2, target_modules=LINEAR)
    over = asyncio.Event()

    async def ask(number):
        found = []
        while not over.is_set():
            wanted = SamplingParams(80, ignore_eos=True, seed=number)
            found.append(await server.generate(GenerationRequest(f"r{number}/{len(found)}", PROMPTS[0], wanted)))
        return found

    async def story():
        running = [asyncio.create_task(ask(number)) for number in range(4)]
        await asyncio.sleep(0.1)
        await sync_to(server, list(tensors.items()), 2, AdapterTensors("policy", config))
        over.set()
        return [one for found in await asyncio.gather(*running) for one in found]

    found = finish(story())
    cut = [one for one in found if set(one.weight_versions) == {1, 2}]
    assert cut, "no request was in the middle of a sequence"
    for one in cut:
        switch = one.weight_versions.index(2)
        assert set(one.weight_versions[:switch]) == {1}
        assert gap(policy, PROMPTS[0], one, start=switch) < 1e-4
        assert gap(first, PROMPTS[0], one, start=switch) > 0.02
        before = replace(one, token_ids=one.token_ids[:switch], logprobs=one.logprobs[:switch])
        assert gap(first, PROMPTS[0], before) < 1e-4


def test_what_an_engine_cannot_take_is_known_before_it_starts(backend, real_adapter, base, tmp_path):
    def unfit(rank=4, **of):
        return ROLLOUT_ENGINES.get(backend).unfit_for_adapter(AdapterKind(rank, **{"model": "qwen3", **of}))

    assert unfit(512) == ""
    assert "DoRA" in unfit(dora=True)
    assert "whole" in unfit(whole_modules=True)
    assert "experts" in unfit(experts=True)
    if backend == "vllm":
        assert "ranks up to 512" in unfit(513)
    else:
        assert unfit(modules=frozenset(LINEAR)) == ""
        assert "it is on embed_tokens, x; SGLang" in unfit(modules=frozenset(["x", "embed_tokens"]))
        assert "and not on mixtral" in unfit(model="mixtral"), "its base would be sent, and then no adapter taken"
    model, _, _ = adapt(base(), 0, target_modules=["q_proj"], use_dora=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter judge \(.*\): (vLLM|SGLang) has no DoRA"):
        real_adapter(backend, 3, lora={"adapters": {"judge": AdapterFiles.at(str(tmp_path))}})
