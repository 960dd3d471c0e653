"""Experts that the built-in engine notes while it generates, and their replay by the trainer: the ratio is 1."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from hone.data.packing import pack
from hone.data.routes import routes_of_text, text_of_routes
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.settings import EngineConfig, MoeConfig, OptimizerConfig
from hone.models.loading import load_language_model
from hone.models.routing import ROUTES
from hone.models.settings import BuildConfig, ModelConfig
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.router import Router
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.types import (
    Completion,
    GenerationRequest,
    LossOutput,
    Prompt,
    SamplingParams,
    Status,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from hone.workers.train import TrainSpec

OPTIONS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.3}
PROMPTS = ((5, 6, 7, 8, 9), (5, 6, 7, 8, 9), (30, 31, 32), (40,))
ASKED = SamplingParams(max_tokens=12, ignore_eos=True, routed_experts=True)


def make_model(architecture="qwen3_moe", options=None, ties=False):
    """A tiny model; with `ties`, router rows come in fours that differ by less than bfloat16 can tell."""
    build = BuildConfig(
        hidden_size=32,
        layers=2,
        heads=4,
        mlp_size=48,
        max_positions=64,
        architecture=architecture,
        options=OPTIONS if options is None else options,
    )
    model = load_language_model(ModelConfig(build=build)).eval()
    if ties:
        noise = torch.Generator().manual_seed(1)
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight.data
            base = weight[[0, 0, 0, 0, 4, 4, 4, 4]]
            weight.copy_(base * (1 + 2e-4 * torch.randn(weight.shape, generator=noise)))
    return model


def make_engine(model, dtype="float32", **settings):
    return BuiltinEngine(BuiltinSettings(dtype=dtype, slots=3, **settings), model)


def generate(engine, prompts=PROMPTS, sampling=ASKED):
    async def all_of_them():
        asked = (
            engine.generate(
                GenerationRequest(f"r{i}", prompt, replace(sampling, seed=i, max_tokens=sampling.max_tokens + 2 * i))
            )
            for i, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*asked)

    return asyncio.run(all_of_them())


def trajectory(prompt, completion, sample=0):
    length = len(prompt)
    return Trajectory(
        prompt_id="p",
        sample=sample,
        token_ids=prompt + completion.token_ids,
        prompt_length=length,
        loss_mask=(0,) * length + (1,) * len(completion.token_ids),
        rollout_logprobs=(0.0,) * length + completion.logprobs,
        weight_versions=(-1,) * length + completion.weight_versions,
        response="",
        stop_reason=StopReason.LENGTH,
        status=Status.OK,
        routed_experts=completion.routed_experts,
    )


def packed_batch(completions, prompts=PROMPTS):
    """A batch whose first two sequences are answers to one prompt."""
    group = [trajectory(p, c, i) for i, (p, c) in enumerate(zip(prompts, completions, strict=True))]
    groups = (group[:2], *([one] for one in group[2:]))
    return pack([TrajectoryGroup(Prompt("p", (1,), (), None, "s"), tuple(one)) for one in groups])


def trainer(folder, moe):
    spec = TrainSpec(
        ModelConfig(path=str(folder)),
        EngineConfig(compute_dtype="float32", moe=moe, optimizer=OptimizerConfig(lr=1e-3)),
        total_steps=10,
    )
    engine = Fsdp2Engine(spec, "cpu")
    engine.initialize()
    return engine


REPLAY = MoeConfig(routing_replay="rollout")


@pytest.mark.parametrize("share", [True, False])
def test_what_is_noted_is_what_the_trainer_would_choose(share, tmp_path):
    """In float32, for prompts and answers, in slots that are used again; with prompts shared or each on its own."""
    model = make_model()
    model.save_pretrained(tmp_path)
    found = generate(make_engine(model, share_prompts=share))
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.routed_experts.dtype == np.int16
        assert one.routed_experts.shape == (len(prompt) + len(one.token_ids) - 1, 2, 2)
    batch = packed_batch(found)
    own = trainer(tmp_path, None).infer_batch(batch, frozenset({ROUTES})).extras[ROUTES]
    noted = batch.routed_experts
    known = noted[:, 0, 0] >= 0
    assert (~known).nonzero()[:, 0].tolist() == (batch.cu_seqlens[1:] - 1).tolist()  # last tokens
    assert torch.equal(own[known], noted[known])


def test_with_near_ties_only_replay_makes_the_ratio_one(tmp_path):
    """A bfloat16 rollout of a float32 policy: experts change places between them, unless they are replayed."""
    model = make_model(ties=True)
    model.save_pretrained(tmp_path)
    batch = packed_batch(generate(make_engine(model, "bfloat16")))
    noted = batch.routed_experts.long()
    known = noted[:, 0, 0] >= 0
    plain, replaying = trainer(tmp_path, None), trainer(tmp_path, REPLAY)
    own = plain.infer_batch(batch, frozenset({ROUTES}))
    unlike = (own.extras[ROUTES].long().sort(-1)[0] != noted.sort(-1)[0]).any(-1)[known].float().mean()
    assert unlike > 0.3
    replayed = replaying.infer_batch(batch, frozenset({ROUTES}))
    assert torch.equal(replayed.extras[ROUTES].long()[known], noted[known])
    mask = batch.loss_mask
    gap = (replayed.logprobs - batch.rollout_logprobs)[mask].abs()
    assert gap.max() < 0.1  # what bfloat16 rounds
    assert (own.logprobs - batch.rollout_logprobs)[mask].abs().max() > 3 * gap.max()
    # the old log-probs' forward and the training forward replay the same experts: the ratio of an unchanged model is 1
    ratios = []

    def loss(output, part):
        ratios.append((output.logprobs - part.old_logprobs)[part.loss_mask].exp())
        return LossOutput(-output.logprobs)

    weighed = batch.with_(old_logprobs=replayed.logprobs, loss_weights=torch.full_like(replayed.logprobs, 0.1))
    figures = replaying.forward_backward(weighed, loss)
    torch.testing.assert_close(torch.cat(ratios), torch.ones(int(mask.sum())), rtol=1e-5, atol=1e-5)
    assert figures["train/routes_replaced"].value > 0.1


def test_tokens_keep_the_experts_that_they_were_sampled_with():
    """An update in the middle: what was sampled before it is prefilled anew by other weights, and keeps its experts."""
    model, other = make_model(), make_model(options=OPTIONS | {"initializer_range": 0.5})
    engine = make_engine(model)

    async def updated():
        task = asyncio.ensure_future(engine.generate(GenerationRequest("r", PROMPTS[0], ASKED)))
        while not engine._scheduler.batch.running or engine._scheduler.batch._host.produced[0] < 4:
            await asyncio.sleep(0)
        await engine.update_weights(other.state_dict().items(), 1)
        return await task

    one = asyncio.run(updated())
    before = one.weight_versions.count(0)
    assert 3 < before < 12
    kept = len(PROMPTS[0]) + before - 1
    assert one.routed_experts.shape == (len(PROMPTS[0]) + 11, 2, 2)
    whole = PROMPTS[0] + one.token_ids
    replies = [
        generate(make_engine(weights), prompts=(whole,), sampling=replace(ASKED, max_tokens=1))[0].routed_experts
        for weights in (model, other)
    ]
    assert np.array_equal(one.routed_experts[:kept], replies[0][:kept])
    assert np.array_equal(one.routed_experts[kept:], replies[1][kept : len(whole) - 1])
    assert not np.array_equal(replies[0], replies[1])


class _Pieces:
    """A replica that stops after two tokens, then serves the rest."""

    positional_seed = True
    weight_version = 0

    def __init__(self, engine):
        self.engine, self.calls = engine, 0

    async def generate(self, request):
        self.calls += 1
        if self.calls > 1:
            return await self.engine.generate(request)
        piece = await self.engine.generate(replace(request, sampling=replace(request.sampling, max_tokens=2)))
        return replace(piece, stop_reason=StopReason.ABORTED, routed_experts=piece.routed_experts + 100)


def test_pieces_of_an_interrupted_completion_are_joined():
    engine = make_engine(make_model())
    whole = generate(engine, prompts=PROMPTS[:1])[0]
    router = Router([_Pieces(engine)], RolloutConfig(builtin=BuiltinSettings()))
    joined = generate(router, prompts=PROMPTS[:1])[0]
    assert joined.token_ids == whole.token_ids
    assert np.array_equal(joined.routed_experts[:6], whole.routed_experts[:6] + 100)  # prompt and one token: as noted
    assert np.array_equal(joined.routed_experts[6:], whole.routed_experts[6:])


def test_who_does_not_ask_gets_none_and_a_dense_model_says_so():
    engine = make_engine(make_model())
    plain = replace(ASKED, routed_experts=False)
    assert generate(engine, sampling=plain)[0].routed_experts is None
    with pytest.raises(ValueError, match="asks for the experts of its tokens, and qwen3 has no routers"):
        generate(make_engine(make_model("qwen3", {})))


def test_askers_do_not_take_a_prompt_from_who_did_not_ask():
    engine = make_engine(make_model())

    async def both():
        plain = engine.generate(GenerationRequest("plain", PROMPTS[0], replace(ASKED, routed_experts=False)))
        return await asyncio.gather(plain, engine.generate(GenerationRequest("asking", PROMPTS[0], ASKED)))

    plain, asking = asyncio.run(both())
    assert plain.routed_experts is None
    assert len(asking.routed_experts) == len(PROMPTS[0]) + 11


FROM_VLLM = (  # what vLLM 0.32's numpy2base64 makes of uint8 [2, 3, 2]: 0, 1, 2 ...
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDMsIDIpLCB9ICAgICAgICAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAQIDBAUGBwgJCgs="
)


def test_routes_travel_as_text():
    routes = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    assert np.array_equal(routes_of_text(text_of_routes(routes)), routes)
    assert routes_of_text(FROM_VLLM).ravel().tolist() == list(range(12))
    assert routes_of_text(text_of_routes(None)) is None
    with pytest.raises(ValueError, match="should be integers"):
        routes_of_text(text_of_routes(routes[0]))


def test_trajectories_with_and_without_routes_are_not_mixed():
    completion = Completion("r", (7, 8), (0.0, 0.0), (0, 0), StopReason.STOP, np.zeros((6, 2, 2), np.int16))
    batch = packed_batch([completion, completion], PROMPTS[:2])
    assert batch.routed_experts[:, 0, 0].tolist() == [0] * 6 + [-1] + [0] * 6 + [-1]
    with pytest.raises(ValueError, match=r"trajectory p sample 1: the experts of its tokens have shape \(0, 2, 2\)"):
        packed_batch([completion, replace(completion, routed_experts=None)], PROMPTS[:2])
    short = replace(completion, routed_experts=np.zeros((5, 2, 2), np.int16))
    with pytest.raises(ValueError, match=r"have shape \(5, 2, 2\); expected 6 to 7 tokens of \(2, 2\) each"):
        packed_batch([completion, short], PROMPTS[:2])
    long = replace(completion, routed_experts=np.zeros((8, 2, 2), np.int16))
    with pytest.raises(ValueError, match=r"have shape \(8, 2, 2\)"):
        packed_batch([completion, long], PROMPTS[:2])
