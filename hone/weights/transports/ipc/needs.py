"""Boxes of the weights that each training rank sends: those that its receivers read in the sync before.

receivers  --facts: the boxes they need--> driver   checks that the ranks of each replica together need all
           of a tensor or nothing; otherwise they get it whole
driver     --boxes of every rank--> every rank      (the smallest box around what its receivers need)
rank       --its boxes--> its receivers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from hone.models.parts.boxes import Boxed, BoxError, BoxMap, around, cover, from_text, is_empty, to_text
from hone.weights.transports.bucketed.channel import Peer, SenderChannel


def wanted(channel: SenderChannel) -> dict[Peer, str]:
    """Return each receiver's needs, as text. One whose text cannot be read is lost."""
    found = {}
    for peer in list(channel.left()):
        text = peer.facts.get("wants", "")
        try:
            from_text(text if isinstance(text, str) else "?")
            found[peer] = text
        except BoxError as error:
            channel.lose(peer, str(error))
    return found


def boxes_of_ranks(chosen: Mapping[Peer, int], texts: Mapping[Peer, str], ranks: int) -> tuple[str, ...]:
    """The boxes that each training rank sends, as text; `chosen` names the rank that sends to a receiver."""
    replicas = sorted({peer.replica for peer in chosen})
    of_replica = [[peer for peer in chosen if peer.replica == replica] for replica in replicas]
    return _planned(
        tuple(tuple(texts[peer] for peer in peers) for peers in of_replica),
        tuple(tuple(chosen[peer] for peer in peers) for peers in of_replica),
        ranks,
    )


@lru_cache(maxsize=4)  # every sync has the same receivers
def _planned(texts: tuple[tuple[str, ...], ...], senders: tuple[tuple[int, ...], ...], ranks: int) -> tuple[str, ...]:
    """`texts` and `senders` are of each rank of each replica."""
    maps: list[list[BoxMap]] = [[] for _ in range(ranks)]  # of the receivers of each sender
    for some, of in zip(texts, senders, strict=True):
        for one, sender in zip(complete([from_text(text) for text in some]), of, strict=True):
            maps[sender].append(one)
    return tuple(to_text(_around(some)) for some in maps)


def complete(maps: Sequence[BoxMap]) -> list[BoxMap]:
    """The maps of one replica's ranks, without tensors of which they together need a part only: these come whole.

    A tensor that no rank needs (a head that is tied, a tower that is not served) stays: each gets nothing of it.
    """
    gaps = {name for name in set(maps[0]).intersection(*maps[1:]) if _has_gap([one[name] for one in maps])}
    return [{name: one for name, one in each.items() if name not in gaps} for each in maps]


def _has_gap(ranks: Sequence[Boxed]) -> bool:
    boxes = frozenset(one.box for one in ranks)
    if len({one.shape for one in ranks}) > 1:
        return True
    return not (all(is_empty(box) for box in boxes) or cover(ranks[0].shape, boxes))


def _around(maps: Sequence[BoxMap]) -> BoxMap:
    """For each tensor the smallest box around what some receivers need."""
    if not maps:
        return {}
    return {name: around([one[name] for one in maps]) for name in set(maps[0]).intersection(*maps[1:])}


__all__ = ["boxes_of_ranks", "complete", "wanted"]
