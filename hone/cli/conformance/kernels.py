"""Section `kernels`: what hone computes on a device, compared with float64 on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from hone.cli.conformance.record import Recorder
from hone.engines.logprobs import Head, score_tokens
from hone.engines.optimizers import build_optimizer
from hone.engines.settings import OptimizerConfig
from hone.models.attention.packed import Packing, Scoring, attend
from hone.platforms.base import PlatformBase, current_platform
from hone.weights.digests.digest import digest_tensors

TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}  # relative to the largest value
SIZE = 512
BUDGET_S = 0.2  # for the figure of one product


def kernels(record: Recorder) -> None:
    platform = current_platform()
    where = platform.torch_device(0)
    torch.manual_seed(0)
    for dtype in platform.dtypes:
        with record.check(f"matrix product in {dtype}") as figures:
            one, other = torch.randn(2, SIZE, SIZE, dtype=torch.float64)
            left, right = (x.to(where, getattr(torch, dtype)) for x in (one, other))
            figures["error"] = _gap(left @ right, one @ other, dtype)
            figures["TFLOP/s"] = round(2 * SIZE**3 / _seconds(lambda: left @ right, platform) / 1e12, 4)  # noqa: B023
    for dtype in (name for name in platform.dtypes if name != "float64"):
        with record.check(f"packed attention in {dtype}, forward and backward") as figures:
            figures |= _attention(where, dtype)
        with record.check(f"soft-capped attention with sinks in {dtype}, forward and backward") as figures:
            figures |= _attention(where, dtype, softcap=2.0, sinks=torch.randn(4, dtype=torch.float64))
    with record.check("log-probs and entropy, forward and backward") as figures:
        figures["error"] = _of_head(where)
    with record.check("optimizer AdamW") as figures:
        figures |= _optimizer(where)
    with record.check("checksum of weights equals the CPU's") as figures:
        weights = {"a": torch.randn(300, 70), "b": torch.randn(1 << 20).to(torch.bfloat16)}
        there = {name: tensor.to(where) for name, tensor in weights.items()}
        if digest_tensors(weights.items()) != digest_tensors(there.items()):
            raise RuntimeError("the digest over device memory is not the one over host memory")
        seconds = _seconds(lambda: digest_tensors(there.items()), platform)
        figures["GB/s"] = round(sum(one.nbytes for one in there.values()) / seconds / 1e9, 2)


def _gap(found: Tensor | None, expected: Tensor | None, dtype: str) -> float:
    """The largest difference relative to the largest expected value.

    Raises RuntimeError above the tolerance, or for a missing result, such as a gradient that was not computed.
    """
    if found is None or expected is None:
        raise RuntimeError("a result is missing: no gradient was computed")
    gap = float((found.detach().cpu().double() - expected.detach()).abs().max() / expected.detach().abs().max())
    if not gap <= TOLERANCES[dtype]:
        raise RuntimeError(f"results differ from the CPU's in float64 by {gap:.3g}, allowed are {TOLERANCES[dtype]:g}")
    return float(f"{gap:.2g}")


def _seconds(run: Callable[[], object], platform: PlatformBase) -> float:
    """Seconds of one call, as a mean after the first."""
    run()
    platform.synchronize()
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < BUDGET_S and calls < 100:
        run()
        calls += 1
        platform.synchronize()
    return (time.perf_counter() - started) / calls


def _attention(
    where: torch.device, dtype: str, softcap: float | None = None, sinks: Tensor | None = None
) -> dict[str, float]:
    """Two sequences that share a prefix of 5 tokens: outputs, and gradients of queries, keys, values and sinks."""
    inputs = [torch.randn(1, heads, 16, 32, dtype=torch.float64) for heads in (4, 2, 2)]
    inputs += [] if sinks is None else [sinks]
    ends, parents = torch.tensor([0, 5, 10, 16]), [None, 0, 0]
    found, gradients = [], []
    for device, kind in ((torch.device("cpu"), torch.float64), (where, getattr(torch, dtype))):
        given = [x.detach().to(device, kind).requires_grad_() for x in inputs]
        q, k, v, *own = given
        scoring = Scoring(scale=32**-0.5, softcap=softcap, sinks=own[0] if own else None)
        out = attend(q, k, v, Packing.of(ends, parents, device), scoring)
        wide = torch.promote_types(kind, torch.float32)
        out.to(wide).square().sum().backward()
        found.append(out)
        gradients.append([x.grad for x in given])
    pairs = zip(gradients[1], gradients[0], strict=True)
    return {"error": _gap(found[1], found[0], dtype), "gradient error": max(_gap(a, b, dtype) for a, b in pairs)}


def _of_head(where: torch.device) -> float:
    hidden, weight = torch.randn(24, 32, dtype=torch.float64), torch.randn(97, 32, dtype=torch.float64)
    targets = torch.arange(24) * 4
    results = []
    for device, kind in ((torch.device("cpu"), torch.float64), (where, torch.float32)):
        states, head = (x.detach().to(device, kind).requires_grad_() for x in (hidden, weight))
        scores = score_tokens(
            states, targets.to(device), Head(head, None), temperature=0.9, chunk_tokens=7, needs=frozenset({"entropy"})
        )
        assert scores.entropy is not None  # it was asked for
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        results.append([scores.logprobs, scores.entropy, states.grad, head.grad])
    return max(_gap(found, expected, "float32") for expected, found in zip(*results, strict=True))


def _optimizer(where: torch.device) -> dict[str, object]:
    start = torch.randn(64, 48)
    results, fused = [], False
    for device in (torch.device("cpu"), where):
        weight = torch.nn.Parameter(start.clone().to(device))
        optimizer = build_optimizer(OptimizerConfig(lr=1e-2), {"weight": weight})
        fused = bool(optimizer.param_groups[0].get("fused"))
        for step in range(3):
            weight.grad = torch.full_like(weight, 0.5 + step)
            optimizer.step()
        results.append(weight)
    return {"error": _gap(results[1], results[0].double(), "float32"), "fused": fused}
