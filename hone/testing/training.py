"""Models, batches and losses of the suite of training engines, and what it does with an engine of any backend.

Every function here uses the verbs of `hone.engines.base.BaseEngine` only. Batches have pad tokens inside of their rows,
and sequences that share a prompt. On several ranks, each rank calls the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.data.packing import Sample, balanced, pack_samples, select, sequence_costs
from hone.engines.base import BaseEngine
from hone.models.files.progress_bars import without_progress_bars
from hone.models.loading import load_language_model
from hone.models.numerics.precision import state_buffers
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import build_tokenizer
from hone.types import Batch, LossFn, LossOutput, ModelOutput

SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "mlp_size": 48,
    "max_positions": 64,
}
LENGTHS = (9, 7, 12, 7, 20, 8, 13)  # ragged: four micro-batches of at most 24 tokens for one rank, two for each of two
GROUPS = (0, 0, 0, 1, 2, 2, 3)
CAP = 24  # tokens of a micro-batch
PAD = 0
TEMPERATURE = 0.9


def save_model(build: BuildConfig, folder: Path) -> Path:
    """Save a tiny model with random weights, norms and biases too, and its tokenizer."""
    with without_progress_bars(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = load_language_model(ModelConfig(build=build))
        with torch.no_grad():
            for weight in (*model.parameters(), *(buffer for _, buffer in state_buffers(model))):
                weight.add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(folder)
    build_tokenizer(build).save_pretrained(folder)
    return folder


def make_batch(seed: int) -> Batch:
    """Seven sequences with a pad token in each; with an odd seed some are answers to one prompt.

    The answers to the first prompt have no advantage then.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, 104, (length,), generator=generator).tolist() for length in LENGTHS]
    groups = GROUPS if seed % 2 else tuple(range(len(LENGTHS)))
    first = {group: tokens[i][:4] for i, group in reversed(list(enumerate(groups)))}
    samples = [
        Sample((*first[group], *row[4:-2], PAD, row[-1]), (0, 0) + (1,) * (len(row) - 2))
        for group, row in zip(groups, tokens, strict=True)
    ]
    batch = pack_samples(samples)
    advantages = torch.randn(batch.num_tokens, generator=generator)
    if seed % 2:
        advantages[: sum(LENGTHS[: groups.count(0)])] = 0
    return batch.with_(
        group_index=torch.tensor(list(groups)),
        loss_weights=torch.full((batch.num_tokens,), 1 / int(batch.loss_mask.sum())),
        advantages=advantages,
    )


def clipped(output: ModelOutput, batch: Batch) -> LossOutput:
    """A clipped ratio to log-probs of another policy."""
    assert output.logprobs is not None
    assert output.entropy is not None
    assert batch.advantages is not None
    ratio = (output.logprobs - output.logprobs.detach() * 1.01).exp()
    values = torch.maximum(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2))
    return LossOutput(values, {"train/entropy": output.entropy.detach()})


def policy(output: ModelOutput, batch: Batch) -> LossOutput:
    """A clipped ratio and an entropy bonus, which answers without advantage have too."""
    found = clipped(output, batch)
    assert output.entropy is not None
    return LossOutput(found.values - 0.01 * output.entropy, found.metrics)


clipped.needs = policy.needs = frozenset({"entropy"})  # type: ignore[attr-defined]
clipped.zero_without_advantage = True  # type: ignore[attr-defined]


def values(output: ModelOutput, batch: Batch) -> LossOutput:
    """Squared error of a value model."""
    assert output.values is not None
    assert batch.advantages is not None
    return LossOutput((output.values - batch.advantages) ** 2)


def nothing_finite(output: ModelOutput, batch: Batch) -> LossOutput:
    """A loss whose gradient is NaN."""
    assert output.logprobs is not None
    return LossOutput(output.logprobs * float("nan"))


LOSSES: Mapping[str, LossFn] = {"language_model": policy, "value_model": values}


def own_part(engine: BaseEngine, batch: Batch) -> list[int]:
    """The sequences of a batch that this rank trains."""
    return balanced(sequence_costs(batch), engine.ranks.data_parallel_size)[engine.ranks.data_parallel_rank]


def train(engine: BaseEngine, steps: Iterable[int] = range(2)) -> list[list[float]]:
    """Loss and gradient norm of some steps; losses as this rank's part of a sum.

    The second step has an optimizer's state already, and a policy has answers without a backward in it.
    """
    first = engine.ranks.is_output_rank
    found = []
    for seed in steps:
        batch, loss = make_batch(seed), LOSSES[engine.model_type]
        if seed % 2 and loss is policy:
            loss = clipped
        metrics = engine.train_batch(select(batch, own_part(engine, batch)), loss)
        found.append([metrics["train/loss"].value if first else 0.0, metrics["train/grad_norm"].value])
    return found


def scores(engine: BaseEngine, seed: int = 9) -> dict[str, Tensor]:
    """Log-probs or values by sequence, of the sequences that this rank answers for."""
    batch = make_batch(seed)
    indices = own_part(engine, batch)
    output = engine.infer_batch(select(batch, indices), getattr(LOSSES[engine.model_type], "needs", frozenset()))
    if not engine.ranks.is_output_rank:
        return {}
    score = output.logprobs if output.logprobs is not None else output.values
    assert score is not None
    parts = score.split([LENGTHS[i] for i in indices])
    return {f"score {i}": part for i, part in zip(indices, parts, strict=True)}


def weights(engine: BaseEngine) -> dict[str, Tensor]:
    """All weights that the engine trains, as they are now."""
    return dict(engine.get_per_tensor_param()[0])
