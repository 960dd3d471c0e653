"""Section `rollouts`: the built-in rollout engine on the device: scores, generation, weight sync, sleep.

vLLM and SGLang are not started here: they run in Python environments of their own (docs/rollout.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hone.cli.conformance.record import Recorder, require
from hone.models.building import build_model
from hone.models.settings import BuildConfig
from hone.platforms.base import current_platform
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import Completion, SamplingParams
from hone.weights.in_process import sync

SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}
PROMPTS = ((9, 10, 11), (20, 21), (30, 31, 32, 33, 34))
TOKENS = 6
TOLERANCE = 1e-3  # of log-probs in float32


def rollouts(record: Recorder) -> None:
    """Run the checks on one event loop, because an engine belongs to the loop that it first ran on."""
    asyncio.run(_checks(record))


async def _checks(record: Recorder) -> None:
    platform = current_platform()
    model = build_model(BuildConfig(**SIZES), torch.float32)
    settings = BuiltinSettings(slots=4, kv_cache_tokens=256)
    engine: BuiltinEngine | None = None
    with record.check("builtin: log-probs of a text equal the CPU's") as figures:
        engine = BuiltinEngine(settings, model, device=platform.torch_device(0))
        texts = [prompt + tuple(range(40, 50)) for prompt in PROMPTS]
        expected = _scores(BuiltinEngine(settings, model), texts)
        figures["error"] = _gap(_scores(engine, texts), expected)
    if engine is None:
        return
    weights = {name: tensor.to(platform.torch_device(0)) for name, tensor in model.state_dict().items()}
    with record.check("builtin: log-probs of generated tokens equal the scores of the same tokens") as figures:
        started = time.perf_counter()
        answers = await _generate(engine)
        figures["tokens/s"] = round(len(PROMPTS) * TOKENS / (time.perf_counter() - started), 1)
        figures["error"] = _against_scores(engine, answers)
    with record.check("builtin: weight sync inside of the process") as figures:
        changed = {name: tensor * 1.5 for name, tensor in weights.items()}
        metrics = await sync(changed.items(), engine.update_weights, 1)
        figures["GB/s"] = round(metrics["perf/weight_sync_gb_per_s"].value, 4)
        _require_version(await _generate(engine), 1)
    for level in (1, 2):
        with record.check(f"builtin: sleep at level {level}, and wake up"):
            await _sleep(engine, level, weights)


async def _sleep(engine: BuiltinEngine, level: int, weights: Mapping[str, Tensor]) -> None:
    """Sleep and wake up; after level 2 the weights are sent again. The answers after it are those before."""
    await sync(weights.items(), engine.update_weights, 2 * level)
    before = [answer.token_ids for answer in await _generate(engine)]
    await engine.sleep(level)
    await engine.wake_up()
    if level > 1:
        await sync(weights.items(), engine.update_weights, 2 * level + 1)
    after = [answer.token_ids for answer in await _generate(engine)]
    require(before == after, f"greedy answers were {before} before it, and are {after} after it")


async def _generate(engine: BuiltinEngine) -> list[Completion]:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    asked = [engine.generate(f"request {number}", prompt, sampling) for number, prompt in enumerate(PROMPTS)]
    return list(await asyncio.gather(*asked))


def _against_scores(engine: BuiltinEngine, answers: list[Completion]) -> float:
    texts = [prompt + answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)]
    scores = _scores(engine, texts)
    own = [torch.tensor(answer.logprobs) for answer in answers]
    return _gap(own, [score[-len(one) :] for score, one in zip(scores, own, strict=True)])


def _scores(engine: BuiltinEngine, texts: list[tuple[int, ...]]) -> list[Tensor]:
    return [one.logprobs for one in engine.score_all(texts, 1.0)]


def _gap(found: list[Tensor], expected: list[Tensor]) -> float:
    gaps = [float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in zip(found, expected, strict=True)]
    require(max(gaps) <= TOLERANCE, f"the largest difference is {max(gaps):.3g}, at most {TOLERANCE:g} is right")
    return float(f"{max(gaps):.2g}")


def _require_version(answers: list[Completion], version: int) -> None:
    found = {number for answer in answers for number in answer.weight_versions}
    require(found == {version}, f"tokens have weight versions {sorted(found)}, expected {version}")
