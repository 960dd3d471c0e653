"""LoRA adapters that SGLang would scale, fuse or drop wrongly; for all servers: tests/rollout/servers."""

import pytest
import torch

from hone.rollout.adapters import AdapterKind
from hone.types import GenerationRequest, SamplingParams
from hone.weights.base import AdapterTensors, WeightSyncError
from hone_sglang.server import ADAPTABLE, ADAPTED
from tests.rollout.peft_adapters import adapt
from tests.rollout.servers.test_adapters import LINEAR, PROMPTS

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def backend():
    return "sglang"


KINDS = {
    "rslora": {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["k_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.k_proj": 2},
        "alpha_pattern": {"down_proj": 3},
    },
    "one_layer": {"target_modules": ["v_proj"], "layers_to_transform": [1]},
}


@pytest.mark.parametrize("name", KINDS)
def test_what_sglang_would_scale_or_fuse_wrongly_is_computed_rightly(name, server, base, push, finish, gap):
    policy, tensors, config = adapt(base(), 5, **KINDS[name])
    push(server, list(base().state_dict().items()), 1)
    push(server, list(tensors.items()), 2, AdapterTensors("policy", config))
    completion = finish(
        server.generate(GenerationRequest("r", PROMPTS[0], SamplingParams(12, ignore_eos=True, seed=1)))
    )
    assert gap(policy, PROMPTS[0], completion) < 1e-4
    assert gap(base(), PROMPTS[0], completion) > 0.02
    scored = finish(server.score("s", (*PROMPTS[0], *completion.token_ids)))
    assert scored.logprobs[len(PROMPTS[0]) :] == pytest.approx(completion.logprobs, abs=1e-4), "by the same adapter"


@pytest.mark.parametrize("kind", ["llama_plain", "mistral", "qwen2"])
def test_sglang_computes_adapters_of_other_families(kind, real_adapter, runner, tiny, push, finish, gap):
    model = tiny.config(kind).model_type
    assert model in ADAPTED
    server = real_adapter("sglang", 4, lora={"adapter": AdapterKind(4, model=model)}, kind=kind)
    runner.run(server.start())
    try:
        push(server, list(tiny(kind).state_dict().items()), 1)
        policy, tensors, config = adapt(tiny(kind), 3, target_modules=list(ADAPTABLE))
        push(server, list(tensors.items()), 2, AdapterTensors("policy", config))
        completion = finish(
            server.generate(GenerationRequest("r", PROMPTS[0], SamplingParams(12, ignore_eos=True, seed=1)))
        )
        assert gap(policy, PROMPTS[0], completion) < 1e-4
        assert gap(tiny(kind), PROMPTS[0], completion) > 0.02
    finally:
        runner.run(server.close())


def test_a_load_that_failed_leaves_room_for_the_next(server, base, push, finish, tmp_path):
    """SGLang would ask for an unload of what it never had."""
    push(server, list(base().state_dict().items()), 1)
    asked = {"lora_name": "late", "lora_path": str(tmp_path)}
    with pytest.raises(RuntimeError, match=r"worker 0: .*no adapter in PEFT's format"):
        finish(server._change("/load_lora_adapter", asked, 60))
    model, _, _ = adapt(base(), 9, target_modules=LINEAR)
    model.save_pretrained(tmp_path)
    assert finish(server._change("/load_lora_adapter", asked, 60))["success"]


def renamed(tensors, old, new):
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "entries", "message"),
    [
        (lambda t: renamed(t, "layers.1", "layers.9"), {}, r"layers\.9.*belongs to no weight of the model"),
        (lambda t: {n: v for n, v in t.items() if "layers.1.self_attn.o_proj.lora_B" not in n}, {}, "has a; expected"),
        (lambda t: {n: v.repeat(4, 1) if "_A" in n else v.repeat(1, 4) for n, v in t.items()}, {}, "has rank 16"),
        (lambda t: renamed(t, "self_attn.o_proj", "mlp.down_proj"), {}, "is for a matrix of"),
        (lambda t: {**t, "base_model.model.model.norm.weight": torch.ones(32)}, {}, "trained whole"),
        (lambda t: t, {"use_dora": True}, "has a, b; expected a, b, magnitude"),
        (lambda t: t, {"peft_type": "LOHA"}, "of the kind 'LOHA'"),
    ],
)
def test_sglang_is_given_no_adapter_that_it_would_drop_or_die_of(
    change, entries, message, server, base, push, finish, gap
):
    whole = list(base().state_dict().items())
    push(server, whole, 1)
    policy, tensors, config = adapt(base(), 5, target_modules=["o_proj"])
    with pytest.raises(WeightSyncError, match=message):
        push(server, list(change(tensors).items()), 2, AdapterTensors("policy", {**config, **entries}))
    with pytest.raises(RuntimeError, match=r"cannot generate: .*update_weights"):
        finish(server.generate(GenerationRequest("r", PROMPTS[0], SamplingParams(4))))
    push(server, whole, 3)
    push(server, list(tensors.items()), 4, AdapterTensors("policy", config))
    completion = finish(server.generate(GenerationRequest("r", PROMPTS[0], SamplingParams(8, ignore_eos=True, seed=1))))
    assert gap(policy, PROMPTS[0], completion) < 1e-4
