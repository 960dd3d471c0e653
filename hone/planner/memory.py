"""Memory of a run by role and phase, on the rank that needs most. Bytes, from sizes and settings; nothing is measured.

    load        weights of all roles; the one that is read last exists in its file's pages, too, on a CPU
    generate    what stays of all roles             + the server's weights, cache and work
    forward     what stays                          + activations of one layer, logits of a chunk
    backward    what stays, gradients               + activations of a micro-batch, logits of a chunk
    optimizer   what stays, gradients
    sync        what stays                          + buckets, or the largest tensor
    checkpoint  what stays                          + on a CPU a copy of weights and optimizer state

Stays: weights, and the optimizer's state of roles that are trained, which exists from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hone.models.attention.shapes import AttentionShape
from hone.planner.anatomy import Anatomy
from hone.platforms.layout import Layout

FLOAT32, BFLOAT16 = 4, 2  # bytes
MOMENTS = 2.0  # AdamW keeps two numbers per weight, in the dtype of the stored weight
# Bytes per weight: 4 bits, an 8-bit scale per block of 64 weights, a float per 256 scales.
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
CPU_BLOCK = 1 << 20  # logits at a time on a CPU, see `hone.engines.logprobs`
LEAST_ROWS = 64  # of such a block
LOGIT_COPIES = 3  # float32 tensors of a chunk's size: logits, their softmax, the gradient
SAMPLING_COPIES = 4  # of a decode step's: logits, probabilities, running sums, a temporary tensor


@dataclass(frozen=True, slots=True)
class Role:
    """A model of a run, and how each of its ranks computes and trains it."""

    name: str
    anatomy: Anatomy
    trained: bool = True
    stored: int = FLOAT32  # bytes of a number that the optimizer updates
    computed: int = BFLOAT16  # bytes of a number in forward and backward
    moments: float = MOMENTS  # optimizer state per weight, in stored weights
    adapter: int = 0  # parameters of a LoRA adapter; 0: all weights are trained
    four_bit: bool = False  # the frozen linear layers
    layout: Layout = field(default_factory=Layout)
    tokens: int = 16384  # of the largest micro-batch, on one rank
    longest: int = 0  # tokens of the longest sequence; 0: as `tokens`
    microbatches: int = 2  # of an optimizer step
    recompute: bool = False  # activation checkpointing
    keeps_inputs: bool = True  # with `recompute`: on the device; False: they wait in CPU memory
    chunk: int = 1024  # tokens whose logits exist together
    offload: bool = False  # weights and optimizer state wait in CPU memory while the model is idle
    values: bool = False  # a head of one number

    @property
    def learnt(self) -> int:
        """Parameters that are trained."""
        return (self.adapter or self.anatomy.parameters) if self.trained else 0


@dataclass(frozen=True, slots=True)
class Static:
    """Bytes of a model on a rank, without activations."""

    weights: int
    gathered: int  # layers that are gathered for computation, and weights outside the layers
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gathered + self.gradients + self.optimizer


def static(role: Role) -> Static:
    """Weights, gradients and optimizer state of a role on one rank."""
    if role.layout.whole:
        return _static_of_whole(role)
    anatomy, devices, learnt = role.anatomy, role.layout.holders, role.learnt
    frozen = anatomy.parameters if role.adapter or not role.trained else 0
    copy = 0 if role.stored == role.computed or devices > 1 else role.computed
    share = -(-learnt // devices)
    gradients, optimizer = (role.stored + copy) * share, round(role.moments * role.stored * share)
    outside = role.computed * anatomy.embedding if devices > 1 else 0
    if role.four_bit:
        bits = round(FOUR_BIT * anatomy.linear_parameters)
        others = anatomy.parameters - anatomy.linear_parameters
        matrix = max((inputs * outputs for _, _, inputs, outputs in anatomy.linear), default=0)  # dequantised at a time
        weights = bits + (role.stored + copy) * share + role.computed * -(-others // devices)
        return Static(weights, role.computed * matrix + outside, gradients, optimizer)
    weights = (role.stored + copy) * share + role.computed * -(-frozen // devices)
    gathered = role.computed * 2 * _largest_on_a_rank(role) if devices > 1 else 0
    return Static(weights, gathered + outside // role.layout.tensor, gradients, optimizer)


def _largest_on_a_rank(role: Role) -> int:
    """Parameters of the largest layer that a rank computes with: its part of the matrices, and its experts."""
    anatomy, layout = role.anatomy, role.layout
    routed = min(anatomy.routed_parameters // max(anatomy.expert_layers, 1), anatomy.largest_layer)
    return (anatomy.largest_layer - routed) // layout.tensor + routed // max(layout.expert, layout.tensor)


def _static_of_whole(role: Role) -> Static:
    """Static memory of a rank that holds whole weights and gradients, and shares the optimizer's state with others.

    The optimizer has weights of its own if they are stored in another dtype. Gradients are summed in float32.
    """
    frozen = role.anatomy.parameters if role.adapter or not role.trained else 0
    learnt, updated = held(role, role.learnt), role.stored * updated_weights(role)
    weights = role.computed * (held(role, frozen) + learnt) + (updated if role.stored != role.computed else 0)
    return Static(weights, 0, max(role.computed, FLOAT32) * learnt, round(role.moments * updated))


def held(role: Role, parameters: int, experts: int = 0) -> int:
    """Parameters of a model or its adapter on the rank that has most of them: in a pipeline one of its ends.

    `experts`: ranks of a stage that split the experts; 0: as the layout says.
    """
    anatomy, layout = role.anatomy, role.layout
    if not layout.whole or parameters != anatomy.parameters:
        return -(-parameters // layout.holders)
    body, routed = parameters - anatomy.embedding, anatomy.routed_parameters
    end = anatomy.embedding // (2 if layout.pipeline > 1 and not anatomy.tied else 1)  # tied: both ends have a copy
    split = -(-(body - routed) // layout.tensor) - (-routed // (experts or layout.expert))
    return -(-split // layout.pipeline) - (-end // layout.tensor)


def updated_weights(role: Role) -> int:
    """Parameters that the optimizer of one rank updates."""
    layout = role.layout
    return -(-held(role, role.learnt, layout.tensor) // (layout.updaters // layout.holders))


def kept_bytes_per_token(anatomy: Anatomy, computed: int = BFLOAT16) -> int:
    """Bytes that the backward keeps for one token of a micro-batch.

    Measured on the meta device where the model's forward runs there, with experts added; else estimated: per layer two
    norms and their outputs (12 bytes per hidden unit in bfloat16, because their inputs are kept in float32), queries,
    keys and values before and after rotation, attention's output, and gate, up, activation and product of the MLP.
    """
    measured = anatomy.kept[0 if computed == BFLOAT16 else 1]
    if measured:
        chosen = anatomy.experts_per_token * anatomy.expert_layers
        return measured + computed * chosen * (2 * anatomy.hidden + 4 * anatomy.expert_width)
    plain = 12 * anatomy.hidden + 8 * anatomy.mlp
    return (plain * anatomy.layers + sum(_attention_bytes(one) for one in anatomy.attention)) * computed // BFLOAT16


def _attention_bytes(one: AttentionShape) -> int:
    pairs = one.kv_heads * (one.key_size + one.value_size) * one.cached  # keys of another layer are kept there
    return 8 * one.heads * one.key_size + 6 * pairs + 2 * one.heads * one.value_size


def activation_bytes_per_token(role: Role) -> int:
    """Bytes that the backward keeps for one token, by the role's checkpointing: all, or each layer's input and a layer.

    A rank of a tensor-parallel group keeps its part of a layer's inside, and all of what lies between layers unless
    these ranks share it. The first stage of a pipeline begins as many micro-batches as there are stages; with
    several parts on each stage it begins its first part of more of them (arXiv 2104.04473).
    """
    anatomy, layout, kept = role.anatomy, role.layout, kept_bytes_per_token(role.anatomy, role.computed)
    between = role.computed * anatomy.hidden * anatomy.layers
    inside = max(kept - between, 0) // layout.tensor
    between //= layout.tensor if layout.between else 1
    parts = layout.pipeline * layout.parts
    ahead = layout.pipeline - 1 if layout.parts > 1 else 0
    begun = min(parts + ahead, role.microbatches * layout.parts)
    if not role.recompute:
        return (between + inside) * begun // parts
    inputs = between * role.keeps_inputs * begun // parts
    return inputs + (inside + between) // max(anatomy.layers, 1)


def logits_bytes(role: Role, on_cpu: bool = False) -> int:
    """Bytes of one chunk of logits and its gradient; only one exists at a time."""
    if role.values:
        return 0
    width = -(-role.anatomy.vocabulary // role.layout.tensor)
    rows = min(role.chunk, max(LEAST_ROWS, CPU_BLOCK // width)) if on_cpu else role.chunk
    return min(rows, role.tokens) * width * FLOAT32 * LOGIT_COPIES


def head_gradient_bytes(role: Role) -> int:
    """Bytes of the head's gradient while it is summed in float32, chunk by chunk: the sum, and a chunk's part."""
    if role.values or role.adapter or not role.trained:
        return 0
    head = role.anatomy.vocabulary * role.anatomy.hidden // role.layout.tensor
    return head * (2 * FLOAT32 + (role.computed if role.anatomy.tied else 0))


@dataclass(frozen=True, slots=True)
class Serving:
    """A rollout engine on a device: the built-in one by its parts, a server by the share that it reserves."""

    weights: int = 0
    adapted: int = 0  # an adapter that is merged into them, and the base of what it changes, which is kept
    cache: int = 0
    work: int = 0  # of the largest prefill or decode step
    reserved: float = 0.0  # of the device, with everything; 0: the parts are counted
    sleeps: bool = False  # while a model trains
    buckets: int = 0  # of weight sync, with servers


@dataclass(frozen=True, slots=True)
class Setup:
    """Models and servers that share a device."""

    roles: Sequence[Role]
    serving: Serving | None = None
    on_cpu: bool = False
    base: int = 0  # of the process before it loads anything, or of the device's context
    device_bytes: int = 0  # of the device, for servers that reserve a share
    sent: int = 0  # the copy of the policy's weights that servers are sent while it is trained, on a CPU


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory in a phase."""

    role: str
    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a run, with everything that is in memory in it."""

    name: str
    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        return sum(one.bytes for one in self.parts)


def phases(setup: Setup) -> list[Phase]:
    """Memory of each phase, in the order of a step; phases that the run does not have are left out."""
    trained = [role for role in setup.roles if role.trained]
    stays = [*_base(setup), *(part for role in setup.roles for part in _staying(role, setup))]
    stays += _part("sync", "copy that is sent", setup.sent)
    asleep = [] if setup.serving is None or setup.serving.sleeps else _serving(setup)
    found = [Phase("load", tuple(_loading(setup)))]
    if setup.serving is not None:
        awake = [*_serving(setup), *_part("rollout", "prefill or decode step", setup.serving.work)]
        found.append(Phase("generate", (*stays, *awake)))
    found.append(_largest("forward", [(*stays, *asleep, *_forward(role, setup)) for role in setup.roles]))
    found.append(_largest("backward", [(*stays, *asleep, *_backward(role, setup)) for role in trained]))
    found.append(_largest("optimizer", [(*stays, *asleep, *_gradients(role)) for role in trained]))
    if setup.serving is not None:
        found.append(Phase("sync", (*stays, *_serving(setup), *_sending(trained[0], setup.serving))))
    copies = [part for role in trained for part in _copies(role, setup)]
    found.append(Phase("checkpoint", (*stays, *asleep, *copies)))
    return found


def peak(found: Sequence[Phase]) -> Phase:
    """The phase that needs most."""
    return max(found, key=lambda phase: phase.total)


def certain_bytes(setup: Setup) -> int:
    """Bytes without which the run cannot be: weights, gradients, optimizer state; no estimate of activations.

    Of gradients the narrower kind, of the built-in engine its weights: its cache grows with what is asked.
    """
    sizes = [(static(role), role) for role in setup.roles]
    kept = sum(one.weights + one.optimizer for one, role in sizes if not role.offload)
    gradients = max(min(role.stored, role.computed) * held(role, role.learnt) for _, role in sizes)
    serving, served = setup.serving, 0
    if serving is not None and not serving.sleeps:
        served = round(serving.reserved * setup.device_bytes) if serving.reserved else serving.weights
    return setup.base + kept + gradients + served


def _part(role: str, what: str, size: int) -> list[Part]:
    return [Part(role, what, size)] if size > 0 else []


def _base(setup: Setup) -> list[Part]:
    return _part("process" if setup.on_cpu else "device", "before loading", setup.base)


def _staying(role: Role, setup: Setup) -> list[Part]:
    return [] if role.offload and not setup.on_cpu else _kept(role)


def _kept(role: Role) -> list[Part]:
    """Weights and optimizer state, and buffers of gradients, which exist all the time."""
    size = static(role)
    parts = [*_part(role.name, "weights", size.weights), *_part(role.name, "optimizer state", size.optimizer)]
    return parts + (_part(role.name, "gradients", size.gradients) if role.layout.whole else [])


def _loading(setup: Setup) -> list[Part]:
    """All weights; on a CPU the last model's once more, because pages of its files count."""
    sizes = [(role, static(role).weights) for role in setup.roles]
    found = [*_base(setup), *(part for role, size in sizes for part in _part(role.name, "weights", size))]
    if setup.serving is not None and not setup.serving.reserved:
        found += _served_weights(setup.serving)
    last, _ = sizes[-1]
    file = last.anatomy.files.bytes or last.anatomy.parameters * last.stored
    return found + (_part(last.name, "pages of its files", file) if setup.on_cpu else [])


def _serving(setup: Setup) -> list[Part]:
    one = setup.serving
    assert one is not None
    if one.reserved:
        return _part("rollout", "reserved by the server", round(one.reserved * setup.device_bytes))
    return [*_served_weights(one), *_part("rollout", "KV cache", one.cache)]


def _served_weights(one: Serving) -> list[Part]:
    return [*_part("rollout", "weights", one.weights), *_part("rollout", "adapter and base", one.adapted)]


def _gathered(role: Role) -> list[Part]:
    return _part(role.name, "gathered layers", static(role).gathered)


def _brought(role: Role, setup: Setup) -> list[Part]:
    """Parts that are on the device only while the role works."""
    return _kept(role) if role.offload and not setup.on_cpu else []


def _forward(role: Role, setup: Setup) -> list[Part]:
    layer = kept_bytes_per_token(role.anatomy, role.computed) // max(role.anatomy.layers, 1) // role.layout.tensor
    work = _part(role.name, "one layer's activations", role.tokens * layer)
    return [*_brought(role, setup), *_gathered(role), *work, *_logits(role, setup)]


def _backward(role: Role, setup: Setup) -> list[Part]:
    """The larger of two moments: its begin, with all activations, and its end, with all gradients.

    Gradients of earlier micro-batches exist at the begin of the next one, too.
    """
    activations = _part(role.name, "activations", role.tokens * activation_bytes_per_token(role))
    head = _part(role.name, "gradient of the head", head_gradient_bytes(role))
    begin = [*activations, *head, *_logits(role, setup)]
    if role.microbatches > 1:
        begin += _gradients(role)
    end = [*_gradients(role), *_forward_of_a_layer(role)]
    larger = max(begin, end, key=lambda parts: sum(one.bytes for one in parts))
    return [*_brought(role, setup), *_gathered(role), *larger]


def _forward_of_a_layer(role: Role) -> list[Part]:
    layer = kept_bytes_per_token(role.anatomy, role.computed) // max(role.anatomy.layers, 1) // role.layout.tensor
    return _part(role.name, "one layer's activations", role.tokens * layer)


def _gradients(role: Role) -> list[Part]:
    return [] if role.layout.whole else _part(role.name, "gradients", static(role).gradients)


def _logits(role: Role, setup: Setup) -> list[Part]:
    return _part(role.name, "logits of a chunk", logits_bytes(role, setup.on_cpu))


def _sending(policy: Role, serving: Serving) -> list[Part]:
    largest = policy.anatomy.largest_weight * policy.stored
    return _part("sync", "buckets" if serving.buckets else "largest tensor", serving.buckets or largest)


def _copies(role: Role, setup: Setup) -> list[Part]:
    """Copies that the writer of a checkpoint has; on an accelerator they are in host memory."""
    if not setup.on_cpu:
        return []
    copied = role.stored * updated_weights(role)
    return _part(role.name, "copies for the checkpoint", copied + static(role).optimizer)


def _largest(name: str, choices: Sequence[tuple[Part, ...]]) -> Phase:
    return max((Phase(name, parts) for parts in choices), key=lambda phase: phase.total)


__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "MOMENTS",
    "Layout",
    "Part",
    "Phase",
    "Role",
    "Serving",
    "Setup",
    "Static",
    "activation_bytes_per_token",
    "certain_bytes",
    "head_gradient_bytes",
    "held",
    "kept_bytes_per_token",
    "logits_bytes",
    "peak",
    "phases",
    "static",
    "updated_weights",
]
