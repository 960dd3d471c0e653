"""The tables of other frameworks' options say what the migrations do: setting an option changes a key that it names."""

import pytest

pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")

from hone.migration.openrlhf.reader import migrate_openrlhf
from hone.migration.trl.reader import migrate_trl
from hone.migration.verl.command import Launch
from hone.migration.verl.reader import migrate_verl
from hone.other_frameworks import KEYS, OPENRLHF, TABLES, TRL, VERL

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
GIVEN = {  # what an option needs beside it
    f"{ACTOR}.kl_loss_coef": {f"{ACTOR}.use_kl_loss": True},
    f"{ACTOR}.kl_loss_type": {f"{ACTOR}.use_kl_loss": True},
    "algorithm.kl_ctrl.kl_coef": {"algorithm.use_kl_in_reward": True},
    "algorithm.kl_penalty": {"algorithm.use_kl_in_reward": True},
    "algorithm.gamma": {"algorithm.adv_estimator": "gae"},
    "algorithm.lam": {"algorithm.adv_estimator": "gae"},
    f"{MODEL}.lora_alpha": {f"{MODEL}.lora_rank": 8},
    "trainer.default_local_dir": {"trainer.experiment_name": "e"},
    "lora_alpha": {"use_peft": True},
    "lora_r": {"use_peft": True},
    "load_in_4bit": {"use_peft": True},
    "eval_steps": {"eval_strategy": "steps", "dataset_name": "d"},
    "vllm_gpu_memory_utilization": {"use_vllm": True},
    "algo.advantage.gamma": {"algo.advantage.estimator": "gae"},
    "algo.advantage.lambd": {"algo.advantage.estimator": "gae"},
    "vllm.gpu_memory_utilization": {"vllm.num_engines": 2},
    "vllm.tensor_parallel_size": {"vllm.num_engines": 2},
}
KINDS = {"max_length": ("sft",), "beta": ("grpo", "dpo")}
VALUES = {  # of options that are no number; others become 7
    "algorithm.adv_estimator": "rloo",
    "algorithm.kl_penalty": "mse",
    "algorithm.rollout_correction.rollout_is": "sequence",
    f"{ACTOR}.kl_loss_type": "mse",
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.ppo_mini_batch_size": 128,
    f"{MODEL}.custom_chat_template": "t",
    f"{MODEL}.enable_gradient_checkpointing": False,
    f"{MODEL}.path": "other",
    f"{ROLLOUT}.name": "sglang",
    "custom_reward_function.path": "r.py",
    "data.filter_overlong_prompts": True,
    "data.prompt_key": "question",
    "data.shuffle": "False",
    "data.tokenizer": "t",
    "data.train_batch_size": 2048,
    "data.train_files": "/e/t.parquet",
    "data.val_files": "/e/v.parquet",
    "trainer.default_local_dir": "elsewhere",
    "trainer.experiment_name": "mine",
    "trainer.logger": ["console"],
    "bf16": False,
    "chat_template_path": "t",
    "dataset_name": "other",
    "per_device_train_batch_size": 16,
    "gradient_checkpointing": False,
    "load_in_4bit": True,
    "lr_scheduler_type": "cosine",
    "model_name_or_path": "other",
    "model_revision": "v2",
    "output_dir": "elsewhere",
    "report_to": ["wandb"],
    "reward_funcs": ["r.py:right"],
    "use_vllm": True,
    "num_generations": 4,
    "actor.gradient_checkpointing_enable": True,
    "actor.model_name_or_path": "other",
    "algo.advantage.estimator": "rloo",
    "ckpt.output_dir": "elsewhere",
    "data.max_len": 3000,
    "actor.eps_clip": 0.3,
    "rollout.batch_size": 2048,
}
BASE = {
    "verl": {"algorithm.adv_estimator": "grpo", f"{MODEL}.path": "m", "data.train_files": "/d/t.parquet"},
    "TRL": {"model_name_or_path": "m", "dataset_name": "d"},
    "OpenRLHF": {"actor.model_name_or_path": "m", "data.prompt_dataset": "d", "algo.advantage.estimator": "group_norm"},
}


def settings(framework, options, kind):
    if framework == "verl":
        found = migrate_verl(Launch("ppo", "verl.trainer.main_ppo", options))
    elif framework == "TRL":
        found = migrate_trl(kind, options, [])
    else:
        words = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items())
        found = migrate_openrlhf(f"python3 -m openrlhf.cli.train_ppo_ray {words}", {})
    return {key: line.value for key, line in found.settings.items()}


@pytest.mark.parametrize(
    ("framework", "option"), [(name, option) for name, table in TABLES.items() for option in table]
)
def test_an_option_changes_the_keys_of_the_table(framework, option):
    keys = TABLES[framework][option]
    changed = set()
    for kind in KINDS.get(option, ("grpo",)) if framework == "TRL" else ("rl",):
        base = BASE[framework] | GIVEN.get(option, {})
        before = settings(framework, base, kind)
        after = settings(framework, base | {option: VALUES.get(option, 7)}, kind)
        changed |= {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert [key for key in keys if any(one == key or one.startswith(f"{key}.") for one in changed)], changed


def test_errors_find_every_option_by_its_last_part():
    for table in (VERL, TRL, OPENRLHF):
        for option, keys in table.items():
            leaf = option.rpartition(".")[2]
            assert leaf in ("name", "path") or set(keys) <= set(KEYS[leaf])
