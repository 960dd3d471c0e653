"""A LoRA policy's adapter on its way to the rollout: base once, then the adapter alone, proven like whole weights."""

import asyncio
import os
import signal
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from hone.config import ConfigError
from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig, LoraConfig
from hone.rollout.builtin.engine import BuiltinEngine
from hone.runtime.local import LocalWorkerGroup
from hone.tracking.metrics import Timer
from hone.types import GenerationRequest, LossOutput, SamplingParams
from hone.weights.base import WeightSyncError
from hone.weights.settings import WeightSyncConfig
from hone.workers.rollout import adapter_kind
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker

WANTED = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = (5, 6, 7)
FOUR_BIT = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes: hone-rl[qlora]")
PROBE = WeightSyncConfig(verify="probe", timeout_s=60)


@pytest.fixture
def lora_actor(model):
    """`lora_actor(**lora)`: an actor that trains an adapter, off its neutral start."""

    def make(**settings):
        engine = EngineConfig(
            compute_dtype="float32",
            optimizer={"name": "SGD", "lr": 1.0},
            max_grad_norm=None,
            lora=LoraConfig(**{"rank": 4, "alpha": 16.0, **settings}),
        )
        spec = TrainSpec(model, engine, total_steps=10)
        handle = TrainHandle(LocalWorkerGroup("actor", TrainWorker(spec), Timer().phase), lambda metrics: None)
        handle.initialize()
        return handle

    return make


def learn(actor):
    """One large step, so that another adapter comes of it."""
    batch = pack_samples([Sample((5, 6, 7, 8, 9, 10), (0, 0, 0, 1, 1, 1))])
    batch = batch.with_(loss_weights=batch.loss_mask.float())
    actor.train_batch(batch, lambda output, part: LossOutput(-output.logprobs))


def gap(actor, prompt, completion):
    """Largest difference of a completion's log-probs from the trainer's own."""
    ids = (*prompt, *completion.token_ids)
    batch = pack_samples([Sample(ids, tuple(int(i >= len(prompt)) for i in range(len(ids))))])
    expected = actor.infer_batch(batch).logprobs[batch.loss_mask]
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


def ask(rollout, loop, name="r"):
    return loop.run(rollout.generate(GenerationRequest(f"{name}/0/0/0", PROMPT, WANTED)))


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dora": True},
        {"rslora": True},
        {"init": "pissa"},
        {"init": "olora"},
        pytest.param({"quantise": {}}, marks=FOUR_BIT),
        pytest.param({"quantise": {"kind": "fp4"}, "dora": True}, marks=FOUR_BIT),
    ],
    ids=str,
)
def test_the_base_travels_once_and_then_the_adapter_alone(settings, start, lora_actor, loop):
    actor = lora_actor(**settings)
    rollout = start(weights=PROBE, builtin={"process": "inside"}, lora=actor_lora(settings))
    base, alone = size(actor.base_weights(torch.float32)), size(actor.adapter(torch.float32))
    assert alone < base / 3
    for version, sent in ((0, base + alone), (1, alone), (2, alone)):
        metrics = rollout.sync_from(actor, version)
        assert metrics["weights/bytes"].value == sent
        assert metrics["correction/probe_max_abs_difference"].value < 1e-5
        completion = ask(rollout, loop)
        assert set(completion.weight_versions) == {version}
        assert gap(actor, PROMPT, completion) < 1e-5
        learn(actor)
        assert gap(actor, PROMPT, completion) > 1e-3, "the policy is another one now"
    served = rollout._engine.weights()
    rollout.sync_from(actor, 3)
    for name, tensor in actor.weights(torch.float32):
        torch.testing.assert_close(served[name], tensor, rtol=1e-6, atol=1e-6)


def test_modules_that_are_trained_whole_travel_with_the_adapter(start, lora_actor, loop):
    """Head and embeddings of this model are one tensor; both names come, and what is served is the new one."""
    settings = {"modules_to_save": ("lm_head",)}
    actor = lora_actor(**settings)
    rollout = start(weights=PROBE, builtin={"process": "inside"}, lora=actor_lora(settings))
    for version in range(3):
        metrics = rollout.sync_from(actor, version)
        assert metrics["correction/probe_max_abs_difference"].value < 1e-4
        assert gap(actor, PROMPT, ask(rollout, loop)) < 1e-4  # of large logits: the steps are
        learn(actor)
    rollout.sync_from(actor, 3)
    served = rollout._engine.weights()
    for name, tensor in actor.weights(torch.float32):
        torch.testing.assert_close(served[name], tensor, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match=r"actor\.lora\.sync: adapter, but rollout\.backend=vllm .* trained whole"):
        start(backend="vllm", lora=actor_lora(settings, sync="adapter"))
    assert adapter_kind(actor_lora(settings), "qwen3").whole_modules
    assert not adapter_kind(actor_lora({}), "qwen3").whole_modules


def actor_lora(settings, **changes):
    return LoraConfig(**{"rank": 4, "alpha": 16.0, **settings, **changes})


@pytest.mark.slow
def test_the_same_adapter_gives_the_same_tokens_merged_alone_and_in_a_process_of_its_own(start, lora_actor, loop):
    """One story, because a server takes seconds to start: equality, a restart, giving the weights back."""
    actor = lora_actor()
    learn(actor)
    alone = start(builtin={"process": "inside"}, lora=actor_lora({}))
    merged = start(builtin={"process": "inside"}, lora=actor_lora({}, sync="merged"))
    served = start(weights=PROBE, replicas=2, lora=actor_lora({}))
    base, adapter = size(actor.base_weights(torch.float32)), size(actor.adapter(torch.float32))
    sent = [one.sync_from(actor, 5)["weights/bytes"].value for one in (alone, merged, served)]
    assert sent == [base + adapter, base, base + adapter]
    first, *others = [ask(one, loop) for one in (alone, merged, served)]
    for one in others:
        assert one.token_ids == first.token_ids
        assert one.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    learn(actor)
    metrics = served.sync_from(actor, 6)
    assert (metrics["weights/bytes"].value, metrics["weights/replicas"].value) == (adapter, 2)
    assert metrics["correction/probe_max_abs_difference"].value < 1e-5

    victim, other = served._engine.replicas

    async def with_a_death():
        os.kill(victim.connection.process.process_ids()[0], signal.SIGKILL)
        asked = [
            served.generate(GenerationRequest(f"6/{i}/0/0", (*PROMPT, i), replace(WANTED, seed=i))) for i in range(8)
        ]
        finished = await asyncio.gather(*asked)
        await served._engine.revived()
        return finished

    finished = loop.run(with_a_death())
    served.wait_for(6, 60)
    assert {version for one in finished for version in one.weight_versions} == {6}
    assert (victim.weight_version, victim.has_base) == (6, True), "it was brought the base, then the adapter"
    learn(actor)
    assert served.sync_from(actor, 7)["weights/bytes"].value == adapter, "both have the base"
    for replica in (victim, other):
        completion = loop.run(replica.generate(GenerationRequest("own", PROMPT, WANTED)))
        assert gap(actor, PROMPT, completion) < 1e-5

    learn(actor)  # else the servers may get version 7 once more when they wake
    loop.run(served._engine.sleep(2))
    loop.run(served._engine.wake_up())
    assert served.sync_from(actor, 8)["weights/bytes"].value == base + adapter, "the base was given back"
    assert gap(actor, PROMPT, ask(served, loop, "last")) < 1e-5


@pytest.mark.slow
def test_nothing_is_sampled_from_the_base_while_its_adapter_is_under_way(start, lora_actor, loop, monkeypatch):
    """A request that comes between the two waits; its tokens are the new policy's, every one."""
    actor = lora_actor()
    learn(actor)
    rollout = start(replicas=1, lora=actor_lora({}))
    way = rollout._publication.sender
    plain, asked = way._sync, []

    async def with_a_request(*arguments, **named):
        metrics = await plain(*arguments, **named)
        if not asked:
            asked.append(
                asyncio.create_task(rollout._engine.replicas[0].generate(GenerationRequest("r", PROMPT, WANTED)))
            )
            await asyncio.sleep(0.3)
            assert not asked[0].done()
        return metrics

    monkeypatch.setattr(way, "_sync", with_a_request)
    rollout.sync_from(actor, 0)
    completion = loop.run(asyncio.wait_for(asked[0], 60))
    assert set(completion.weight_versions) == {0}
    assert gap(actor, PROMPT, completion) < 1e-5


def test_an_adapter_that_the_rollout_does_not_compute_with_is_seen_by_the_probe(start, lora_actor):
    actor = lora_actor()
    learn(actor)
    rollout = start(weights=PROBE, builtin={"process": "inside"}, lora=actor_lora({}))
    rollout._engine._weights._merge = lambda tensors, config: None
    with pytest.raises(WeightSyncError, match="does not compute with the weights it was sent"):
        rollout.sync_from(actor, 0)


def test_a_rollout_that_takes_whole_weights_only_gets_them_or_says_so(start, lora_actor, monkeypatch):
    monkeypatch.setattr(BuiltinEngine, "unfit_for_adapter", staticmethod(lambda kind: f"rank {kind.rank} is odd"))
    with pytest.raises(ConfigError, match=r"actor\.lora\.sync: adapter, but rollout\.backend=builtin .*rank 4 is odd"):
        start(builtin={"process": "inside"}, lora=actor_lora({}, sync="adapter"))
    actor = lora_actor()
    rollout = start(builtin={"process": "inside"}, lora=actor_lora({}))
    assert rollout.sync_from(actor, 0)["weights/bytes"].value == size(actor.weights(torch.float32))
