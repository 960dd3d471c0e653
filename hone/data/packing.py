"""Packing: finished trajectories or samples become one `Batch`, and a `Batch` is cut and put together again.

    groups --pack--> Batch --minibatches--> index lists --select--> Batch (one optimizer step)
                                                          |-- balanced_parts: one part for each data-parallel rank
                                                          `-- microbatches: one forward/backward each, hard token cap
    outputs of the parts, each [T of its part] --restore--> [T] in the batch's own order

Every cut is a list of sequence indices, so one function (`select`) makes batches of them, and all cuts are
deterministic: they depend on the lengths, the order and the seed only.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hone.data.packed_images import pack_images, select_images
from hone.data.routes import packed_routes
from hone.spans import cumulative, ranges
from hone.types import Batch, Image, Selection, Trajectory, TrajectoryGroup

PER_TOKEN = (
    "token_ids",
    "position_ids",
    "loss_mask",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "token_rewards",
    "advantages",
    "returns",
    "loss_weights",
)
PER_SEQUENCE = ("group_index", "episode_index", "rewards")
MAPPINGS = {"extras": True, "components": False}  # name -> whether its tensors are per token


@dataclass(frozen=True, slots=True)
class Sample:
    """One supervised sequence: `loss_mask` is 1 on the tokens to learn.

    Sample(token_ids=(5, 6, 7, 2), loss_mask=(0, 0, 1, 1), source="warm_start")
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]  # same length; the first is 0, for a first token has no log-prob
    source: str = ""  # name of the data set
    images: tuple[Image, ...] = ()  # in the order of their placeholders


# ------------------------------------------------------------------------------------------------------- packing


def pack(groups: Sequence[TrajectoryGroup]) -> Batch:
    """Every trainable trajectory of the groups, packed end to end.

    `group_index` is the group's position in `groups`; a group without trainable trajectories contributes nothing, so
    numbers may be missing. `episode_index` numbers the episodes over the whole batch. A reward component that a
    trajectory does not have is NaN in `components`.

    Raises ValueError if nothing is trainable, or if a trajectory is inconsistent (lengths, first token, reward).
    """
    chosen = [(index, one) for index, group in enumerate(groups) for one in group.trainable]
    if not chosen:
        raise ValueError(_nothing_trainable(groups))
    for _, one in chosen:
        _check_trajectory(one)
    episodes: dict[tuple[int, int], int] = {}
    for index, one in chosen:
        episodes.setdefault((index, one.episode), len(episodes))
    batch = _packed([one.token_ids for _, one in chosen], [one.loss_mask for _, one in chosen])
    names = sorted({name for _, one in chosen for name in one.components})
    routes = packed_routes([one for _, one in chosen])
    return batch.with_(
        group_index=torch.tensor([index for index, _ in chosen]),
        episode_index=torch.tensor([episodes[index, one.episode] for index, one in chosen]),
        rewards=torch.tensor([one.reward for _, one in chosen], dtype=torch.float32),
        components={
            name: torch.tensor([one.components.get(name, math.nan) for _, one in chosen], dtype=torch.float32)
            for name in names
        },
        rollout_logprobs=_flat((one.rollout_logprobs for _, one in chosen), np.float32),
        extras={} if routes is None else {"routed_experts": torch.from_numpy(routes)},
        images=pack_images(
            [one.token_ids for _, one in chosen],
            [one.images for _, one in chosen],
            [f"trajectory {one.prompt_id} sample {one.sample}" for _, one in chosen],
        ),
    )


def pack_samples(samples: Sequence[Sample]) -> Batch:
    """Supervised samples, packed end to end; each is its own group and episode.

    Raises ValueError if there are none, or if a sample is inconsistent.
    """
    if not samples:
        raise ValueError("there are no samples to pack")
    for index, sample in enumerate(samples):
        _check_sequence(sample.token_ids, sample.loss_mask, f"sample {index} of {sample.source or 'an unnamed source'}")
    names = [f"sample {index} of {one.source or 'an unnamed source'}" for index, one in enumerate(samples)]
    images = pack_images([one.token_ids for one in samples], [one.images for one in samples], names)
    return _packed([one.token_ids for one in samples], [one.loss_mask for one in samples]).with_(images=images)


def _packed(token_ids: Sequence[Sequence[int]], loss_mask: Sequence[Sequence[int]]) -> Batch:
    lengths = torch.tensor([len(ids) for ids in token_ids])
    cu_seqlens = cumulative(lengths)
    number = torch.arange(len(token_ids))
    return Batch(
        token_ids=_flat(token_ids, np.int64),
        position_ids=ranges(torch.zeros_like(lengths), lengths),
        loss_mask=_flat(loss_mask, np.bool_),
        cu_seqlens=cu_seqlens,
        group_index=number,
        episode_index=number.clone(),
    )


def _flat(rows: Iterable[Sequence[float]], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(itertools.chain.from_iterable(rows), dtype))  # a tenth of torch.tensor's time


def _check_trajectory(one: Trajectory) -> None:
    where = f"trajectory {one.prompt_id} sample {one.sample}"
    _check_sequence(one.token_ids, one.loss_mask, where)
    if len(one.rollout_logprobs) != len(one.token_ids):
        raise ValueError(f"{where} has {len(one.token_ids)} tokens but {len(one.rollout_logprobs)} rollout log-probs")
    if not math.isfinite(one.reward):
        raise ValueError(f"{where} has status {one.status} but reward {one.reward}: it should be reward_failed")


def _check_sequence(token_ids: Sequence[int], loss_mask: Sequence[int], where: str) -> None:
    if not token_ids:
        raise ValueError(f"{where} has no tokens")
    if len(loss_mask) != len(token_ids):
        raise ValueError(f"{where} has {len(token_ids)} tokens but a loss mask of {len(loss_mask)}")
    if loss_mask[0]:
        raise ValueError(f"{where} asks for a loss on its first token, which has no log-prob")


def _nothing_trainable(groups: Sequence[TrajectoryGroup]) -> str:
    statuses: dict[str, int] = {}
    for group in groups:
        for one in group.trajectories:
            statuses[one.status.value] = statuses.get(one.status.value, 0) + 1
    found = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items())) or "no trajectories"
    reason = next((one.error for group in groups for one in group.trajectories if one.error), "")
    return f"nothing to train on in {len(groups)} groups: {found}" + (
        f"; the first failure: {reason}" if reason else ""
    )


# ------------------------------------------------------------------------------------------ selecting and restoring


def select(batch: Batch, indices: Sequence[int]) -> Batch:
    """The sequences at `indices`, in that order, with every field they have; an index may occur more than once.

    `group_index` and `episode_index` keep their numbers.
    """
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=batch.cu_seqlens.device)
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < batch.num_sequences:
        raise IndexError(f"sequence indices should be 0 to {batch.num_sequences - 1}, found {list(indices)}")
    positions = token_positions(batch.cu_seqlens, chosen)
    fields: dict[str, Any] = {"cu_seqlens": cumulative(batch.lengths[chosen])}
    for names, rows, at in ((PER_TOKEN, batch.num_tokens, positions), (PER_SEQUENCE, batch.num_sequences, chosen)):
        fields |= {name: _take(getattr(batch, name), at, rows, name) for name in names}
    for name, per_token in MAPPINGS.items():
        rows, at = (batch.num_tokens, positions) if per_token else (batch.num_sequences, chosen)
        fields[name] = {key: _take(value, at, rows, f"{name}.{key}") for key, value in getattr(batch, name).items()}
    part = Batch(**fields, images=None if batch.images is None else select_images(batch.images, chosen))
    return part.with_(origin=Selection(batch, tuple(chosen.tolist()), part))


def restore(
    outputs: Sequence[torch.Tensor], index_lists: Sequence[Sequence[int]], cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Undo a cut: per-token outputs of `select(batch, indices)` for each index list, back in the batch's order.

    outputs[i] is [T_i, ...]; the index lists hold every sequence of `cu_seqlens` [N+1] exactly once. Gives [T, ...].
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
    """Where the tokens of the sequences `chosen` are, one sequence after the other: [tokens of these] int64."""
    starts = cu_seqlens[chosen]
    return ranges(starts, cu_seqlens[chosen + 1] - starts)


def _take(value: torch.Tensor | None, at: torch.Tensor, rows: int, name: str) -> torch.Tensor | None:
    if value is None:
        return None
    if value.shape[0] != rows:
        raise ValueError(f"batch field {name} should have {rows} rows, found {tuple(value.shape)}")
    return value.index_select(0, at.to(value.device))


# --------------------------------------------------------------------------------------------------------- cutting


def microbatches(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Index lists of at most `max_tokens` tokens each: few and even, the largest first.

    The cap is hard. The number of lists is the smallest one that largest-first balancing fits into, and never more
    than best-fit-decreasing needs. The largest comes first so that a run that does not fit into memory fails at once.

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


def groups_of(batch: Batch) -> list[list[int]]:
    """The sequences of each group, groups in the order of their first sequence."""
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group_index.tolist()):
        members.setdefault(group, []).append(sequence)
    return list(members.values())


def microbatches_of_groups(batch: Batch, max_tokens: int) -> list[list[int]]:
    """The same, with every group whole: for losses that compare the sequences of a group with each other.

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
    """Best-fit decreasing: each sequence goes where the least room is left over (at most 11/9 of the optimum)."""
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
    """Each sequence, longest first, goes to the bin with the fewest tokens so far."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in descending:
        load, number = heapq.heappop(heap)
        bins[number].append(index)
        heapq.heappush(heap, (load + lengths[index], number))
    return bins


def balanced_parts(batch: Batch, parts: int, equal_cost_length: float | None = None) -> list[list[int]]:
    """`parts` index lists of near-equal cost, whose numbers of sequences differ by at most one.

    A sequence of L tokens costs L, or L (1 + L / equal_cost_length) where attention matters: that is the length at
    which attention costs as much as everything else. Method: balanced largest differencing (Michiels et al. 2003,
    "Performance ratios for the Karmarkar-Karp differencing method").

    Raises ValueError if there are fewer sequences than parts.
    """
    lengths: list[int] = batch.lengths.tolist()
    if len(lengths) < parts:
        raise ValueError(f"cannot split {len(lengths)} sequences over {parts} data-parallel ranks")
    costs = [float(n) if equal_cost_length is None else n * (1 + n / equal_cost_length) for n in lengths]
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
    return [sorted(part) for _, part in heap[0][2]]


def minibatches(batch: Batch, count: int, epoch: int, seed: int) -> list[list[int]]:
    """`count` index lists that share out the groups evenly; a group is never divided.

    Epoch 0 takes the groups in the order they came; later epochs shuffle them by (seed, epoch).

    Raises ValueError if there are fewer groups than mini-batches.
    """
    groups = groups_of(batch)
    if len(groups) < count:
        raise ValueError(f"cannot cut {len(groups)} groups into minibatches={count}: each needs at least one group")
    if epoch:
        random.Random(f"minibatches/{seed}/{epoch}").shuffle(groups)
    edges = [len(groups) * i // count for i in range(count + 1)]
    return [sorted(itertools.chain.from_iterable(groups[a:b])) for a, b in itertools.pairwise(edges)]
