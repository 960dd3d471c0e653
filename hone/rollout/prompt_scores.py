"""A completion with the log-probs of its prompt: the prompt is scored, then continued.

    generate(prompt_logprobs=5, max_tokens=0) --score--> Scored

Two requests, because engines that score a prompt while they continue it do not use their prefix cache for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from hone.types import Completion, GenerateFn, GenerationRequest, Scored, StopReason

ScoreFn = Callable[[str, tuple[int, ...], int], Awaitable[Scored]]


async def with_prompt_scores(request: GenerationRequest, score: ScoreFn, generate: GenerateFn) -> Completion:
    """Score the prompt as `sampling.prompt_logprobs` asks, and continue it unless `max_tokens` is 0.

    Raises ValueError for a prompt that cannot be scored.
    """
    sampling = request.sampling
    assert sampling.prompt_logprobs is not None
    if request.images:
        raise ValueError(f"request {request.id!r}: log-probs of a prompt with images cannot be computed")
    if sampling.adapter:
        raise ValueError(
            f"request {request.id!r}: log-probs of a prompt are the policy's, and it names the adapter "
            f"{sampling.adapter!r}"
        )
    if sampling.prompt_logprobs < 0:
        raise ValueError(
            f"request {request.id!r}: prompt_logprobs should be at least 0, found {sampling.prompt_logprobs}"
        )
    scored = await score(f"{request.id}/prompt", request.tokens, sampling.prompt_logprobs)
    if sampling.max_tokens == 0:
        return Completion(request.id, (), (), (), StopReason.LENGTH, prompt_scores=scored)
    completion = await generate(replace(request, sampling=replace(sampling, prompt_logprobs=None)))
    return replace(completion, prompt_scores=scored)


def scorer_of(engine: Any, name: str) -> ScoreFn:
    """The `score` of an engine. Raises ValueError for one of a plug-in that has none."""
    score: ScoreFn | None = getattr(engine, "score", None)
    if score is None:
        raise ValueError(f"rollout engine {name} cannot compute log-probs of a prompt: it has no `score`")
    return score


__all__ = ["scorer_of", "with_prompt_scores"]
