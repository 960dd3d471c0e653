"""Pure decisions about the weight version that each replica takes next, and the snapshots that are kept.

    a draw and its requests    the versions that they may be sampled from: least and greatest, both included
    a replica                  the version that it has proven, and the requests that it runs

A replica takes a newer version as soon as all its requests allow it, and no held draw is left without a replica. With
`finish` the range of a draw is one version, so a replica lets its answers end and the others go on. With `recompute`
and `keep_cache` the range has no end (`NEWEST`), so every replica moves at once, and its answers go on under the new
weights. All replicas that may move to the same version do so together: one pass over the snapshot serves them all, and
none generates longer with older weights than it has to.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hone.types import Versions

NEWEST = sys.maxsize  # greatest version of a range without an end


@dataclass(frozen=True, slots=True)
class Standing:
    """A replica that can take weights now."""

    name: str
    version: int  # that it has proven; -1: it holds no weights
    running: frozenset[Versions] = frozenset()  # of its requests
    lent: bool = False  # it may rest at any moment, so no draw is left to it alone


def fits(version: int, versions: Versions | None) -> bool:
    """Return whether a request of this range may be sampled from `version`; None: from any."""
    return version >= 0 and (versions is None or versions[0] <= version <= versions[1])


def moves(
    replicas: Sequence[Standing], waiting: Sequence[Versions], held: Collection[Versions], kept: Collection[int]
) -> dict[str, int]:
    """Return the replicas that take new weights now: name -> version.

    `waiting` are the ranges of requests without a seat, oldest first; `held` the ranges of all open draws; `kept` the
    versions of which there is a snapshot. A request that no replica can serve gets one first, even by going back to an
    older version, because the replica that had it may have died. Every other replica moves towards the newest.
    """
    versions = {one.name: one.version for one in replicas}
    lasting = {one.name for one in replicas if not one.lent}
    found: dict[str, int] = {}
    open_ranges = {*held, *waiting}

    def move(one: Standing, target: int) -> None:
        found[one.name] = versions[one.name] = target

    def may(one: Standing, target: int) -> bool:
        allowed = all(fits(target, running) for running in one.running)
        counted = {name: version for name, version in versions.items() if name in lasting or name == one.name}
        return one.name not in found and allowed and not _strands(one.name, target, counted, open_ranges)

    for wanted in dict.fromkeys(waiting):
        if any(fits(version, wanted) for version in versions.values()):
            continue
        target = newest_of(wanted, kept)
        able = [one for one in replicas if target >= 0 and may(one, target)]
        if able:
            move(min(able, key=lambda one: one.version), target)
    for one in sorted(replicas, key=lambda one: one.version):
        targets = [newest_of(wanted, kept) for wanted in waiting[:1]] + [max(kept, default=-1)]
        for target in targets:
            if target > one.version and may(one, target):
                move(one, target)
    return found


def needed(held: Collection[Versions], kept: Collection[int]) -> set[int]:
    """The snapshots that have to stay: the newest, and those that a held draw may still have to be sampled from."""
    return {newest_of(versions, kept) for versions in (*held, (0, NEWEST))} - {-1}


def newest_of(versions: Versions, kept: Collection[int]) -> int:
    """The newest of the `kept` versions within a range; -1: there is none."""
    return max((version for version in kept if fits(version, versions)), default=-1)


def _strands(name: str, target: int, versions: Mapping[str, int], ranges: Collection[Versions]) -> bool:
    """Return whether a draw that ends below `target` would have no replica any more if this one moved there."""
    others = [version for other, version in versions.items() if other != name]
    return any(
        greatest < target
        and fits(versions[name], (least, greatest))
        and not any(fits(version, (least, greatest)) for version in others)
        for least, greatest in ranges
    )
