"""New weights in the middle of answers: which weights sampled a token, and a run that repeats another bit for bit."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.cli.recipe import load_recipe
from hone.cli.training import train as command
from hone.config import ConfigError
from hone.registry import Entry
from hone.rollout import ROLLOUT_ENGINES
from hone.schedule.journal import JOURNAL, read_journal
from hone.schedule.replay import ReplayError
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.exports.checkpoint import export_checkpoint
from hone.trainers.run.context import RunControl
from hone.trainers.run.launch import run_policy
from tests.trainers.gated_server import STEPS, Gated
from tests.trainers.test_asynchronous import AHEAD, assert_same
from tests.trainers.tiny import metrics, recipe


def mixed(mode):
    """Answers of up to 6 tokens; all but those of the first step go on under new weights after their first token."""
    return {
        **AHEAD,
        "run": {**AHEAD["run"], "steps": STEPS},
        "rollout": {**AHEAD["rollout"], "sampling": {"max_response_tokens": 6}, "backend": "gated"},
        "asynchrony": {"staleness": 1, "new_weights": mode},
        "checkpoint": {"every_steps": 1, "keep": STEPS + 1},
    }


@pytest.fixture(scope="module", autouse=True)
def gated():
    """The backend of that name, for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROLLOUT_ENGINES._entries, "gated", Entry(Gated))
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return run_policy(load_recipe(recipe(tmp_path_factory.mktemp("recorded"), mixed("recompute"))))


def spans(run):
    """The spans of every answer that was trained or dropped."""
    return [one for record in read_journal(run / JOURNAL) for answers in record["spans"].values() for one in answers]


@pytest.mark.slow
def test_a_replay_is_equal_bit_for_bit(recorded):
    found = spans(recorded)
    assert sum(len(one) > 1 for one in found) / len(found) > 0.2
    command([str(recorded), "rollout.backend=builtin"], replay=recorded / JOURNAL)
    assert_same(recorded, recorded.with_name("run-replay"))


@pytest.mark.slow
def test_a_replay_that_differs_ends_with_the_first_difference(recorded, tmp_path):
    lines = [json.loads(line) for line in (recorded / JOURNAL).read_text().splitlines()]
    step, answer = next(
        (line["step"], one) for line in lines for group in line["spans"].values() for one in group if len(one) > 1
    )
    (version, tokens), (later, rest) = answer[:2]
    answer[:2] = [[version, tokens + 1]] + ([[later, rest - 1]] if rest > 1 else [])
    other = tmp_path / JOURNAL
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ReplayError, match=rf"step {step} of the replay differs from .* in '(spans|batch)'"):
        run_policy(
            load_recipe(recorded / "config.yaml", ["rollout.backend=builtin", f"run.dir={tmp_path / 'run'}"]),
            RunControl(replay=other),
        )


def logprobs(run, folder, steps=STEPS):
    """(the rollout's log-prob, a forward's with the weights of the token's version, is this version a later one)."""
    models = {}
    for version in range(steps):
        export_checkpoint(run, folder / str(version), str(version))
        models[version] = AutoModelForCausalLM.from_pretrained(folder / str(version), dtype=torch.float32)
    for line in rollout_lines(run / "rollouts.jsonl.gz"):
        one = json.loads(line)
        if one["set"] is not None:
            continue
        versions = [version for version, tokens in one["weight_versions"] for _ in range(tokens)]
        ids, start = torch.tensor([one["prompt_token_ids"] + one["token_ids"]]), len(one["prompt_token_ids"])
        for place, version in enumerate(versions):
            with torch.no_grad():
                found = models[version](ids[:, : start + place]).logits[0, -1].log_softmax(-1)
            own = found[one["token_ids"][place]].item()
            yield one["rollout_logprobs"][place], own, version != versions[0]


@pytest.mark.slow
def test_each_token_has_the_logprob_of_the_weights_of_its_version(recorded, tmp_path):
    found = list(logprobs(recorded, tmp_path))
    assert sum(later for _, _, later in found) > 50
    assert max(abs(sampled - own) for sampled, own, _ in found) < 1e-5


@pytest.mark.slow
def test_with_the_old_cache_later_tokens_have_a_mixture_of_weights(tmp_path):
    run = run_policy(load_recipe(recipe(tmp_path, mixed("keep_cache"))))
    assert sum(len(one) > 1 for one in spans(run)) > 10
    taken = [number for record in read_journal(run / JOURNAL) for number in record["taken"]]
    assert taken == list(range(4 * STEPS))
    assert max(line["schedule/staleness_max"] for line in metrics(run)[1:]) == 1
    found = list(logprobs(run, tmp_path / "models"))
    assert max(abs(sampled - own) for sampled, own, later in found if not later) < 1e-5
    assert max(abs(sampled - own) for sampled, own, later in found if later) > 1e-5


CANNOT = {
    "in turns": ({"asynchrony": {"staleness": 0}}, "run it again without --replay"),
    "keep_cache": (
        {"asynchrony": {"staleness": 1, "new_weights": "keep_cache"}},
        "record a run with recompute or finish",
    ),
    "vllm": ({"rollout": {**AHEAD["rollout"], "backend": "vllm"}}, "only the built-in engine can repeat a run"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_refused_because(name, tmp_path):
    change, message = CANNOT[name]
    (tmp_path / JOURNAL).touch()
    with pytest.raises(ConfigError, match=message):
        run_policy(load_recipe(recipe(tmp_path, AHEAD, change)), RunControl(replay=tmp_path / JOURNAL))


def test_a_replay_has_a_folder_and_a_record(tmp_path):
    path = recipe(tmp_path, AHEAD)
    with pytest.raises(ConfigError, match="there is no such file"):
        run_policy(load_recipe(path), RunControl(replay=tmp_path / JOURNAL))
    (tmp_path / JOURNAL).touch()
    with pytest.raises(ConfigError, match=r"set another run\.dir"):
        run_policy(load_recipe(path, [f"run.dir={tmp_path}"]), RunControl(replay=tmp_path / JOURNAL))
