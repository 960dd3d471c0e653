"""Reward models that judge a run's answers: the same scores from everywhere, and a failure is never a 0."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from hone.config import ConfigError, load
from hone.data.rendering import Renderer
from hone.models.loading import VALUE_HEAD_FILE, load_value_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer, vocabulary_digest
from hone.registry import resolve
from hone.rewards.model import Answer, ServedRewardModel
from hone.rewards.settings import RewardComponent, RewardModelConfig
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.exports.checkpoint import export_checkpoint
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.reward_models.placement import _hosting
from hone.trainers.reward_models.scorer import AnswerScorer, reward_model_spec, separator_tokens
from hone.trainers.run.launch import run_policy, run_reward_model
from hone.trainers.supervised.settings import RewardModelRunConfig
from hone.workers.train import TrainWorker
from tests.trainers.tiny import metrics, recipe

SIZES = {"hidden_size": 32, "layers": 1, "heads": 2, "mlp_size": 64, "max_positions": 32}
POLICY = vocabulary_digest(load_tokenizer(ModelConfig(build=BuildConfig(characters="abcd"))))
BOS, EOS, USER, ASSISTANT = 1, 2, 5, 6  # of the built tokenizer; its characters begin at 8
ASKED = ({"role": "user", "content": "ab"},)


def export(folder, characters="abcd"):
    """A value model with a head of its own, as `export_hf` of a value engine writes one."""
    model = ModelConfig(build=BuildConfig(**SIZES, characters=characters, seed=7))
    value_model = load_value_model(model)
    torch.nn.init.normal_(value_model.score.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    value_model.save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export(tmp_path_factory.mktemp("reward_model") / "export")


def by_hand(folder, *sequences):
    """The value at the last token of each sequence: a plain forward of transformers, one sequence at a time."""
    body = AutoModel.from_pretrained(folder, dtype=torch.float32)
    head = load_file(folder / VALUE_HEAD_FILE)["score.weight"][0]
    with torch.no_grad():
        return [float(body(torch.tensor([list(ids)])).last_hidden_state[0, -1] @ head) for ids in sequences]


def settings(folder, **more):
    return RewardModelConfig(path=str(folder), compute_dtype="float32", **more)


def scorer(folder, vocabulary=POLICY, **more):
    config = settings(folder, **more)
    worker = TrainWorker(reward_model_spec(config))
    worker.initialize()
    return AnswerScorer(config, vocabulary, worker)


def said(*ids, text=""):
    prompt = (BOS, USER, 8, 9, ASSISTANT)
    return Answer((*prompt, *ids), len(prompt), ASKED, text, 1)


# ------------------------------------------------------------------------------------------------------------ scores


def test_the_score_is_the_value_at_the_answers_last_token(folder):
    ask = scorer(folder)
    ended, cut = ask([said(10, 11, EOS), said(10, 11)])
    (expected,) = by_hand(folder, said(10, 11).token_ids)
    assert ended.value == pytest.approx(expected, abs=1e-5)
    assert cut.value == pytest.approx(expected, abs=1e-5)  # without an end token it is judged as if it ended there
    assert abs(expected) > 1e-3


def test_scores_do_not_depend_on_what_is_scored_beside_or_how_it_is_cut(folder):
    answers = [said(*[8 + (n + k) % 4 for k in range(n)], EOS) for n in range(1, 9)]
    together = [one.value for one in scorer(folder)(answers)]
    in_parts = [one.value for one in scorer(folder, max_tokens_per_batch=16)(answers)]
    assert together == pytest.approx(in_parts, abs=1e-5)
    assert together == pytest.approx(by_hand(folder, *(one.token_ids[:-1] for one in answers)), abs=1e-5)


def test_another_vocabulary_is_rendered_with_the_reward_models_own_template(tmp_path):
    """Its characters are numbered otherwise: a is 11, b 10, c 9, d 8."""
    folder = export(tmp_path / "other", characters="dcba")
    (outcome,) = scorer(folder)([said(10, 11, EOS, text="cd")])
    (expected,) = by_hand(folder, (BOS, USER, 11, 10, ASSISTANT, 9, 8))
    assert outcome.value == pytest.approx(expected, abs=1e-5)
    (turns,) = scorer(folder)([Answer((BOS, 8, 9), 1, ASKED, "cd", turns=2)])
    assert "2 turns" in turns.error


def test_answers_that_cannot_be_scored_fail_alone(folder):
    ask = scorer(folder, max_tokens_per_batch=10)
    outcomes = ask([said(10, EOS), said(*[9] * 20, EOS), said(), said(11, EOS)])
    assert [bool(one.error) for one in outcomes] == [False, True, True, False]
    assert "26 tokens in the reward model's vocabulary, more than max_tokens_per_batch=10" in outcomes[1].error
    assert "no tokens" in outcomes[2].error
    (long,) = scorer(folder)([said(*[9] * 40)])
    assert "max_position_embeddings=32" in long.error


def test_a_score_that_is_not_finite_is_a_failure(tmp_path):
    folder = export(tmp_path / "broken")
    value_model = load_value_model(ModelConfig(path=str(folder)))
    torch.nn.init.constant_(value_model.score.weight, math.nan)
    value_model.save_pretrained(folder)
    (outcome,) = scorer(folder)([said(10, EOS)])
    assert "score is [nan]" in outcome.error


# ----------------------------------------------------------------------------------------------- process reward models


@pytest.mark.parametrize(
    ("pieces", "separator", "found"),
    [
        (["a", "\n", "b", "\n", "c"], "\n", [1, 3]),
        (["a", "\n", "b", "\n"], "\n", [1]),  # nothing follows the last one: the end token judges that step
        (["\n", "a", "\n", "\n", "b"], "\n", [2]),  # an empty step is none
        (["a.\n", "\nb"], "\n\n", [0]),
        (["ab"], "\n", []),
        (["a", "\n", "b"], "", []),
    ],
)
def test_separators_are_found_at_their_first_token(pieces, separator, found):
    assert separator_tokens(pieces, separator) == found


@pytest.mark.parametrize(
    ("aggregation", "pick"), [("last", lambda s: s[-1]), ("min", min), ("mean", lambda s: sum(s) / 3)]
)
def test_the_steps_of_an_answer_become_one_score(folder, aggregation, pick):
    """`d` separates steps: ab, c, a. Each is judged by what was said up to it."""
    answer = said(8, 9, 11, 10, 11, 8, EOS, text="abdcda")
    before = [answer.token_ids[:end] for end in (7, 9, 11)]
    steps = [1 / (1 + math.exp(-value)) for value in by_hand(folder, *before)]
    for vocabulary in (POLICY, "another"):  # as sampled, and rendered anew: here the same tokens
        (outcome,) = scorer(folder, vocabulary, aggregation=aggregation, step_separator="d")([answer])
        assert outcome.value == pytest.approx(pick(steps), abs=1e-5)
        assert outcome.parts == {"steps": 3.0}


# ------------------------------------------------------------------------------------ what `hone reward-model` exports


@pytest.fixture
def in_the_root(monkeypatch):
    """The recipes name their own files from here."""
    monkeypatch.chdir(Path(__file__).parents[2])


def exported(folder, name, *overrides):
    """(evaluation figures, folder) of a few steps of a recipe."""
    steps = ["run.steps=12", f"run.dir={folder / 'run'}", "tracking.trackers=[jsonl]", "runtime.threads=1"]
    sizes = ["data.train.source.size=256", "evaluation.sets.held_out.source.size=32", "samples_per_step=32"]
    run = run_reward_model(
        load(RewardModelRunConfig, f"recipes/reward_model/{name}.yaml", [*steps, *sizes, *overrides])
    )
    return metrics(run)[-1], run / "export"


def spoken(renderer, row, text, *before):
    messages = (*before, {"role": "user", "content": row["prompt"]})
    ids, _ = renderer.render_steps(messages, [text], "")
    return Answer(ids, len(renderer.render_prompt(messages)), messages, text, 1)


def margins_of(ask, said):
    """By how much the chosen answer of each held-out comparison is ahead; `said(row, text)` is an answer."""
    rows = list(resolve("recipes/reward_model/task.py:comparisons")(2, 32))
    scores = [[one.value for one in ask([said(row, row[key]) for row in rows])] for key in ("chosen", "rejected")]
    return [a - b for a, b in zip(*scores, strict=True)]


@pytest.mark.parametrize("vocabulary", ["its own", pytest.param("another", marks=pytest.mark.slow)])
def test_scores_are_those_of_the_training_of_reward_models(tmp_path, in_the_root, vocabulary):
    """The accuracy and margin that its own evaluation found, from the same comparisons."""
    figures, folder = exported(tmp_path, "bradley_terry")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    ask = scorer(folder, vocabulary_digest(tokenizer) if vocabulary == "its own" else vocabulary)
    margins = margins_of(ask, lambda row, text: spoken(Renderer(tokenizer), row, text))
    assert figures["eval/held_out/margin"] == pytest.approx(sum(margins) / 32, abs=1e-5)
    assert figures["eval/held_out/accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 32)


TEMPLATE = (  # an answer ends with <tool>, which is not the tokenizer's end of a sequence
    "{{ bos_token }}{% for one in messages %}{{ '<' + one.role + '>' + mark + one.content }}"
    "{% if one.role == 'assistant' %}<tool>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' + mark }}{% endif %}"
)


@pytest.mark.slow
def test_a_reward_model_is_spoken_to_as_in_its_training(tmp_path, in_the_root):
    """Chat template, options and system prompt of its run, none of which its base tokenizer knows of."""
    (tmp_path / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    spoken_to = [f"data.chat_template={tmp_path}/template.jinja", "data.chat.options={mark: q}",
                 "data.train.system_prompt=be good", "evaluation.sets.held_out.system_prompt=be good"]  # fmt: skip
    figures, folder = exported(tmp_path, "bradley_terry", *spoken_to)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder.parent / "model")))
    assert "<tool>" not in tokenizer.chat_template
    trained = Renderer(tokenizer, TEMPLATE, {"mark": "q"})
    system = {"role": "system", "content": "be good"}
    own = margins_of(scorer(folder, vocabulary_digest(tokenizer)), lambda row, text: spoken(trained, row, text, system))
    another = margins_of(scorer(folder, "another"), lambda row, text: spoken(trained, row, text))
    introduced = margins_of(scorer(folder, "another"), lambda row, text: spoken(trained, row, text, system))
    for margins in (own, another, introduced):
        assert figures["eval/held_out/margin"] == pytest.approx(sum(margins) / 32, abs=1e-5)
    export_checkpoint(folder.parent, tmp_path / "again")
    for name in ("chat_template.jinja", "rendering.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    "said", ["{", "[]", '{"chat": {}, "system_prompt": 3}', '{"chat": {"option": 1}, "system_prompt": ""}']
)
def test_a_folder_that_says_wrongly_how_it_was_spoken_to_is_refused(tmp_path, said):
    folder = export(tmp_path / "broken")
    (folder / "rendering.json").write_text(said, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rendering\.json(:? cannot be read| should hold chat|: unknown key)"):
        scorer(folder)


def test_scores_of_steps_are_those_of_the_training_of_process_reward_models(tmp_path, in_the_root):
    """Cross-entropy of each step's verdict, by the score of the answer that ends with this step."""
    figures, folder = exported(tmp_path, "process")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    losses = []
    for vocabulary in (vocabulary_digest(tokenizer), "another"):
        ask, losses = scorer(folder, vocabulary, aggregation="last"), []
        for row in resolve("recipes/reward_model/task.py:selections")(2, 32):
            texts = ["\n".join(row["completions"][: n + 1]) for n in range(len(row["labels"]))]
            outcomes = ask([spoken(Renderer(tokenizer), row, text) for text in texts])
            assert [one.parts["steps"] for one in outcomes] == [1.0, 2.0, 3.0, 4.0]
            pairs = zip(outcomes, row["labels"], strict=True)
            losses += [-math.log(one.value if right else 1 - one.value) for one, right in pairs]
        assert figures["eval/held_out/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


# ---------------------------------------------------------------------------------------------- a process of its own


def pid_of(model):
    (process,) = model._pool._processes.values()
    return process.pid


@pytest.fixture(scope="module")
def served(folder):
    config = settings(folder, place="process", max_tokens_per_batch=64)
    part = RewardComponent(model=config, timeout_s=5.0)
    model = ServedRewardModel(_hosting("judge", part, config, POLICY))
    model.start()
    yield model
    model.close()


@pytest.mark.slow
def test_a_process_gives_the_same_scores_and_batches_what_waits(served, folder):
    answers = [said(*[8 + (n + k) % 4 for k in range(n % 9)], EOS) for n in range(1, 40)]
    outcomes = [future.result(30) for future in [served.submit(answer) for answer in answers]]
    here = scorer(folder)(answers)
    assert [one.value for one in outcomes] == pytest.approx([one.value for one in here], abs=1e-5)
    assert not any(one.error for one in outcomes)
    # `seconds` is that of the forward that an answer was part of: fewer forwards than answers.
    assert len({one.seconds for one in outcomes}) < len(answers) / 2


@pytest.mark.slow
def test_an_answer_that_is_too_long_fails_in_the_process_too(served):
    outcome = served.submit(said(*[9] * 40)).result(30)
    assert "max_position_embeddings=32" in outcome.error


@pytest.mark.slow
def test_a_killed_process_is_replaced_and_its_calls_are_made_again(served, folder):
    before, restarts = pid_of(served), served.restarts
    os.kill(before, signal.SIGKILL)
    outcomes = [future.result(60) for future in [served.submit(said(n, EOS)) for n in (8, 9, 10)]]
    expected = [one.value for one in scorer(folder)([said(n, EOS) for n in (8, 9, 10)])]
    assert sum(bool(one.error) for one in outcomes) <= 1  # the one that was running, if there was one alone
    for one, value in zip(outcomes, expected, strict=True):
        assert one.error.startswith("the reward process") or one.value == pytest.approx(value, abs=1e-5)
    assert pid_of(served) != before
    assert served.restarts == restarts + 1


@pytest.mark.slow
def test_a_process_that_hangs_costs_its_call_and_is_replaced(served):
    stopped = pid_of(served)
    os.kill(stopped, signal.SIGSTOP)
    outcome = served.submit(said(8, EOS)).result(60)
    assert outcome.late
    assert "no answer within 5 s" in outcome.error
    assert not served.submit(said(8, EOS)).result(60).error
    assert pid_of(served) != stopped


@pytest.mark.slow
def test_a_process_that_cannot_load_its_model_says_so_at_the_start(folder, tmp_path):
    broken = export(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    config = settings(broken, place="process")
    model = ServedRewardModel(_hosting("judge", RewardComponent(model=config), config, POLICY))
    with pytest.raises(ConfigError, match=r"reward\.components\.judge\.model: ModelError: .*cannot be loaded"):
        model.start()


# ------------------------------------------------------------------------------------------------------ whole runs


def change(folder, place="colocated", **more):
    task = folder / "task.py"
    model = {"path": str(more.pop("path")), "place": place, "compute_dtype": "float32", **more}
    parts = {"share": {"reward": f"{task}:share"}, "preferred": {"model": model, "weight": 0.5}}
    return {
        "reward": {"components": parts, "workers": 1},
        "evaluation": {},
        "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
        "run": {"steps": 3},
        "checkpoint": {"every_steps": 2},
    }


def train(folder, settings, *overrides):
    run_policy(load(PolicyRunConfig, recipe(folder, settings), list(overrides)))
    lines = list(rollout_lines(folder / "run" / "rollouts.jsonl.gz"))
    return metrics(folder / "run"), [json.loads(line) for line in lines]


def without_end(ids):
    return ids[:-1] if ids[-1] == EOS else ids


def test_a_colocated_reward_model_is_a_component_like_any_other(tmp_path, folder):
    steps, rollouts = train(tmp_path, change(tmp_path, path=folder))
    expected = by_hand(folder, *(without_end(one["prompt_token_ids"] + one["token_ids"]) for one in rollouts))
    for one, score in zip(rollouts, expected, strict=True):
        assert one["components"]["preferred"] == pytest.approx(score, abs=1e-4)
        assert one["reward"] == pytest.approx(one["components"]["share"] + 0.5 * score, abs=1e-4)
    first = [one["components"]["preferred"] for one in rollouts if one["step"] == 1]
    assert steps[1]["reward/preferred"] == pytest.approx(sum(first) / len(first), abs=1e-6)
    assert steps[1]["reward/scored"] == 16
    assert steps[1]["reward/failed"] == 0


@pytest.mark.slow
def test_two_halves_equal_the_whole_and_the_greedy_baseline_is_judged_too(tmp_path, folder):
    remax = {"algorithm": {"advantage": "remax"}}
    for name in ("whole", "halves"):
        settings = {**change(tmp_path / name, path=folder), **remax}
        if name == "halves":
            train(tmp_path / name, settings, "run.steps=2")
        train(tmp_path / name, settings)
    whole, halves = tmp_path / "whole" / "run", tmp_path / "halves" / "run"
    assert metrics(whole) == metrics(halves)
    assert (whole / "rollouts.jsonl.gz").read_bytes() == (halves / "rollouts.jsonl.gz").read_bytes()
    assert metrics(whole)[1]["rollout/greedy_failed"] == 0
    assert metrics(whole)[1]["reward/scored"] == 20


@pytest.mark.slow
def test_a_reward_model_in_a_process_judges_a_run(tmp_path, folder):
    settings = change(tmp_path, path=folder, place="process")
    settings["reward"]["components"].pop("share")  # a reward model may be the only component
    settings["reward"].pop("workers")  # of functions
    settings["run"] = {"steps": 1}
    _, rollouts = train(tmp_path, settings)
    expected = by_hand(folder, *(without_end(one["prompt_token_ids"] + one["token_ids"]) for one in rollouts))
    assert [one["reward"] for one in rollouts] == pytest.approx([0.5 * score for score in expected], abs=1e-4)


@pytest.mark.parametrize("place", ["colocated", "process"])
def test_a_folder_without_a_value_head_is_no_reward_model(tmp_path, folder, place):
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("value_head.safetensors"))
    settings = change(tmp_path, path=plain, place=place)
    with pytest.raises(ConfigError, match=r"reward\.components\.preferred\.model: .* is not a reward model"):
        train(tmp_path, settings)


def test_a_deadline_that_nothing_keeps_is_refused(tmp_path, folder):
    settings = change(tmp_path, path=folder)
    settings["reward"]["components"]["preferred"]["timeout_s"] = 3
    with pytest.raises(ConfigError, match=r"reward\.components\.preferred\.timeout_s"):
        train(tmp_path, settings)
