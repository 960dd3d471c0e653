"""Weights that are published while answers are written and the trainer trains, with real servers."""

import asyncio
import copy
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from hone.config import ConfigError
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.attention.packed import packed
from hone.runtime.local import LocalWorkerGroup
from hone.schedule.seats import NEWEST
from hone.tracking.metrics import Timer
from hone.types import GenerationRequest, SamplingParams
from hone.weights.base import WeightSyncError
from hone.weights.settings import WeightSyncConfig
from hone.weights.snapshot import Copied, Snapshot
from hone.workers.control import request
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker

pytestmark = pytest.mark.slow

WAIT_S = 60.0
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
LONG = replace(SHORT, max_tokens=100)
PROMPT = (5, 6, 7)


def train(actor, amount=0.05):
    """Change the weights in place, as an optimizer step does."""
    actor.updates += 1
    with torch.no_grad():
        for parameter in actor._group._worker.engine.model.parameters():
            parameter.add_(amount * torch.randn_like(parameter))


async def play(rollout, name, versions, sampling=SHORT, prompt=PROMPT):
    """One draw: held as long as it is open."""
    with rollout.hold(versions):
        return await rollout.generate(GenerationRequest(name, prompt, sampling, versions=versions))


async def running(rollout, count=1):
    """Wait until so many requests are at replicas."""
    while sum(len(one.running) for one in rollout._engine.pool.members) < count:
        await asyncio.sleep(0.005)


def process_of(replica):
    return replica.connection.process.process_ids()[0]


def copy_of(actor):
    return copy.deepcopy(actor._group._worker.engine.model)


def forward(model, completion, prompt=PROMPT):
    """The log-probs of an answer by a model."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad(), packed(torch.tensor([0, ids.shape[1]])):
        scores = model(input_ids=ids).logits[0].float().log_softmax(-1)
    places = range(len(prompt) - 1, ids.shape[1] - 1)
    return [scores[place, ids[0, place + 1]].item() for place in places]


class Eventful(Copied):
    """A copy whose sending is interrupted by an event in its middle, the first time."""

    def stream(self):
        for number, item in enumerate(self.tensors.items()):
            if number == 3 and events:
                events.pop()()
            yield item


events = []


def test_finish_lets_answers_end_and_keeps_what_was_published(share, actor, start):
    rollout, inside = share(new_weights="finish"), start(builtin={"process": "inside"})
    rollout.sync_from(actor, 0)
    inside.sync_from(actor, 0)
    loop = share.loop
    older = loop.start(play(rollout, "1/0/0/0", (0, 0), LONG))
    loop.run(running(rollout))
    train(actor)
    rollout.publish(actor, 1)
    newer = loop.start(play(rollout, "2/0/0/0", (1, 1), LONG))
    inside_first = start.loop.run(inside.generate(GenerationRequest("1/0/0/0", PROMPT, LONG)))
    inside.sync_from(actor, 1)
    train(actor)  # while version 1 waits for the answers: what is sent is what was published
    assert set(older.result(WAIT_S).weight_versions) == {0}
    assert set(newer.result(WAIT_S).weight_versions) == {1}
    assert older.result(0).token_ids == inside_first.token_ids
    assert (
        newer.result(0).token_ids
        == start.loop.run(inside.generate(GenerationRequest("2/0/0/0", PROMPT, LONG))).token_ids
    )
    rollout.wait_for(1, WAIT_S)
    assert rollout.weight_version == 1
    figures = rollout.metrics()
    assert figures["weights/version"].value == 1
    assert 0 <= figures["perf/publication_hidden_fraction"].value <= 1


def test_one_replica_keeps_the_older_version_for_the_rest_of_its_draws(share, actor):
    rollout = share(new_weights="finish", replicas=2)
    rollout.sync_from(actor, 0)
    loop, second_turn = share.loop, threading.Event()

    async def two_turns():
        with rollout.hold((0, 0)):
            first = await rollout.generate(GenerationRequest("1/0/0/0", PROMPT, SHORT, versions=(0, 0)))
            while not second_turn.is_set():  # a tool that works between two turns
                await asyncio.sleep(0.01)
            second = await rollout.generate(
                GenerationRequest("1/0/0/1", (*PROMPT, *first.token_ids, 9), SHORT, versions=(0, 0))
            )
            return first.weight_versions + second.weight_versions

    older = loop.start(two_turns())
    train(actor)
    rollout.publish(actor, 1)
    assert set(loop.run(play(rollout, "2/0/0/0", (1, 1))).weight_versions) == {1}
    assert sorted(one.weight_version for one in rollout._engine.serving) == [0, 1]
    second_turn.set()
    assert set(older.result(WAIT_S)) == {0}
    rollout.wait_for(1, WAIT_S)


def test_recompute_continues_answers_and_each_token_has_the_log_prob_of_its_own_weights(share, actor):
    rollout = share(new_weights="recompute")
    rollout.sync_from(actor, 0)
    models, answers, enough = [copy_of(actor)], [], threading.Event()

    async def keep_asking(name, sampling):
        while not enough.is_set():
            answers.append(await play(rollout, name, (0, NEWEST), sampling))

    # Of different lengths: new weights do not come between two answers of both.
    asking = [
        share.loop.start(keep_asking(f"{number}/0/0/0", replace(LONG, max_tokens=tokens)))
        for number, tokens in enumerate((100, 70))
    ]
    share.loop.run(running(rollout, count=2))
    for version in (1, 2):
        train(actor, 0.02)
        models.append(copy_of(actor))
        rollout.publish(actor, version)
        rollout.wait_for(version, WAIT_S)
    enough.set()
    for one in asking:
        one.result(WAIT_S)
    assert any(len(set(found.weight_versions)) > 1 for found in answers), "no answer was there when new weights came"
    for found in answers:
        versions = found.weight_versions
        assert list(versions) == sorted(versions)
        expected = [forward(model, found) for model in models]
        own = [expected[version][place] for place, version in enumerate(versions)]
        assert found.logprobs == pytest.approx(own, abs=1e-5)


def test_a_replica_that_dies_gets_the_version_that_its_answers_need(share, actor):
    """Version 1 is served by the other one already; the answer of version 0 is written to its end from version 0."""
    rollout = share(new_weights="finish", replicas=2)
    rollout.sync_from(actor, 0)
    loop, router = share.loop, rollout._engine
    expected = loop.run(play(rollout, "0/0/0/0", (0, 0), LONG))
    older = loop.start(play(rollout, "1/0/0/0", (0, 0), LONG))
    loop.run(running(rollout))
    (victim,) = (one.engine for one in router.pool.members if one.running)
    os.kill(process_of(victim), signal.SIGSTOP)  # it cannot end before version 1 is there
    train(actor)
    rollout.publish(actor, 1)
    assert set(loop.run(play(rollout, "2/0/0/0", (1, 1))).weight_versions) == {1}
    train(actor)
    os.kill(process_of(victim), signal.SIGKILL)
    found = older.result(WAIT_S)
    assert set(found.weight_versions) == {0}
    assert found.token_ids == expected.token_ids
    rollout.wait_for(1, WAIT_S)
    assert {one.weight_version for one in router.replicas} == {1}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stroke", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_hangs_while_weights_are_sent_is_replaced(share, actor, stroke):
    rollout = share(new_weights="finish", replicas=2, weights=WeightSyncConfig(timeout_s=9, bucket_mib=1))
    rollout.sync_from(actor, 0)
    loop, router = share.loop, rollout._engine
    victim, other = router.replicas
    first = process_of(victim)
    events.append(lambda: os.kill(first, stroke))
    train(actor)
    copied = Copied.of(actor.weights(torch.float32))
    loop.run(rollout._publication.publish(Snapshot(1, Eventful(copied.tensors, copied.digest)).weights()))
    rollout.wait_for(1, WAIT_S)
    assert set(loop.run(play(rollout, "1/0/0/0", (1, 1))).weight_versions) == {1}
    loop.run(router.revived())
    rollout.wait_for(1, WAIT_S)
    assert process_of(victim) != first
    assert (victim.weight_version, other.weight_version) == (1, 1)


def test_a_snapshot_that_training_writes_to_is_never_served(share, actor):
    rollout = share(new_weights="finish")
    rollout.sync_from(actor, 0)
    live = actor._group._worker.engine.model.state_dict()
    torn = Snapshot(1, Copied(live, Copied.of(live.items()).digest))
    train(actor)
    share.loop.run(rollout._publication.publish(torn.weights()))
    with pytest.raises(WeightSyncError, match="version 1 was changed"):
        share.loop.run(play(rollout, "1/0/0/0", (1, 1)))
    with pytest.raises(WeightSyncError, match="version 1 was changed"):
        rollout.publish(actor, 2)
    assert rollout.weight_version == -1, "nothing is served any more"


def test_a_version_that_open_draws_forbid_is_not_waited_for_without_end(share, actor):
    rollout = share(new_weights="finish")
    rollout.sync_from(actor, 0)

    async def held():
        with rollout.hold((0, 0)):
            await asyncio.sleep(WAIT_S)

    held_draw = share.loop.start(held())
    rollout.publish(actor, 1)
    with pytest.raises(TimeoutError, match=r"version 1 .* builtin-0 is serving with 0; .* versions \[\(0, 0\)\]"):
        rollout.wait_for(1, 0.2)
    held_draw.cancel()
    rollout.wait_for(1, WAIT_S)


def test_an_adapter_is_published_without_its_base(share, model):
    engine = EngineConfig(compute_dtype="float32", lora=LoraConfig(rank=2))
    worker = TrainWorker(TrainSpec(model, engine, total_steps=10))
    actor = TrainHandle(LocalWorkerGroup("actor", worker, Timer().phase), lambda metrics: None)
    actor.initialize()
    rollout = share(new_weights="finish", lora=engine.lora)
    rollout.sync_from(actor, 0)
    first = rollout.metrics()["weights/bytes"].value
    rollout.publish(actor, 1)
    rollout.wait_for(1, WAIT_S)
    assert rollout.metrics()["weights/bytes"].value < first / 2
    assert list(rollout._publication._kept) == [1], "no draw needs version 0"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"builtin": {"process": "inside"}}, "rollout.builtin.process=separate"),
        ({"sleep_while_training": "level_1"}, "rollout.sleep_while_training=none"),
        ({"weights": WeightSyncConfig(verify="probe")}, "weights.verify=digest"),
        ({"backend": "vllm", "new_weights": "keep_cache"}, "set recompute, or finish"),
    ],
)
def test_what_cannot_generate_while_the_trainer_trains_is_refused(start_beside, settings, match):
    with pytest.raises(ConfigError, match=match):
        start_beside(**{"new_weights": "finish", **settings})


def test_servers_join_and_leave_while_answers_are_written(start_beside, actor, tmp_path):
    rollout = start_beside(new_weights="finish")
    rollout.sync_from(actor, 0)
    loop, router, control = start_beside.loop, rollout._engine, tmp_path / "control"
    alone = loop.run(play(rollout, "0/0/0/0", (0, 0), LONG))
    train(actor)
    assert request(control, "join", "", WAIT_S) == "builtin-1 has joined and receives weights"
    rollout.wait_for(0, WAIT_S)
    assert {one.name: one.weight_version for one in router.serving} == {"builtin-0": 0, "builtin-1": 0}, "from the copy"
    answers = [loop.start(play(rollout, f"1/0/{i}/0", (0, 0), LONG)) for i in range(2)]
    loop.run(running(rollout, 2))
    assert request(control, "leave", "builtin-0", WAIT_S).startswith("builtin-0 has left")
    assert [one.name for one in router.replicas] == ["builtin-1"]
    assert {answer.result(WAIT_S).token_ids for answer in answers} == {alone.token_ids}, "they went on where they were"
    with pytest.raises(ValueError, match="builtin-1 is the last replica that runs"):
        request(control, "leave", "builtin-1", WAIT_S)
    with pytest.raises(ValueError, match="no replica 'builtin-7'; there are builtin-1"):
        request(control, "leave", "builtin-7", WAIT_S)
    rollout.publish(actor, 1)
    assert set(loop.run(play(rollout, "2/0/0/0", (1, 1))).weight_versions) == {1}
