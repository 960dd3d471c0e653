"""Packing of trajectories or samples into one `Batch`; cutting a `Batch` into parts and restoring its order.

    groups --pack--> Batch --minibatches--> index lists --select--> Batch (one optimizer step)
                                                          |-- balanced: one part for each data-parallel rank
                                                          `-- microbatches: one forward/backward each, hard token cap
    outputs of the parts, each [T of its part] --restore--> [T] in the batch's own order

A cut is a list of sequence indices, from which `select` makes a batch. Cuts are deterministic: they depend only on the
lengths, the order and the seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hone.data.packed_images import pack_images, select_images
from hone.data.routes import packed_routes
from hone.data.turns import turn_fields
from hone.spans import cumulative, ranges
from hone.types import COLUMNS, Axis, Batch, BatchImages, Image, Selection, Status, Trajectory, TrajectoryGroup

Key = tuple[str, str]
"""A field of `Batch`, and the name in it where it is a mapping."""

SHORTEST_SHARED = 4  # tokens: a shorter prefix costs more to share than to compute again


@dataclass(frozen=True, slots=True)
class Sample:
    """One supervised sequence: `loss_mask` is 1 on the tokens to learn.

    Sample(token_ids=(5, 6, 7, 2), loss_mask=(0, 0, 1, 1), source="warm_start")
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]  # same length; the first is 0, because a first token has no log-prob
    source: str = ""  # name of the data set
    images: tuple[Image, ...] = ()  # in the order of their placeholders
    row: str = field(default="", compare=False)  # "<data set>/<row number>", for messages

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


# ------------------------------------------------------------------------------------------------------- packing


def pack(groups: Sequence[TrajectoryGroup]) -> Batch:
    """Pack every trainable trajectory of the groups end to end.

    `group_index` is the group's position in `groups`; numbers are missing for groups without trainable trajectories.
    `episode_index` numbers the episodes over the whole batch; each role of an episode counts as one. `role_index` is
    set if there are several roles, and `sampled` if a trajectory is masked. A reward component that a trajectory does
    not have is NaN in `components`. `token_rewards` and `anchors` are filled if an environment gives rewards or anchors
    for turns.

    Raises ValueError if nothing is trainable, or if a trajectory is inconsistent (lengths, first token, reward).
    """
    chosen = [(index, one) for index, group in enumerate(groups) for one in group.trainable]
    if not chosen:
        raise ValueError(nothing_trainable(groups))
    for _, one in chosen:
        _check_trajectory(one)
    episodes: dict[tuple[int, int, str], int] = {}
    for index, one in chosen:
        episodes.setdefault((index, one.episode, one.role), len(episodes))
    roles = sorted({one.role for _, one in chosen})
    masked = any(one.masked for _, one in chosen)
    sampled = [one.loss_mask for _, one in chosen]
    mask = [(0,) * len(one.loss_mask) if one.masked else one.loss_mask for _, one in chosen] if masked else sampled
    batch = _packed([one.token_ids for _, one in chosen], mask)
    names = sorted({name for _, one in chosen for name in one.components})
    routed = any(one.routed_experts is not None for _, one in chosen)
    return batch.with_(
        group_index=torch.tensor([index for index, _ in chosen]),
        episode_index=torch.tensor([episodes[index, one.episode, one.role] for index, one in chosen]),
        role_index=torch.tensor([roles.index(one.role) for _, one in chosen]) if len(roles) > 1 else None,
        rewards=torch.tensor([one.reward for _, one in chosen], dtype=torch.float32),
        components={
            name: torch.tensor([one.components.get(name, math.nan) for _, one in chosen], dtype=torch.float32)
            for name in names
        },
        sampled=_flat("sampled", sampled) if masked else None,
        weight_versions=_flat("weight_versions", (one.weight_versions for _, one in chosen)),
        rollout_logprobs=_flat("rollout_logprobs", (one.rollout_logprobs for _, one in chosen)),
        routed_experts=torch.from_numpy(packed_routes([one for _, one in chosen])) if routed else None,
        **(turn_fields(chosen) if any(one.credited for _, one in chosen) else {}),
        images=_images(
            [one for _, one in chosen], [f"trajectory {one.prompt_id} sample {one.sample}" for _, one in chosen]
        ),
    )


def pack_samples(samples: Sequence[Sample]) -> Batch:
    """Pack supervised samples end to end; each is one group and one episode.

    Raises ValueError if there are none, or if a sample is inconsistent.
    """
    if not samples:
        raise ValueError("there are no samples to pack")
    for index, sample in enumerate(samples):
        _check_sequence(sample.token_ids, sample.loss_mask, f"sample {index} of {sample.source or 'an unnamed source'}")
    names = [f"sample {index} of {one.source or 'an unnamed source'}" for index, one in enumerate(samples)]
    packed = _packed([one.token_ids for one in samples], [one.loss_mask for one in samples])
    return packed.with_(images=_images(samples, names))


def _images(sequences: Sequence[Trajectory | Sample], names: Sequence[str]) -> BatchImages | None:
    if not any(one.images for one in sequences):
        return None
    return pack_images([one.token_ids for one in sequences], [one.images for one in sequences], names)


def _packed(token_ids: Sequence[Sequence[int]], loss_mask: Sequence[Sequence[int]]) -> Batch:
    lengths = torch.tensor([len(ids) for ids in token_ids])
    cu_seqlens = cumulative(lengths)
    number = torch.arange(len(token_ids))
    return Batch(
        token_ids=_flat("token_ids", token_ids),
        position_ids=ranges(torch.zeros_like(lengths), lengths),
        loss_mask=_flat("loss_mask", loss_mask),
        cu_seqlens=cu_seqlens,
        group_index=number,
        episode_index=number.clone(),
    )


def _flat(name: str, rows: Iterable[Sequence[float]]) -> torch.Tensor:
    """The rows end to end, in the dtype of the field `name`."""
    return torch.from_numpy(
        np.fromiter(itertools.chain.from_iterable(rows), COLUMNS[name].dtype)
    )  # a tenth of torch.tensor's time


def _check_trajectory(one: Trajectory) -> None:
    where = f"trajectory {one.prompt_id} sample {one.sample}"
    _check_sequence(one.token_ids, one.loss_mask, where)
    if len(one.rollout_logprobs) != len(one.token_ids):
        raise ValueError(f"{where} has {len(one.token_ids)} tokens but {len(one.rollout_logprobs)} rollout log-probs")
    if len(one.weight_versions) != len(one.token_ids):
        raise ValueError(f"{where} has {len(one.token_ids)} tokens but {len(one.weight_versions)} weight versions")
    if not math.isfinite(one.reward):
        raise ValueError(f"{where} has status {one.status} but reward {one.reward}: it should be reward_failed")


def _check_sequence(token_ids: Sequence[int], loss_mask: Sequence[int], where: str) -> None:
    if not token_ids:
        raise ValueError(f"{where} has no tokens")
    if len(loss_mask) != len(token_ids):
        raise ValueError(f"{where} has {len(token_ids)} tokens but a loss mask of {len(loss_mask)}")
    if loss_mask[0]:
        raise ValueError(f"{where} asks for a loss on its first token, which has no log-prob")


def nothing_trainable(groups: Sequence[TrajectoryGroup]) -> str:
    statuses: dict[str, int] = {}
    for group in groups:
        for one in group.trajectories:
            statuses[one.status.value] = statuses.get(one.status.value, 0) + 1
    found = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items())) or "no trajectories"
    failed = (one for group in groups for one in group.trajectories if one.status is not Status.FILTERED)
    reason = next((one.error for one in failed if one.error), "")
    return f"no answer of {len(groups)} groups can be trained on: {found}" + (
        f"; the first failure: {reason}" if reason else ""
    )


# ------------------------------------------------------------------------------------------ selecting and restoring


def select(batch: Batch, indices: Sequence[int]) -> Batch:
    """Take the sequences at `indices`, in that order, with all fields; an index may occur more than once.

    `group_index` and `episode_index` keep their numbers.
    """
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=batch.cu_seqlens.device)
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < batch.num_sequences:
        raise IndexError(f"sequence indices should be 0 to {batch.num_sequences - 1}, found {list(indices)}")
    positions = token_positions(batch.cu_seqlens, chosen)
    taken: dict[Key, torch.Tensor] = {("cu_seqlens", ""): cumulative(batch.lengths[chosen])}
    for key, axis, value in columns(batch):
        if axis is not Axis.ENDS:
            rows, at = (batch.num_tokens, positions) if axis is Axis.TOKEN else (batch.num_sequences, chosen)
            taken[key] = _take(value, at, rows, ".".join(filter(None, key)))
    part = assembled(taken, None if batch.images is None else select_images(batch.images, chosen))
    return part.with_(origin=Selection(batch, tuple(chosen.tolist()), part))


def columns(batch: Batch) -> Iterator[tuple[Key, Axis, Any]]:
    """The tensors that a batch has, in the order of its fields, each with its axis."""
    for name, column in COLUMNS.items():
        value = getattr(batch, name)
        for key, tensor in value.items() if column.named else [("", value)]:
            if tensor is not None:
                yield (name, key), column.axis, tensor


def assembled(values: Mapping[Key, torch.Tensor], images: BatchImages | None) -> Batch:
    """A batch from its tensors: the reverse of `columns`."""
    return Batch(**_by_field(values, {}), images=images)


def with_columns(batch: Batch, values: Mapping[Key, torch.Tensor]) -> Batch:
    """The batch with more tensors, or others in the place of its own."""
    mine = {name: getattr(batch, name) for name, column in COLUMNS.items() if column.named}
    return batch.with_(**_by_field(values, mine))


def _by_field(values: Mapping[Key, torch.Tensor], before: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: dict(one) for name, one in before.items()}
    for (name, key), tensor in values.items():
        if COLUMNS[name].named:
            found.setdefault(name, {})[key] = tensor
        else:
            found[name] = tensor
    return found


def restore(
    outputs: Sequence[torch.Tensor], index_lists: Sequence[Sequence[int]], cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Undo a cut: put the per-token outputs [T_i, ...] of each index list back in the batch's order, [T, ...].

    The index lists hold every sequence of `cu_seqlens` [N+1] exactly once.
    """
    order = list(itertools.chain.from_iterable(index_lists))
    sequences = len(cu_seqlens) - 1
    if sorted(order) != list(range(sequences)):
        raise ValueError(f"the index lists should hold each of {sequences} sequences exactly once, found {order}")
    device = outputs[0].device
    positions = token_positions(cu_seqlens.to(device), torch.as_tensor(order, dtype=torch.int64, device=device))
    lengths = [len(output) for output in outputs]
    if sum(lengths) != len(positions):
        raise ValueError(f"the parts have {sum(lengths)} tokens in all, but the batch has {len(positions)}")
    whole = outputs[0].new_empty(len(positions), *outputs[0].shape[1:])
    for output, at in zip(outputs, torch.split(positions, lengths), strict=True):
        whole.index_copy_(0, at, output)
    return whole


def token_positions(cu_seqlens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Positions of the tokens of the sequences `chosen`, one sequence after the other, int64."""
    starts = cu_seqlens[chosen]
    return ranges(starts, cu_seqlens[chosen + 1] - starts)


def _take(value: torch.Tensor, at: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    if value.shape[0] != rows:
        raise ValueError(f"batch field {name} should have {rows} rows, found {tuple(value.shape)}")
    return value.index_select(0, at.to(value.device))


# --------------------------------------------------------------------------------------------------------- cutting


def microbatches(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Cut a batch into index lists of at most `max_tokens` tokens each: few and even, the largest first.

    The number of lists is the smallest for which largest-first balancing stays within the cap, and never larger
    than with best-fit-decreasing. The largest comes first so that a run that does not fit into memory fails at once.

    Raises ValueError for a sequence that is longer than the cap.
    """
    lengths: list[int] = batch.lengths.tolist()
    if not lengths:
        return []
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {lengths[longest]} tokens, more than max_tokens_per_microbatch={max_tokens}; "
            "raise that key, or lower the limits on prompt and response tokens"
        )
    descending = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _best_fit(descending, lengths, max_tokens)
    for count in range(math.ceil(sum(lengths) / max_tokens), len(bins) + 1):
        even = _largest_first(descending, lengths, count)
        if max(sum(lengths[i] for i in part) for part in even) <= max_tokens:
            bins = even
            break
    bins = [sorted(part) for part in bins]
    return sorted(bins, key=lambda part: (-sum(lengths[i] for i in part), part))


def shared_beginning(sequences: list[list[int]]) -> int:
    """Length of the common prefix; every sequence keeps at least one unshared token."""
    first, last = min(sequences), max(sequences)  # in sorted order, all others share what these two share
    shortest = min(len(sequence) for sequence in sequences) - 1
    return next((i for i in range(shortest) if first[i] != last[i]), shortest)


def groups_of(batch: Batch) -> list[list[int]]:
    """The sequences of each group; groups are in the order of their first sequence."""
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group_index.tolist()):
        members.setdefault(group, []).append(sequence)
    return list(members.values())


def microbatches_of_groups(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Cut as `microbatches` does, but never within a group: for losses that compare the sequences of a group.

    Raises ValueError for a group that is longer than the cap.
    """
    groups = groups_of(batch)
    lengths = batch.lengths
    sizes = [int(lengths[group].sum()) for group in groups]
    for group, size in zip(groups, sizes, strict=True):
        if size > max_tokens:
            raise ValueError(
                f"sequences {', '.join(map(str, group))} are of one group and have {size} tokens together, more than "
                f"max_tokens_per_microbatch={max_tokens}; they are compared with each other, so they have to be in one "
                "micro-batch: raise that key, or lower the limits on their tokens"
            )
    ends = cumulative(torch.tensor(sizes)).to(lengths.device)
    return [
        [i for group in part for i in groups[group]] for part in microbatches(batch.with_(cu_seqlens=ends), max_tokens)
    ]


def _best_fit(descending: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: put each sequence where the least room is left over (at most 11/9 of the optimum)."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index in descending:
        at = bisect_left(room, (lengths[index], -1))
        left, number = room.pop(at) if at < len(room) else (max_tokens, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        insort(room, (left - lengths[index], number))
    return bins


def _largest_first(descending: list[int], lengths: list[int], count: int) -> list[list[int]]:
    """Put each sequence, longest first, into the bin with the fewest tokens so far."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in descending:
        load, number = heapq.heappop(heap)
        bins[number].append(index)
        heapq.heappush(heap, (load + lengths[index], number))
    return bins


def sequence_costs(batch: Batch, equal_cost_length: float | None = None) -> list[float]:
    """Cost of each sequence: L for L tokens, or L (1 + L / equal_cost_length) with quadratic attention.

    `equal_cost_length` is the length at which attention costs as much as everything else.
    """
    lengths: list[int] = batch.lengths.tolist()
    return [float(n) if equal_cost_length is None else n * (1 + n / equal_cost_length) for n in lengths]


def balanced(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide items into `parts` lists of near-equal cost; their lengths differ by at most one.

    Method: balanced largest differencing (Michiels et al. 2003, "Performance ratios for the Karmarkar-Karp
    differencing method").
    """
    descending = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    tickets = itertools.count()  # breaks ties in the heap, so that lists are never compared
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(descending), parts):
        row = [(costs[i], [i]) for i in descending[start : start + parts]]
        row += [(0.0, [])] * (parts - len(row))
        heapq.heappush(heap, (row[-1][0] - row[0][0], next(tickets), row))
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], next(tickets), joined))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(parts)]


def minibatches(batch: Batch, count: int, epoch: int, seed: int) -> list[list[int]]:
    """Divide the groups evenly over `count` index lists; a group is never split.

    Epoch 0 keeps the order of the groups; later epochs shuffle them by (seed, epoch).

    Raises ValueError if there are fewer groups than mini-batches.
    """
    groups = groups_of(batch)
    if len(groups) < count:
        raise ValueError(f"cannot cut {len(groups)} groups into minibatches={count}: each needs at least one group")
    if epoch:
        random.Random(f"minibatches/{seed}/{epoch}").shuffle(groups)
    edges = [len(groups) * i // count for i in range(count + 1)]
    return [sorted(itertools.chain.from_iterable(groups[a:b])) for a, b in itertools.pairwise(edges)]
