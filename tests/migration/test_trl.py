"""Numbers of a run file that comes from TRL's scripts and files, computed by hand from TRL's definitions."""

from pathlib import Path

import pytest

from hone.cli.main import main
from hone.composition import ConfigError, from_yaml
from hone.migration.page import run_file
from hone.migration.trl.command import options_of_shell
from hone.migration.trl.reader import migrate_trl
from hone.migration.trl.source import options_of_script

GRPO = """
import os
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

LENGTH = 256
name = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")

def right(completions, **kwargs):
    return [1.0 for _ in completions]

def main():
    dataset = load_dataset("open-r1/math", "easy", split="train")
    dataset = dataset.map(lambda row: {"prompt": row["question"]})
    args = GRPOConfig(
        output_dir=f"out/{name}", per_device_train_batch_size=4, gradient_accumulation_steps=2,
        steps_per_generation=4, num_generations=8, max_completion_length=LENGTH * 2, learning_rate=5e-6, beta=0.04,
        epsilon_high=0.28, loss_type="dr_grpo", scale_rewards=False, num_iterations=2, max_steps=80, use_vllm=True,
        warmup_ratio=0.1, report_to=["wandb"],
    )
    args.temperature = 0.7
    trainer = GRPOTrainer(
        model=name, reward_funcs=[right, "org/reward-model"], args=args, train_dataset=dataset,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]), processing_class=None,
    )
    trainer.train()
"""


def run_of(migration):
    return from_yaml(run_file(migration, "x"))


def test_a_script_with_grpo():
    script = options_of_script(GRPO, {})
    migration = migrate_trl(script.kind, script.options, script.notes, devices=2)
    run = run_of(migration)
    # 4 on each of 2 devices x 4 steps per generation = 32 answers in groups of 8; one optimizer step takes 4 x 2 x 2
    assert run["update"] == {"prompts_per_step": 4, "samples_per_prompt": 8, "minibatches": 2, "epochs": 2}
    assert run["run"]["steps"] == 20  # 80 optimizer steps / (2 mini-batches x 2 passes)
    assert run["run"]["dir"] == "out/Qwen/Qwen3-0.6B"
    assert run["algorithm"]["advantage"] == {"name": "grpo", "scale_by": "none"}
    assert run["algorithm"]["aggregation"] == {"mode": "seq_mean_token_sum_norm", "norm_tokens": 512}
    assert run["algorithm"]["loss"] == {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}
    assert run["algorithm"]["kl"] == {"where": "in_loss", "kind": "k3", "coef": 0.04}
    assert run["algorithm"]["correction"] == {"weights": "sequence", "band": [0.0, 3.0]}  # TRL's default with vLLM
    assert run["rollout"]["sampling"] == {"max_response_tokens": 512, "temperature": 0.7}
    assert run["rollout"]["engine"] == {"gpu_memory_utilization": 0.3}
    assert run["actor"]["lora"] == {"rank": 8, "alpha": 16.0, "targets": ["q_proj"]}
    assert run["actor"]["schedule"] == {"name": "linear", "warmup_fraction": 0.1}
    assert run["data"]["train"]["source"] == {"name": "hf", "split": "train", "subset": "easy"}
    decisions = " ".join(migration.undecided())
    assert "copy the function right to a file" in decisions
    assert "org/reward-model" in decisions
    assert "changes the rows of data.train" in decisions
    assert migration.unknown == {}


def test_the_script_is_not_run_and_its_environment_is_given(tmp_path):
    mark = tmp_path / "mark"
    script = options_of_script(f"open({str(mark)!r}, 'w')\n{GRPO}", {"MODEL": "mine"})
    assert not mark.exists()
    assert script.options["model_name_or_path"] == "mine"
    for text, problem in [("x = (", "no Python"), ("x = 1", "calls no trainer of TRL")]:
        with pytest.raises(ConfigError, match=problem):
            options_of_script(text, {})
    for grows in ("x = 'a' * 10**12", "x = 10**10**10", "x = [" * 5000, "x = " + "-" * 100_000 + "1"):
        with pytest.raises(ConfigError):
            options_of_script(grows, {})


def test_a_command_with_dpo():
    pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")
    text = (
        "accelerate launch --num_processes 4 trl/scripts/dpo.py --model_name_or_path m --dataset_name org/pairs "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --beta 0.3 --loss_type sigmoid "
        "--label_smoothing 0.1 --max_length 1024 --use_peft --lora_r 32 --num_train_epochs 1 --eval_strategy steps "
        "--eval_steps 50 --bf16"
    )
    kind, options, notes, _ = options_of_shell(text, {}, Path())
    run = run_of(migrate_trl(kind, options, notes))
    assert run["kind"] == "prefer"
    assert run["samples_per_step"] == 64  # 2 x 8 x 4
    assert run["loss"] == {"name": "cdpo", "beta": 0.3, "label_smoothing": 0.1}
    assert run["data"]["train"]["max_sample_tokens"] == 1024
    assert run["evaluation"]["every_steps"] == 50
    assert run["evaluation"]["sets"]["test"]["source"]["split"] == "test"
    assert run["actor"]["lora"] == {"rank": 32, "alpha": 32.0, "dropout": 0.05}  # ModelConfig's defaults
    assert run["runtime"]["backend"]["devices"] == 4


def test_only_what_every_branch_sets_is_known():
    text = """
common = dict(learning_rate=2e-6, max_length=2048)
bs, steps = 4, 10
bs = 4
bs *= 2
if torch.cuda.is_available():
    beta = 0.2
else:
    beta = 0.3
if bs == 8 or True:
    common = common
def never():
    args.max_steps = 5
def main(epochs=2):
    args = DPOConfig(per_device_train_batch_size=bs, num_train_epochs=epochs, beta=beta, **common, **more())
    if other:
        args.seed = 1
    DPOTrainer(model="m", args=args, train_dataset=load_dataset("d")["train"], peft_config=LoraConfig()).train()
if __name__ == "__main__":
    main()
"""
    script = options_of_script(text, {"epochs": "3"})
    migration = migrate_trl(script.kind, script.options, script.notes)
    run = run_of(migration)
    assert run["samples_per_step"] == 8
    assert run["run"] == {"dir": "runs/dpo", "seed": 42, "epochs": 3}
    assert run["actor"]["optimizer"]["lr"] == 2e-6
    assert run["data"]["train"]["max_sample_tokens"] == 2048
    assert run["data"]["train"]["source"] == {"name": "hf", "split": "train"}
    assert run["actor"]["lora"] == {"rank": 8, "alpha": 8.0}  # PEFT's defaults
    assert migration.unknown == {}
    decisions = " ".join(migration.undecided())
    assert "**more(): only running the script tells these options; they may set what the file marks as" in decisions
    assert "beta is beta, and should be a number" in decisions
    assert "seed is seed" in decisions


def test_options_in_two_stars_that_only_running_tells_are_one_decision():
    text = "GRPOTrainer('m', right, args=GRPOConfig({}), train_dataset=load_dataset('d'))"
    for arguments, names in (
        ("**build(2), **more, beta=0.1", "**build(2), **more"),
        ("**{'beta': 0.1, **build(2)}", "**build(2)"),
        ("**dict(beta=0.1, **build(2))", "**build(2)"),
        ("**{**{'beta': 0.1}}", ""),
    ):
        script = options_of_script(text.format(arguments), {})
        migration = migrate_trl(script.kind, script.options, script.notes)
        assert run_of(migration)["algorithm"]["kl"]["coef"] == 0.1
        found = [one for one in migration.undecided() if "TRL's default" in one]
        assert [one.partition(": ")[0] for one in found] == [names][: bool(names)]
        assert migration.unknown == {}


@pytest.mark.parametrize(
    ("imported", "used"),
    [
        ("from trl.rewards import accuracy_reward", "accuracy_reward"),
        ("from trl.rewards import accuracy_reward as right", "right"),
        ("from trl.rewards.accuracy_rewards import accuracy_reward", "accuracy_reward"),
        ("from trl import rewards", "rewards.accuracy_reward"),
        ("import trl.rewards", "trl.rewards.accuracy_reward"),
        ("import trl.rewards as own", "own.accuracy_reward"),
    ],
)
def test_a_reward_that_is_imported_from_trl_is_one_of_trl(imported, used):
    for text in (
        "{0}\nGRPOTrainer('m', reward_funcs=[{1}])",
        "def main():\n  {0}\n  GRPOTrainer('m', reward_funcs={1})",
    ):
        script = options_of_script(text.format(imported, used), {})
        migration = migrate_trl(script.kind, script.options, script.notes)
        (said,) = [one for one in migration.undecided() if "reward.components" in one]
        assert said.startswith("reward.components.accuracy_reward: trl.rewards.")
        assert "accuracy_reward is a reward of TRL; `hone list rewards`" in said


def test_asynchronous_training_has_defaults_of_its_own(tmp_path):
    text = (
        "args = AsyncGRPOConfig(per_device_train_batch_size=16, weight_sync_steps=2, queue_maxsize=64)\n"
        "args.token_budget = 8192\n"
        "AsyncGRPOTrainer(model='m', args=args, reward_funcs=right, train_dataset=load_dataset('d', split='train'))"
    )
    script = options_of_script(text, {})
    migration = migrate_trl(script.kind, script.options, script.notes)
    run = run_of(migration)
    # two optimizer steps of 16 answers between synchronisations
    assert run["update"] == {"prompts_per_step": 4, "samples_per_prompt": 8, "minibatches": 2, "epochs": 1}
    assert run["asynchrony"] == {"staleness": 4, "new_weights": "keep_cache"}
    assert run["rollout"] == {"sampling": {"max_response_tokens": 2048}, "backend": "vllm"}
    assert run["actor"]["schedule"] == {"name": "constant"}
    assert run["actor"]["max_tokens_per_microbatch"] == 8192
    assert migration.unknown == {}
    (tmp_path / "run.yaml").write_text(run_file(migration, "x").replace("FILE.py:right", "rewards.py:right"))
    assert main(["config", str(tmp_path / "run.yaml")]) == 0


@pytest.mark.parametrize(
    ("kind", "options", "wanted", "decided"),
    [
        ("sft", {}, {"data.train.max_sample_tokens": 1024}, ""),
        ("reward", {"max_length": "\ue000x\ue001"}, {"data.train.max_sample_tokens": 1024}, "max_length is x"),
        ("sft", {"max_length": None, "assistant_only_loss": True}, {}, ""),
        ("sft", {"completion_only_loss": False}, {}, "completion_only_loss=False"),
        ("sft", {"optim": "adamw_8bit"}, {"actor.optimizer.name": "AdamW8bit"}, ""),
        ("sft", {"optim": "lomo"}, {}, "optim=lomo"),
        ("grpo", {"repetition_penalty": 1.05}, {}, "repetition_penalty=1.05"),
        ("grpo", {"generation_kwargs": {"stop": ["x"]}}, {"rollout.sampling.stop": ["x"]}, ""),
        ("grpo", {"generation_kwargs": {"bad": 1}}, {}, "generation_kwargs={'bad': 1}"),
        ("grpo", {"importance_sampling_level": "sequence", "delta": 3.0}, {}, "delta=3.0"),
        (
            "grpo",
            {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.2},
            {"algorithm.loss.name": "top_entropy", "algorithm.loss.loss.name": "gspo"},
            "",
        ),
        (
            "dpo",
            {"learning_rate": 1e-5, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            {"actor.schedule.name": "cosine", "actor.schedule.min_ratio": 0.1},
            "",
        ),
        ("grpo", {"cast_lm_head_to_fp32": True}, {"actor.head_dtype": "float32"}, ""),
        ("dpo", {"datasets": [{"path": "a"}, {"path": "b"}]}, {"data.train.path": "a"}, "datasets: add b"),
    ],
)
def test_an_option_becomes_what_it_means_or_a_decision(kind, options, wanted, decided):
    base = {"model_name_or_path": "m", "reward_funcs": ["org/judge"]}
    data = {} if "datasets" in options else {"dataset_name": "d"}
    migration = migrate_trl(kind, base | data | options, [])
    found = {key: line.value for key, line in migration.settings.items()}
    assert wanted.items() <= found.items()
    assert ("data.train.max_sample_tokens" in found) == (kind != "grpo" and options.get("max_length", 0) is not None)
    sentences = [one for one in migration.undecided() if "org/judge" not in one]
    assert len(sentences) == bool(decided)
    assert decided in " ".join(sentences)


def test_an_unknown_option_is_listed_whatever_its_value():
    options = {"model_name_or_path": "m", "dataset_name": "d", "new_a": 0, "new_b": False, "new_c": None, "fp16": False}
    assert set(migrate_trl("sft", options, []).unknown) == {"new_a", "new_b", "new_c"}


@pytest.mark.parametrize(
    ("text", "options", "notes"),
    [
        ("accelerate launch --num_processes 4 dpo.py --beta 1", {"num_processes": 4, "beta": 1}, 0),
        ("torchrun --nnodes 2 --nproc-per-node=8 -m trl.scripts.dpo --beta 1", {"num_processes": 16, "beta": 1}, 0),
        ("accelerate launch --config_file a.yaml -m trl.scripts.dpo --config b.yaml", {"config": "b.yaml"}, 1),
    ],
)
def test_options_of_a_launcher_are_not_those_of_the_training(text, options, notes):
    pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")
    found = options_of_shell(text, {}, Path())
    assert (found[0], found[1], len(found[2])) == ("dpo", options, notes)


def test_a_command_takes_the_options_of_its_file_beside_the_script(tmp_path, capsys):
    pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: m\ndataset_name: org/rows\nlearning_rate: 3.0e-5\nseed: 7\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("trl sft --config sft.yaml --seed 8\n")
    assert main(["migrate", "trl", str(script), str(tmp_path / "run.yaml")]) == 0
    run = from_yaml((tmp_path / "run.yaml").read_text())
    assert (run["model"], run["actor"]["optimizer"]["lr"], run["run"]["seed"]) == ({"path": "m"}, 3e-5, 8)
    script.write_text("trl sft --config elsewhere.yaml --model_name_or_path m\n")
    assert main(["migrate", "trl", str(script)]) == 3
    assert "to decide: config=elsewhere.yaml: this file has more options" in capsys.readouterr().err
    (tmp_path / "elsewhere.yaml").write_text("- 1\n")
    assert main(["migrate", "trl", str(script)]) == 2
    assert "--config elsewhere.yaml: this should contain a mapping" in capsys.readouterr().err


def test_what_a_branch_sets_that_is_not_read_is_to_be_decided(tmp_path, capsys):
    pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")
    branch = 'if nvidia-smi; then\n  RATE="--learning_rate 1e-4"\nfi\n'
    for framework, start in (
        ("trl", "trl sft --model_name_or_path m --dataset_name org/rows $RATE"),
        ("openrlhf", "python3 -m openrlhf.cli.train_sft --actor.model_name_or_path m --data.dataset rows.jsonl $RATE"),
    ):
        script = tmp_path / f"{framework}.sh"
        script.write_text(f"{branch}{start}\n")
        assert main(["migrate", framework, str(script), str(tmp_path / f"{framework}.yaml")]) == 3
        said = capsys.readouterr().err
        assert "to decide: line 1: `if nvidia-smi; then` depends on a condition that only running tells" in said
        assert "RATE may have another value" in said


def test_a_settings_file_of_the_command(tmp_path, capsys):
    settings = tmp_path / "sft.yaml"
    settings.write_text(
        "model_name_or_path: m\ndataset_name: org/rows\nlearning_rate: 1.0e-4\nmax_length: 512\nnum_train_epochs: 2\n"
        "per_device_train_batch_size: 16\nsome_new_option: 3\n"
    )
    assert main(["migrate", "trl", str(settings)]) == 2
    assert "--kind" in capsys.readouterr().err
    assert main(["migrate", "trl", str(settings), str(tmp_path / "run.yaml"), "--kind", "sft"]) == 3
    assert "unknown: some_new_option=3" in capsys.readouterr().err
    assert main(["config", str(tmp_path / "run.yaml")]) == 0
    assert from_yaml((tmp_path / "run.yaml").read_text())["samples_per_step"] == 16


def test_a_second_training_of_a_script_is_noted(tmp_path):
    _, options, notes, _ = options_of_shell("trl dpo --beta 1\ntrl kto --beta 2\n", {}, tmp_path)
    assert options == {"beta": 1}
    assert notes == ["the script starts 2 trainings; this is the first: dpo"]
