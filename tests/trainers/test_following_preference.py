"""A reference that follows the policy of `hone prefer`: its weights, the losses against it, resuming, refusals."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.config import ConfigError, load
from hone.data.preference_readers import PairMaker
from hone.data.rendering import Renderer
from hone.data.stream import ItemStream
from hone.runtime.base import RankLost
from hone.trainers.run.following import Follower
from hone.trainers.run.settings import FollowConfig
from hone.trainers.supervised.settings import PreferenceRunConfig
from tests.trainers.preference_task import answer_logprob, prefer, written
from tests.trainers.tiny import BASE, metrics

QUICK = {"samples_per_step": 4, "evaluation": {}, "checkpoint": {"every_steps": 1, "keep": 9}}
DPO = {"name": "dpo", "beta": 0.1}
PRECISIONS = {  # model.dtype, actor.compute_dtype -> tolerance of a weight
    ("float32", "float32"): {"rtol": 1e-6, "atol": 1e-7},
    ("float32", "bfloat16"): {"rtol": 1e-6, "atol": 1e-7},
    ("bfloat16", "bfloat16"): {"rtol": 2**-8, "atol": 1e-6},
}


def following(every, **more):
    return {"reference": {"logprobs": "live", "follow": {"every_steps": every, **more}}}


def run(folder, *overrides, loss=DPO, **changes):
    return prefer(written(folder, "prefer", loss, **{**QUICK, **changes}), *overrides)


def saved(folder, step, role):
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / role / "model-00000-of-00001.safetensors")


def quarter(new, old):
    return (0.25 * new.float() + 0.75 * old.float()).to(old.dtype)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, marks=[] if one == ("float32", "float32") else pytest.mark.slow, id="-".join(one))
        for one in PRECISIONS
    ],
)
def blended(request, tmp_path_factory):
    """(run, tolerance): two steps, after each of which the reference moves a quarter of the way."""
    dtype, compute = request.param
    folder = tmp_path_factory.mktemp(f"{dtype}-{compute}")
    model = {"build": BASE["model"]["build"], "dtype": dtype}
    given = "run.steps=2", f"actor.compute_dtype={compute}", "actor.schedule.warmup_steps=0"
    return run(folder, *given, model=model, **following(1, mixup=0.25)), PRECISIONS[request.param]


def test_the_reference_is_the_blend_of_policies_computed_by_hand(blended):
    folder, close = blended
    start, first, second = (saved(folder, step, "actor") for step in range(3))
    references = [saved(folder, step, "reference") for step in range(3)]
    for name in start:
        assert torch.equal(references[0][name], start[name])
        torch.testing.assert_close(references[1][name], quarter(first[name], start[name]), **close)
        torch.testing.assert_close(references[2][name], quarter(second[name], references[1][name]), **close)
    changed = [name for name in start if not torch.equal(references[1][name], start[name])]
    assert changed == list(start) or start[name].dtype == torch.bfloat16  # which rounds small moves of large weights
    assert changed


def test_the_loss_is_measured_against_the_blend(tmp_path):
    """The second step's loss, by plain forwards of the policy and the reference after the first step."""
    overrides = "run.steps=2", "actor.schedule.warmup_steps=0"
    folder = run(tmp_path, *overrides, **following(1, mixup=0.25))
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "model") for _ in range(2))
    policy.load_state_dict(saved(folder, 1, "actor"), strict=False)
    reference.load_state_dict(saved(folder, 1, "reference"), strict=False)
    config = load(PreferenceRunConfig, tmp_path / "run.yaml").config
    renderer = Renderer(AutoTokenizer.from_pretrained(folder / "model"))
    losses = []
    for pair in ItemStream(PairMaker, config.data, renderer, config.run.seed).take(8)[4:]:
        chosen, rejected = (
            answer_logprob(policy, one) - answer_logprob(reference, one) for one in (pair.chosen, pair.rejected)
        )
        losses.append(math.log(1 + math.exp(-0.1 * (chosen - rejected))))
    loss = metrics(folder)[2]["train/preference_loss"]
    assert loss == pytest.approx(sum(losses) / 4, abs=1e-6)
    assert abs(loss - math.log(2)) > 1e-4


@pytest.mark.slow
def test_losses_change_with_the_first_move_and_are_log_2_after_it(tmp_path):
    """It moves after steps 2 and 4, and becomes the policy: the next step begins with policy = reference."""
    still, moved = (
        metrics(run(tmp_path / name, "run.steps=5", **changes))[1:]
        for name, changes in (("still", {"reference": {"logprobs": "live"}}), ("moved", following(2)))
    )
    losses = [step["train/preference_loss"] for step in moved]
    assert [one["train/preference_loss"] == loss for one, loss in zip(still, losses, strict=True)] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert [loss == pytest.approx(math.log(2), abs=1e-6) for loss in losses] == [True, False, True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_run_in_two_parts_equals_the_whole(tmp_path, loss):
    evaluated = {key: value for key, value in QUICK.items() if key != "evaluation"} | following(2, mixup=0.5)
    for name, parts in (("whole", ["run.steps=5"]), ("parts", ["run.steps=3", "run.steps=5"])):
        path = written(tmp_path / name, "prefer", loss, **evaluated)
        for steps in parts:
            prefer(path, steps)
    whole, parts = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    kept = [step for step in metrics(whole) if step["step"] != 3]  # the first part evaluated its last step
    assert [step for step in metrics(parts) if step["step"] != 3] == kept
    for role in ("actor", "reference"):
        one, other = saved(parts, 5, role), saved(whole, 5, role)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    states = [json.loads(file.read_text()) for file in (whole / "checkpoints").glob("step_*/state.json")]
    assert [state["score"] for state in states] == [None] * 6  # losses against different references are not compared


class Gone:
    """A reference whose peers have ended."""

    def follow(self, policy, mixup):
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")


def test_a_rank_that_is_lost_during_a_move_is_named():
    with pytest.raises(RankLost, match="gave up in the move of the reference: another rank has ended"):
        Follower(Gone(), None, FollowConfig(every_steps=1)).end(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": {"follow": {"every_steps": 1}}}, r"reference\.logprobs = precomputed .*logprobs=live"),
        ({"loss": "simpo"}, "loss simpo has no reference; remove the section"),
        ({"loss": "orpo"}, "loss orpo has no reference"),
        ({"loss": "sft"}, "loss sft has no reference"),
        ({"reference": {"model": BASE["model"], "follow": {"every_steps": 1}}}, r"reference\.model: .* remove one"),
        ({"actor": {"lora": {"rank": 2}}}, r"actor\.lora: .* remove one of them"),
    ],
)  # fmt: skip
def test_what_cannot_follow_is_refused_before_a_model_is_built(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=rf"reference\.follow.* {message}"):
        run(tmp_path, **{**following(1), **changes})
    assert not (tmp_path / "run").exists()
