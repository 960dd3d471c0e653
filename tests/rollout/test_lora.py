"""LoRA adapters in the built-in engine: the weights and the samples of PEFT's own merge, and what is refused."""

import asyncio
from dataclasses import replace

import pytest
import torch

from hone.config import ConfigError
from hone.rollout.adapters import AdapterFiles, Delta
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams
from hone.weights.digests.digest import digest_tensors
from tests.rollout.peft_adapters import adapt

PROMPT = (9, 10, 11)
LINEAR = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": ("qwen3", {"target_modules": LINEAR}),
    "rslora": ("qwen2", {"target_modules": LINEAR, "use_rslora": True}),
    "dora": ("qwen3", {"target_modules": LINEAR, "use_dora": True}),
    "patterns": (
        "llama",
        {"target_modules": LINEAR, "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    ),
    "embedding": ("qwen2", {"target_modules": ["embed_tokens", "up_proj"]}),
    "whole_head": ("qwen2", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "transposed_dora": ("gpt2", {"target_modules": ["c_fc"], "fan_in_fan_out": True, "use_dora": True}),
}


def wanted(number=8):
    return SamplingParams(max_tokens=number, ignore_eos=True)


@pytest.fixture
def adapted(tiny):
    """`adapted(model kind, seed, **config)`: PEFT's model with an adapter off its neutral start, tensors, config."""

    return lambda kind, seed, **settings: adapt(tiny(kind), seed, **settings)


def based(model, settings=None):
    return BuiltinEngine(settings or BuiltinSettings(), model)


@pytest.mark.parametrize("name", KINDS)
def test_the_weights_and_samples_are_those_of_pefts_merge(name, adapted, tiny, finish, gap):
    kind, settings = KINDS[name]
    engine = based(tiny(kind))
    for version, seed in ((1, 0), (2, 7)):  # the second takes the place of the first
        model, tensors, config = adapted(kind, seed, **settings)
        served = finish(engine.update_adapter(tensors.items(), config, version))
        assert digest_tensors(served.tensors.items()) == digest_tensors(tensors.items())
        assert (served.version, len(served.tensors)) == (version, len(tensors))
        completion = finish(engine.generate(GenerationRequest(f"r{version}", PROMPT, wanted())))
        assert set(completion.weight_versions) == {version}
        assert gap(model, PROMPT, completion) < 1e-5, "of PEFT's forward, in which nothing is merged"
        merged = model.merge_and_unload().state_dict()
        served = engine.weights()
        assert served.keys() == merged.keys()
        for weight, tensor in merged.items():
            torch.testing.assert_close(served[weight], tensor, rtol=0, atol=1e-6)


def test_what_an_adapter_leaves_alone_is_the_base_again(adapted, tiny, finish):
    base = tiny("qwen3")
    engine = based(base)
    _, first, config = adapted("qwen3", 0, target_modules=["q_proj", "o_proj"])
    finish(engine.update_adapter(first.items(), config, 1))
    model, second, config = adapted("qwen3", 1, target_modules=["v_proj"])
    finish(engine.update_adapter(second.items(), config, 2))
    merged = model.merge_and_unload().state_dict()
    for name, tensor in engine.weights().items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)
        assert torch.equal(tensor, base.state_dict()[name]) == ("v_proj" not in name)


def test_an_adapter_is_put_on_the_newest_whole_weights(adapted, tiny, finish):
    engine = based(tiny("qwen3", seed=3))
    model, tensors, config = adapted("qwen3", 0, target_modules=LINEAR)
    finish(engine.update_adapter(tensors.items(), config, 1))
    finish(engine.update_weights(tiny("qwen3").state_dict().items(), 2))
    for name, tensor in tiny("qwen3").state_dict().items():
        assert torch.equal(engine.weights()[name], tensor)
    finish(engine.update_adapter(tensors.items(), config, 3))
    merged = model.merge_and_unload().state_dict()
    for name, tensor in engine.weights().items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)


def test_whole_weights_have_to_come_first_and_again_after_they_were_given_back(adapted, tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny.config("qwen3"))
    _, tensors, config = adapted("qwen3", 0, target_modules=LINEAR)
    with pytest.raises(RuntimeError, match="whole weights come before an adapter"):
        finish(engine.update_adapter(tensors.items(), config, 0))
    whole = tiny("qwen3").state_dict()
    finish(engine.update_weights(whole.items(), 0))
    finish(engine.update_adapter(tensors.items(), config, 0))
    finish(engine.sleep(2))
    finish(engine.wake_up())
    assert not engine.has_base
    with pytest.raises(RuntimeError, match="whole weights come before an adapter"):
        finish(engine.update_adapter(tensors.items(), config, 1))


def test_running_requests_go_on_with_the_new_adapter(adapted, tiny, finish, gap):
    """Their KV of the old one is dropped: what is sampled from then on has the log-probs of the new policy."""
    engine = based(tiny("qwen3"))
    model, tensors, config = adapted("qwen3", 0, target_modules=LINEAR)

    async def story():
        running = asyncio.create_task(engine.generate(GenerationRequest("r", PROMPT, wanted(24))))
        while engine._scheduler.batch.counters.tokens < 8:
            await asyncio.sleep(0)
        await engine.update_adapter(tensors.items(), config, 5)
        return await running

    completion = finish(story())
    switch = completion.weight_versions.index(5)
    assert 8 <= switch < 24
    assert set(completion.weight_versions[:switch]) == {0}
    assert gap(model, PROMPT, completion, start=switch) < 1e-5
    assert gap(model, PROMPT, completion) > 1e-2


@pytest.fixture
def folders(adapted, tmp_path):
    """Adapters in files, by name: (PEFT's model, folder as it wrote it)."""
    found = {}
    for seed, name in enumerate(("left", "right")):
        model, _, _ = adapted("qwen3", seed, target_modules=LINEAR)
        model.save_pretrained(tmp_path / name)
        found[name] = model, AdapterFiles.at(str(tmp_path / name))
    return found


def test_named_adapters_answer_beside_the_policy(folders, adapted, tiny, finish, gap):
    """Each request has the log-probs of the adapter it names, however they are mixed, and whatever the policy is."""
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"), adapters={n: files for n, (_, files) in folders.items()})
    models = {name: model for name, (model, _) in folders.items()}
    policy, tensors, config = adapted("qwen3", 7, target_modules=["q_proj"])

    async def ask(tag):
        order = ["", "left", "", "right", "left", "right"]
        asked = [(name, PROMPT[: 1 + i % 3]) for i, name in enumerate(order)]
        done = await asyncio.gather(
            *(
                engine.generate(GenerationRequest(f"{tag}{i}", prompt, replace(wanted(6), adapter=name)))
                for i, (name, prompt) in enumerate(asked)
            )
        )
        return [(name, prompt, one) for (name, prompt), one in zip(asked, done, strict=True)]

    found = finish(ask("a"))
    assert all(gap({"": tiny("qwen3"), **models}[name], prompt, one) < 1e-5 for name, prompt, one in found)
    assert gap(models["left"], found[3][1], found[3][2]) > 1e-2, "they are told apart"
    finish(engine.update_adapter(tensors.items(), config, 4))
    found = finish(ask("b"))
    assert all(gap({"": policy, **models}[name], prompt, one) < 1e-5 for name, prompt, one in found)
    with pytest.raises(ValueError, match=r"adapter 'rihgt'.*right"):
        finish(engine.generate(GenerationRequest("c", PROMPT, replace(wanted(), adapter="rihgt"))))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "adapter_config.json").unlink(),
            "is no adapter in PEFT's format: it has no adapter_config",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "it has no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "adapter_config.json: "),
        (lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}'), "of the kind 'IA3'"),
    ],
)
def test_a_folder_without_a_whole_adapter_is_refused(spoil, message, folders):
    folder = folders["left"][1].folder
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        AdapterFiles.at(str(folder))


def renamed(tensors, old, new):
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "entries", "message"),
    [
        (lambda t: t, {"peft_type": "LOHA"}, "of the kind 'LOHA'; expected LORA"),
        (lambda t: t, {"bias": "all"}, "bias = 'all'"),
        (lambda t: t, {"use_qalora": True}, "use_qalora = True, which changes what its matrices mean"),
        (lambda t: t, {"use_dora": True}, "has a, b; expected a, b, magnitude"),
        (lambda t: {}, {}, "has no LoRA matrix"),
        (lambda t: renamed(t, "layers.1", "layers.9"), {}, r"layers\.9.*belongs to no weight of the model"),
        (lambda t: renamed(t, "base_model.model.", ""), {}, "should begin with 'base_model.model.'"),
        (lambda t: renamed(t, "lora_A", "lora_C"), {}, "of no kind that is known"),
        (lambda t: renamed(t, "q_proj", "o_proj"), {}, r"o_proj.weight' is for a matrix of \(32, 48\)"),
        (lambda t: {n: v for n, v in t.items() if "layers.1.self_attn.q_proj.lora_B" not in n}, {}, "has a; expected"),
        (lambda t: {n: v[:3] if "lora_A" in n else v for n, v in t.items()}, {}, "of unlike rank"),
        (
            lambda t: {**t, "base_model.model.model.norm.weight": torch.ones(1)},
            {},
            r"the adapter's 'model\.norm\.weight' has shape \(1,\), the model's \(32,\)",
        ),
    ],
)
def test_what_would_be_merged_wrongly_is_refused(change, entries, message, adapted, tiny, finish):
    engine = based(tiny("llama"))
    _, tensors, config = adapted("llama", 0, target_modules=["q_proj"])
    if "o_proj" in message:  # a matrix of another shape
        tensors = {n: torch.cat([v, v[:, :16]], 1) if "lora_A" in n else v for n, v in tensors.items()}
    with pytest.raises(ValueError, match=message):
        finish(engine.update_adapter(change(tensors).items(), {**config, **entries}, 1))
    assert engine.weight_version == -1, "it serves nothing"
    finish(engine.update_weights(tiny("llama").state_dict().items(), 2))
    finish(engine.update_adapter(tensors.items(), config, 3)) if "o_proj" not in message else None


def test_one_name_of_a_tied_tensor_is_refused(adapted, tiny, finish):
    engine = based(tiny("qwen3"))
    _, tensors, config = adapted("qwen2", 0, target_modules=["embed_tokens"])  # untied, and of the same sizes
    with pytest.raises(ValueError, match=r"on one of 'model\.embed_tokens\.weight' and 'lm_head\.weight'"):
        finish(engine.update_adapter(tensors.items(), config, 1))


@pytest.mark.parametrize("transposed", [False, True])
def test_an_adapter_from_a_file_is_merged_where_the_weight_is(transposed):
    parts = {"a": torch.ones(2, 4), "b": torch.ones(3, 2), "magnitude": torch.ones(3)}
    base = torch.empty((4, 3) if transposed else (3, 4), dtype=torch.bfloat16, device="meta")
    merged = Delta(1.0, transposed, parts).merged(base)
    assert (merged.device.type, merged.shape, merged.dtype) == ("meta", base.shape, torch.bfloat16)
