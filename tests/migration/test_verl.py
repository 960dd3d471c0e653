"""Numbers of a run file that comes from a verl script, computed by hand from verl's definitions."""

import pytest

pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")

from hone.cli.main import main
from hone.composition import ConfigError, from_yaml
from hone.migration.page import run_file
from hone.migration.shell.holes import hole
from hone.migration.verl.command import Launch, launch_of_script, launch_of_yaml
from hone.migration.verl.reader import migrate_verl

SYNCHRONOUS = """
set -x
DATA=(data.train_files=/d/gsm8k/train.parquet data.val_files="['/d/gsm8k/test.parquet']" data.train_batch_size=512
  data.max_prompt_length=300 data.max_response_length=700 data.filter_overlong_prompts=True data.truncation='error')
ACTOR=(actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen3-4B} actor_rollout_ref.actor.optim.lr=2e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_kl_loss=True
  actor_rollout_ref.actor.kl_loss_coef=0.002 actor_rollout_ref.actor.kl_loss_type=low_var_kl
  actor_rollout_ref.actor.clip_ratio_high=0.28 +actor_rollout_ref.actor.fsdp_config.param_offload=True
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.use_dynamic_bsz=True)
ROLLOUT=(actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=5
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" \\
  trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.logger='["console","wandb"]' trainer.project_name=p \\
  trainer.experiment_name=e trainer.total_epochs=3 trainer.test_freq=5 trainer.save_freq=10 "$@"
"""

ASYNCHRONOUS = """
python -m verl.experimental.fully_async_policy.fully_async_main --config-name='fully_async_ppo_megatron_trainer.yaml' \\
  data.train_files=/d/math.parquet data.train_batch_size=0 data.gen_batch_size=1 algorithm.adv_estimator=grpo \\
  actor_rollout_ref.model.path=m actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.n=16 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \\
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 data.max_response_length=8192 \\
  rollout.total_rollout_steps=51200 rollout.nnodes=1 rollout.n_gpus_per_node=4 \\
  trainer.nnodes=1 trainer.n_gpus_per_node=4 async_training.staleness_threshold=0.5 \\
  async_training.require_batches=2 async_training.trigger_parameter_sync_step=4 async_training.partial_rollout=True
"""


def of_script(text, **variables):
    """The migration and the run file of a script."""
    migration = migrate_verl(launch_of_script(text, variables, []))
    return migration, from_yaml(run_file(migration, "x"))


def test_a_synchronous_run():
    migration, run = of_script(SYNCHRONOUS)
    assert run["update"] == {"prompts_per_step": 512, "samples_per_prompt": 5, "minibatches": 4}  # 512 / 128
    assert run["algorithm"]["kl"] == {"where": "in_loss", "kind": "k3", "coef": 0.002}
    assert run["algorithm"]["loss"] == {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert run["algorithm"]["aggregation"] == {"mode": "token_mean"}
    assert run["runtime"]["backend"] == {"name": "ray", "devices": 8, "nodes": 2}
    assert run["rollout"]["replicas"] == 8  # 16 devices / 2 of each server
    assert run["rollout"]["engine"] == {"mem_fraction_static": 0.6}  # SGLang's name
    assert run["rollout"]["sampling"]["max_response_tokens"] == 700
    assert run["actor"]["backend"] == {"name": "fsdp2", "parallel": {"sequence": 2}, "offload": True}
    assert run["actor"]["optimizer"]["lr"] == 2e-6
    assert run["actor"]["optimizer"]["weight_decay"] == 0.01  # verl's default, which is not hone's
    assert run["actor"]["activation_checkpointing"] is True  # on by default in verl
    assert run["data"]["train"]["columns"] == {"ground_truth": "reward_model.ground_truth"}
    assert (run["data"]["train"]["max_prompt_tokens"], run["data"]["train"]["too_long"]) == (300, "drop")
    assert run["run"] == {"dir": "runs/e", "epochs": 3}
    assert (run["evaluation"]["every_steps"], run["checkpoint"]["every_steps"]) == (5, 10)
    assert migration.unknown == {}
    assert migration.undecided() == []
    assert migration.dropped["actor_rollout_ref.actor.use_dynamic_bsz"] == "hone always does this"


def test_a_fully_asynchronous_run():
    migration, run = of_script(ASYNCHRONOUS)
    assert run["update"] == {"prompts_per_step": 256, "samples_per_prompt": 16, "minibatches": 8}  # 32 x 2 x 4; 2 x 4
    assert run["run"]["steps"] == 200  # 51,200 prompts / 256
    assert run["asynchrony"] == {"staleness": 1, "new_weights": "recompute"}
    assert run["algorithm"]["correction"] == {"old": "rollout"}
    assert run["algorithm"]["aggregation"] == {"mode": "seq_mean_token_sum_norm", "norm_tokens": 8192}
    assert run["actor"]["backend"] == {"name": "megatron", "parallel": {"tensor": 2, "sequence": True}}
    assert run["runtime"]["backend"]["pools"] == {"rollout": {"devices": 4, "nodes": 1}}
    assert run["rollout"]["replicas"] == 4
    assert any("staleness_threshold=0.5" in note for note in migration.notes)


V1 = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m "
    "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=1 actor_rollout_ref.rollout.nnodes=1 "
)


@pytest.mark.parametrize(
    ("options", "update", "asynchrony"),
    [
        (  # verl's own test of the mode
            "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.num_warmup_batches=1 "
            "trainer.v1.separate_async.parameter_sync_step=4 trainer.v1.sampler.max_off_policy_threshold=8",
            {"prompts_per_step": 4, "samples_per_prompt": 1, "minibatches": 4},
            {"staleness": 1, "new_weights": "recompute"},
        ),
        (
            "trainer.v1.trainer_mode=colocate_async trainer.v1.colocate_async.num_warmup_batches=5 "
            "trainer.v1.sampler.max_off_policy_threshold=3",
            {"prompts_per_step": 4, "samples_per_prompt": 1, "minibatches": 4},
            {"staleness": 2, "new_weights": "recompute"},
        ),
        (
            "trainer.v1.trainer_mode=colocate_async trainer.v1.sampler.max_off_policy_threshold=1",
            {"prompts_per_step": 4, "samples_per_prompt": 1, "minibatches": 4},
            None,
        ),
    ],
)
def test_modes_of_the_v1_trainer(options, update, asynchrony):
    _, run = of_script(V1 + options)
    assert run["update"] == update
    assert run.get("asynchrony") == asynchrony


def test_a_v1_batch_that_verl_refuses_is_a_decision():
    migration, _ = of_script(
        V1 + "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=2"
    )
    assert any("which verl refuses" in sentence for sentence in migration.undecided())


def test_explicit_weights_of_whole_sequences_are_a_decision():
    migration, _ = of_script(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo actor_rollout_ref.model.path=m "
        "algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.loss_type=reinforce "
        "algorithm.rollout_correction.rollout_is=sequence"
    )
    assert any("loss_type=reinforce with rollout_is=sequence" in sentence for sentence in migration.undecided())


@pytest.mark.parametrize(
    ("options", "section", "expected"),
    [
        ("algorithm.adv_estimator=rloo", "advantage", {"name": "rloo"}),
        (
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False",
            "advantage",
            {"name": "grpo", "scale_by": "none"},
        ),
        ("algorithm.adv_estimator=gae algorithm.lam=0.95", "advantage", {"name": "gae", "lam": 0.95}),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4 "
            "actor_rollout_ref.actor.clip_ratio_high=4e-4",
            "loss",
            {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2",
            "kl",
            {"where": "in_reward", "kind": "k1", "coef": 0.001, "adaptive": {"target": 0.2, "horizon": 10000}},
        ),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0",
            "correction",
            {"weights": "token", "truncate": 2.0},
        ),
        (
            "algorithm.rollout_correction.rollout_is=sequence "
            "algorithm.rollout_correction.rollout_is_threshold=0.5_4.0 "
            "algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2' "
            "algorithm.rollout_correction.rollout_rs_threshold='0.6_1.6,2.5'",
            "correction",
            {
                "weights": "sequence",
                "band": [0.5, 4.0],
                "rejections": [
                    {"statistic": "k1", "level": "token", "low": 0.6, "high": 1.6},
                    {"statistic": "k2", "level": "sequence_max", "high": 2.5},
                ],
            },
        ),
        ("algorithm.rollout_correction.bypass_mode=true", "correction", {"old": "rollout"}),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv actor_rollout_ref.actor.clip_ratio_c=9",
            "loss",
            {"name": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "truncate": 9.0},
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl actor_rollout_ref.actor.clip_ratio=0.07",
            "loss",
            {"name": "dppo_kl", "threshold": 0.07, "truncate": 3.0},
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=dro actor_rollout_ref.actor.policy_loss.dro_beta=0.3",
            "loss",
            {"name": "dro", "beta": 0.3},
        ),
        (
            "algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.loss_type=reinforce "
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3.0",
            "loss",
            {"name": "cispo", "clip_low": 1.0, "clip_high": 2.0},
        ),
        (
            "algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.loss_type=reinforce",
            "loss",
            {"name": "gpg"},
        ),
        (
            "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
            "algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=96 data.train_batch_size=32 "
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "dynamic_sampling",
            {"metric": "reward", "max_draws": 10, "oversample": 3.0},
        ),
        (
            "+reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=4096 "
            "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            "overlong",
            {"buffer_tokens": 4096, "factor": 0.5},
        ),
        (
            "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=2048 "
            "reward_model.overlong_buffer.penalty_factor=1.5",
            "overlong",
            {"buffer_tokens": 2048, "factor": 1.5},
        ),
    ],
)
def test_parts_of_the_algorithm(options, section, expected):
    estimator = "" if "adv_estimator" in options else "algorithm.adv_estimator=grpo "
    _, run = of_script(f"python3 -m verl.trainer.main_ppo {estimator}actor_rollout_ref.model.path=m {options}")
    assert run["algorithm"][section] == expected


A = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (f"{A}.use_dynamic_bsz=True {A}.ulysses_sequence_parallel_size=4", 65536),  # 16,384 of each of 4 devices
        (f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=3000", 4096),  # the longest sequence
        (f"{A}.ppo_max_token_len_per_gpu=3000 {A}.ppo_micro_batch_size_per_gpu=2", 8192),  # 2 sequences
    ],
)
def test_the_cap_of_a_micro_batch(options, tokens):
    _, run = of_script(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m "
        f"data.max_prompt_length=1024 data.max_response_length=3072 {options}"
    )
    assert run["actor"]["max_tokens_per_microbatch"] == tokens


PPO = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae actor_rollout_ref.model.path=m "


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        (f"{A}.optim.optimizer=AdamW", f"{A}.optim.optimizer=Adam8bit"),
        (f"{A}.optim.num_cycles=0.5", f"{A}.optim.lr_scheduler_type=cosine {A}.optim.num_cycles=2"),
        ("actor_rollout_ref.rollout.do_sample=True", "actor_rollout_ref.rollout.do_sample=False"),
        (
            "+actor_rollout_ref.model.override_config.attention_dropout=0",
            "actor_rollout_ref.model.override_config.attention_dropout=0.1",
        ),
        ("data.video_key=videos", "data.video_key=clips"),
        ("critic.ppo_epochs=1", "critic.ppo_epochs=3"),
        ("critic.model.lora_rank=0", "critic.model.lora_rank=8"),
    ],
)
def test_an_option_is_dropped_at_its_usual_value_only(usual, other):
    before, _ = of_script(PPO + usual)
    migration, _ = of_script(PPO + other)
    name, _, value = other.rpartition("=")
    name = name.rpartition(" ")[2]
    assert not any(f"{name}=" in sentence for sentence in before.undecided())
    assert any(sentence.startswith(f"{name}={value}") for sentence in migration.undecided())


def test_an_unknown_option_is_listed_even_if_it_is_off():
    migration, _ = of_script(f"{PPO} {A}.brand_new=0 +trainer.other=False trainer.val_only=False")
    assert migration.unknown == {f"{A}.brand_new": 0, "trainer.other": False}


def test_the_reference_and_the_critic_keep_settings_of_their_own():
    _, run = of_script(f"{PPO} {A}.use_kl_loss=True actor_rollout_ref.ref.model.path=other critic.grad_clip=0.3")
    assert run["reference"]["model"]["path"] == "other"
    assert run["critic"]["engine"]["max_grad_norm"] == 0.3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "the agent loop single_turn_agent without tools: write"),
        ("multi_turn.tool_config_path=null", "the agent loop single_turn_agent without tools: write"),
        ("multi_turn.tool_config_path=t.yaml", "the agent loop single_turn_agent with the tools of t.yaml: write"),
    ],
)
def test_turns_name_the_tools_that_they_have(options, said):
    rollout = "actor_rollout_ref.rollout."
    text = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m {rollout}multi_turn.enable=True "
    migration, _ = of_script(text + (rollout + options if options else ""))
    assert [one for one in migration.decisions if one.startswith(said)]


def test_what_a_script_may_set_by_a_part_that_is_not_read_is_to_be_decided(tmp_path, capsys):
    text = (
        'case "${DEVICE:-$(python3 -c x)}" in gpu) KL=(actor_rollout_ref.actor.use_kl_loss=True);; *) KL=();; esac\n'
        "LAUNCH=(python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m)\n"
        '"${LAUNCH[@]}" "${KL[@]}" $MORE "$@"\n'
    )
    migration, _ = of_script(text)
    assert [one.rpartition(": ")[2] for one in migration.decisions[:3]] == [
        "give --set DEVICE=VALUE",
        "add its options to the file",
        "give --set MORE=VALUE",
    ]
    migration, run = of_script(text, DEVICE="gpu", MORE="")
    assert run["algorithm"]["kl"]["where"] == "in_loss"
    assert not any("--set" in one for one in migration.undecided())
    script = tmp_path / "run.sh"
    script.write_text("if ls; then\npython3 -m verl.trainer.main_ppo a=1\nfi\n")
    assert main(["migrate", "verl", str(script)]) == 2
    assert "line 1: `if ls; then` depends on a condition" in capsys.readouterr().err


def test_a_supervised_run():
    _, run = of_script(
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=/d/a.parquet "
        "data.train_batch_size=96 "
        "data.max_length=2048 data.truncation=right data.messages_key=messages model.path=m optim.lr=1e-5 engine=fsdp "
        "optim.betas='[0.9,0.95]' optim.clip_grad=0.5 optim.lr_warmup_steps_ratio=0.2 optim.lr_scheduler_type=cosine "
        "engine.ulysses_sequence_parallel_size=2 trainer.total_epochs=2 trainer.n_gpus_per_node=8 trainer.save_freq=-1"
    )
    assert run["kind"] == "sft"
    assert run["samples_per_step"] == 96
    assert run["data"]["train"] == {"path": "/d/a.parquet", "max_sample_tokens": 2048, "too_long": "truncate"}
    assert run["actor"]["schedule"] == {"name": "cosine", "warmup_fraction": 0.2}
    assert run["actor"]["optimizer"]["betas"] == [0.9, 0.95]
    assert run["actor"]["max_grad_norm"] == 0.5
    assert run["actor"]["backend"]["parallel"] == {"sequence": 2}
    assert run["run"]["epochs"] == 2


@pytest.mark.parametrize(
    ("launcher", "devices", "nodes"),
    [
        ("torchrun --standalone --nnodes=1 --nproc_per_node=4", 4, 1),
        ("N=2; torchrun --nnodes $N --nproc-per-node $((N * 4)) --node_rank 0", 8, 2),
    ],
)
def test_the_processes_of_torchrun_are_the_devices(launcher, devices, nodes):
    _, run = of_script(f"{launcher} -m verl.trainer.sft_trainer data.train_files=/d/a.parquet model.path=m")
    assert run["runtime"]["backend"] == {"name": "ray", "devices": devices, "nodes": nodes}
    migration, _ = of_script("torchrun --nproc_per_node=$N -m verl.trainer.sft_trainer model.path=m")
    assert any(one.startswith("--nproc_per_node is $N") for one in migration.undecided())


def test_a_reward_model_with_an_own_function_is_to_be_decided():
    script = (
        "python3 -m verl.trainer.main_ppo data.train_files=/d/a.parquet actor_rollout_ref.model.path=m "
        "reward.custom_reward_function.path=r.py reward.reward_model.model_path=judge reward.reward_model.enable="
    )
    migration, _ = of_script(script + "True")
    assert [one for one in migration.decisions if "judge" in one]
    assert "reward.reward_model.enable" not in migration.dropped
    assert not [one for one in of_script(script + "False")[0].decisions if "judge" in one]


def test_settings_that_hydra_composed_are_read_too():
    launch = launch_of_yaml(
        "actor_rollout_ref: {model: {path: m}, rollout: {n: 4, name: vllm}, actor: {ppo_mini_batch_size: 16}}\n"
        "data: {train_batch_size: 64, train_files: [a.parquet, b.parquet]}\nalgorithm: {adv_estimator: gpg}\n"
        "critic: {enable: null}\ntrainer: {resume_from_path: null, save_freq: 5}\n"
    )
    migration = migrate_verl(launch)
    run = from_yaml(run_file(migration, "x"))
    assert run["update"] == {"prompts_per_step": 64, "samples_per_prompt": 4, "minibatches": 4}
    assert run["data"]["mix"]["b"]["path"] == "b.parquet"
    assert not any("resume_from_path" in sentence for sentence in migration.undecided())
    assert any("keeps every checkpoint" in note for note in migration.notes)
    assert any("weight" in sentence for sentence in migration.undecided())
    with pytest.raises(ConfigError, match="neither verl's section actor_rollout_ref"):
        launch_of_yaml("a: 1")


def test_values_that_name_other_options_are_resolved():
    launch = launch_of_yaml(
        "trainer: {project_name: p, experiment_name: e,\n"
        "  default_local_dir: 'x/${.project_name}/${trainer.experiment_name}'}\n"
        "actor_rollout_ref: {rollout: {n: 4}, actor: {rollout_n: '${oc.select:actor_rollout_ref.rollout.n,1}'}}\n"
        "critic: {ppo_epochs: '${oc.select:actor_rollout_ref.none,${oc.select:none,3}}', path: '${oc.env:HOME}'}\n"
        "a: {b: '${a.b}${a.b}'}"
    )
    assert launch.options["trainer.default_local_dir"] == "x/p/e"
    assert launch.options["actor_rollout_ref.actor.rollout_n"] == 4
    assert launch.options["critic.ppo_epochs"] == 3
    assert launch.options["critic.path"] == hole("${oc.env:HOME}")
    assert len(launch.options["a.b"]) < 100_000


def test_an_unknown_option_is_listed_with_its_value_and_never_guessed():
    migration, _ = of_script(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m actor_rollout_ref.rollout.new_thing=7 "
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_topk=4 algorithm.adv_estimator=magic"
    )
    assert migration.unknown == {
        "actor_rollout_ref.rollout.new_thing": 7,
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_topk": 4,
    }
    assert any("algorithm.adv_estimator=magic has no counterpart" in one for one in migration.undecided())


@pytest.mark.parametrize(("script", "values"), [(SYNCHRONOUS, (hole("$X"), "abc", -1)), (ASYNCHRONOUS, (None, 0, []))])
def test_no_value_of_an_option_breaks_the_migration(script, values):
    launch = launch_of_script(script, {}, [])
    for name in launch.options:
        for value in values:
            migration = migrate_verl(Launch(launch.kind, launch.module, {**launch.options, name: value}))
            assert from_yaml(run_file(migration, "x"))["kind"] == "rl"


def test_the_command_writes_a_file_that_loads_and_says_what_is_left(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(SYNCHRONOUS.replace("/d/gsm8k/train", "$DATA_DIR/gsm8k/train"))
    assert main(["migrate", "verl", str(script), str(tmp_path / "a.yaml")]) == 3
    said = capsys.readouterr().err
    assert "to decide: $DATA_DIR is known only when the script runs" in said
    assert "--set DATA_DIR=VALUE" in said
    assert main(["migrate", "verl", str(script), str(tmp_path / "b.yaml"), "--set", "DATA_DIR=/d"]) == 0
    said = capsys.readouterr().err
    for command in ("config", "check", "plan", "train"):
        assert f": hone {command} {tmp_path / 'b.yaml'}\n" in said
    assert main(["migrate", "verl", str(script), "--set", "DATA_DIR=/d"]) == 0
    assert "then hone config, hone check, hone plan" in capsys.readouterr().err
    assert main(["config", str(tmp_path / "b.yaml")]) == 0
    assert main(["migrate", "verl", str(script), str(tmp_path / "b.yaml")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["migrate", "verl", str(tmp_path / "none.sh")]) == 2
    assert main(["migrate", "vrel", str(script)]) == 2
    assert "did you mean 'verl'" in capsys.readouterr().err
    script.write_text("echo nothing")
    assert main(["migrate", "verl", str(script)]) == 2
    assert "starts no trainer of verl" in capsys.readouterr().err
