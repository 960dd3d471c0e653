"""Names of OpenRLHF's options before 0.10, which had no dots, and what they are called now."""

from __future__ import annotations

from collections.abc import Mapping


def _each(section: str, names: str) -> dict[str, str]:
    return {name: f"{section}.{name}" for name in names.split()}


def _without(section: str, prefix: str, names: str) -> dict[str, str]:
    return {f"{prefix}{name}": f"{section}.{name}" for name in names.split()}


NAMES: Mapping[str, str] = {
    **_each("actor", "eps_clip eps_clip_low_high dual_clip policy_loss_type aux_loss_coef"),
    **_each("critic", "value_clip critic_pretrain critic_learning_rate"),
    **_each("ckpt", "save_steps save_hf_ckpt ckpt_path disable_ds_ckpt max_ckpt_mem load_checkpoint"),
    **_each("data", "max_samples max_len input_key label_key output_key chosen_key rejected_key apply_chat_template"),
    **_each("data", "input_template prompt_split dataset multiturn disable_fast_tokenizer"),
    **_each("dpo", "label_smoothing nll_loss_coef"),
    **_each("ds", "zero_stage adam_offload packing_samples ring_attn_size ring_head_stride load_in_4bit bf16 zpg"),
    **_each("ds", "overlap_comm grad_accum_dtype flash_attn deepcompile deepspeed_enable_sleep disable_trace_cache"),
    **_each("logger", "logging_steps"),
    **_each("rollout", "micro_rollout_batch_size n_samples_per_prompt temperature top_p vllm_generate_batch_size"),
    **_each("train", "max_epochs num_episodes seed agent_func_path async_queue_size colocate_actor_ref"),
    **_each("train", "colocate_critic_reward"),
    **_each("reward", "overlong_buffer_len overlong_penalty_factor"),
    **_each("vllm", "enforce_eager enable_prefix_caching"),
    **_without("vllm", "vllm_", "num_engines tensor_parallel_size gpu_memory_utilization enable_sleep"),
    **_without("vllm", "vllm_", "sync_backend sync_with_ray"),
    **_without("actor", "actor_", "num_nodes num_gpus_per_node init_on_gpu"),
    **_without("critic", "critic_", "num_nodes num_gpus_per_node"),
    **_without("ref", "ref_", "num_nodes num_gpus_per_node offload reward_offload"),
    **_without("reward", "reward_", "num_nodes num_gpus_per_node clip_range"),
    **_without("eval", "eval_", "steps dataset split temperature n_samples_per_prompt"),
    **_without("logger.wandb", "wandb_", "org group project run_name"),
    **_without("ds.lora", "lora_", "rank alpha dropout"),
    **_without("algo.kl", "kl_", "estimator target horizon"),
    "actor_learning_rate": "actor.adam.lr",
    "adam_betas": "adam.betas",
    "advantage_estimator": "algo.advantage.estimator",
    "async_train": "train.async_enable",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "colocate_all_models": "train.colocate_all",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "entropy_loss_coef": "actor.entropy_coef",
    "full_determinism": "train.full_determinism_enable",
    "gamma": "algo.advantage.gamma",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "generate_max_len": "rollout.max_new_tokens",
    "init_kl_coef": "algo.kl.init_coef",
    "l2": "adam.weight_decay",
    "lambd": "algo.advantage.lambd",
    "learning_rate": "adam.lr",
    "max_ckpt_num": "ckpt.max_num",
    "micro_train_batch_size": "train.micro_batch_size",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "normalize_reward": "reward.normalize_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "prompt_data": "data.prompt_dataset",
    "ref_pretrain": "ref.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "reward_pretrain": "reward.model_name_or_path",
    "rollout_batch_size": "rollout.batch_size",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "save_path": "ckpt.output_dir",
    "target_modules": "ds.lora.target_modules",
    "train_batch_size": "train.batch_size",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "train_split": "data.prompt_split",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "use_kl_loss": "algo.kl.use_loss",
    "use_tensorboard": "logger.tensorboard_dir",
    "use_wandb": "logger.wandb.key",
}
"""Old name -> name with dots. Others had and have no dots, or have no counterpart."""
