"""Failures of publications to servers, over the real router, by a clock of its own: no server and no waiting."""

import asyncio

import pytest

from hone.rollout.router import Router
from hone.rollout.settings import RolloutConfig
from hone.weights.base import Source, VersionWeights, WeightSyncError
from hone.workers.publishing.publication import ToServers
from tests.trainers.test_feed_under_load import Loop, Server


class Sends:
    """A sender whose sends end as they were told to: with the names of those that prove the version, or an error."""

    def __init__(self, router, *ends):
        self.router, self.ends, self.sent = router, list(ends), []

    async def send(self, weights, names):
        self.sent.append(sorted(names))
        end = self.ends.pop(0)
        chosen = [one for one in self.router.replicas if one.name in names]
        with self.router.updating(chosen):
            await asyncio.sleep(0.1)
            if isinstance(end, Exception):
                raise end
            for one in chosen:
                if one.name in end:
                    one.weight_version = weights.version
                    self.router.replica_serves(one)
        return {}

    async def close(self):
        """It holds nothing."""


@pytest.fixture
def publishing():
    """`publishing(ends, copies)`: a publication to two servers, its sender, and how to run a coroutine."""
    loop = Loop()
    asyncio.set_event_loop(loop.clock)

    def begin(*ends, copies=False):
        router = Router([Server("s-0"), Server("s-1")], RolloutConfig())
        sender = Sends(router, *ends)
        return ToServers(router, sender, copies), sender, loop.run

    yield begin
    loop.close()
    asyncio.set_event_loop(None)


def version(number):
    return VersionWeights(number, Source(lambda: iter(())), lambda: True)


def test_an_error_that_names_no_replica_ends_the_publication(publishing):
    """One server has proven the version; the sender cannot send it to the other."""
    publication, sender, run = publishing(("s-0",), WeightSyncError("no memory for buckets"))
    with pytest.raises(WeightSyncError, match="no memory for buckets"):
        run(publication.publish(version(0)))
    assert sender.sent == [["s-0", "s-1"], ["s-1"]]


def test_an_error_that_names_no_replica_ends_asynchronous_training(publishing):
    publication, _, run = publishing(("s-0",), WeightSyncError("no memory for buckets"), copies=True)
    run(publication.publish(version(0)))
    with pytest.raises(WeightSyncError, match="no memory for buckets"):
        run(publication.reached(0, 60.0))


def test_a_replica_that_another_error_keeps_from_a_proven_version_starts_again(publishing):
    publication, sender, run = publishing(("s-0",), OSError("connection reset"), ("s-1",))
    run(publication.publish(version(0)))
    assert sender.sent == [["s-0", "s-1"], ["s-1"], ["s-1"]]
    assert sender.router.metrics()["rollout/replica_restarts"].value == 1


def test_any_other_error_before_a_replica_has_proven_the_version_ends_the_publication(publishing):
    publication, _, run = publishing(OSError("connection reset"))
    with pytest.raises(OSError, match="connection reset"):
        run(publication.publish(version(0)))


def test_nothing_is_sent_to_servers_that_sleep(publishing):
    publication, sender, run = publishing(("s-0", "s-1"), ("s-0", "s-1"))
    run(publication.publish(version(0)))
    run(publication.withdraw())
    for one in sender.router.replicas:
        one.weight_version = -1  # as a server that gave its weights back
    run(asyncio.sleep(30))
    assert len(sender.sent) == 1
    run(publication.publish(version(1)))
    assert len(sender.sent) == 2


def test_a_send_that_has_begun_ends_before_servers_sleep(publishing):
    publication, sender, run = publishing(("s-0",), ("s-1",))
    run(publication.publish(version(0)))
    sender.ends = [("s-0",)]
    sender.router.replicas[0].weight_version = -1

    async def withdrawn_while_sending():
        while len(sender.sent) < 3:
            await asyncio.sleep(0.01)
        await publication.withdraw()
        return sender.router.replicas[0].weight_version

    assert run(withdrawn_while_sending()) == 0
