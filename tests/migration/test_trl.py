"""Numbers of a run file that comes from TRL's scripts and files, computed by hand from TRL's definitions."""

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
    kind, options, notes = options_of_shell(text, {})
    options.pop("num_processes")
    run = run_of(migrate_trl(kind, options, notes, devices=4))
    assert run["kind"] == "prefer"
    assert run["samples_per_step"] == 64  # 2 x 8 x 4
    assert run["loss"] == {"name": "cdpo", "beta": 0.3, "label_smoothing": 0.1}
    assert run["data"]["train"]["max_sample_tokens"] == 1024
    assert run["evaluation"]["every_steps"] == 50
    assert run["evaluation"]["sets"]["test"]["source"]["split"] == "test"
    assert run["actor"]["lora"]["rank"] == 32


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
