"""What the backward keeps with `activation_checkpointing`: inputs of layers (`offload` moves them), or of parts."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

pytest.importorskip("megatron.core")

from hone.engines.layout import lay_out
from hone.engines.memory import worth_moving
from hone.models.errors import ModelError
from tests.engines.contract.cases import SIZES, Mesh, make_batch, make_engine, save_model, train, weights
from tests.ranks import run_ranks

PARTS = {  # model -> parts of its layers
    "qwen3": ("core_attn", "mlp"),
    "deepseek_v3": ("core_attn", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"),
    "gpt_oss": ("core_attn", "moe", "moe_act"),
}
MOE = {"router_aux_loss_coef": 0.5, "routing_replay": "old_logprobs"}


def engine_of(folder, parts=None, mesh=None, **settings):
    more = {} if parts is None else {"recompute_modules": parts}
    how = {} if parts is None else {"activation_checkpointing": "selective"}
    mesh = Mesh("megatron", 1, more=more) if mesh is None else Mesh("megatron", mesh.world, mesh.parallel, more)
    return make_engine(mesh, folder, **{"max_tokens_per_microbatch": 99, **how, **settings})


def kept_by(engine):
    """Shapes of the tensors that a forward keeps."""
    kept = []

    def pack(tensor):
        kept.append(list(tensor.shape)) if worth_moving(tensor, least_bytes=0) else None
        return tensor

    with engine.train_mode(), saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward(make_batch(0), frozenset())
    return kept


def keep(folder):
    found = {"all": kept_by(engine_of(folder)), "inputs": kept_by(engine_of(folder, activation_checkpointing=True))}
    return {**found, "row": len(lay_out(make_batch(0)).token_ids)}


@pytest.mark.slow
def test_only_the_input_of_each_layer_is_kept(tmp_path):
    found = run_ranks(1, keep, save_model("qwen3", tmp_path))[0]
    width, layers = SIZES["hidden_size"], SIZES["layers"]
    assert found["inputs"].count([found["row"], 1, width]) >= layers
    assert {shape[-1] for shape in found["inputs"] if len(shape) > 2} <= {width, 1}
    assert SIZES["mlp_size"] in {shape[-1] for shape in found["all"]}


def select_parts(folders, mesh):
    """Of each model and part: what is kept, calls of a matrix in it, and whether two steps give the same weights."""
    found = {}
    for name, parts in parts_on(mesh).items():
        settings = {} if name == "qwen3" else {"moe": MOE}
        plain = engine_of(folders[name], mesh=mesh, **settings)
        found[f"{name} all"] = sum(torch.Size(shape).numel() for shape in kept_by(plain))
        wanted = [train(plain, range(2)), weights(plain)]
        for chosen in (*((part,) for part in parts), parts):
            engine = engine_of(folders[name], chosen, mesh, **settings)
            label = f"{name} {'+'.join(chosen)}"
            found[label] = sum(torch.Size(shape).numel() for shape in kept_by(engine))
            calls = count(engine)
            steps, now = train(engine, range(2)), weights(engine)
            same = all(torch.equal(one, wanted[1][key]) for key, one in now.items())
            found |= {f"{label} calls": calls, f"{label} same": same and steps == wanted[0]}
    return found


def parts_on(mesh):
    """The models that a mesh divides: a dense one has no experts to share."""
    return {name: parts for name, parts in PARTS.items() if mesh.world == 1 or name != "qwen3"}


def count(engine):
    """How often the matrices of dense layers, the routers and shared experts run, by kind of module."""
    calls = {}
    for path, module in engine._parts[0].named_modules():
        kind = next(
            (end for end in ("mlp.linear_fc1", "mlp.router", "shared_experts.linear_fc1") if path.endswith(end)), ""
        )
        if kind:
            calls[kind] = 0
            module.register_forward_hook(lambda *_, kind=kind: calls.__setitem__(kind, calls[kind] + 1))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh("megatron", 1), Mesh("megatron", 2, {"expert_tensor": 2})], ids=str)
def test_parts_of_layers_are_computed_again_with_the_same_gradients(mesh, tmp_path):
    folders = {name: save_model(name, tmp_path / name) for name in PARTS}
    found = run_ranks(mesh.world, select_parts, folders, mesh)[0]
    for name, parts in parts_on(mesh).items():
        for part in parts:
            kept, whole = found[f"{name} {part}"], found[f"{name} all"]
            if (name, part) == ("gpt_oss", "core_attn"):  # attention with sinks is tiled, and keeps only its inputs
                assert kept == whole
            else:
                assert kept < whole, f"{part} of {name} keeps as much"
        label = f"{name} {'+'.join(parts)}"
        assert all(found[f"{name} {part} same"] for part in parts)
        assert found[f"{label} same"]
        assert found[label] <= min(found[f"{name} {part}"] for part in parts)
    times = {part: found[f"deepseek_v3 {part} calls"] for part in PARTS["deepseek_v3"]}
    once = times["core_attn"]
    assert times["mlp"] == {**once, "mlp.linear_fc1": 2 * once["mlp.linear_fc1"]}
    assert times["shared_experts"] == {**once, "shared_experts.linear_fc1": 2 * once["shared_experts.linear_fc1"]}
    assert times["moe"]["mlp.router"] == 2 * once["mlp.router"]


def refuse(folder):
    bad = {
        ("moe",): r"recompute_modules: .* has no experts, which moe recomputes; remove moe",
        ("core_attn", "mla_up_proj"): "has no latent attention, which mla_up_proj recomputes",
    }
    for parts, message in bad.items():
        with pytest.raises(ModelError, match=message):
            engine_of(folder, parts)
    with pytest.raises(ValueError, match=r"recompute_modules needs .*activation_checkpointing=selective, found True"):
        engine_of(folder, ("mlp",), activation_checkpointing=True)
    with pytest.raises(ValueError, match="activation_checkpointing=selective: backend fsdp2 recomputes whole layers"):
        make_engine(Mesh("fsdp2", 1), folder, activation_checkpointing="selective")


@pytest.mark.slow
def test_parts_that_a_model_or_a_backend_lacks_are_errors(tmp_path):
    run_ranks(1, refuse, save_model("qwen3", tmp_path))
