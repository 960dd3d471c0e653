"""Losses as weights of tokens, settings that are refused, and requests as the protocol's own client parses them."""

import asyncio
import dataclasses
import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.algorithms.objective import PolicyObjective, SftObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.cli.main import main
from hone.config import ConfigError, build
from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.service.protocol.wire import MESSAGES, read_tensor
from hone.types import GenerationRequest, LossOutput, SamplingParams, TopK
from hone.weights.base import WeightSyncError
from hone.workers.train import TrainSpec
from hone_tinker import connection
from hone_tinker.engine import PROBE_LOGPROBS, SNAPSHOT, ServiceEngine
from hone_tinker.gradients import check_needs, fixed_weights, targets, token_weights
from hone_tinker.messages import DATUMS, cross_entropy, training_requests
from hone_tinker.named_losses import differ, named_loss, named_weights
from hone_tinker.rollout import ServiceRollout

PYTHON = Path(__file__).parents[3] / ".venv-tinker/bin/python"


def batch_of(advantages, old=None):
    """One sequence of two prompt tokens and three answers, each with a loss weight of 1/2."""
    batch = pack_samples([Sample((5, 6, 7, 5, 9), (0, 0, 1, 1, 1))])
    fields = {"advantages": torch.tensor([0.0, 0.0, *advantages]), "loss_weights": torch.full((5,), 0.5)}
    if old is not None:
        fields["old_logprobs"] = torch.tensor([0.0, 0.0, *old])
    return batch.with_(**fields)


def test_one_update_per_batch_needs_no_forward_before_it():
    batch = batch_of([1.0, -2.0, 0.0])
    weights = fixed_weights(PolicyObjective(AlgorithmConfig()), batch)
    assert weights.tolist() == pytest.approx([0, 0, 0.5, -1.0, 0])  # advantage x loss weight


def test_clipped_ratios_become_weights_at_the_log_probs():
    batch = batch_of([1.0, 1.0, -1.0], old=[-1.0, -1.0, -1.0])
    loss = PolicyObjective(build(AlgorithmConfig, {"loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2}}, ""))
    assert fixed_weights(loss, batch) is None
    ratios = [1.1, 1.5, 0.9]
    logprobs = torch.tensor([0.0, 0.0, *(math.log(one) - 1 for one in ratios)])
    weights, _ = token_weights(loss, batch, logprobs)
    assert weights.tolist() == pytest.approx([0, 0, 0.5 * 1.1, 0.0, -0.5 * 0.9])  # the second one is clipped


def test_supervised_weights_are_the_loss_weights():
    assert fixed_weights(SftObjective(), batch_of([0, 0, 0])).tolist() == [0, 0, 0.5, 0.5, 0.5]


def test_weights_that_depend_on_the_difference_of_two_tokens_only_are_not_fixed():
    def loss(output, batch):  # as in DPO: it stays the same if all log-probs move alike
        values = torch.zeros_like(output.logprobs)
        values[3] = torch.nn.functional.softplus(output.logprobs[4] - output.logprobs[3])
        return LossOutput(values)

    assert fixed_weights(loss, batch_of([0, 0, 0])) is None


@pytest.mark.parametrize("bound", [{"low": 0.5}, {"high": 4.0}])
def test_weights_that_depend_on_the_mean_of_a_long_sequence_are_not_fixed(bound):
    rule = {"statistic": "k1", "level": "sequence_mean", "policy": "current", **bound}
    settings = {"loss": "reinforce", "correction": {"rejections": [rule]}}
    batch = pack_samples([Sample((5,) * 502, (0,) * 2 + (1,) * 500)])
    ones = torch.ones(502)
    batch = batch.with_(advantages=ones, loss_weights=ones / 500, rollout_logprobs=-2 * ones)
    assert fixed_weights(PolicyObjective(build(AlgorithmConfig, settings, "")), batch) is None


def test_a_large_batch_is_several_requests_with_numbers_in_order():
    tokens = torch.tensor([5, 6, 7])
    one = tokens, cross_entropy(tokens, torch.tensor([0.0, 0.5, 1.0]))
    found = [
        MESSAGES["ForwardBackwardRequest"].FromString(body)
        for body in training_requests("m", 7, [one] * (DATUMS + 1), forward_only=False)
    ]
    assert [(one.seq_id, len(one.data)) for one in found] == [(7, DATUMS), (8, 1)]
    weights = read_tensor(found[1].data[0].loss_fn_inputs["weights"], "weights", 10)
    assert weights.tolist() == [0.5, 1.0]


def objective(**settings):
    return PolicyObjective(build(AlgorithmConfig, settings, ""))


OLD = [-1.0, -1.5, -0.5]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
CORRECTION = {"weights": "token", "truncate": 2.0}


@pytest.mark.parametrize("loss", [{"name": "ppo", **CLIP}, {"name": "cispo", **CLIP}, {"name": "gspo", **CLIP}])
@pytest.mark.parametrize("correction", [{}, CORRECTION], ids=["plain", "corrected"])
def test_a_loss_that_the_service_has_is_sent_by_name_with_the_same_gradient(loss, correction):
    batch = batch_of([1.0, -2.0, 0.5], old=OLD).with_(rollout_logprobs=torch.tensor([0, 0, -1.2, -1.4, -0.5]))
    batch = batch.with_(loss_weights=torch.tensor([0.0, 0.0, 0.5, 0.25, 0.1]))
    wanted = objective(loss=loss, correction=correction)
    found = named_loss(wanted, batch)
    assert found.name == loss["name"]
    for by in (0.0, 0.1, 0.25, -0.3):
        logprobs = torch.tensor([0.0, 0.0, *OLD]) + by
        assert named_weights(found, batch, logprobs).tolist() == pytest.approx(
            token_weights(wanted, batch, logprobs)[0].tolist(), rel=1e-5
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": {"name": "ppo", "dual_clip": 3.0}},
        {"loss": {"name": "sapo"}},
        {"loss": "ppo", "kl": {"coef": 0.1, "where": "in_loss"}},
        {"loss": "ppo", "correction": {"rejections": [{"statistic": "k3", "policy": "current", "high": 0.1}]}},
    ],
)
def test_a_loss_that_the_service_has_not_is_not_sent_by_name(settings):
    more = {"rollout_logprobs": torch.tensor([0, 0, *OLD]), "ref_logprobs": torch.zeros(5)}
    assert named_loss(objective(**settings), batch_of([1.0, -2.0, 0.5], old=OLD).with_(**more)) is None


def test_ratios_beyond_the_limit_of_hones_losses_are_noticed():
    batch, wanted = batch_of([1.0, -2.0, 0.5], old=[-25.0, -25.0, -25.0]), objective(loss={"name": "ppo", **CLIP})
    found, logprobs = named_loss(wanted, batch_of([1.0, -2.0, 0.5], old=OLD)), torch.tensor([0.0, 0.0, -1, -1, -1])
    found = dataclasses.replace(found, inputs={**found.inputs, "logprobs": batch.old_logprobs})
    weights, _ = token_weights(wanted, batch, logprobs)
    assert differ(weights - named_weights(found, batch, logprobs), weights)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_a_step_of_a_named_loss_is_that_of_its_weights(server, key, base, name):
    batch, wanted = batch_of([1.0, -2.0, 0.5], old=OLD), objective(loss={"name": name, **CLIP})
    found = []
    for named in (True, False):
        engine = made(server, base, named_losses=named)
        metrics = engine.train_batch(batch, wanted)
        found.append(({name: one.value for name, one in metrics.items()}, engine.infer_batch(batch).logprobs))
    (first, after), (second, other) = found
    assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(after, other, rtol=1e-4, atol=1e-6)
    assert (engine._seq, made(server, base)._seq) == (4, 0)  # by weights: forward, backward, step, forward


def test_a_loss_of_more_than_log_probs_is_refused():
    def full(output, batch):
        return LossOutput(output.logprobs)

    full.needs = frozenset({"full_kl"})
    with pytest.raises(ValueError, match="needs full_kl of a forward, and services return the log-probs"):
        check_needs(full)
    bonus = PolicyObjective(build(AlgorithmConfig, {"entropy_coef": 0.01}, ""))
    with pytest.raises(ValueError, match=r"set algorithm\.entropy_coef=0"):
        fixed_weights(bonus, batch_of([1.0, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("settings", "temperature", "said"),
    [
        ({"lora": {"dora": True}}, 1.0, "lora.dora = True: requests to a service have rank and seed only"),
        ({"lora": {"alpha": 8.0}}, 1.0, "lora.alpha = 8.0"),
        ({"optimizer": {"name": "SGD"}}, 1.0, "optimizer.name = SGD: services have AdamW"),
        ({"optimizer": {"options": {"amsgrad": True}}}, 1.0, "options.amsgrad is not sent"),
        ({}, 0.7, "rollout.sampling.temperature = 0.7"),
    ],
)
def test_settings_without_a_place_in_the_protocol_are_refused(settings, temperature, said):
    config = build(EngineConfig, {"backend": {"name": "tinker"}, **settings}, "actor")
    with pytest.raises(ValueError, match=said):
        ServiceEngine(TrainSpec(ModelConfig(path="x"), config, temperature=temperature, total_steps=1), "cpu")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("actor.backend=tinker",), "remove actor.backend and set runtime.backend=tinker"),
        (("runtime.backend=tinker", "actor.backend=fsdp2"), "actor.backend = fsdp2, but the service of"),
        (("runtime.backend=tinker", "rollout.backend=vllm"), "rollout.backend = vllm, but the service of"),
    ],
)
def test_the_policy_is_where_the_runtime_says(run_file, capsys, settings, said):
    assert main(["config", str(run_file("clash")), *settings]) == 2
    assert said in capsys.readouterr().err


def test_an_address_and_a_key_are_asked_for(monkeypatch):
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"runtime\.backend\.url should be the address of a service"):
        connection.connect("", 1.0)
    with pytest.raises(ConfigError, match="export TINKER_API_KEY=tml-"):
        connection.connect("http://127.0.0.1:1", 1.0)


def test_a_service_that_is_not_there_is_an_error_in_time(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-none")
    with pytest.raises(connection.ServiceFailed, match=r"create_session at http://127.0.0.1:1: .*, for 0.5 s"):
        connection.connect("http://127.0.0.1:1", 0.5)


def made(server, base, **keys):
    """An engine with an adapter on the service."""
    backend = {"name": "tinker", "url": server.url, "base_model": "tiny", **keys}
    settings = {"backend": backend, "lora": {"rank": 4}, "optimizer": {"lr": 0.05}}
    spec = TrainSpec(ModelConfig(path=str(base)), build(EngineConfig, settings, "actor"), total_steps=9)
    engine = ServiceEngine(spec, "cpu")
    engine.initialize()
    return engine


def test_likely_tokens_of_the_base_are_the_models_own(server, key, base):
    engine, batch = made(server, base), batch_of([1.0, 1.0, 1.0])
    with engine.disable_adapter():
        found = engine.infer_batch(batch, frozenset({TopK(3)}))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        likely = model(batch.token_ids[None]).logits[0, 1:4].log_softmax(-1).topk(3)
    assert torch.equal(found.extras["top_k_ids"][2:], likely.indices)
    torch.testing.assert_close(found.extras["top_k_logprobs"][2:], likely.values)
    assert not found.extras["top_k_ids"][:2].any()  # of the prompt
    assert not found.extras["top_k_logprobs"][:2].any()
    with pytest.raises(ValueError, match="TopK"):
        engine.infer_batch(batch, frozenset({TopK(3)}))  # the model in training answers no such question


def test_a_loss_of_other_tokens_has_a_weight_for_each_of_them():
    def loss(output, batch):
        return LossOutput(output.logprobs**2 + (torch.tensor([2.0, 3.0]) * output.extras["logprobs_at"] ** 2).sum(-1))

    loss.needs = frozenset({"logprobs_at"})
    batch = batch_of([1.0, 1.0, 1.0]).with_(ids_at=torch.tensor([[1, 2]] * 5))
    assert fixed_weights(loss, batch) is None
    assert targets(loss, batch).tolist() == [[own, 1, 2] for own in (5, 6, 7, 5, 9)]
    weights, _ = token_weights(loss, batch, torch.tensor([[-1.0, -2.0, -4.0]] * 5))
    assert weights.tolist() == [[0.0] * 3] * 2 + [[1.0, 4.0, 12.0]] * 3  # -dL/d log-prob, times 1/2


def test_a_new_sampler_that_answers_like_the_one_before_ends_the_run(server, key, base):
    engine = made(server, base)
    rollout, batch = ServiceRollout(None, None, None, "cpu", "one"), batch_of([1.0, 1.0, 1.0])
    first = list(engine.get_per_tensor_param()[0])

    async def run():
        await rollout.update_weights(first, 0)
        engine.train_batch(batch, SftObjective())
        good = list(engine.get_per_tensor_param()[0])
        assert [name for name, _ in good][-1] == PROBE_LOGPROBS
        loaded = await rollout.update_weights(good, 1)
        assert loaded.version == rollout.weight_version == 1
        engine.train_batch(batch, SftObjective())
        newest = list(engine.get_per_tensor_param()[0])
        stale = [(name, dict(good)[SNAPSHOT] if name == SNAPSHOT else tensor) for name, tensor in newest]
        with pytest.raises(WeightSyncError, match="answers like the one before"):
            await rollout.update_weights(stale, 2)

    asyncio.run(run())


def test_a_request_is_answered_by_the_sampler_of_its_version_after_later_ones_were_synced(server, key, base):
    engine = made(server, base)
    rollout, batch = ServiceRollout(None, None, None, "cpu", "one"), batch_of([1.0, 1.0, 1.0])

    async def asked(number, versions):
        """Tokens and log-probs of the same answer."""
        params = SamplingParams(max_tokens=4, seed=7, ignore_eos=True)
        found = await rollout.generate(GenerationRequest(str(number), (5, 6, 7), params, versions=versions))
        return found.token_ids, found.logprobs, set(found.weight_versions)

    async def run():
        await rollout.update_weights(list(engine.get_per_tensor_param()[0]), 0)
        first = await asked(0, (0, 0))
        for _ in range(3):
            engine.train_batch(batch, SftObjective())
        await rollout.update_weights(list(engine.get_per_tensor_param()[0]), 1)
        assert await asked(1, (0, 0)) == first
        newest = await asked(2, (1, 1))
        assert (first[2], newest[2]) == ({0}, {1})
        assert newest[:2] != first[:2]
        assert await asked(3, (0, 9)) == await asked(4, None) == newest
        with pytest.raises(RuntimeError, match=r"no sampler has weights of version 2 to 3; synced: \[0, 1\]"):
            await asked(5, (2, 3))

    asyncio.run(run())


PARSE = """
import json, sys
from typing import get_args
import tinker.types as types
from tinker.types import LossFnType
from tinker.proto import tinker_public_pb2 as messages
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

CLASSES = {
    "asample": types.SampleRequest, "create_model": types.CreateModelRequest, "optim_step": types.OptimStepRequest,
    "create_session": types.CreateSessionRequest, "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest, "load_weights": types.LoadWeightsRequest,
    "save_weights_external": types.SaveWeightsExternalRequest, "retrieve_future": types.FutureRetrieveRequest,
    "create_sampling_session": types.CreateSamplingSessionRequest, "session_heartbeat": SessionHeartbeatRequest,
}
seen = set()
for path, body in json.load(sys.stdin):
    if path == "forward_backward":
        message = messages.ForwardBackwardRequest.FromString(bytes.fromhex(body))
        assert message.loss_fn in get_args(LossFnType) and message.seq_id > 0, message
        assert (message.loss_fn == "ppo") == bool(message.loss_fn_config_v2), message
        size = message.ByteSize()
        message.DiscardUnknownFields()
        assert message.ByteSize() == size, "a field that the client does not know"
        for datum in message.data:
            count = len(datum.model_input[0].encoded_text.tokens) // 4
            inputs = ["advantages", "logprobs"] if message.loss_fn == "ppo" else ["weights"]
            assert sorted(datum.loss_fn_inputs) == sorted(["target_tokens", *inputs]), datum
            assert all(list(one.shape) == [count] for one in datum.loss_fn_inputs.values()), datum
    else:
        CLASSES[path].model_validate(body)
    seen.add(path)
print(*sorted(seen))
"""


class Recording(connection.Connection):
    """A connection that keeps what it sends."""

    def __init__(self, *arguments):
        self.sent = []
        super().__init__(*arguments)

    async def _once(self, method, path, body, timeout_s):
        if body is not None:
            self.sent.append((path, body.hex() if isinstance(body, bytes) else dict(body)))
        return await super()._once(method, path, body, timeout_s)


@pytest.mark.tinker
def test_the_clients_own_classes_parse_every_request(server, base, tmp_path, monkeypatch):
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} does not exist: make .venv-tinker installs it")
    recording = Recording(server.url, server.key, 60.0)
    monkeypatch.setitem(connection._connections, server.url, recording)
    engine, rollout, batch = made(server, base), ServiceRollout(None, None, None, "cpu", "one"), batch_of([1.0] * 3)
    engine.train_batch(batch, SftObjective())
    engine.train_batch(batch_of([1.0] * 3, old=OLD), objective(loss={"name": "ppo", **CLIP}))
    with engine.disable_adapter():
        engine.infer_batch(batch)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    engine.export_adapter(tmp_path)
    weights = list(engine.get_per_tensor_param()[0])

    async def sample():
        await rollout.update_weights(weights, 0)
        for stop in ({}, {"stop": ("a",)}, {"stop_token_ids": (3,)}, {"ignore_eos": True}):
            params = SamplingParams(max_tokens=2, seed=2**62, **stop)
            found = await rollout.generate(GenerationRequest("r", (5, 6), params))
            assert 1 <= len(found.token_ids) == len(found.logprobs) <= 2
        return await rollout.score("s", (5, 6, 7), top_k=2)

    scored = asyncio.run(sample())
    assert scored.logprobs[0] == 0.0
    assert [len(one) for one in scored.top_ids] == [0, 2, 2]
    done = subprocess.run(
        [PYTHON, "-c", PARSE], input=json.dumps(recording.sent), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "asample create_model" in done.stdout
    assert "save_weights_for_sampler" in done.stdout
