"""Training on a device: gradients of transformers in float64, offload, checkpoints, adapters, experts, images.

Every test runs on the CPU too, so that on an accelerator only the device is new.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.engines.checks import isolation
from hone.engines.fsdp2.settings import Fsdp2Settings
from hone.engines.memory import kept_in_cpu_memory
from hone.models.attention.stateful import state_layers
from hone.models.settings import BuildConfig, ModelConfig
from hone.platforms.base import current_platform
from tests.engines.adapters import MOE, weights
from tests.engines.bounded import plant
from tests.engines.pictures import Case, batch_of
from tests.engines.pictures import likelihood as likelihood_of_pictures
from tests.engines.pictures import make_engine as engine_of_pictures

SIZES = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 96, "max_positions": 64}
ARCHITECTURES = {"qwen3": {}, "qwen3_moe": MOE}
NEAR = {"float32": 1e-4, "bfloat16": 4e-2}  # relative error of all gradients together


def model_of(architecture="qwen3", **settings):
    built = BuildConfig(**SIZES, architecture=architecture, options=ARCHITECTURES[architecture])
    return ModelConfig(build=built, **settings)


def exact_gradients(model, batch):
    """Of `likelihood`, by transformers' own forward of each sequence alone, in float64 on the CPU."""
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager").double()
    plain.set_experts_implementation("eager")
    plain.load_state_dict(model.state_dict())
    total = 0.0
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        ids = batch.token_ids[start:end]
        scores = plain(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        wanted = batch.loss_mask[start + 1 : end]
        total = total - (scores * batch.loss_weights[start + 1 : end] * wanted).sum()
    total.backward()
    return {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}


def relative_error(found, exact):
    """Of all tensors together. Raises AssertionError unless both have the same names."""
    assert found.keys() == exact.keys()
    wrong = sum((found[name].cpu().double() - exact[name]).square().sum() for name in exact)
    return float((wrong / sum(one.square().sum() for one in exact.values())).sqrt())


def trained(engine, batches, loss):
    """The losses of a step for each batch."""
    return [engine.train_batch(batch, loss)["train/loss"].value for batch in batches]


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_gradients_are_those_of_transformers_in_float64(
    architecture, dtype, each_device, make_engine, make_batch, losses
):
    """The packed forward, the head, the experts' grouped products, and masters that stay in float32."""
    engine = make_engine(model=model_of(architecture), compute_dtype=dtype, device=each_device)
    batch = make_batch()
    exact = exact_gradients(engine.model, batch)
    engine.forward_backward(batch, losses.likelihood)
    found = {name: one.grad for name, one in engine.weights.masters.items()}
    assert {one.device.type for one in found.values()} == {each_device}
    assert {one.dtype for one in engine.weights.masters.values()} == {torch.float32}
    assert relative_error(found, exact) < NEAR[dtype]


def test_kernels_keep_the_sequences_of_a_row_apart(each_device, make_engine, make_batch, losses, monkeypatch):
    """flash-linear-attention's gated DeltaNet on an accelerator, beside a convolution that honours bounds too."""
    options = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
    options |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    model = ModelConfig(build=BuildConfig(**SIZES, architecture="qwen3_5_text", options=options))
    settings = {"model": model, "device": each_device, "max_tokens_per_microbatch": 200}
    kernels = ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"]
    if each_device != "cpu":
        pytest.importorskip("fla")
        del kernels[1]
    batch = make_batch(lengths=(13, 9, 60, 7))
    found = []
    for planted in (False, True):
        calls = plant("qwen3_5_text", monkeypatch, kernels=kernels) if planted else []
        engine = make_engine(**settings)
        isolation._proven.clear()  # the config is the same
        logprobs = engine.infer_batch(batch).logprobs
        engine.forward_backward(batch, losses.likelihood)
        found.append((logprobs, {name: one.grad.cpu() for name, one in engine.weights.masters.items()}))
        layers = state_layers(engine.model).values()
        assert not planted or all(layer._hone_uses_bounds for layer in layers)
        assert all(one.total() for one in calls)
    (expected, exact), (logprobs, grads) = found
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
    assert relative_error(grads, {name: one.double() for name, one in exact.items()}) < 1e-3


def test_log_probs_are_those_of_the_cpu(each_device, make_engine, make_batch):
    there, here = (make_engine(device=device) for device in (each_device, "cpu"))
    batch = make_batch()
    found = there.infer_batch(batch).logprobs
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, here.infer_batch(batch).logprobs, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("deterministic")
def test_offload_brings_everything_back_and_changes_no_bit(each_device, make_engine, make_batch, losses):
    batches, results = [make_batch(seed=seed) for seed in range(3)], []
    for offload in (False, True):
        engine = make_engine(compute_dtype="bfloat16", backend=Fsdp2Settings(offload=offload), device=each_device)
        results.append((trained(engine, batches, losses.policy), weights(engine), engine))
    (losses_on, on, _), (losses_off, off, engine) = results
    assert losses_on == losses_off
    assert all(torch.equal(on[name].cpu(), off[name].cpu()) for name in on)
    resting = [*engine.model.parameters(), *engine.weights.masters.values()]
    resting += [one for state in engine.update.optimizer.state.values() for one in state.values() if one.dim()]
    assert {one.device.type for one in resting} == {"cpu"}


def test_parts_move_to_the_cpu_and_back(each_device, make_engine, make_batch, losses):
    engine, batch = make_engine(compute_dtype="bfloat16", device=each_device), make_batch()
    trained(engine, [batch], losses.likelihood)
    before = engine.infer_batch(batch).logprobs
    engine.to("cpu", model=False, grad=False)
    assert {one.device.type for one in engine.weights.masters.values()} == {"cpu"}
    assert torch.equal(engine.infer_batch(batch).logprobs, before)
    engine.to(each_device)
    assert {one.device.type for one in engine.weights.masters.values()} == {each_device}
    assert engine.train_batch(batch, losses.likelihood)["train/skipped_steps"].value == 0


@pytest.mark.usefixtures("deterministic")
def test_activations_in_cpu_memory_change_no_gradient(each_device, make_engine, make_batch, losses):
    found = []
    for checkpointing in (False, "offload"):
        engine = make_engine(model=model_of(), activation_checkpointing=checkpointing, device=each_device)
        engine.forward_backward(make_batch(), losses.policy)
        found.append({name: one.grad.cpu().double() for name, one in engine.weights.masters.items()})
    assert relative_error(*found) < 1e-6


def test_activations_in_cpu_memory_leave_the_device(each_device):
    """4 MiB saved by `sin` and by `exp` each: none of it is on an accelerator between forward and backward."""

    def gradient(context):
        x = torch.linspace(-1, 1, 1 << 20, device=each_device).requires_grad_()
        start = current_platform().memory().allocated
        with context():
            y = (x * 2).sin().exp().sum()
        held = current_platform().memory().allocated - start
        y.backward()
        return x.grad, held

    (plain, held), (moved, less) = gradient(torch.enable_grad), gradient(kept_in_cpu_memory)
    assert torch.equal(plain, moved)
    if each_device != "cpu":  # a CPU's figure is the whole process's
        assert (held >> 20, less >> 20) == (8, 0)


@pytest.mark.usefixtures("deterministic")
def test_a_checkpoint_of_a_device_continues_there_to_the_bit_and_loads_on_a_cpu(
    each_device, make_engine, make_batch, losses, tmp_path
):
    settings = {"compute_dtype": "bfloat16", "device": each_device}
    batches = [make_batch(seed=seed) for seed in range(4)]
    through = make_engine(**settings)
    trained(through, batches[:2], losses.policy)
    through.save_checkpoint(tmp_path)
    resumed, here = make_engine(**settings), make_engine(compute_dtype="bfloat16")
    for engine in (resumed, here):
        engine.load_checkpoint(tmp_path)
        saved = weights(through)
        assert all(torch.equal(one.cpu(), saved[name].cpu()) for name, one in weights(engine).items())
    one, other, cpu = (trained(engine, batches[2:], losses.policy) for engine in (through, resumed, here))
    assert one == other
    assert one == pytest.approx(cpu, rel=0.1, abs=1e-3)


@pytest.mark.parametrize("four_bit", [False, True], ids=["lora", "qlora"])
def test_an_adapter_learns_beside_frozen_weights(four_bit, each_device, saved, engine_of, make_batch, losses):
    if four_bit:
        pytest.importorskip("bitsandbytes", reason="comes with hone-rl[qlora]")
    quantised = {"quantise": {}} if four_bit else {}
    there, here = (engine_of(saved("qwen3"), engine={"device": device}, **quantised) for device in (each_device, "cpu"))
    batches = [make_batch(seed=seed) for seed in range(4)]
    found, expected = (trained(engine, batches, losses.likelihood) for engine in (there, here))
    assert found == pytest.approx(expected, rel=2e-3)
    learnt = [one for name, one in there.get_per_tensor_param(adapter_only=True)[0] if "lora_B" in name]
    assert learnt
    assert all(one.abs().max() > 0 for one in learnt)


def test_images_are_seen_as_on_the_cpu(each_device):
    batch, found = batch_of(), []
    for device in (each_device, "cpu"):
        engine = engine_of_pictures(Case(), device=device)
        engine.forward_backward(batch, likelihood_of_pictures)
        found.append({name: one.grad.cpu().double() for name, one in engine.weights.masters.items()})
    assert any("visual" in name and one.abs().max() > 0 for name, one in found[0].items())
    assert relative_error(*found) < 1e-3
