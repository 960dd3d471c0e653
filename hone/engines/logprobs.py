"""Log-probs and entropy of chosen tokens from hidden states, without ever holding all logits.

    hidden [R, H] --chunks of rows--> logits [C, V] --float32 log-softmax--> logprobs, entropy, sum_pi_squared, each [R]

Only rows whose next token is trained on are given to it, so a prompt costs no logits. The backward makes each chunk's
logits again: one chunk exists at a time, in both directions. Log-probs are those of logits / temperature, the
distribution that the rollout sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CPU_BLOCK = 1 << 20  # logits per block that stay in a CPU core's cache


@dataclass(frozen=True, slots=True)
class Head:
    """The last step of a language model: logits = softcap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap) (Gemma 2)

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a transformers causal language model (its live parameters)."""
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{type(model).__name__} has a {type(layer).__name__} as its head; a linear one is needed")
        config = model.config.get_text_config()
        times, divided_by = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        scale = float(times or 1.0) / float(divided_by or 1.0)  # Cohere; Granite
        return cls(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in float32 at least."""
        raw = F.linear(hidden, self.weight, self.bias)
        return self.finish(raw.to(torch.promote_types(raw.dtype, torch.float32)))

    def finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def unfinish(self, grad: Tensor, finished: Tensor) -> Tensor:
        """The gradient before `finish`, from the gradient after it and its result."""
        if self.softcap is not None:
            grad = grad * (1 - (finished / self.softcap) ** 2)
        return grad * self.scale if self.scale != 1.0 else grad


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per row: log-prob of its target; entropy and sum of squared probabilities of its distribution, if asked for."""

    logprobs: Tensor  # [R] float32, as are the others
    entropy: Tensor | None
    sum_pi_squared: Tensor | None  # carries no gradient


def score_tokens(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    needs: frozenset[str] = frozenset(),
) -> TokenScores:
    """Score `targets` [R] given `hidden` [R, H]: row r of `hidden` predicts `targets[r]`.

    needs: "entropy" and "sum_pi_squared" are computed when named. At most `chunk_tokens` rows of logits exist at once.
    """
    rows = _rows_per_block(chunk_tokens, head.weight)
    plan = _Plan(head.scale, head.softcap, temperature, rows, "entropy" in needs, "sum_pi_squared" in needs)
    logprobs, entropy, squared = _ScoreTokens.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, plan
    )
    return TokenScores(logprobs, entropy if plan.entropy else None, squared if plan.squared else None)


def _rows_per_block(chunk_tokens: int, weight: Tensor) -> int:
    if weight.device.type != "cpu":
        return chunk_tokens
    return min(chunk_tokens, max(64, _CPU_BLOCK // weight.shape[0]))


@dataclass(frozen=True, slots=True)
class _Plan:
    scale: float
    softcap: float | None
    temperature: float
    rows: int
    entropy: bool
    squared: bool


class _ScoreTokens(torch.autograd.Function):
    """Forward keeps only its inputs; backward recomputes each block's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(weight, bias, plan.scale, plan.softcap)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        entropy = torch.empty_like(logprobs) if plan.entropy else logprobs.new_empty(0)
        squared = torch.empty_like(logprobs) if plan.squared else logprobs.new_empty(0)
        for start in range(0, len(hidden), plan.rows):
            part = slice(start, start + plan.rows)
            log_pi = F.log_softmax(_tempered(head.logits(hidden[part]), plan.temperature), -1)
            logprobs[part] = log_pi.gather(1, targets[part, None])[:, 0]
            if plan.entropy:
                entropy[part] = -(log_pi.exp() * log_pi).sum(-1)
            if plan.squared:
                squared[part] = (2 * log_pi).exp_().sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.plan = plan
        ctx.mark_non_differentiable(squared)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, squared

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets = ctx.saved_tensors
        plan: _Plan = ctx.plan
        head = Head(weight, bias, plan.scale, plan.softcap)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        of_logprob = grads[0] if grads[0] is not None else hidden.new_zeros(len(hidden), dtype=wide)
        of_entropy = grads[1] if plan.entropy else None
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and to_bias else None
        for start in range(0, len(hidden), plan.rows):
            part = slice(start, start + plan.rows)
            finished = head.logits(hidden[part])
            grad = _logit_gradient(
                _tempered(finished, plan.temperature),
                targets[part],
                of_logprob[part],
                of_entropy[part] if of_entropy is not None else None,
            )
            grad = head.unfinish(_tempered(grad, plan.temperature), finished)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            narrow = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[part]
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            None,
            None,
        )


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _logit_gradient(logits: Tensor, targets: Tensor, of_logprob: Tensor, of_entropy: Tensor | None) -> Tensor:
    """d loss / d logits, [C, V]: (onehot - pi) g for the log-probs, -pi (log pi + H) g for the entropies."""
    if of_entropy is None:
        grad = F.softmax(logits, -1).mul_(-of_logprob[:, None])
    else:
        log_pi = F.log_softmax(logits, -1)
        pi = log_pi.exp()
        entropy = -(pi * log_pi).sum(-1, keepdim=True)
        grad = log_pi.add_(entropy).mul_(of_entropy[:, None]).add_(of_logprob[:, None]).mul_(pi).neg_()
    return grad.scatter_add_(1, targets[:, None], of_logprob[:, None])
