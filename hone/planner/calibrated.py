"""Costs of a step from timings of a model's shape on this device (`hone plan --calibrate`).

Each part was timed with few layers and with more, on few tokens and on more, so that it holds for any number of both:

    seconds = (call + layer x layers) + (token + layer_token x layers) x tokens

The tokens of a decode step are its answers. Each answer also reads its row of the KV cache: `attention` is the seconds
for one column of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hone.planner.costs import Costs
from hone.planner.memory import Role

PARTS = ("forward", "training", "optimizer", "decode", "attention", "prefill", "sync")
SEQUENCE = "sequence"  # and the kind of run: seconds of a trained sequence outside the models (episode, packing ...)
Timings = Mapping[tuple[int, int], float]  # (layers, tokens) -> seconds


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a part for any number of layers and tokens."""

    call: float
    layer: float
    token: float
    layer_token: float

    def fixed(self, layers: int) -> float:
        """Seconds whatever the number of tokens."""
        return self.call + self.layer * layers

    def each(self, layers: int) -> float:
        """Seconds of each token."""
        return self.token + self.layer_token * layers


def line(timings: Timings) -> Line:
    """The line through timings with one or two numbers of layers, each with one or two of tokens; no part is below 0.

    >>> line({(1, 10): 3.0, (1, 20): 4.0, (3, 10): 7.0, (3, 20): 10.0})
    Line(call=1.0, layer=1.0, token=0.0, layer_token=0.1)
    """
    fixed: dict[int, float] = {}
    each: dict[int, float] = {}
    for layers in sorted({one for one, _ in timings}):
        points = sorted((tokens, seconds) for (one, tokens), seconds in timings.items() if one == layers)
        (few, short), (many, long) = points[0], points[-1]
        each[layers] = max((long - short) / (many - few), 0.0) if many > few else 0.0
        fixed[layers] = max(short - each[layers] * few, 0.0)
    return Line(*_by_layers(fixed), *_by_layers(each))


def _by_layers(found: Mapping[int, float]) -> tuple[float, float]:
    """Seconds without layers, and of each layer; of one number of layers, all is the layers'."""
    few, many = min(found), max(found)
    if few == many:
        return 0.0, found[few] / few
    layer = min(max((found[many] - found[few]) / (many - few), 0.0), found[many] / many)
    return max(found[few] - layer * few, 0.0), layer


def shape_of(role: Role) -> str:
    """The name of a role's shape in a file of devices: all that its timings depend on but layers and tokens."""
    one = role.anatomy
    heads = {(a.heads, a.kv_heads, a.key_size) for a in one.attention}
    attention = "+".join("/".join(map(str, sizes)) for sizes in sorted(heads))
    words = [one.family, f"h{one.hidden}", f"m{one.mlp}", f"a{attention}", f"v{one.vocabulary}"]
    words += [f"e{one.experts_per_token}of{one.experts}"] if one.experts else []
    words += [f"w{role.stored}", f"c{role.computed}"]
    words += [f"lora{role.adapter // max(one.layers, 1)}"] if role.adapter else []
    words += ["recompute"] if role.recompute else []
    return " ".join([*words, *(["values"] if role.values else [])])


@dataclass(frozen=True, slots=True)
class TimedShape:
    """All lines of a shape."""

    lines: Mapping[str, Line]
    sequence_s: float

    @classmethod
    def read(cls, facts: Mapping[str, Sequence[float]], kind: str) -> TimedShape:
        """From a file of devices, for a kind of run."""
        lines = {name: Line(*facts[name]) for name in PARTS if name in facts}
        return cls(lines, facts.get(f"{SEQUENCE} {kind}", (0.0,))[0])


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step on one rank."""

    tokens: float  # of all ranks, as the models compute them
    sequences: int
    microbatches: float  # of one pass over the step's tokens
    updates: int
    columns: float = 0.0  # of the KV cache that a decode step reads for an answer, on average
    prefilled: float = 1.0  # tokens of prompts that are computed together


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of a step, the share of training that is forwards before the update, and what no model does."""

    costs: Costs
    forward_share: float
    rest_s: float


def costs_from(shapes: Sequence[TimedShape], passes: Sequence[tuple[Role, float, float]], work: Work) -> Cost:
    """Costs of a step. `passes`: of each role its forwards before the update and its passes with a backward."""
    forward_fixed = forward_token = train_fixed = train_token = 0.0
    for shape, (role, forwards, epochs) in zip(shapes, passes, strict=True):
        layers, lines = role.anatomy.layers, shape.lines
        forward_fixed += forwards * work.microbatches * lines["forward"].fixed(layers)
        forward_token += forwards * lines["forward"].each(layers)
        if epochs:
            train_fixed += epochs * work.microbatches * lines["training"].fixed(layers)
            train_fixed += work.updates * lines["optimizer"].fixed(layers)
            train_token += epochs * lines["training"].each(layers)
    rest = shapes[0].sequence_s * work.sequences
    forward = forward_fixed + forward_token * work.tokens
    whole = forward + train_fixed + train_token * work.tokens
    policy, lines = passes[0][0].anatomy.layers, shapes[0].lines
    none = Line(0.0, 0.0, 0.0, 0.0)
    decode, attention, prefill, sync = (lines.get(name, none) for name in ("decode", "attention", "prefill", "sync"))
    costs = Costs(
        decode_s=decode.fixed(policy),
        decode_row_s=decode.each(policy) + attention.fixed(policy) * work.columns,
        prefill_token_s=prefill.each(policy) + prefill.fixed(policy) / work.prefilled,
        train_token_s=forward_token + train_token,
        train_step_s=forward_fixed + train_fixed + rest,
        send_s=sync.fixed(policy),
    )
    return Cost(costs, forward / whole if whole else 0.0, rest)


__all__ = ["PARTS", "SEQUENCE", "Cost", "Line", "TimedShape", "Timings", "Work", "costs_from", "line", "shape_of"]
