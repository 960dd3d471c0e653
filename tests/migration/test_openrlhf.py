"""Numbers of a run file that comes from a command of OpenRLHF, computed by hand from its definitions."""

import pytest

pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")

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


def test_a_script_without_a_trainer_is_refused():
    with pytest.raises(ConfigError, match="starts no trainer of OpenRLHF"):
        migrate_openrlhf("echo", {})
