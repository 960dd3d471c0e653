"""`weights.verify: probe`: after a sync, compare the log-probs that trainer and replicas give to the same tokens.

    every replica: 72 fixed prompt tokens -> 8 sampled tokens and their log-probs
    the trainer:   log-probs of the same tokens, by its own forward           |difference| <= tolerance, or no step

A checksum proves which bytes a replica holds; the probe proves that it computes with them. A stale output head, an old
cache or a wrong layout changes log-probs by 0.4 and more, rounding by less than the tolerances: 4e-6 was measured
between two engines in float32, 0.07 in bfloat16, 0.16 with a server in fp8. In a mixture of experts, rounding to less
than float32 lets a router choose other experts for a token whose scores are close: 0.41 was measured at one such token
and 0.02 at the others. The median of the tokens is compared there, which wrong weights move as much.

The prompt is always the same and fills whole blocks of a prefix cache (16 or 32 tokens), to detect KV of old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hone.data.packing import Sample, pack_samples
from hone.rollout.base import ReplicaLost
from hone.types import Batch, Completion, GenerationRequest, Metric, Metrics, ModelOutput, SamplingParams
from hone.weights.base import WeightSyncError

TOLERANCE = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.25,
    torch.float8_e4m3fn: 0.5,
}
"""Largest allowed difference of one token's log-prob, by the less precise dtype of the two sides."""
QUANTISED = torch.float8_e4m3fn  # stands for every quantisation of a server
PROMPT_TOKENS, SAMPLED_TOKENS = 72, 8

LostFn = Callable[[Any, str], None]
"""Function that gets a replica that turned out to be dead or to hang, and the reason."""


class Probe:
    """One prompt for all syncs of a run."""

    def __init__(
        self, vocabulary: int, temperature: float, dtypes: Sequence[torch.dtype], context: int, mixture: bool
    ) -> None:
        """`temperature`: of the run's rollouts and the trainer's log-probs; `context`: the longest sequence, in tokens,
        that all engines take; `mixture`: whether the model has experts."""
        length = max(1, min(PROMPT_TOKENS, context - SAMPLED_TOKENS))
        self.prompt = tuple((7919 * place + 11) % vocabulary for place in range(length))
        self.tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
        self._median = mixture and self.tolerance > TOLERANCE[torch.float32]
        self._of = " at half of its tokens" if self._median else ""
        self._sampling = SamplingParams(SAMPLED_TOKENS, temperature=temperature, ignore_eos=True)

    async def ask(
        self, replicas: Sequence[Any], version: int, lost: LostFn | None = None
    ) -> list[tuple[str, Completion]]:
        """Return (replica, its sample) for each; one that died since the sync, or is late, goes to `lost` instead."""
        found = []
        for number, replica in enumerate(replicas):
            name = str(getattr(replica, "name", "") or getattr(replica, "replica", number))
            request = GenerationRequest(f"probe/{version}/{number}", self.prompt, self._sampling)
            try:
                found.append((name, await replica.generate(request)))
            except (ReplicaLost, TimeoutError) as error:
                if lost is None:
                    raise
                lost(replica, str(error))
        return found

    def compare(
        self, asked: Sequence[tuple[str, Completion]], infer: Callable[[Batch], ModelOutput], version: int
    ) -> Metrics:
        """Return the largest difference. Raises WeightSyncError, with replica and figures, if it is too large."""
        if not asked:  # all died; restarted ones are probed at the next sync
            return {}
        mask = (0,) * len(self.prompt)
        samples = [Sample((*self.prompt, *one.token_ids), (*mask, *(1 for _ in one.token_ids))) for _, one in asked]
        batch = pack_samples(samples)
        logprobs = infer(batch).logprobs
        if logprobs is None:
            raise WeightSyncError("the trainer gave no log-probs for the probe prompt")
        trainer = logprobs[batch.loss_mask].float().cpu().split([len(one.token_ids) for _, one in asked])
        worst = 0.0
        for (name, one), expected in zip(asked, trainer, strict=True):
            if set(one.weight_versions) != {version}:
                raise WeightSyncError(
                    f"replica {name} sampled the probe prompt with weight versions {set(one.weight_versions)}, "
                    f"sent was {version}",
                    [name],
                )
            gaps = (torch.tensor(one.logprobs) - expected).abs()
            gap = float(gaps.median() if self._median else gaps.max())
            if not gap <= self.tolerance:
                raise WeightSyncError(
                    f"replica {name} serves weight version {version}, but its log-probs of the probe prompt differ "
                    f"from the trainer's by {gap:.3g}{self._of} (at most {self.tolerance:g} is rounding): it does not "
                    "compute with the weights it was sent",
                    [name],
                )
            worst = max(worst, float(gaps.max()))
        return {"correction/probe_max_abs_difference": Metric.max(worst)}


__all__ = ["QUANTISED", "TOLERANCE", "Probe"]
