"""`head_dtype: float32`: logits of a bfloat16 model that are not rounded to bfloat16, in training and inference."""

import pytest
import torch

from hone.engines.logprobs import Head, score_tokens
from hone.engines.reference_head import head_of_reference
from hone.models.loading import load_head
from hone.models.settings import BuildConfig, ModelConfig
from tests.engines.conftest import BUILD
from tests.engines.test_logprobs import ROWS, VOCABULARY, WIDTH, plain

UNTIED = BuildConfig(**BUILD.model_dump(exclude={"tie_embeddings"}), tie_embeddings=False)


@pytest.mark.parametrize("build", [BUILD, UNTIED], ids=["tied", "untied"])
def test_log_probs_and_entropy_lose_the_error_of_rounded_logits(build, make_engine, make_batch, losses):
    errors = {}
    for dtype in (None, "float32"):
        engine = make_engine(model=ModelConfig(build=build), compute_dtype="bfloat16", head_dtype=dtype)
        batch = make_batch()
        found = engine.infer_batch(batch, frozenset({"entropy", "states"}))
        states = found.extras["states"][batch.loss_mask].double()
        logits = states @ engine.model.get_output_embeddings().weight.double().T
        log_pi = torch.log_softmax(logits, -1)
        exact = log_pi.gather(1, batch.token_ids[batch.loss_mask, None])[:, 0]
        errors[dtype] = (found.logprobs[batch.loss_mask] - exact).abs().max()
        if dtype is not None:
            entropy = -(log_pi.exp() * log_pi).sum(-1)
            torch.testing.assert_close(found.entropy[batch.loss_mask].double(), entropy, rtol=1e-5, atol=1e-5)
        trained = engine.forward_backward(batch, losses.policy)["train/logprob"].value
        # in training another kernel of attention may round the states
        assert trained == pytest.approx(found.logprobs[batch.loss_mask].mean().item(), rel=1e-4)
    assert errors["float32"] < 1e-5
    assert errors[None] > 20 * errors["float32"]


def test_gradients_are_those_of_float32_logits_rounded_once():
    hidden = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_()
    weight, bias = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((VOCABULARY, WIDTH), (VOCABULARY,)))
    targets, inputs = torch.randint(0, VOCABULARY, (ROWS,)), (hidden, weight, bias)
    scores = score_tokens(hidden, targets, Head(weight, bias, dtype=torch.float32), temperature=0.7, chunk_tokens=7)
    expected = plain(hidden.float(), targets, Head(weight.float(), bias.float()), 0.7)[0]
    torch.testing.assert_close(scores.logprobs, expected)
    kept = [one.dtype for one in scores.logprobs.grad_fn.saved_tensors if one.is_floating_point()]
    assert kept == [torch.bfloat16] * 3  # no float32 copy of the head waits for the backward
    found, exact = (torch.autograd.grad(one.sum(), inputs) for one in (scores.logprobs, expected))
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=0.01, atol=1e-4)


def test_a_tied_head_teaches_the_embeddings(make_engine, make_batch, losses):
    engine, batch = make_engine(compute_dtype="bfloat16", head_dtype="float32"), make_batch()
    engine.forward_backward(batch, losses.likelihood)
    grad = engine.weights.masters["model.embed_tokens.weight"].grad
    unseen = torch.ones(len(grad), dtype=torch.bool)
    unseen[batch.token_ids] = False
    assert (grad[unseen].abs().sum(1) > 0).all()  # these tokens have a gradient as outputs only


def test_the_reference_of_the_exact_kl_is_multiplied_in_float32_too(engine_of, saved, make_batch):
    folder = saved("untied")
    model = ModelConfig(path=str(folder))
    head = head_of_reference(model, "bfloat16", "cpu", torch.float32)()
    assert torch.equal(head.weight, load_head(model).get_output_embeddings().weight.bfloat16().float())
    for reference in (model, ModelConfig(path=str(folder), use={"dropout": "config"})):
        engine = engine_of(folder, {"compute_dtype": "bfloat16", "head_dtype": "float32"}, reference=reference)
        batch = make_batch()
        states = engine.infer_batch(batch, frozenset({"states"})).extras["states"]
        found = engine.infer_batch(batch.with_(reference_states=states), frozenset({"full_kl"}))
        assert found.extras["full_kl"].abs().max() == 0  # the untrained adapter changes nothing


def test_a_float32_model_is_unchanged_to_the_bit(make_engine, make_batch, losses):
    batch = make_batch()
    engines = [make_engine(head_dtype=dtype) for dtype in (None, "float32")]
    one, other = (
        [engine.train_batch(batch, losses.entropy)["train/loss"].value for _ in range(2)] for engine in engines
    )
    assert one == other
