"""LoRA on every mesh: the first values, losses, gradients and adapters of `fsdp2` in one process, in PEFT's files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.adapters import by_peft
from tests.engines.contract.cases import LENGTHS, Mesh, make_batch, make_engine, scores, train, weights
from tests.engines.contract.test_behaviour import refuse_all
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8}
OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
EXPERTS = {**LORA, "targets": ("q_proj", *OF_EXPERTS)}
ADAPTERS = {
    "qwen3": {"lora": LORA},
    "qwen2": {"lora": {**LORA, "init": "orthogonal", "rslora": True, "exclude": ("k_proj", "gate_proj")}},
    "value": {"lora": {**LORA, "init": "gaussian"}, "model_type": "value_model", "activation_checkpointing": True},
    "late": {"lora": {"rank": 1, "targets": ("3.self_attn.q_proj",)}},  # a first stage trains nothing
    "experts": {"lora": {**EXPERTS, "init": "gaussian", "rslora": True}},
    "clamped": {"lora": {"rank": 3, "alpha": 8, "targets": OF_EXPERTS}, "activation_checkpointing": True},
    "value experts": {"lora": {"rank": 1, "targets": ("experts.down_proj",)}, "model_type": "value_model"},
}
"""A rank of 4 has grouped products; of 1 and 3, products one by one."""
MODEL = {
    "value": "llama",
    "late": "qwen3_moe",
    "experts": "qwen3_moe",
    "clamped": "gpt_oss",
    "value experts": "deepseek_v3",
}
DENSE = ("qwen3", "qwen2", "value")
MIXED = ("experts", "clamped", "value experts")
SHARED = {"tensor": 2, "sequence": True}
MESHES = [
    (Mesh("megatron", 1), (*DENSE, *MIXED)),
    (Mesh("megatron", 2), (*DENSE, "late", *MIXED)),
    (Mesh("megatron", 2, {"tensor": 2}), DENSE),
    (Mesh("megatron", 2, SHARED), (*DENSE, *MIXED)),
    (Mesh("megatron", 2, {"context": 2}), DENSE),
    (Mesh("megatron", 2, {"pipeline": 2}), (*DENSE, "late", *MIXED)),
    (Mesh("megatron", 2, {"pipeline": 2, "virtual_pipeline": 2}), DENSE),
    (Mesh("megatron", 4, {**SHARED, "pipeline": 2}), DENSE),
    (Mesh("megatron", 2, {"expert": 2}), MIXED),
    (Mesh("megatron", 2, {"expert_tensor": 2}), MIXED),
    (Mesh("megatron", 4, {**SHARED, "expert": 2}), ("late", *MIXED)),
    (Mesh("megatron", 4, {"expert": 2, "expert_tensor": 2}), MIXED),
]


def adapter(engine):
    return dict(engine.get_per_tensor_param(adapter_only=True)[0])


def train_adapters(mesh, names, folders):
    """Of each adapter: first values, scores, three steps; then the adapter, merged weights, and the base again."""
    found = {}
    for name in names:
        engine = make_engine(mesh, folders[MODEL.get(name, name)], **ADAPTERS[name])
        one = {f"first {key}": value for key, value in adapter(engine).items()} | scores(engine)
        one |= {"steps": train(engine), **adapter(engine), **weights(engine)}
        with engine.disable_adapter():
            one |= {f"base {key}": value for key, value in (weights(engine) | scores(engine)).items()}
        found |= {f"{name}/{key}": value for key, value in one.items()}
    return found


@pytest.fixture(scope="module")
def alone(folders):
    return train_adapters(Mesh("fsdp2", 1), ADAPTERS, folders)


@pytest.mark.parametrize(("mesh", "names"), MESHES, ids=lambda one: str(one) if isinstance(one, Mesh) else "")
def test_an_adapter_trains_as_in_one_process(mesh, names, alone, folders, needs_backend):
    needs_backend(mesh.backend)
    ranks = run_ranks(mesh.world, train_adapters, mesh, names, folders)
    for name in names:
        of_ranks = [{key: value for key, value in rank.items() if key.startswith(f"{name}/")} for rank in ranks]
        wanted = {key: value for key, value in alone.items() if key.startswith(f"{name}/")}
        for step, (loss, norm) in enumerate(wanted.pop(f"{name}/steps")):
            steps = [rank[f"{name}/steps"][step] for rank in of_ranks]
            assert sum(loss for loss, _ in steps) == pytest.approx(loss, rel=1e-5, abs=1e-5)
            assert [norm for _, norm in steps] == pytest.approx([norm] * mesh.world, rel=1e-5)
        scored = {key for key in wanted if key.partition("score ")[2].isdigit()}
        assert len(scored) == 2 * len(LENGTHS)
        for key, value in wanted.items():
            found = [rank[key] for rank in of_ranks if key in rank]
            assert len(found) == (1 if key in scored else mesh.world), key
            assert all(torch.equal(one, found[0]) for one in found), f"{key} differs between ranks"
            torch.testing.assert_close(found[0], value, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
            if "/first " in key or ("/base " in key and key not in scored and not key.endswith("score.weight")):
                assert torch.equal(found[0], value), f"{key} is not that of one process"


def carry_on(mesh, folder, path, save):
    """Train an adapter of PEFT's files one more step, and export it; in bfloat16, which dtype has what."""
    engine = make_engine(mesh, folder, lora={"path": path})
    found = {f"read {key}": value for key, value in adapter(engine).items()}
    parts = engine.weights._parts
    buffers = [buffer for part in parts for buffer in (*part.buffers, *part.expert_parallel_buffers)]
    found["buffered"] = sum(len(buffer.params) for buffer in buffers)
    train(engine, [3])
    engine.export_adapter(Path(save))
    narrow = make_engine(mesh, folder, lora={"path": path}, compute_dtype="bfloat16")
    held = {name: one.dtype for name, one, _ in narrow.weights.parts()}
    trained = {name for name, _, _ in narrow.weights.trained()}
    found["trained"] = sorted({str(held[name]) for name in trained})
    found["frozen"] = sorted({str(dtype) for name, dtype in held.items() if name not in trained})
    train(narrow, [3])
    wide, rounded = scores(engine), scores(narrow)
    gaps = torch.cat([(wide[key] - rounded[key]).abs() for key in wide] or [torch.ones(1)])
    found["gap"] = float(gaps[gaps > 0].median())  # not the largest: a near tie between experts falls otherwise
    return {**found, **adapter(engine), **wide}


@pytest.mark.parametrize(
    ("model", "lora", "parallel", "adapted"),
    [
        ("qwen3", LORA, {"tensor": 2}, 7),
        ("qwen3_moe", EXPERTS, {"expert": 2}, 3),
        ("gpt_oss", EXPERTS, {"expert_tensor": 2}, 3),
    ],
    ids=["dense", "experts", "shared experts"],
)
def test_peft_loads_the_adapter_and_gives_the_same_log_probs(
    model, lora, parallel, adapted, folders, tmp_path, needs_backend
):
    needs_backend("megatron")
    folder, first, last = folders[model], tmp_path / "first", tmp_path / "last"
    engine = make_engine(Mesh("fsdp2", 1), folder, lora=lora)
    train(engine)
    engine.export_adapter(first)
    ranks = run_ranks(2, carry_on, Mesh("megatron", 2, parallel), folder, str(first), str(last))
    found = {key: value for rank in reversed(ranks) for key, value in rank.items()}  # each rank may score a part
    for name, tensor in load_file(first / "adapter_model.safetensors").items():
        assert torch.equal(found[f"read {name}"], tensor), name
    for name, tensor in load_file(last / "adapter_model.safetensors").items():
        assert torch.equal(found[name], tensor), name
        assert not torch.equal(tensor, found[f"read {name}"]), f"{name} has not learned"
    batch = make_batch(9)
    wanted, _ = by_peft(folder, last, batch)
    mine = torch.cat([found[f"score {i}"] for i in range(len(LENGTHS))])[batch.loss_mask]
    torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    assert (found["trained"], found["frozen"]) == (["torch.float32"], ["torch.bfloat16"])
    assert 0 < found["gap"] < 0.02
    assert found["buffered"] == 2 * adapted * 4, "gradient buffers should have A and B alone, in each of four layers"


def compare_heads(folder, path):
    engine = make_engine(Mesh("megatron", 2, {"pipeline": 2}), folder, model_type="value_model", lora={"path": path})
    assert torch.equal(
        weights(engine)["score.weight"], load_file(Path(path) / "value_head.safetensors")["score.weight"]
    )
    return scores(engine)


def test_a_value_model_continues_with_the_head_of_its_adapter(folders, tmp_path, needs_backend):
    needs_backend("megatron")
    folder = folders["llama"]
    engine = make_engine(Mesh("fsdp2", 1), folder, model_type="value_model", lora=LORA)
    train(engine)
    engine.export_adapter(tmp_path)
    found = run_ranks(2, compare_heads, folder, str(tmp_path))[-1]
    for key, value in scores(engine).items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)


def test_what_megatron_cannot_adapt_is_refused_with_the_reason(folders, tmp_path, needs_backend):
    needs_backend("megatron")
    dora = tmp_path / "dora"
    make_engine(Mesh("fsdp2", 1), folders["qwen3"], lora={**LORA, "dora": True}).export_adapter(dora)
    gate, gated = tmp_path / "gate", {"targets": ("q_proj", "experts.down_proj", "shared_expert_gate")}
    make_engine(Mesh("fsdp2", 1), folders["qwen2_moe"], lora=gated).export_adapter(gate)
    no_layer = "model.layers.0.mlp.shared_expert_gate of"
    mesh, folder = Mesh("megatron", 1), folders["qwen3"]
    bad = [
        (mesh, folder, {"lora": {"dora": True}}, "lora.dora=True: backend megatron does not have it: DoRA needs"),
        (mesh, folder, {"lora": {"init": "pissa"}}, "lora.init=pissa: backend megatron does not have it: it takes"),
        (mesh, folder, {"lora": {"dropout": 0.1}}, "lora.dropout=0.1: backend megatron does not have it: layers in"),
        (mesh, folder, {"lora": {"modules_to_save": ("lm_head",)}}, "lora.modules_to_save=lm_head: backend megatron"),
        (mesh, folder, {"lora": {"quantise": {}}}, "lora.quantise: backend megatron does not have it: Megatron-Core's"),
        (mesh, folder, {"lora": {"path": str(dora)}}, "lora.path: backend megatron does not have adapters with DoRA"),
        (mesh, folder, {"lora": {"targets": ("q_prj",)}}, "did you mean 'q_proj'"),
        (mesh, folders["qwen2_moe"], {"lora": gated}, f"lora.targets: {no_layer}"),
        (mesh, folders["qwen2_moe"], {"lora": {"path": str(gate)}}, f"lora.path: {no_layer}"),
    ]
    run_ranks(1, refuse_all, bad)
