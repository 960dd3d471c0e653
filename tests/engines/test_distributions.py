"""Outputs that compare distributions: top-k, log-probs at given tokens, exact KL. Against all logits at once."""

import pytest
import torch

from hone.engines.logprobs import Head, Queries, Reference, score_tokens
from hone.models.attention.packed import Packing, packed
from hone.models.settings import BuildConfig, ModelConfig
from hone.types import LossOutput, TopK
from tests.engines import spread
from tests.engines.conftest import BUILD
from tests.engines.test_logprobs import ROWS, VOCABULARY, WIDTH, WidestLogits, head_of
from tests.ranks import run_ranks

OTHER = 4  # width of the reference


def log_pi(hidden, head, temperature):
    logits = (hidden @ head.weight.T + (0 if head.bias is None else head.bias)) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("kind", [{}, {"bias": True, "softcap": 3.0, "scale": 2.0}], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_the_plain_computation(chunk, kind, dtype, tolerance):
    head = head_of(dtype, **kind)
    reference = Reference(torch.randn(ROWS, OTHER, dtype=dtype), Head(torch.randn(VOCABULARY, OTHER, dtype=dtype)))
    hidden = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    ids = torch.randint(0, VOCABULARY, (ROWS, 3))
    ids[:, 0] = targets  # a token may be asked for twice
    ours = score_tokens(
        hidden,
        targets,
        head,
        temperature=0.7,
        chunk_tokens=chunk,
        needs=frozenset({"entropy"}),
        queries=Queries(ids, 5, reference),
    )
    mine, theirs = log_pi(hidden, head, 0.7), log_pi(reference.hidden, reference.head, 0.7)
    at, kl = mine.gather(1, ids), (mine.exp() * (mine - theirs)).sum(-1)
    one, entropy = mine.gather(1, targets[:, None])[:, 0], -(mine.exp() * mine).sum(-1)
    torch.testing.assert_close(ours.logprobs_at, at, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.full_kl, kl, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.top_k_logprobs, mine.topk(5).values, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours.top_k_ids, mine.topk(5).indices)
    a, b, c, d = (torch.randn(*shape, dtype=dtype) for shape in ((ROWS,), (ROWS, 3), (ROWS,), (ROWS,)))
    inputs = [hidden, head.weight] + ([head.bias] if head.bias is not None else [])
    for left, right in (
        ((ours.logprobs_at * b).sum(), (at * b).sum()),
        ((ours.full_kl * c).sum(), (kl * c).sum()),
        (
            (ours.logprobs * a + ours.full_kl * c + ours.entropy * d).sum() + (ours.logprobs_at * b).sum(),
            (one * a + kl * c + entropy * d).sum() + (at * b).sum(),
        ),
    ):
        found = torch.autograd.grad(left, inputs, retain_graph=True)
        expected = torch.autograd.grad(right, inputs, retain_graph=True)
        for mine_, theirs_ in zip(found, expected, strict=True):
            torch.testing.assert_close(mine_, theirs_, rtol=tolerance, atol=tolerance)


def test_kl_of_two_tokens_by_hand():
    # The model says 1/4 and 3/4, the reference 1/2 and 1/2: KL = 1/4 ln(1/2) + 3/4 ln(3/2).
    model, reference = Head(torch.tensor([[0.0], [1.0986123]])), Head(torch.zeros(2, 1))
    ones = torch.ones(1, 1)
    queries = Queries(reference=Reference(ones, reference), top_k=1)
    scores = score_tokens(ones, torch.tensor([0]), model, queries=queries)
    torch.testing.assert_close(scores.full_kl, torch.tensor([0.1308120]))
    assert scores.top_k_ids.tolist() == [[1]]
    torch.testing.assert_close(scores.top_k_logprobs.exp(), torch.tensor([[0.75]]))


def test_no_more_than_one_chunk_of_logits_exists_on_either_side():
    head = head_of(torch.float32)
    hidden = torch.randn(500, WIDTH, requires_grad=True)
    reference = Reference(torch.randn(500, OTHER), Head(torch.randn(VOCABULARY, OTHER)))
    targets, ids = torch.zeros(500, dtype=torch.int64), torch.zeros(500, 2, dtype=torch.int64)
    with WidestLogits() as seen:
        scores = score_tokens(hidden, targets, head, chunk_tokens=10, queries=Queries(ids, 3, reference))
        (scores.logprobs_at.sum() + scores.full_kl.sum()).backward()
    assert 0 < seen.rows <= 10


def test_a_reference_over_another_vocabulary_is_refused():
    reference = Reference(torch.randn(2, OTHER), Head(torch.randn(VOCABULARY - 1, OTHER)))
    with pytest.raises(ValueError, match=f"{VOCABULARY} tokens, the reference {VOCABULARY - 1}"):
        score_tokens(
            torch.randn(2, WIDTH),
            torch.tensor([0, 1]),
            Head(torch.randn(VOCABULARY, WIDTH)),
            queries=Queries(reference=reference),
        )


# --------------------------------------------------------------------------------------------------- in the engine

SMALLER = ModelConfig(build=BuildConfig(hidden_size=16, layers=1, heads=2, mlp_size=16, max_positions=64, seed=7))
DOUBLE = {"compute_dtype": "float64", "max_tokens_per_microbatch": 24}


def double(model):
    return model.model_copy(update={"dtype": "float64"})


def all_logprobs(engine, batch):
    """log pi before every token of a batch, [T, V], a sequence at a time with transformers' own forward."""
    rows = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        with packed(Packing.of(torch.tensor([0, end - start]))):
            logits = engine.model(input_ids=batch.token_ids[None, start:end], use_cache=False).logits[0]
        rows += [torch.zeros_like(logits[:1]), logits.log_softmax(-1)[:-1]]
    return torch.cat(rows)


def test_the_engine_gives_a_teachers_top_k_and_the_students_log_probs_there(make_engine, make_batch):
    batch = make_batch()
    teacher = make_engine(double(SMALLER), total_steps=0, **DOUBLE)
    said = teacher.infer_batch(batch, frozenset({TopK(4)}))
    expected = all_logprobs(teacher, batch).topk(4)
    mask = batch.loss_mask
    assert torch.equal(said.extras["top_k_ids"][mask], expected.indices[mask])
    torch.testing.assert_close(said.extras["top_k_logprobs"][mask], expected.values[mask])
    assert said.logprobs.shape == mask.shape

    student = make_engine(double(ModelConfig(build=BUILD)), **DOUBLE)
    batch = batch.with_(ids_at=said.extras["top_k_ids"])
    found = student.infer_batch(batch, frozenset({"logprobs_at"})).extras["logprobs_at"]
    dense = all_logprobs(student, batch).gather(1, said.extras["top_k_ids"])
    torch.testing.assert_close(found[mask], dense[mask])


def test_full_kl_in_the_engine_has_the_value_and_gradient_of_the_dense_one(make_engine, make_batch):
    """The reference runs in an engine of its own, cut differently, and is narrower than the model."""
    batch = make_batch()
    other = make_engine(double(SMALLER), total_steps=0, **{**DOUBLE, "max_tokens_per_microbatch": 60})
    batch = batch.with_(
        reference_states=other.infer_batch(batch, frozenset({"states"})).extras["states"],
        loss_weights=batch.loss_weights.double(),
    )
    assert batch.reference_states.shape == (batch.num_tokens, 16)
    engine = make_engine(double(ModelConfig(build=BUILD)), reference=double(SMALLER), **DOUBLE)

    def loss(output, part):
        return LossOutput(output.extras["full_kl"])

    loss.needs = frozenset({"full_kl"})
    engine.forward_backward(batch, loss)
    found = {name: weight.grad.clone() for name, weight in engine.weights.masters.items()}
    engine.weights.clear_gradients()
    mine, theirs = all_logprobs(engine, batch), all_logprobs(other, batch).detach()
    kl = (mine.exp() * (mine - theirs)).sum(-1)
    value = engine.infer_batch(batch, frozenset({"full_kl"})).extras["full_kl"]
    torch.testing.assert_close(value[batch.loss_mask], kl.detach()[batch.loss_mask])
    (kl * batch.loss_weights)[batch.loss_mask].sum().backward()
    for name, weight in engine.model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("need", "missing"), [("logprobs_at", "ids_at"), ("full_kl", "reference_states"), ("full_kl", "reference model")]
)
def test_what_an_output_is_computed_from_must_be_there(make_engine, make_batch, need, missing):
    batch = make_batch()
    if missing == "reference model":
        batch = batch.with_(reference_states=torch.zeros(batch.num_tokens, 32))
    with pytest.raises(ValueError, match=missing):
        make_engine().infer_batch(batch, frozenset({need}))


# ---------------------------------------------------------------------------------------------------- on several ranks

NEEDS = frozenset({"entropy", TopK(3), "states", "logprobs_at", "full_kl"})


def compared(output, batch):
    """A loss of everything that compares distributions."""
    return LossOutput(output.extras["full_kl"] - 0.1 * output.extras["logprobs_at"].sum(-1))


compared.needs = frozenset({"logprobs_at", "full_kl"})


def outputs(cases):
    """On one rank or several: what each case's engine says of its part of a batch, and the norm of its gradient."""
    found = {}
    for number, case in enumerate(cases):
        engine = spread.make_engine(case, reference=SMALLER)
        batch = spread.make_batch(0)
        generator = torch.Generator().manual_seed(3)
        batch = batch.with_(
            ids_at=torch.randint(8, 104, (batch.num_tokens, 2), generator=generator),
            reference_states=torch.randn(batch.num_tokens, 16, generator=generator),
        )
        part = spread.own_part(engine, batch)
        output = engine.infer_batch(part, NEEDS)
        mine = {**output.extras, "entropy": output.entropy, "tokens": part.token_ids, "mask": part.loss_mask}
        found |= {f"{number}/{name}": value for name, value in mine.items()}
        found[f"{number}/norm"] = engine.train_batch(part, compared)["train/grad_norm"].value
    return found


MESHES = [spread.Case(parallel=parallel) for parallel in ({}, {"tensor": 2}, {"sequence": 2})]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MESHES)), ids=lambda number: MESHES[number].name)
def test_outputs_and_gradients_are_those_of_one_process_on_a_mesh(number, on_two_ranks):
    alone, ranks = on_two_ranks
    norms = {rank[f"{number}/norm"] for rank in ranks}
    assert all(norm == pytest.approx(alone["0/norm"], rel=1e-4) for norm in norms)
    for rank in ranks:
        tokens = rank[f"{number}/tokens"]
        for name in ("entropy", "states", "logprobs_at", "full_kl", "top_k_ids", "top_k_logprobs"):
            torch.testing.assert_close(rank[f"{number}/{name}"], same_tokens(alone, tokens, name), atol=1e-4, rtol=1e-4)


def same_tokens(alone, tokens, name):
    """The rows of one process's output that belong to a rank's sequences, found by their tokens."""
    batch = spread.make_batch(0)
    whole = [batch.token_ids[a:b] for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]
    rows, at = [], 0
    while at < len(tokens):
        found = next(i for i, one in enumerate(whole) if torch.equal(one, tokens[at : at + len(one)]))
        rows.append(torch.arange(int(batch.cu_seqlens[found]), int(batch.cu_seqlens[found + 1])))
        at += len(whole[found])
    return alone[f"0/{name}"][torch.cat(rows)]


@pytest.fixture(scope="module")
def on_two_ranks():
    return outputs([spread.Case()]), run_ranks(2, outputs, MESHES)
