"""Costs of a step's parts on a device, from operations, bytes and links.

decode step     weights once, and the KV of every row   / memory speed; two operations per weight and row
prefill         two operations per weight and token     / operations per second
training        forward 2, backward 4 operations per weight and token, a second forward with checkpointing;
                forwards of the other roles; attention grows with the length
optimizer       weights, gradients and state once       / memory speed
sharded ranks   weights twice per micro-batch, gradients once  / link; of experts the ranks' own
tensor ranks    sums of the hidden states after attention and MLP, in each pass over a layer   / link
copies          gradients are added up after every micro-batch                                 / link or network
sequence ranks  queries, keys, values and outputs in each pass over a layer                    / link
expert ranks    hidden states to the chosen experts and back                                   / link
ZeRO-1          gradients and weights once per update          / link
pipeline        stages wait while the first micro-batch comes and the last one leaves, less with several parts on each;
                hidden states from part to part, and their gradients back                      / link
sync            weights once                            / link
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.planner.anatomy import Anatomy
from hone.planner.costs import Costs
from hone.planner.devices import Device
from hone.planner.memory import Role, held, static

FORWARD, BACKWARD = 2.0, 4.0  # operations per weight and token


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward of a role over all tokens of a step, or `trained` ones, with their number in a step."""

    role: Role
    forwards: float = 0.0  # before the update: old log-probs, reference, values
    epochs: float = 0.0  # passes with a backward


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes of a step."""

    sequence_tokens: float  # mean length of a trained sequence, prompt included
    tokens: float  # of a step that is trained on
    optimizer_steps: int  # in a step
    microbatches: float  # in a step, on a rank
    rows: float  # that a server decodes together
    server_devices: int = 1  # of one server
    serving_width: int = 2  # bytes of a number of its weights and cache
    link_is_network: bool = False
    node_devices: int = 8  # ranks that share the fast link


def forward_operations(anatomy: Anatomy, length: float, scored: bool = True) -> float:
    """Operations of a forward for one token in a causal sequence of `length` tokens."""
    head = anatomy.vocabulary * anatomy.hidden
    body = anatomy.active - anatomy.embedding  # the embedding itself is a look-up
    weights = body + (head if scored else 0)
    attention = sum(one.heads * (one.key_size + one.value_size) for one in anatomy.attention) * length / 2
    return FORWARD * (weights + attention)


def costs_of(device: Device, passes: Sequence[Pass], load: Load) -> Costs:
    """Costs of the parts of a step, as the simulation takes them; of training for one device of the trainer's."""
    policy = passes[0].role
    anatomy, speed, reading = policy.anatomy, device.tflops * 1e12, device.memory_gb_s * 1e9 * device.reading_share
    served = load.server_devices
    weights = anatomy.parameters * load.serving_width
    touched = (
        weights
        if load.rows * max(anatomy.experts_per_token, 1) >= anatomy.experts
        else anatomy.active * load.serving_width
    )
    row_bytes = anatomy.kv_bytes_per_token(load.serving_width) * load.sequence_tokens
    row_work = forward_operations(anatomy, load.sequence_tokens) / (speed * device.prefill_share)
    link = (device.network_gb_s if load.link_is_network else device.link_gb_s) * 1e9
    return Costs(
        decode_s=touched / reading / served + device.decode_overhead_s,
        decode_row_s=max(row_bytes / reading, row_work) / served,
        prefill_token_s=row_work / served,
        train_token_s=sum(
            _token_s(one, load.sequence_tokens, speed, device) + _exchange_s(one, load, device) for one in passes
        ),
        train_step_s=sum(_step_s(one, load, device) for one in passes),
        copy_s=0.0,
        send_s=weights / link,
    )


def _token_s(one: Pass, length: float, speed: float, device: Device) -> float:
    forward = forward_operations(one.role.anatomy, length)
    backward = forward * (BACKWARD / FORWARD if not one.role.adapter else 1.0 + 0.1)  # frozen weights have no gradient
    trained = forward + backward + (forward if one.role.recompute else 0.0)
    layout = one.role.layout
    idle = (layout.pipeline - 1) / (layout.parts * one.role.microbatches)  # stages wait for their first micro-batch
    return (one.forwards * forward * device.training_share / device.prefill_share + one.epochs * trained) * (
        (1 + idle) / (speed * device.training_share)
    )


def _exchange_s(one: Pass, load: Load, device: Device) -> float:
    """Seconds per token that the ranks of one copy exchange activations, for one device as `_token_s`."""
    role, layout, anatomy = one.role, one.role.layout, one.role.anatomy
    tensor, sequence, expert = layout.tensor, layout.sequence, layout.expert

    def seconds(numbers: float, ranks: int) -> float:
        link = device.link_gb_s if ranks <= load.node_devices else device.network_gb_s
        return role.computed * numbers / (link * 1e9)

    sums = 2 * 2 * (tensor - 1) * anatomy.hidden * anatomy.layers
    shapes = sum((one.heads + one.kv_heads) * (one.key_size + one.value_size) for one in anatomy.attention)
    copies = 1 if layout.between else tensor  # tensor ranks that do not share tokens send each to its experts
    sent = 2 * anatomy.experts_per_token * anatomy.hidden * anatomy.expert_layers * copies * (expert - 1) / expert
    handed = (layout.pipeline * layout.parts - 1) * anatomy.hidden * (1 if layout.between else tensor)
    passes = one.forwards + one.epochs * (2 + role.recompute)
    return (one.forwards + one.epochs * 2) * seconds(handed, layout.holders * sequence) + passes * (
        seconds(sums, tensor)
        + seconds(shapes * (sequence - 1) / sequence, tensor * sequence)
        + seconds(sent, max(expert, tensor))
    )


def _step_s(one: Pass, load: Load, device: Device) -> float:
    """The optimizer's reading and writing, and the exchange of sharded weights and gradients."""
    size, role = static(one.role), one.role
    updates = load.optimizer_steps if one.epochs else 0
    update_s = updates * 2 * (size.weights + size.gradients + size.optimizer) / (device.memory_gb_s * 1e9)
    if not role.layout.whole and role.layout.replicate > 1:
        update_s += _added_s(one, load, device)
    if role.layout.holders == 1 and not role.layout.whole:
        return update_s
    link = (device.network_gb_s if load.link_is_network else device.link_gb_s) * 1e9
    if role.layout.whole:
        moved = size.gradients + role.computed * held(role, role.learnt)  # scatter gradients, gather weights
        return update_s + (updates * moved / link if role.layout.updaters > role.layout.holders else 0.0)
    routed, tensor = role.anatomy.routed_parameters, role.layout.tensor
    gathered = (role.anatomy.parameters - routed) / tensor + routed / max(role.layout.expert, tensor)
    whole = role.computed * gathered
    rounds = one.forwards * load.microbatches + one.epochs * load.microbatches * 3  # gather twice, scatter once
    return update_s + rounds * whole / link / 2  # half of it overlaps with the computation


def _added_s(one: Pass, load: Load, device: Device) -> float:
    """Seconds that copies of the model take to add up their gradients, in a ring."""
    layout = one.role.layout
    link = device.link_gb_s if layout.ranks <= load.node_devices else device.network_gb_s
    sent = 2 * (layout.replicate - 1) / layout.replicate * static(one.role).gradients
    return one.epochs * load.microbatches * sent / (link * 1e9)


__all__ = ["Load", "Pass", "costs_of", "forward_operations"]
