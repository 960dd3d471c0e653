"""The engine: gradients that do not depend on how a batch is cut, precision, refusals, and its public calls."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hone.data.packing import microbatches, select
from hone.engines.base import BaseEngine
from hone.engines.fsdp2.settings import Fsdp2Settings
from hone.engines.layout import lay_out
from hone.engines.memory import worth_moving
from hone.models.attention.packed import packed
from hone.models.settings import BuildConfig, ModelConfig, UseConfig
from hone.types import LossOutput

SMALL = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}
ARCHITECTURES = {"qwen3": {}, "llama": {}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2}}


def gradients(engine, batch, loss):
    metrics = engine.forward_backward(batch, loss)
    found = {name: weight.grad.clone() for name, weight in engine.weights.masters.items()}
    engine.weights.clear_gradients()
    return found, metrics


def assert_equal_gradients(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        scale = float(one[name].abs().max())
        assert float((one[name] - other[name]).abs().max()) <= tolerance * max(scale, 1e-2), name


def test_it_is_what_the_contract_says(make_engine):
    engine: BaseEngine = make_engine()
    for name in (name for name in vars(BaseEngine) if not name.startswith("_")):
        assert hasattr(engine, name), name
    assert (engine.ranks.data_parallel_rank, engine.ranks.data_parallel_size, engine.ranks.is_output_rank) == (
        0,
        1,
        True,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_equal_those_of_each_sequence_alone(architecture, make_engine, make_batch):
    build = BuildConfig(**SMALL, architecture=architecture, options=ARCHITECTURES[architecture])
    engine, batch = make_engine(model=ModelConfig(build=build), temperature=0.8), make_batch()
    found = engine.infer_batch(batch).logprobs
    engine.model.set_attn_implementation("sdpa")
    expected = []
    for i in range(batch.num_sequences):
        ids = select(batch, [i]).token_ids
        with torch.no_grad():
            logits = engine.model(ids[None], use_cache=False).logits[0] / 0.8
        scored = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        expected.append(torch.cat([torch.zeros(1), scored]))
    torch.testing.assert_close(found, torch.cat(expected) * batch.loss_mask, rtol=1e-5, atol=1e-5)
    assert (found[batch.loss_mask] < 0).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-7)])
def test_gradients_do_not_depend_on_the_cut_or_the_order(
    architecture, dtype, tolerance, make_engine, make_batch, losses
):
    """float64 stops at 1e-7 because transformers computes norms and rotations in float32 whatever the model's type."""
    if (architecture, dtype) == ("qwen3_moe", "float64"):
        pytest.skip("torch's grouped matrix product, which transformers uses for experts, has no float64")
    build = BuildConfig(**SMALL, architecture=architecture, options=ARCHITECTURES[architecture])
    batch = make_batch()
    order = [3, 0, 4, 2, 1]
    cuts = {20: batch, 26: batch, 64: batch, 1000: select(batch, order)}
    assert [len(microbatches(b, cap)) for cap, b in cuts.items()] == [3, 2, 1, 1]
    results = []
    for cap, one in cuts.items():
        model = ModelConfig(build=build, dtype=dtype)
        engine = make_engine(model=model, compute_dtype=dtype, max_tokens_per_microbatch=cap, logprob_chunk_tokens=7)
        results.append(gradients(engine, one, losses.policy))
    for found, metrics in results[1:]:
        assert_equal_gradients(results[0][0], found, tolerance)
        assert metrics["train/loss"].value == pytest.approx(results[0][1]["train/loss"].value, abs=1e-6)
        assert metrics["train/logprob"].value == pytest.approx(results[0][1]["train/logprob"].value, rel=1e-5)
        assert metrics["train/logprob"].count == int(batch.loss_mask.sum())


def test_bfloat16_gradients_of_micro_batches_add_up_in_float32(make_engine, make_batch, losses):
    batch = make_batch()
    found = [
        gradients(make_engine(compute_dtype="bfloat16", max_tokens_per_microbatch=cap), batch, losses.likelihood)[0]
        for cap in (20, 64)
    ]
    for name, whole in found[1].items():
        assert found[0][name].dtype == torch.float32
        assert (found[0][name] - whole).norm() < 0.05 * whole.norm() + 1e-4, name


def test_gradients_are_exact_to_1e10_where_the_architecture_computes_in_float64(make_engine, make_batch, losses):
    """GPT-2 has neither rotations nor RMS norms, so its float64 is float64 throughout."""
    build = BuildConfig(architecture="gpt2", hidden_size=32, layers=2, heads=4, mlp_size=48, max_positions=64)
    model = ModelConfig(build=build, dtype="float64")
    engines = [
        make_engine(model=model, compute_dtype="float64", max_tokens_per_microbatch=cap, logprob_chunk_tokens=chunk)
        for cap, chunk in ((20, 3), (1000, 1000))
    ]
    for engine in engines:
        engine.model.eval()  # GPT-2 has dropout, which would draw other numbers for other cuts
        engine.train_mode = engine.eval_mode
    batch = make_batch()
    one, other = (gradients(engine, batch, losses.likelihood)[0] for engine in engines)
    assert_equal_gradients(one, other, 1e-10)


def test_the_gradient_is_that_of_the_plain_computation(make_engine, make_batch, losses):
    engine, batch = make_engine(), make_batch()
    found, metrics = gradients(engine, batch, losses.likelihood)
    with packed(batch.cu_seqlens):
        logits = engine.model(batch.token_ids[None], position_ids=batch.position_ids[None], use_cache=False).logits[0]
    scored = torch.log_softmax(logits[:-1], -1).gather(1, batch.token_ids[1:, None])[:, 0]
    loss = -scored[batch.loss_mask[1:]].mean()
    loss.backward()
    assert_equal_gradients({n: w.grad for n, w in engine.weights.masters.items()}, found, 1e-5)
    assert metrics["train/loss"].value == pytest.approx(loss.item(), rel=1e-6)


def test_training_lowers_the_loss_and_reports_what_it_did(make_engine, make_batch, losses):
    engine, batch = make_engine(optimizer={"lr": 1e-2}, schedule={"name": "linear", "warmup_steps": 2}), make_batch()
    history = [engine.train_batch(batch, losses.likelihood) for _ in range(20)]
    assert history[-1]["train/loss"].value < 0.5 * history[0]["train/loss"].value
    assert [round(m["train/lr"].value, 6) for m in history[:3]] == [0.005, 0.01, 0.01]
    assert history[0]["train/grad_norm"].value > 0
    assert history[0]["train/skipped_steps"].value == 0


def test_gradients_are_clipped_to_the_norm(make_engine, make_batch, losses):
    batch = make_batch()
    moved = []
    for max_norm in (None, 1e-3):
        engine = make_engine(optimizer={"name": "SGD", "lr": 1.0}, max_grad_norm=max_norm)
        before = {name: weight.detach().clone() for name, weight in engine.weights.masters.items()}
        norm = engine.train_batch(batch, losses.likelihood)["train/grad_norm"].value
        moved.append(
            sum(float((w - before[n]).detach().square().sum()) for n, w in engine.weights.masters.items()) ** 0.5
        )
    assert moved[0] == pytest.approx(norm, rel=1e-3)
    assert moved[1] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, bad, make_engine, make_batch, losses):
    engine, batch = make_engine(compute_dtype=dtype), make_batch()
    engine.train_batch(batch, losses.likelihood)
    before = {name: tensor.clone() for name, tensor in engine.weights.whole()}
    moment = next(iter(engine.update.optimizer.state.values()))["exp_avg"].clone()
    metrics = engine.train_batch(batch.with_(loss_weights=batch.loss_weights * bad), losses.likelihood)
    assert metrics["train/skipped_steps"].value == 1
    assert "train/grad_norm" not in metrics
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights.whole())
    assert torch.equal(next(iter(engine.update.optimizer.state.values()))["exp_avg"], moment)
    assert engine.train_batch(batch, losses.likelihood)["train/skipped_steps"].value == 0


def test_updates_too_small_for_bfloat16_are_not_lost(make_engine, make_batch, losses):
    engine, batch = make_engine(compute_dtype="bfloat16", optimizer={"lr": 1e-5}), make_batch()
    name, working = next(iter(engine.model.named_parameters()))
    before, at_start = engine.weights.masters[name].detach().clone(), working.detach().clone()
    engine.train_batch(batch, losses.likelihood)
    large = before.abs() > 0.02  # bfloat16 steps there are 1e-4 or more: one update of 1e-5 cannot show
    assert (working.detach()[large] == at_start[large]).float().mean() > 0.8
    assert not torch.equal(engine.weights.masters[name].detach()[large], before[large])
    for _ in range(40):
        engine.train_batch(batch, losses.likelihood)
    assert (working.detach()[large] == at_start[large]).float().mean() < 0.5
    assert torch.equal(working.detach(), engine.weights.masters[name].detach().bfloat16())


def test_bfloat16_computes_in_bfloat16_and_agrees_with_float32(make_engine, make_batch, losses):
    batch = make_batch()
    narrow, wide = make_engine(compute_dtype="bfloat16"), make_engine()
    assert {p.dtype for p in narrow.model.parameters()} == {torch.bfloat16}
    assert {w.dtype for w in narrow.weights.masters.values()} == {torch.float32}
    assert narrow.model.base_model.rotary_emb.inv_freq.dtype == torch.float32
    gap = (narrow.infer_batch(batch).logprobs - wide.infer_batch(batch).logprobs).abs().max()
    assert 0 < gap < 0.05
    ours, theirs = gradients(narrow, batch, losses.likelihood)[0], gradients(wide, batch, losses.likelihood)[0]
    for name in theirs:
        assert (ours[name] - theirs[name]).norm() < 0.05 * theirs[name].norm() + 1e-4, name


def test_outputs_come_in_the_order_of_the_batch(make_engine, make_batch):
    batch = make_batch(lengths=(3, 20, 7, 11, 2, 20))
    needs = frozenset({"entropy", "sum_pi_squared"})
    whole, cut = (make_engine(max_tokens_per_microbatch=cap).infer_batch(batch, needs) for cap in (64, 20))
    torch.testing.assert_close(whole.logprobs, cut.logprobs)
    torch.testing.assert_close(whole.entropy, cut.entropy)
    torch.testing.assert_close(whole.extras["sum_pi_squared"], cut.extras["sum_pi_squared"])
    assert (whole.logprobs[~batch.loss_mask] == 0).all()
    plain = make_engine().infer_batch(batch)
    assert plain.entropy is None
    assert plain.extras == {}


def test_a_loss_gets_what_it_needs(make_engine, make_batch, losses):
    metrics = make_engine().forward_backward(make_batch(), losses.entropy)
    assert 0 < metrics["train/entropy"].value < torch.tensor(104.0).log()


def test_a_metric_is_the_mean_over_the_tokens_that_the_loss_counts(make_engine, make_batch):
    """However the batch is cut: the first token of each pair of sequences in one, none at all in another."""
    batch = make_batch(lengths=(9, 5, 12, 5, 20))

    def loss(output, part):
        marked = part.loss_mask & (part.position_ids == 4)  # the last token of the sequences of five
        shown = {"train/position": part.position_ids.double(), "train/all": part.position_ids.double()}
        return LossOutput(-output.logprobs, shown, {"train/position": marked & (part.token_ids % 2 == 0)})

    at = (batch.position_ids == 4) & (batch.token_ids % 2 == 0)
    everywhere = batch.position_ids[batch.loss_mask].double().mean().item()
    assert 0 < int(at.sum()) < 5
    for budget in (20, 64):
        metrics = make_engine(max_tokens_per_microbatch=budget).forward_backward(batch, loss)
        assert (metrics["train/position"].value, metrics["train/position"].count) == (4.0, int(at.sum()))
        assert metrics["train/all"].value == pytest.approx(everywhere)


def test_a_value_model_learns_one_number_per_state(make_engine, make_batch, losses):
    engine, batch = make_engine(model_type="value_model", optimizer={"lr": 1e-2}), make_batch(lengths=(9, 5, 12))
    assert torch.equal(engine.infer_batch(batch).values, torch.zeros(batch.num_tokens))
    first = engine.train_batch(batch, losses.values)["train/loss"].value
    for _ in range(60):
        last = engine.train_batch(batch, losses.values)["train/loss"].value
    assert last < 0.1 * first
    values = engine.infer_batch(batch).values
    assert (values[~batch.loss_mask] == 0).all()
    # The value at token t is of the state before it: changing that token (and later ones) does not change it.
    at = int(batch.loss_mask.nonzero()[-1])
    other = engine.infer_batch(batch.with_(token_ids=batch.token_ids.index_fill(0, torch.tensor(at), 9))).values
    torch.testing.assert_close(other, values)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_activation_checkpointing_changes_memory_only(architecture, make_engine, make_batch, losses):
    build = BuildConfig(**SMALL, architecture=architecture, options=ARCHITECTURES[architecture])
    batch = make_batch()
    one, other = (
        gradients(make_engine(model=ModelConfig(build=build), activation_checkpointing=on), batch, losses.policy)[0]
        for on in (False, "offload")
    )
    assert_equal_gradients(one, other, 1e-6)


def test_with_checkpointing_only_the_input_of_each_layer_is_worth_moving(make_engine, make_batch, losses):
    """What `offload` takes away: nothing of the layers' inner tensors, and no weight, not even the head's."""
    engine, batch = make_engine(activation_checkpointing=True), make_batch()
    moved = []

    def pack(tensor):
        moved.append(tuple(tensor.shape)) if worth_moving(tensor, least_bytes=0) else None
        return tensor

    with engine.train_mode(), saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward(batch, frozenset())
    width, layers = engine.model.config.hidden_size, engine.model.config.num_hidden_layers
    row = lay_out(batch).token_ids.numel()
    assert moved.count((1, row, width)) >= layers
    assert {shape[-1] for shape in moved if len(shape) > 1} <= {width, 1}


def test_dropout_is_on_in_training_and_off_in_inference(make_engine, make_batch, losses):
    build = BuildConfig(**SMALL, options={"attention_dropout": 0.5})
    model = ModelConfig(build=build, use=UseConfig(dropout="config"))
    engine, batch = make_engine(model=model), make_batch()
    assert torch.equal(engine.infer_batch(batch).logprobs, engine.infer_batch(batch).logprobs)
    one, other = (gradients(engine, batch, losses.likelihood)[1]["train/loss"].value for _ in range(2))
    assert one != other
    with engine.train_mode():
        assert engine.model.training
        with engine.eval_mode():
            assert not engine.model.training
        assert engine.model.training
    assert not engine.model.training


def test_weights_come_under_their_names_and_own_their_storage(make_engine, make_batch, losses):
    engine = make_engine(compute_dtype="bfloat16")
    stream, adapter = engine.get_per_tensor_param()
    sent = dict(stream)
    assert adapter is None
    assert sent.keys() == engine.model.state_dict().keys()
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])  # the head is tied, and sent
    assert {tensor.dtype for tensor in sent.values()} == {torch.float32}
    copies = {name: tensor.clone() for name, tensor in sent.items()}
    engine.train_batch(make_batch(), losses.likelihood)
    assert all(torch.equal(sent[name], copies[name]) for name in sent)
    after = dict(engine.get_per_tensor_param()[0])
    assert not torch.equal(after["lm_head.weight"], sent["lm_head.weight"])
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


def test_offload_changes_where_weights_are_and_nothing_else(make_engine, make_batch, losses):
    one, other = (
        make_engine(compute_dtype="bfloat16"),
        make_engine(compute_dtype="bfloat16", backend=Fsdp2Settings(offload=True)),
    )
    where = []
    move, other.to = other.to, lambda device, **parts: where.append((device, *sorted(p for p in parts if parts[p])))
    batch = make_batch()
    other.infer_batch(batch)
    with other.train_mode():
        other.infer_batch(batch)
    model, rest = ("model",), ("grad", "model", "optimizer")
    assert where == [("cpu", *model), ("cpu", *model), ("cpu", *rest), ("cpu", *rest)]  # there is one device here
    other.to = move
    results = [
        [engine.train_batch(batch, losses.policy)["train/loss"].value for _ in range(2)] for engine in (one, other)
    ]
    assert results[0] == results[1]


def test_an_engine_without_steps_only_infers(make_engine, make_batch, losses):
    engine = make_engine(total_steps=0, compute_dtype="bfloat16")
    assert engine.weights.masters == {}
    assert not any(p.requires_grad for p in engine.model.parameters())
    assert engine.infer_batch(make_batch()).logprobs.abs().sum() > 0
    with pytest.raises(RuntimeError, match="never trained"):
        engine.train_batch(make_batch(), losses.likelihood)


def test_a_batch_without_trained_tokens_changes_nothing(make_engine, make_batch, losses):
    engine, batch = make_engine(), make_batch(lengths=(5, 4), prompt=9)
    before = {name: tensor.clone() for name, tensor in engine.weights.whole()}
    metrics = engine.train_batch(batch, losses.likelihood)
    assert metrics["train/loss"].value == 0
    assert metrics["train/grad_norm"].value == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights.whole())
    assert torch.equal(engine.infer_batch(batch).logprobs, torch.zeros(9))


def test_what_cannot_be_trained_is_named(make_engine, make_batch, losses):
    engine, batch = make_engine(max_tokens_per_microbatch=16), make_batch()
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=16"):
        engine.forward_backward(batch, losses.likelihood)
    with pytest.raises(ValueError, match="loss_weights is not set"):
        make_engine().forward_backward(batch.with_(loss_weights=None), losses.likelihood)
    with pytest.raises(ValueError, match="first token of a sequence"):
        make_engine().infer_batch(batch.with_(loss_mask=torch.ones_like(batch.loss_mask)))
    with pytest.raises(ValueError, match="temperature=0"):
        make_engine(temperature=0.0)
    with pytest.raises(ValueError, match="has no adapter"):
        make_engine().disable_adapter()
