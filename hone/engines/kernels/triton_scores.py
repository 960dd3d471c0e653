"""Log-probs and entropy of a chunk of logits, and their gradient: one Triton kernel for each direction.

    Fused.score       products [C, V] --read once--> [C, 5], a row's `FOUND`
    Fused.gradient    products [C, V], [C, 5], upstream gradients --read once, written once--> gradient, in place

torch multiplies hidden states and weight, before and after. Kernels that fuse these products too were looked at. verl's
makes whole logits of a part of the vocabulary in its usual backward, so its peak is the same. Apple's
cut-cross-entropy leaves out blocks with small probabilities. Liger's computes the gradient in the forward, which needs
the loss to be known before the log-probs are. All of them replace the vendor's matrix product by their own.

Logits may be bfloat16, float16 or float32; everything is computed in float32. A row's sums do not depend on other rows,
and are added in the same order each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FOUND = ("logprob", "entropy", "sum_pi_squared", "largest", "log_total")
"""Numbers of a row: log-prob of the target, entropy, sum of squared probabilities, and what the gradient needs again:
the largest logit, and the logarithm of the sum of exp(logit - largest)."""

_BLOCK = 4096  # logits that a program reads at once
_TOLERANCE = 1e-4  # of `check`
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}  # the second is explicit because Triton 3.10 changes its default


@dataclass(frozen=True, slots=True)
class Fused:
    """The kernels for one head: logits are outer * tanh(inner * product) with soft-capping, else inner * product."""

    inner: float
    outer: float  # 0: no soft-capping

    @classmethod
    def of(cls, scale: float, softcap: float | None, temperature: float) -> Fused:
        if softcap is None:
            return cls(scale / temperature, 0.0)
        return cls(scale / softcap, softcap / temperature)

    def score(self, products: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Score `targets` [C] by the rows of `products` [C, V]: fields of `TokenScores`, then `FOUND` [C, 5].

        The log-prob of a target that is not in the vocabulary is NaN. Fields that no kernel computes are empty.
        """
        rows, columns = products.shape
        found = torch.empty(rows, len(FOUND), dtype=torch.float32, device=products.device)
        if rows:
            _score[(rows,)](products, targets, found, columns, self.inner, self.outer, _block(columns), **_OPTIONS)
        none = found.new_empty(0)
        return found[:, 0], found[:, 1], found[:, 2], none, none, none.long(), none, found

    def gradient(
        self, products: Tensor, targets: Tensor, found: Tensor, of_logprob: Tensor | None, of_entropy: Tensor | None
    ) -> Tensor:
        """Turn `products` into the loss's gradient to them, in place.

        `found` is the last result of `score`; the others are the loss's gradients to log-probs and entropies, [C],
        None where the loss does not use them.
        """
        rows, columns = products.shape
        upstream = [torch.zeros_like(found[:, 0]) if one is None else one for one in (of_logprob, of_entropy)]
        known = torch.stack([found[:, 1], found[:, 3], found[:, 4], *upstream], 1)
        block = _block(columns)
        if rows:
            _differentiate[(rows, triton.cdiv(columns, block))](
                products, targets, known, columns, self.inner, self.outer, block, **_OPTIONS
            )
        return products


def check(device: str) -> None:
    """Raise RuntimeError if the kernels differ from torch's operations on the device: its compiler breaks them."""
    columns, generator = _BLOCK + 77, torch.Generator().manual_seed(0)
    products = 3 * torch.randn(2, columns, generator=generator, dtype=torch.float32)
    targets, grads = torch.tensor([5, columns - 1]), torch.tensor([[1.0, 0.5], [-2.0, 1.0]])
    for fused in (Fused.of(1.5, None, 0.7), Fused.of(1.5, 4.0, 0.7)):
        ours, there = products.to(device, copy=True), targets.to(device)
        *_, found = fused.score(ours, there)
        ours = fused.gradient(ours, there, found, *grads.to(device).unbind(1))
        scores, gradient = _by_torch(products.double(), targets, grads, fused)
        for one, other in ((found[:, :3], scores), (ours, gradient)):
            gap = float((one.cpu() - other).abs().max() / other.abs().max())
            if not gap <= _TOLERANCE:
                raise RuntimeError(
                    f"the Triton kernel for log-probs differs from torch's operations on {device} by {gap:.3g} of the "
                    f"largest value, with triton {triton.__version__}; {_TOLERANCE:g} is allowed. Set the environment "
                    "variable HONE_TRITON=0 to use torch's operations, on every machine of the run"
                )


@torch.enable_grad()
def _by_torch(products: Tensor, targets: Tensor, grads: Tensor, fused: Fused) -> tuple[Tensor, Tensor]:
    """Log-probs, entropies and sums of squared probabilities, [C, 3], and the gradient, [C, V]."""
    products.requires_grad_()
    logits = fused.outer * torch.tanh(fused.inner * products) if fused.outer else fused.inner * products
    log_pi = logits.log_softmax(-1)
    pi = log_pi.exp()
    scores = torch.stack([log_pi.gather(1, targets[:, None])[:, 0], -(pi * log_pi).sum(-1), (pi * pi).sum(-1)], 1)
    return scores.detach(), torch.autograd.grad((scores[:, :2] * grads).sum(), products)[0]


def _block(columns: int) -> int:
    return int(min(_BLOCK, triton.next_power_of_2(columns)))


@triton.jit  # type: ignore[untyped-decorator]
def _score(
    products: tl.tensor,
    targets: tl.tensor,
    found: tl.tensor,
    columns: tl.tensor,
    inner: tl.constexpr,
    outer: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program for a row: sums are kept relative to the largest logit so far, and rescaled when it changes."""
    row = tl.program_id(0).to(tl.int64)
    products += row * columns
    target = tl.load(targets + row)
    chosen = tl.load(products + target, mask=(target >= 0) & (target < columns), other=float("nan")).to(tl.float32)
    largest = float("-inf")
    total = 0.0  # sum of p = exp(logit - largest)
    weighted = 0.0  # sum of p (logit - largest)
    squared = 0.0  # sum of p^2
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        raw = tl.load(products + at, mask=at < columns, other=0.0).to(tl.float32)
        logits = tl.where(at < columns, _finished(raw, inner, outer), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # so far only logits of -inf: no NaN from them
        gap = logits - base
        p = tl.exp(gap)
        moved = largest - base
        kept = tl.exp(moved)
        moved = tl.where(kept > 0, moved, 0.0)
        weighted = kept * (weighted + moved * total) + tl.sum(p * tl.where(p > 0, gap, 0.0), 0)
        squared = kept * kept * squared + tl.sum(p * p, 0)
        total = kept * total + tl.sum(p, 0)
        largest = new_largest
    log_total = tl.log(total)
    found += row * 5
    tl.store(found, _finished(chosen, inner, outer) - largest - log_total)
    tl.store(found + 1, log_total - weighted / total)
    tl.store(found + 2, squared / (total * total))
    tl.store(found + 3, largest)
    tl.store(found + 4, log_total)


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(
    products: tl.tensor,
    targets: tl.tensor,
    known: tl.tensor,
    columns: tl.tensor,
    inner: tl.constexpr,
    outer: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program for a block of a row: (onehot - pi) g of the log-prob, -pi (log pi + H) g of the entropy."""
    row = tl.program_id(0).to(tl.int64)
    products += row * columns
    known += row * 5
    entropy = tl.load(known)
    largest = tl.load(known + 1)
    log_total = tl.load(known + 2)
    of_logprob = tl.load(known + 3)
    of_entropy = tl.load(known + 4)
    at = tl.program_id(1) * block + tl.arange(0, block)
    raw = tl.load(products + at, mask=at < columns, other=0.0).to(tl.float32)
    logits = _finished(raw, inner, outer)
    log_pi = tl.where(at < columns, logits - largest - log_total, float("-inf"))
    pi = tl.exp(log_pi)
    surprise = tl.where(pi > 0, log_pi + entropy, 0.0)
    grad = tl.where(at == tl.load(targets + row), of_logprob, 0.0) - pi * (of_logprob + surprise * of_entropy)
    if outer == 0:
        grad = grad * inner
    else:
        capped = logits / outer
        grad = grad * (inner * outer * (1 - capped * capped))
    tl.store(products + at, grad.to(products.dtype.element_ty), mask=at < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _finished(raw: tl.tensor, inner: tl.constexpr, outer: tl.constexpr) -> tl.tensor:
    """Logits of products (`Fused`). Triton's interpreter has no tanh, so this is tanh by exp."""
    logits = raw * inner
    if outer != 0:
        small = tl.exp(-2 * tl.abs(logits))
        capped = (1 - small) / (1 + small)
        logits = outer * tl.where(logits < 0, -capped, capped)
    return logits
