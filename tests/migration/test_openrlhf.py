"""Numbers of a run file that comes from a command of OpenRLHF, computed by hand from its definitions."""

import pytest

pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")

from hone.cli.main import main
from hone.composition import ConfigError, from_yaml
from hone.migration.openrlhf.reader import migrate_openrlhf
from hone.migration.page import run_file


def test_a_ray_run():
    migration = migrate_openrlhf(
        "ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray "
        "--actor.model_name_or_path m --data.prompt_dataset org/prompts --data.input_key question "
        "--data.label_key answer "
        "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256 --algo.kl.init_coef 1e-3 "
        "--algo.kl.use_loss --algo.kl.estimator k3 --algo.advantage.estimator group_norm "
        "--actor.eps_clip_low_high 0.2 0.3 "
        "--vllm.num_engines 4 --vllm.tensor_parallel_size 2 --rollout.max_new_tokens 1024 --data.max_len 1536 "
        "--actor.adam.lr 5e-7 --reward.model_name_or_path rm --train.async_enable --train.partial_rollout_enable "
        "--ds.ring_attn_size 2 --ds.zero_stage 3 --what.is_this 5",
        {},
    )
    run = from_yaml(run_file(migration, "x"))
    assert run["update"] == {
        "prompts_per_step": 128,
        "samples_per_prompt": 8,
        "minibatches": 4,
        "epochs": 1,
    }  # 1024/256
    assert run["algorithm"]["advantage"] == {"name": "grpo", "scale_by": "group"}
    assert run["algorithm"]["kl"] == {"where": "in_loss", "kind": "k3", "coef": 0.001}
    assert run["algorithm"]["loss"] == {"name": "ppo", "clip_low": 0.2, "clip_high": 0.3}
    assert run["rollout"]["replicas"] == 4
    assert run["data"]["train"]["max_prompt_tokens"] == 512  # 1536 - 1024
    assert run["data"]["train"]["columns"] == {"prompt": "question", "ground_truth": "answer"}
    assert run["reward"]["components"] == {"model": {"model": {"path": "rm"}}}
    assert run["asynchrony"] == {"staleness": 1, "new_weights": "recompute"}
    assert run["actor"]["backend"]["parallel"] == {"sequence": 2}
    assert run["actor"]["schedule"] == {"name": "cosine", "warmup_fraction": 0.03, "min_ratio": 0.1}  # its defaults
    assert migration.unknown == {"what.is_this": 5}


def test_names_without_dots_are_those_before_0_10():
    migration = migrate_openrlhf(
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data org/prompts --input_key question "
        "--rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 256 --micro_train_batch_size 4 "
        "--prompt_max_len 300 --generate_max_len 700 --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 "
        "--advantage_estimator reinforce_baseline --eps_clip_low_high 0.2 0.3 --vllm_num_engines 4 "
        "--actor_learning_rate 5e-7 --l2 0.1 --reward_pretrain rm --async_train --zero_stage 3 --packing_samples "
        "--flash_attn --gradient_checkpointing --colocate_all_models --save_path out --use_wandb key "
        "--gradient_checkpointing_use_reentrant --normalize_reward",
        {},
    )
    run = from_yaml(run_file(migration, "x"))
    assert run["update"] == {"prompts_per_step": 128, "samples_per_prompt": 8, "minibatches": 4, "epochs": 1}
    assert run["algorithm"]["advantage"] == {"name": "reinforce_pp_baseline"}
    assert run["algorithm"]["kl"] == {"where": "in_loss", "kind": "k3", "coef": 0.001}
    assert run["data"]["train"]["max_prompt_tokens"] == 300
    assert run["rollout"]["sampling"]["max_response_tokens"] == 700
    assert run["actor"]["optimizer"]["lr"] == 5e-7
    assert run["actor"]["optimizer"]["weight_decay"] == 0.1
    assert run["run"]["dir"] == "out"
    assert migration.unknown == {}


@pytest.mark.parametrize(
    ("options", "backend", "decided"),
    [
        (
            "--vllm.num_engines 4 --vllm.tensor_parallel_size 2",
            {"name": "ray", "devices": 8, "nodes": 1, "pools": {"rollout": {"devices": 8, "nodes": 1}}},
            0,
        ),
        (
            "--vllm.num_engines 1 --actor.num_gpus_per_node 1",
            {"name": "ray", "devices": 1, "nodes": 1, "pools": {"rollout": {"devices": 1, "nodes": 1}}},
            0,
        ),
        (
            "--vllm.num_engines 6 --vllm.tensor_parallel_size 2",
            {"name": "ray", "devices": 8, "nodes": 1, "pools": {"rollout": {"devices": 6, "nodes": 2}}},
            0,
        ),
        (
            "--vllm.num_engines 1 --vllm.tensor_parallel_size 16",
            {"name": "ray", "devices": 8, "nodes": 1, "pools": {"rollout": {"devices": 8, "nodes": 2}}},
            0,
        ),
        ("--vllm.num_engines 9", {"name": "ray", "devices": 8, "nodes": 1}, 1),
        ("--vllm.num_engines 8 --train.colocate_all", {"name": "ray", "devices": 8, "nodes": 1}, 0),
        ("--vllm_num_engines 8 --colocate_all_models", {"name": "ray", "devices": 8, "nodes": 1}, 0),
        (  # an asynchronous run shares the devices of the other roles only
            "--vllm.num_engines 8 --train.colocate_all --train.async_enable",
            {"name": "ray", "devices": 8, "nodes": 1, "pools": {"rollout": {"devices": 8, "nodes": 1}}},
            0,
        ),
    ],
)
def test_servers_have_devices_of_their_own_unless_all_roles_share(tmp_path, options, backend, decided):
    migration = migrate_openrlhf(
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset d "
        f"--reward.model_name_or_path rm {options}",
        {},
    )
    page = run_file(migration, "x")
    assert from_yaml(page)["runtime"]["backend"] == backend
    assert len(migration.undecided()) == decided
    (tmp_path / "run.yaml").write_text(page)
    assert main(["config", str(tmp_path / "run.yaml")]) == 0


def test_a_preference_loss_with_smoothing_and_likelihood():
    migration = migrate_openrlhf(
        "deepspeed --module openrlhf.cli.train_dpo --model.model_name_or_path m --data.dataset org/pairs "
        "--dpo.label_smoothing 0.2 --dpo.nll_loss_coef 0.5",
        {},
    )
    found = {key: line.value for key, line in migration.settings.items() if key.startswith("loss.")}
    assert found == {"loss.name": "cdpo", "loss.label_smoothing": 0.2, "loss.beta": 0.1}
    assert migration.undecided() == [
        "dpo.nll_loss_coef=0.5: set loss: combined, with the parts cdpo and sft and their weights"
    ]


COMMAND = (
    "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset rows.jsonl "
    "--train.batch_size 64"
)


def test_another_reference_model_is_kept():
    for name in ("ref.model_name_or_path", "ref_pretrain"):
        command = f"deepspeed --module openrlhf.cli.train_dpo --model.model_name_or_path m --data.dataset d --{name} "
        assert from_yaml(run_file(migrate_openrlhf(command + "other", {}), "x"))["reference"] == {
            "model": {"path": "other"}
        }
        assert "reference" not in from_yaml(run_file(migrate_openrlhf(command + "m", {}), "x"))


def test_columns_of_a_supervised_run():
    command = "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d "
    for options, columns in (
        ("--data.input_key question --data.output_key answer", {"prompt": "question", "completion": "answer"}),
        ("--data.output_key answer", {"prompt": "input", "completion": "answer"}),
        ("--data.input_key talk", {"messages": "talk"}),
    ):
        run = from_yaml(run_file(migrate_openrlhf(command + options, {}), "x"))
        assert run["data"]["train"]["columns"] == columns


def test_a_second_trainer_of_a_script_is_noted():
    command = "python3 -m openrlhf.cli.train_{} --model.model_name_or_path m --data.dataset d\n"
    migration = migrate_openrlhf(command.format("sft") + command.format("rm"), {})
    assert "the script starts 2 trainers; this is the first: sft" in migration.notes


def test_a_command_is_read_in_quotes_and_after_two_dashes(tmp_path, capsys):
    for place, words in enumerate(
        ([COMMAND, "RUN"], ["RUN", "--", *COMMAND.split()], ["RUN", "--", "bash", "-c", COMMAND])
    ):
        target = tmp_path / f"{place}.yaml"
        assert main(["migrate", "openrlhf", *[str(target) if word == "RUN" else word for word in words]]) == 0
        assert from_yaml(target.read_text())["samples_per_step"] == 64
    assert "hone train" not in capsys.readouterr().err.partition("to run it: hone sft")[0]
    assert main(["migrate", "openrlhf", "--", *COMMAND.split()]) == 0  # printed
    assert "# From a command of openrlhf" in capsys.readouterr().out
    assert main(["migrate", "openrlhf", "echo nothing"]) == 2
    assert "the command: the script starts no trainer of OpenRLHF" in capsys.readouterr().err


def test_a_script_without_a_trainer_is_refused():
    with pytest.raises(ConfigError, match="starts no trainer of OpenRLHF"):
        migrate_openrlhf("echo", {})
