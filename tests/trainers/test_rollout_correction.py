"""Rollout correction at work: answers sampled from deliberately perturbed weights, the on-policy gradient wanted.

Answers have two tokens, so the exact on-policy gradient is a sum over every answer there is. What is compared is its
length along its own direction: unbiased where the sequence's importance weight is used, and off where none is.
"""

import asyncio
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.settings import AlgorithmConfig
from hone.config import build
from hone.data.packing import pack, select
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.loading import load_language_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, Prompt, SamplingParams, Status, StopReason, Trajectory, TrajectoryGroup
from hone.workers.train import TrainSpec, TrainWorker

SAMPLES, CHUNKS = 4096, 32
PROMPT = (9, 10)
MODEL = ModelConfig(
    build=BuildConfig(hidden_size=16, layers=1, heads=2, mlp_size=32, max_positions=16, characters="0123456789")
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The trainer's model in float64, and a perturbed copy that generates."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("policy")
    model = load_language_model(MODEL).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # well away from uniform
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    model.config.dtype = torch.float64
    model.save_pretrained(folder)
    load_tokenizer(MODEL).save_pretrained(folder)
    plain, other = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        for _ in range(2)
    )
    for parameter in other.parameters():
        parameter.data += 0.06 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return folder, plain, other


def every_answer(model):
    """Log-probs of all V^2 answers of two tokens, [V, V]."""
    vocabulary = model.config.vocab_size
    with torch.no_grad():
        first = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
        rows = torch.tensor([[*PROMPT, token] for token in range(vocabulary)])
        second = model(rows).logits[:, -1].log_softmax(-1)
    return first[:, None] + second


def reward(first, second):
    """Between 0 and 1, and different for most answers."""
    return ((3 * first + 5 * second) % 11) / 10


def sampled(model):
    """`SAMPLES` answers of the built-in engine that serves `model`."""
    engine = BuiltinEngine(BuiltinSettings(dtype="float64", share_prompts=True), model, load_tokenizer(MODEL))

    async def ask():
        wanted = [SamplingParams(max_tokens=2, ignore_eos=True, seed=seed) for seed in range(SAMPLES)]
        return await asyncio.gather(
            *(engine.generate(GenerationRequest(str(i), PROMPT, one)) for i, one in enumerate(wanted))
        )

    return asyncio.run(asyncio.wait_for(ask(), 120))


@pytest.fixture(scope="module")
def batch(policy):
    prompt = Prompt(prompt_id="p", token_ids=PROMPT, messages=(), ground_truth="", data_source="", row={}, draw=0)
    answers = [
        Trajectory(
            prompt_id="p",
            sample=number,
            token_ids=(*PROMPT, *answer.token_ids),
            prompt_length=2,
            loss_mask=(0, 0, 1, 1),
            rollout_logprobs=(0.0, 0.0, *answer.logprobs),
            weight_versions=(-1, -1, 0, 0),
            response="",
            stop_reason=StopReason.LENGTH,
            status=Status.TRUNCATED,
            error="",
            episode=number,
        ).with_(reward=reward(*answer.token_ids))
        for number, answer in enumerate(sampled(policy[2]))
    ]
    return pack([TrajectoryGroup(prompt, tuple(answers))])


def worker(folder):
    engine = EngineConfig(compute_dtype="float64", max_grad_norm=None, optimizer=OptimizerConfig(name="SGD", lr=1.0))
    found = TrainWorker(TrainSpec(ModelConfig(path=str(folder), dtype="float64"), engine, total_steps=10**6))
    found.initialize()
    return found


def exact_gradient(policy):
    """Of the expected reward under the policy itself, by name: sum over answers of p r grad log p."""
    _, model, _ = policy
    vocabulary = model.config.vocab_size
    tokens = torch.tensor([[*PROMPT, a, b] for a in range(vocabulary) for b in range(vocabulary)])
    logprobs = model(tokens[:, :-1]).logits.log_softmax(-1)
    of_answer = sum(logprobs[:, 1 + i].gather(1, tokens[:, 2 + i, None])[:, 0] for i in range(2))
    expected = (of_answer.exp() * reward(tokens[:, 2], tokens[:, 3])).sum()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    return dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))


def along(policy, batch, correction, tmp_path):
    """Estimates, one for each chunk of the batch, of the gradient's length along the exact direction; and the truth."""
    exact = exact_gradient(policy)
    length = math.sqrt(sum(float(g.square().sum()) for g in exact.values()))
    actor = worker(policy[0])
    before = {name: tensor.clone() for name, tensor in actor.weights(torch.float64)}
    actor.engine.save_checkpoint(tmp_path)
    settings = build(
        AlgorithmConfig,
        {
            "advantage": {"name": "reinforce_pp"},
            "loss": "reinforce",
            "aggregation": {"mode": "seq_mean_token_sum"},
            "correction": correction,
        },
        "test",
    )
    algorithm = Algorithm(settings, 1)
    batch = batch.with_(old_logprobs=actor.infer_batch(batch).logprobs)
    batch = algorithm.advantages(batch)
    # the plain reward as advantage: what is to be estimated is the gradient of its mean
    rewards = torch.repeat_interleave(batch.rewards.double(), batch.lengths)
    batch = batch.with_(advantages=torch.where(batch.loss_mask, rewards, 0))
    found = []
    for rows in torch.arange(SAMPLES).chunk(CHUNKS):
        actor.train_batch(algorithm.weigh(select(batch, rows.tolist())), algorithm.policy_objective())
        after = dict(actor.weights(torch.float64))
        found.append(sum(float(((after[n] - before[n]) * exact[n]).sum()) for n in exact) / length)
        actor.engine.load_checkpoint(tmp_path)
    return torch.tensor(found), length, algorithm.measure(batch)


def error_in_deviations(found, truth):
    return float((found.mean() - truth) / (found.std() / math.sqrt(len(found))))


def test_sequence_weights_recover_the_on_policy_gradient(policy, batch, tmp_path):
    (tmp_path / "without").mkdir()
    without, truth, _ = along(policy, batch, {}, tmp_path / "without")
    (tmp_path / "with").mkdir()
    weighted, _, measured = along(policy, batch, {"weights": "sequence", "old": "trainer"}, tmp_path / "with")
    assert abs(error_in_deviations(weighted, truth)) < 3.5
    assert abs(error_in_deviations(without, truth)) > 6
    assert abs(weighted.mean() - truth) < 0.3 * abs(without.mean() - truth)

    trainer, rollout = every_answer(policy[1]), every_answer(policy[2])
    divergence = float((rollout.exp() * (rollout - trainer)).sum())  # nats per answer of two tokens
    assert divergence > 0.02
    assert measured["correction/kl"].value == pytest.approx(divergence / 2, rel=0.2)
    assert measured["correction/k3"].value == pytest.approx(divergence / 2, rel=0.2)
    assert measured["correction/ess"].value < 0.95
    assert measured["correction/max_abs_difference"].value > 0.3
