"""`hone config`: the resolved file, explanations, the schema; kinds of runs."""

import json
import re
from pathlib import Path

import pytest

from hone import other_frameworks
from hone.cli.config import schema_of
from hone.cli.main import COMMANDS, main
from hone.cli.recipe import load_recipe
from hone.composition import from_yaml
from hone.config import ConfigError, dump, key_paths, load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.supervised.settings import PreferenceRunConfig, SupervisedRunConfig

RL = """
run: {dir: runs/x, steps: 3}
model: {path: some/model}
data: {train: {path: prompts.jsonl}}
reward: {components: {exact: {reward: exact_match}}}
update: {prompts_per_step: 4}
"""
SFT = """
kind: sft
run: {dir: runs/y, steps: 3}
model: {path: some/model}
data: {train: {path: samples.jsonl}}
samples_per_step: 4
"""


@pytest.fixture
def rl(tmp_path: Path) -> Path:
    path = tmp_path / "rl.yaml"
    path.write_text(RL)
    return path


@pytest.fixture
def sft(tmp_path: Path) -> Path:
    path = tmp_path / "sft.yaml"
    path.write_text(SFT)
    return path


def shown(capsys, *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out


def test_what_is_shown_is_yaml_that_gives_the_same_settings(capsys, rl, tmp_path):
    text = shown(capsys, str(rl), "run.steps=9", "actor.optimizer.lr=1e-5")
    (tmp_path / "again.yaml").write_text(text)
    first = load(PolicyRunConfig, rl, ["run.steps=9", "actor.optimizer.lr=1e-5"]).config
    assert load(PolicyRunConfig, tmp_path / "again.yaml").config == first
    assert from_yaml(text) == from_yaml(dump(first))


def test_each_line_that_is_not_a_default_says_what_set_it(capsys, rl):
    lines = shown(capsys, str(rl), "run.steps=9").splitlines()
    assert "  steps: 9  # command line" in lines
    assert f"  dir: runs/x  # {rl}" in lines
    assert "  seed: 0" in lines
    assert sum("#" in line for line in lines) == 6


def test_long_values_stay_on_their_line(capsys, rl):
    text = "x " * 200
    assert f"system_prompt: '{text}'" in shown(capsys, str(rl), f"data.train.system_prompt='{text}'")


def test_explain_prints_everything_known_of_a_key(capsys, rl):
    text = shown(capsys, str(rl), "run.steps=9", "--explain", "run.steps")
    assert [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in text.splitlines()] == [
        ["run.steps"],
        ["meaning", "training steps of the whole run, resumed parts included"],
        ["type", "int >= 1 or null, in steps"],
        ["default", "null"],
        ["value", "9"],
        ["set by", "command line"],
    ]


def test_explain_of_a_section_prints_every_key(capsys, rl):
    text = shown(capsys, str(rl), "--explain", "run")
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == [
        "run.dir",
        "run.steps",
        "run.epochs",
        "run.stop_when",
        "run.seed",
    ]


def test_explain_of_words_finds_the_keys_that_this_kind_of_run_has(capsys, rl):
    text = shown(capsys, str(rl), "--explain", "kl")
    keys = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert keys[0] == "algorithm.kl"
    assert not any(key.startswith("loss.") for key in keys)  # of preferences


def test_explain_of_an_unknown_key(capsys, rl):
    assert main(["config", str(rl), "--explain", "run.step"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown key 'run.step'; did you mean run.steps")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("num_generations", "update.samples_per_prompt"),
        ("max_new_tokens", "rollout.sampling.max_response_tokens"),
        ("early stopping", "run.stop_when.score_reaches"),
        ("save checkpoints", "checkpoint.every_steps"),
        ("push_to_hub", "a finished model is uploaded by `hone export RUN OUTPUT --push OWNER/NAME`"),
    ],
)
def test_names_of_other_frameworks_are_explained(capsys, words, key):
    assert shown(capsys, "--explain", words).startswith(key)


def test_without_a_run_file_a_key_is_explained_with_the_kinds_that_have_it(capsys):
    text = shown(capsys, "--explain", "algorithm.kl.coef")
    assert [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in text.splitlines()] == [
        ["algorithm.kl.coef"],
        ["meaning", "weight of the penalty (its first value, if it is adaptive)"],
        ["type", "number >= 0"],
        ["default", "0.0"],
        ["kinds", "rl, distill"],
    ]


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ("learning rate", "actor.schedule"),  # a section counts
        ("lr", "actor.optimizer.lr"),  # not `already`
        ("checkpoint", "checkpoint.every_steps"),  # of a section, each key
        ("reward.components.mine.weight", "reward.components.mine.weight"),  # under any name
        ("evaluation.sets.held_out.path", "evaluation.sets.held_out.path"),
    ],
)
def test_keys_are_found_by_words(capsys, asked, first):
    assert shown(capsys, "--explain", asked).splitlines()[0] == first


def test_words_that_no_key_has(capsys):
    assert main(["config", "--explain", "xyzzy"]) == 2
    assert "no key has 'xyzzy'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "runtime.backend.devices=8",
            "runtime.backend.devices is a setting of runtime.backend=ray, and runtime.backend is",
        ),
        ("algorithm.loss.beta=1", "algorithm.loss=dro, and algorithm.loss is ppo: set algorithm.loss=dro too"),
        ("actor.dtype=bf16", "did you mean 'actor.compute_dtype' or 'actor.head_dtype'?"),
        ("push_to_hub=true", "a finished model is uploaded by `hone export RUN OUTPUT --push OWNER/NAME`"),
        ("data.path=x", "unknown key 'data.path'; did you mean 'data.train.path'? (data has"),
        ("run.name=x", "did you mean 'run.dir'?"),
        ("deepspeed=x.json", "did you mean 'actor.backend'?"),
        ("eval_strategy=steps", "did you mean 'evaluation.every_steps'?"),
        (
            "actor.backend.tensor_parallel=2",
            "did you mean 'actor.backend.parallel.tensor' or 'rollout.tensor_parallel'?",
        ),
        ("algorithm.loss=dpo", "DPO is learnt from pairs of answers: hone prefer RUN.yaml loss=dpo"),
        (
            "model=some/folder",
            "model should be a mapping (key: value), found 'some/folder'; write model.path=some/folder",
        ),
        ("tracking.trackers=wandb", "tracking.trackers should be a list (found 'wandb'); write [wandb]"),
    ],
)
def test_a_key_that_is_elsewhere_says_where(capsys, rl, override, said):
    assert main(["config", str(rl), override]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--lr", "actor.optimizer.lr"),
        ("--run-steps", "run.steps"),
        ("--max-steps", "run.steps"),
        ("--batch-size", "update.prompts_per_step or --samples_per_step"),
    ],
)
def test_an_option_that_is_a_key_says_which(capsys, option, key):
    assert main(["train", option, "1"]) == 2
    assert f"a key of the run file is meant? --{key} (see" in capsys.readouterr().err


def test_a_wrong_override_is_one_line(capsys, rl):
    assert main(["config", str(rl), "run.stesp=1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: command line: unknown key 'run.stesp'; did you mean 'run.steps'?")


def test_the_kind_chooses_the_settings(rl, sft):
    assert isinstance(load_recipe(rl).config, PolicyRunConfig)
    assert isinstance(load_recipe(sft).config, SupervisedRunConfig)
    assert isinstance(load_recipe(sft, kind="sft").config, SupervisedRunConfig)


def test_a_file_of_another_kind_names_the_command_for_it(sft):
    with pytest.raises(ConfigError, match=r"sft\.yaml has kind: sft, expected rl; run it with `hone sft "):
        load_recipe(sft, kind="rl")


def test_a_file_that_names_no_kind_is_what_the_command_runs(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(SFT.replace("kind: sft\n", ""))
    assert isinstance(load_recipe(path, kind="sft").config, SupervisedRunConfig)


def test_an_unknown_kind(rl):
    known = "distill, prefer, reward_model, rl, sft"
    with pytest.raises(
        ConfigError, match=rf"command line: unknown kind 'slf'; did you mean 'sft'\? \(there is: {known}\)"
    ):
        load_recipe(rl, ["kind=slf"])


def test_the_schema_tells_the_kinds_apart(capsys, rl, sft):
    branch, branches = json.loads(shown(capsys, "--schema")), {}
    while "if" in branch:
        branches[branch["if"]["properties"]["kind"]["const"]] = branch["then"]["properties"]
        branch = branch["else"]
    assert set(branches) == {"distill", "prefer", "reward_model", "sft"}
    assert "samples_per_step" in branches["sft"]
    assert "update" in branches["distill"]
    assert "update" in branch["properties"]
    assert "update" in schema_of(rl)["properties"]
    assert "samples_per_step" in schema_of(sft)["properties"]


def test_every_reference_in_the_schema_leads_somewhere():
    described = schema_of(None)
    names = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(described)))
    assert names == set(described["$defs"])


def test_the_schema_lists_what_the_registries_hold(rl):
    described = schema_of(rl)
    algorithm = described["$defs"][described["properties"]["algorithm"]["$ref"].removeprefix("#/$defs/")]
    assert {"grpo", "gae", "rloo"} <= set(algorithm["properties"]["advantage"]["anyOf"][0]["enum"])


@pytest.mark.parametrize(
    ("recipe", "override", "meant"),
    [
        ("reverse/grpo.yaml", "learning_rate=1", "actor.optimizer.lr"),  # TRL
        ("reverse/grpo.yaml", "actor_rollout_ref.rollout.n=8", "update.samples_per_prompt"),  # verl
        ("reverse/grpo.yaml", "trainer.total_epochs=3", "run.epochs"),
        ("reverse/grpo.yaml", "max_response_tokens=3", "rollout.sampling.max_response_tokens"),  # ours, elsewhere
        ("reverse/grpo.yaml", "trainer.n_gpus_per_node=8", "runtime.backend"),
        ("reverse/grpo.yaml", "algorithm.use_kl_loss=true", "algorithm.kl.coef"),
        ("reverse/grpo.yaml", "model.load_in_4bit=true", "actor.lora.quantise"),
        ("reverse/grpo.yaml", "runn.steps=3", "run"),  # misspelt
        ("preference/dpo.yaml", "beta=0.2", "loss.beta"),
        (
            "reverse/grpo.yaml",
            "tracking.rollouts_max_mib=9",
            "tracking.trackers=[{name: jsonl, rollouts_max_mib: ...}]",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_key_that_was_meant(capsys, recipe, override, meant):
    assert main(["config", f"recipes/{recipe}", override]) == 2
    hint = re.search("did you mean (.*?)[?]", capsys.readouterr().err)[1]
    assert repr(meant) in hint.split(" or ")


def test_a_number_format_that_is_not_here_suggests_none_of_another_size(capsys):
    assert main(["config", "recipes/reverse/grpo.yaml", "actor.compute_dtype=float8"]) == 2
    said = capsys.readouterr().err
    assert "(found 'float8')" in said
    assert "did you mean" not in said
    assert main(["config", "recipes/reverse/grpo.yaml", "actor.compute_dtype=bf16"]) == 2
    assert "did you mean 'bfloat16'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("trainer.resume_mode=auto", "unknown key 'trainer'; the same command continues the run in run.dir"),
        ("resume_from_checkpoint=x", "the same command continues the run in run.dir from its last checkpoint"),
        ("trainer.push_to_hub=true", "`hone export RUN OUTPUT --push OWNER/NAME`"),
        ("--dry-run", "No such option: --dry-run; `hone check RUN.yaml` tries a run file without training"),
    ],
)
def test_what_one_does_instead_of_setting_a_key(capsys, asked, said):
    assert main(["train", "recipes/reverse/grpo.yaml", asked]) == 2
    assert said in capsys.readouterr().err


def test_an_algorithm_that_is_no_loss_here_is_explained(capsys):
    assert main(["config", "recipes/reverse/grpo.yaml", "algorithm.loss=grpo"]) == 2
    said = capsys.readouterr().err
    assert (
        "algorithm.loss: 'grpo' is no policy loss here: GRPO is algorithm.advantage=grpo with algorithm.loss=ppo"
        in said
    )


def test_names_of_other_frameworks_lead_to_keys_and_commands_that_exist(capsys):
    kinds = (PolicyRunConfig, SupervisedRunConfig, PreferenceRunConfig)
    ours = {key for kind in kinds for key in key_paths(kind)}
    assert {key for keys in other_frameworks.KEYS.values() for key in keys} - ours == set()
    assert set(other_frameworks.COMMANDS.values()) <= set(COMMANDS)
    assert not set(other_frameworks.COMMANDS) & set(COMMANDS)
    assert main(["dpo"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'dpo': here it is hone prefer\n"
