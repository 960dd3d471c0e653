"""The thread that computes, without the network."""

import asyncio
from dataclasses import replace

import numpy as np

from hone.engines.settings import LoraConfig
from hone.service.disk.registry import NOBODY
from hone.service.machine import Machine
from hone.service.quotas import Quotas
from hone.service.settings import ServeConfig
from hone.workers.tenants.work import Datum, work_of
from tests.service.conftest import MODEL


def work():
    tokens = np.arange(10, 16)
    return work_of("cross_entropy", {}, [Datum(tokens, {"target_tokens": tokens + 1})])


def test_a_model_that_was_closed_meanwhile_takes_no_part_in_a_shared_forward(tmp_path):
    training = {"compute_dtype": "float32", "share_forwards": True}
    machine = Machine(ServeConfig(model=MODEL, names=("tiny",), folder=str(tmp_path), training=training))

    async def story():
        await machine.start()
        for name in "abc":
            await machine.call(machine.open, name, LoraConfig(rank=2, seed=1))
        del machine.models["b"]
        replies = await machine.call(machine.train_together, [("alice", name, work()) for name in "abc"])
        await machine.stop()
        return replies

    first, second, third = asyncio.run(story())
    assert second is None
    assert isinstance(first, bytes)
    assert first == third


def test_a_limit_that_was_taken_away_holds_no_more():
    quotas, tenant = Quotas(), replace(NOBODY, name="alice", tokens_per_minute=10)
    quotas.know(tenant)
    quotas.spend("alice", 1000)
    assert not quotas.has_room("alice")
    quotas.know(replace(tenant, tokens_per_minute=None))
    assert quotas.has_room("alice")
