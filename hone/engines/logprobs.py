"""What an algorithm reads of a model's next-token distributions, without ever holding all logits.

    hidden [R, H] --chunks of rows--> logits [C, V] --float32 log-softmax--> logprobs, entropy, sum_pi_squared [R]
                                          |                                  logprobs of K given tokens, top k  [R, K]
    reference's hidden [R, H'] --its head-'--------------------------------> KL to the reference [R]

Only rows whose next token is trained on are given to it, so a prompt costs no logits. The backward makes each chunk's
logits again: one chunk exists at a time, in both directions. Log-probs are those of logits / temperature, the
distribution that the rollout sampled from.

A reference is given as its hidden states and its head: H' numbers for each token in place of V, so another worker can
compute them for a whole batch, however that is cut there, and send them here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CPU_BLOCK = 1 << 20  # logits per block that stay in a CPU core's cache

Chosen = tuple[Tensor, Tensor]  # token ids [C, K], and the gradients of their log-probs [C, K]
Compared = tuple[Tensor, Tensor]  # the reference's logits [C, V], and the gradient of the KL to it [C]


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
        layer = getattr(layer, "active", layer)  # of an adapter's: see `whole_modules`
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
class Beside:
    """What a row's distribution is asked beyond its target."""

    token_ids: Tensor | None = None  # [R, K] int64: tokens whose log-probs are wanted
    top_k: int = 0  # how many of the most likely tokens are wanted
    reference: Reference | None = None  # KL to it is wanted


@dataclass(frozen=True, slots=True)
class Reference:
    """Another model's distributions over the same vocabulary, as hidden states and a head; gets no gradient."""

    hidden: Tensor  # [R, H']
    head: Head  # weight [V, H']


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per row: log-prob of its target, and what else was asked for. float32 at least; None if not asked for."""

    logprobs: Tensor  # [R]
    entropy: Tensor | None = None  # [R]
    sum_pi_squared: Tensor | None = None  # [R], carries no gradient
    logprobs_at: Tensor | None = None  # [R, K], of `Beside.token_ids`
    full_kl: Tensor | None = None  # [R], KL(model, reference) over the whole vocabulary
    top_k_ids: Tensor | None = None  # [R, k] int64, most likely first
    top_k_logprobs: Tensor | None = None  # [R, k], carries no gradient


def score_tokens(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    needs: frozenset[str] = frozenset(),
    beside: Beside | None = None,
) -> TokenScores:
    """Score `targets` [R] given `hidden` [R, H]: row r of `hidden` predicts `targets[r]`.

    needs: "entropy" and "sum_pi_squared" are computed when named. At most `chunk_tokens` rows of logits exist at once,
    and as many of the reference's. Raises ValueError for a reference over another vocabulary.
    """
    beside = beside or Beside()
    if beside.reference is not None and beside.reference.head.weight.shape[0] != head.weight.shape[0]:
        raise ValueError(
            f"KL over the vocabulary: the model has {head.weight.shape[0]} tokens, the reference "
            f"{beside.reference.head.weight.shape[0]}; both need the same vocabulary"
        )
    plan = _Plan(
        scale=head.scale,
        softcap=head.softcap,
        temperature=temperature,
        rows=_rows_per_block(chunk_tokens, head.weight),
        entropy="entropy" in needs,
        squared="sum_pi_squared" in needs,
        beside=beside,
    )
    found = _ScoreTokens.apply(hidden, head.weight, head.bias, targets, plan)  # type: ignore[no-untyped-call]
    wanted = (True, *plan.wanted)
    return TokenScores(*(value if asked else None for value, asked in zip(found, wanted, strict=True)))


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
    beside: Beside

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Which outputs after the log-probs are computed, in the order of `TokenScores`."""
        top = self.beside.top_k > 0
        at, reference = self.beside.token_ids is not None, self.beside.reference is not None
        return self.entropy, self.squared, at, reference, top, top

    def logits(self, head: Head, hidden: Tensor) -> Tensor:
        return _tempered(head.logits(hidden), self.temperature)

    def reference_logits(self, part: slice) -> Tensor | None:
        """The reference's logits of a block of rows, at the same temperature."""
        reference = self.beside.reference
        return None if reference is None else self.logits(reference.head, reference.hidden[part])


class _ScoreTokens(torch.autograd.Function):
    """Forward keeps only its inputs; backward recomputes each block's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, ...]:
        head = Head(weight, bias, plan.scale, plan.softcap)
        blocks = []
        for start in range(0, len(hidden) or 1, plan.rows):
            part = slice(start, start + plan.rows)
            blocks.append(_scores_of_block(plan.logits(head, hidden[part]), targets[part], part, plan))
        outputs = [torch.cat(pieces) for pieces in zip(*blocks, strict=True)]
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.plan = plan
        ctx.mark_non_differentiable(outputs[2], *outputs[5:])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets = ctx.saved_tensors
        plan: _Plan = ctx.plan
        head = Head(weight, bias, plan.scale, plan.softcap)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and to_bias else None
        for start in range(0, len(hidden), plan.rows):
            part = slice(start, start + plan.rows)
            finished = head.logits(hidden[part])
            reference = plan.reference_logits(part) if grads[4] is not None else None
            grad = _logit_gradient(
                _tempered(finished, plan.temperature),
                _log_prob_gradients(grads, targets, part, plan),
                grads[1][part] if plan.entropy and grads[1] is not None else None,
                (reference, grads[4][part]) if reference is not None and grads[4] is not None else None,
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


def _scores_of_block(logits: Tensor, targets: Tensor, part: slice, plan: _Plan) -> tuple[Tensor, ...]:
    """The outputs of one block of rows, in the order of `TokenScores`; empty ones for what is not wanted."""
    log_pi = F.log_softmax(logits, -1)
    none = log_pi.new_empty(0)
    reference = plan.reference_logits(part)
    ids, top_k = plan.beside.token_ids, plan.beside.top_k
    top = log_pi.topk(top_k) if top_k else None
    return (
        log_pi.gather(1, targets[:, None])[:, 0],
        -(log_pi.exp() * log_pi).sum(-1) if plan.entropy else none,
        (2 * log_pi).exp_().sum(-1) if plan.squared else none,
        log_pi.gather(1, ids[part]) if ids is not None else none,
        _kl(log_pi, F.log_softmax(reference, -1)) if reference is not None else none,
        top.indices if top is not None else none.long(),
        top.values if top is not None else none,
    )


def _kl(log_pi: Tensor, log_ref: Tensor) -> Tensor:
    return (log_pi.exp() * (log_pi - log_ref)).sum(-1)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _log_prob_gradients(grads: tuple[Tensor | None, ...], targets: Tensor, part: slice, plan: _Plan) -> list[Chosen]:
    """For a block of rows: the tokens whose log-probs are read, [C, K], and the gradients of these, [C, K]."""
    found = []
    if grads[0] is not None:
        found.append((targets[part, None], grads[0][part, None]))
    if plan.beside.token_ids is not None and grads[3] is not None:
        found.append((plan.beside.token_ids[part], grads[3][part]))
    return found


def _logit_gradient(
    logits: Tensor, chosen: list[Chosen], of_entropy: Tensor | None, compared: Compared | None
) -> Tensor:
    """d loss / d logits, [C, V], for a block.

    (onehot - pi) g for each log-prob, -pi (log pi + H) g for the entropy, pi (log pi - log ref - KL) g for the KL.
    """
    total = sum((grad.sum(-1) for _, grad in chosen), start=logits.new_zeros(len(logits)))[:, None]
    if of_entropy is None and compared is None:  # nearly every step: one pass over the logits less
        grad = F.softmax(logits, -1).mul_(-total)
    else:
        log_pi = F.log_softmax(logits, -1)
        pi = log_pi.exp()
        grad = -total.expand_as(pi)
        if of_entropy is not None:
            entropy = -(pi * log_pi).sum(-1, keepdim=True)
            grad = grad - (log_pi + entropy) * of_entropy[:, None]
        if compared is not None:
            gap = log_pi - F.log_softmax(compared[0], -1)
            grad = grad + (gap - (pi * gap).sum(-1, keepdim=True)) * compared[1][:, None]
        grad = grad * pi
    for ids, of_logprob in chosen:
        grad.scatter_add_(1, ids, of_logprob)
    return grad
