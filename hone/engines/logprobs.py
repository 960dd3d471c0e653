"""Scores of next-token distributions, chunk by chunk, without ever holding all logits.

    hidden [R, H] --chunks of rows--> logits [C, V] --float32 log-softmax--> logprobs, entropy, sum_pi_squared [R]
                                          |                                  logprobs of K given tokens, top k  [R, K]
    reference's hidden [R, H'] --its head-'--------------------------------> KL to the reference [R]

Only rows whose next token has a loss are scored, so a prompt costs no logits. The backward recomputes each chunk's
logits: one chunk exists at a time, in both directions. Log-probs are taken of logits / temperature, the distribution
that the rollout sampled from. On GPUs, a Triton kernel (`kernels/triton_scores`) reads each chunk once instead, and
turns it into its gradient in place.

A reference is given as its hidden states and its head. Hidden states have H' numbers per token instead of V, so another
worker can compute them for a whole batch and send them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.engines.kernels.choice import NEVER, kernels_for
from hone.types import Need

_CPU_BLOCK = 1 << 20  # logits per block that stay in a CPU core's cache

Chosen = tuple[Tensor, Tensor]  # token ids [C, K], and the gradients of their log-probs [C, K]
Compared = tuple[Tensor, Tensor]  # the reference's logits [C, V], and the gradient of the KL to it [C]


class Vocabulary(Protocol):
    """Part of the vocabulary in the last dimension of logits. Token ids count over the whole vocabulary."""

    def width(self, rows: int) -> int:
        """The most logits of a token that one rank has; `rows` is the number of rows of this rank's head."""

    def log_softmax(self, logits: Tensor) -> Tensor: ...

    def softmax(self, logits: Tensor) -> Tensor:
        """The same, exponentiated; the result is a tensor of its own."""

    def sum(self, values: Tensor) -> Tensor:
        """[R, V] -> [R], over the whole vocabulary."""

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        """[R, V], [R, K] -> [R, K]."""

    def top(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest values, [R, count], and their token ids, largest first."""

    def scatter_add(self, into: Tensor, ids: Tensor, values: Tensor) -> None:
        """Add `values` [R, K] to `into` [R, V] at tokens `ids`, in place."""


@dataclass(frozen=True, slots=True)
class WholeVocabulary:
    """All logits are on this rank."""

    def width(self, rows: int) -> int:
        return rows

    def log_softmax(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits, -1)

    def softmax(self, logits: Tensor) -> Tensor:
        return F.softmax(logits, -1)

    def sum(self, values: Tensor) -> Tensor:
        return values.sum(-1)

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        return values.gather(1, ids)

    def top(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        found = values.topk(count)
        return found.values, found.indices

    def scatter_add(self, into: Tensor, ids: Tensor, values: Tensor) -> None:
        into.scatter_add_(1, ids, values)


WHOLE = WholeVocabulary()


@dataclass(frozen=True, slots=True)
class Head:
    """The last step of a language model: logits = softcap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap) (Gemma 2)
    dtype: torch.dtype | None = None  # of the product, weight and states are converted to it; None: the weight's own
    vocabulary: Vocabulary = WHOLE  # of which `weight` has this rank's rows

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

    def converted(self) -> Head:
        """The same head with its weight in `dtype`; the copy is large, so nothing keeps it for the backward."""
        if self.dtype in (None, self.weight.dtype):
            return self
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return replace(self, weight=self.weight.to(self.dtype), bias=bias)

    def product(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in the weight's dtype, before `finish`; of a `converted` head."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in float32 at least; of a `converted` head."""
        raw = self.product(hidden)
        return self.finish(raw.to(torch.promote_types(raw.dtype, torch.float32)))

    def finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def unfinish(self, grad: Tensor, finished: Tensor) -> Tensor:
        """Backward of `finish`: its input's gradient, from its output and the output's gradient."""
        if self.softcap is not None:
            grad = grad * (1 - (finished / self.softcap) ** 2)
        return grad * self.scale if self.scale != 1.0 else grad


@dataclass(frozen=True, slots=True)
class Queries:
    """Figures of a row's distribution in addition to its target's log-prob."""

    token_ids: Tensor | None = None  # [R, K] int64: return the log-probs of these tokens
    top_k: int = 0  # return this many of the most likely tokens
    reference: Reference | None = None  # return the KL to this model


@dataclass(frozen=True, slots=True)
class Reference:
    """Another model's distributions over the same vocabulary, as hidden states and a head, without gradient."""

    hidden: Tensor  # [R, H']
    head: Head  # weight [V, H']


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Results per row, float32 at least; optional ones are None unless requested."""

    logprobs: Tensor  # [R]
    entropy: Tensor | None = None  # [R]
    sum_pi_squared: Tensor | None = None  # [R], carries no gradient
    logprobs_at: Tensor | None = None  # [R, K], of `Queries.token_ids`
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
    needs: frozenset[Need] = frozenset(),
    queries: Queries | None = None,
) -> TokenScores:
    """Score `targets` [R] given `hidden` [R, H]: row r of `hidden` predicts `targets[r]`.

    `needs` may name "entropy" and "sum_pi_squared". At most `chunk_tokens` rows of logits exist at once, and as many
    of the reference's. If ranks share the head's vocabulary, every rank gets the same scores, and the gradient of
    `hidden` is this rank's part of a sum. Raises ValueError if the reference has another vocabulary.
    """
    fused = _fused(hidden, head, temperature) if queries is None else None
    queries = queries or Queries()
    if queries.reference is not None and queries.reference.head.weight.shape[0] != head.weight.shape[0]:
        raise ValueError(
            f"KL over the vocabulary: the model has {head.weight.shape[0]} tokens, the reference "
            f"{queries.reference.head.weight.shape[0]}; both need the same vocabulary"
        )
    plan = _Plan(
        scale=head.scale,
        softcap=head.softcap,
        dtype=head.dtype,
        temperature=temperature,
        rows=_rows_per_block(chunk_tokens, head),
        entropy="entropy" in needs,
        squared="sum_pi_squared" in needs,
        queries=queries,
        vocabulary=head.vocabulary,
        fused=fused,
    )
    found = _ScoreTokens.apply(hidden, head.weight, head.bias, targets, plan)  # type: ignore[no-untyped-call]
    logprobs, *others = found
    return TokenScores(logprobs, *(value if asked else None for value, asked in zip(others, plan.wanted, strict=True)))


def _rows_per_block(chunk_tokens: int, head: Head) -> int:
    if head.weight.device.type != "cpu":
        return chunk_tokens
    return min(chunk_tokens, max(64, _CPU_BLOCK // head.vocabulary.width(head.weight.shape[0])))


def _fused(hidden: Tensor, head: Head, temperature: float) -> Any:
    """The kernel that scores targets over a vocabulary that is all on this rank; None: torch's operations do."""
    if hidden.device.type in NEVER or not isinstance(head.vocabulary, WholeVocabulary):
        return None
    kernels = kernels_for(hidden.device.type, head.dtype or head.weight.dtype)
    return None if kernels is None else kernels.Fused.of(head.scale, head.softcap, temperature)


@dataclass(frozen=True, slots=True)
class _Plan:
    scale: float
    softcap: float | None
    dtype: torch.dtype | None
    temperature: float
    rows: int
    entropy: bool
    squared: bool
    queries: Queries
    vocabulary: Vocabulary
    fused: Any  # `triton_scores.Fused`, or None

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Return a flag for each optional output, in the order of `TokenScores`."""
        top = self.queries.top_k > 0
        at, reference = self.queries.token_ids is not None, self.queries.reference is not None
        return self.entropy, self.squared, at, reference, top, top

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        return Head(weight, bias, self.scale, self.softcap, self.dtype).converted()

    def logits(self, head: Head, hidden: Tensor) -> Tensor:
        return _tempered(head.logits(hidden), self.temperature)

    def reference_logits(self, part: slice) -> Tensor | None:
        """The reference's logits of a block of rows, at the same temperature."""
        reference = self.queries.reference
        return None if reference is None else self.logits(reference.head, reference.hidden[part])


class _ScoreTokens(torch.autograd.Function):
    """Forward keeps only its inputs; backward recomputes each block's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, ...]:
        head = plan.head(weight, bias)
        blocks = []
        for start in range(0, len(hidden) or 1, plan.rows):
            part = slice(start, start + plan.rows)
            if plan.fused is not None:
                blocks.append(plan.fused.score(head.product(hidden[part]), targets[part]))
            else:
                blocks.append(_scores_of_block(plan.logits(head, hidden[part]), targets[part], part, plan))
        outputs = [torch.cat(pieces) for pieces in zip(*blocks, strict=True)]
        outputs, found = outputs[:7], outputs[7:]  # the kernel's has one more, for its backward
        ctx.save_for_backward(hidden, weight, bias, targets, *found)
        ctx.plan = plan
        ctx.mark_non_differentiable(outputs[2], *outputs[5:])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets, *found = ctx.saved_tensors
        plan: _Plan = ctx.plan
        head = plan.head(weight, bias)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and to_bias else None
        for start in range(0, len(hidden), plan.rows):
            part = slice(start, start + plan.rows)
            if plan.fused is not None:
                upstream = [None if one is None else one[part] for one in grads[:2]]
                grad = plan.fused.gradient(head.product(hidden[part]), targets[part], found[0][part], *upstream)
            else:
                finished = head.logits(hidden[part])
                reference = plan.reference_logits(part) if grads[4] is not None else None
                grad = _logit_gradient(
                    _tempered(finished, plan.temperature),
                    _log_prob_gradients(grads, targets, part, plan),
                    grads[1][part] if plan.entropy and grads[1] is not None else None,
                    (reference, grads[4][part]) if reference is not None and grads[4] is not None else None,
                    plan.vocabulary,
                )
                grad = head.unfinish(_tempered(grad, plan.temperature), finished)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
            narrow = grad.to(head.weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ head.weight
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[part].to(narrow.dtype)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            None,
            None,
        )


def _scores_of_block(logits: Tensor, targets: Tensor, part: slice, plan: _Plan) -> tuple[Tensor, ...]:
    """Outputs of one block of rows, in the order of `TokenScores`; empty tensors where not requested."""
    vocabulary = plan.vocabulary
    log_pi = vocabulary.log_softmax(logits)
    none = log_pi.new_empty(0)
    reference = plan.reference_logits(part)
    ids, top_k = plan.queries.token_ids, plan.queries.top_k
    top_values, top_ids = vocabulary.top(log_pi, top_k) if top_k else (none, none.long())
    return (
        vocabulary.gather(log_pi, targets[:, None])[:, 0],
        -vocabulary.sum(log_pi.exp() * log_pi) if plan.entropy else none,
        vocabulary.sum((2 * log_pi).exp_()) if plan.squared else none,
        vocabulary.gather(log_pi, ids[part]) if ids is not None else none,
        _kl(log_pi, vocabulary.log_softmax(reference), vocabulary) if reference is not None else none,
        top_ids,
        top_values,
    )


def _kl(log_pi: Tensor, log_ref: Tensor, vocabulary: Vocabulary) -> Tensor:
    return vocabulary.sum(log_pi.exp() * (log_pi - log_ref))


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _log_prob_gradients(grads: tuple[Tensor | None, ...], targets: Tensor, part: slice, plan: _Plan) -> list[Chosen]:
    """Tokens of a block whose log-probs are read, [C, K], and the gradients of these log-probs, [C, K]."""
    found = []
    if grads[0] is not None:
        found.append((targets[part, None], grads[0][part, None]))
    if plan.queries.token_ids is not None and grads[3] is not None:
        found.append((plan.queries.token_ids[part], grads[3][part]))
    return found


def _logit_gradient(
    logits: Tensor,
    chosen: list[Chosen],
    of_entropy: Tensor | None,
    compared: Compared | None,
    vocabulary: Vocabulary,
) -> Tensor:
    """d loss / d logits, [C, V], for a block.

    (onehot - pi) g for each log-prob, -pi (log pi + H) g for the entropy, pi (log pi - log ref - KL) g for the KL.
    """
    total = sum((grad.sum(-1) for _, grad in chosen), start=logits.new_zeros(len(logits)))[:, None]
    if of_entropy is None and compared is None:  # the usual case, with one pass over the logits less
        grad = vocabulary.softmax(logits).mul_(-total)
    else:
        log_pi = vocabulary.log_softmax(logits)
        pi = log_pi.exp()
        grad = -total.expand_as(pi)
        if of_entropy is not None:
            entropy = -vocabulary.sum(pi * log_pi)[:, None]
            grad = grad - (log_pi + entropy) * of_entropy[:, None]
        if compared is not None:
            gap = log_pi - vocabulary.log_softmax(compared[0])
            grad = grad + (gap - vocabulary.sum(pi * gap)[:, None]) * compared[1][:, None]
        grad = grad * pi
    for ids, of_logprob in chosen:
        vocabulary.scatter_add(grad, ids, of_logprob)
    return grad
