"""hone's names for keys and commands of verl, TRL, OpenRLHF and transformers, for errors about unknown names."""

from __future__ import annotations

from collections.abc import Mapping

_LR = ("actor.optimizer.lr",)
_GROUP = ("update.samples_per_prompt",)
_PROMPTS = ("update.prompts_per_step", "samples_per_step")
_KL = ("algorithm.kl.coef",)
_ANSWER = ("rollout.sampling.max_response_tokens",)
_STEPS = ("run.steps",)
_EPOCHS = ("run.epochs",)
_FOLDER = ("run.dir",)
_MODEL = ("model.path",)
_TOKENS = ("actor.max_tokens_per_microbatch",)
_CLIP = ("algorithm.loss.clip_low", "algorithm.loss.clip_high")

KEYS: Mapping[str, tuple[str, ...]] = {
    "actor_learning_rate": _LR,
    "adam_beta1": ("actor.optimizer.betas",),
    "adv_estimator": ("algorithm.advantage",),
    "advantage_estimator": ("algorithm.advantage",),
    "batch_size": _PROMPTS,
    "beta": ("loss.beta", *_KL),
    "bf16": ("actor.compute_dtype",),
    "clip_ratio": _CLIP,
    "clip_ratio_high": ("algorithm.loss.clip_high",),
    "clip_ratio_low": ("algorithm.loss.clip_low",),
    "cliprange": _CLIP,
    "custom_reward_function": ("reward.components",),
    "dataset": ("data.train.path",),
    "dataset_name": ("data.train.source",),
    "default_local_dir": _FOLDER,
    "early_stopping": ("run.stop_when",),
    "early_stopping_patience": ("run.stop_when.no_better_for",),
    "enable_gradient_checkpointing": ("actor.activation_checkpointing",),
    "entropy_coeff": ("algorithm.entropy_coef",),
    "eps_clip": _CLIP,
    "epsilon": _CLIP,
    "epsilon_high": ("algorithm.loss.clip_high",),
    "eval_steps": ("evaluation.every_steps",),
    "experiment_name": _FOLDER,
    "filter_overlong_prompts": ("data.train.too_long",),
    "fp16": ("actor.compute_dtype",),
    "fsdp_size": ("actor.backend.parallel",),
    "gamma": ("algorithm.advantage.gamma",),
    "generate_max_len": _ANSWER,
    "gpu_memory_utilization": ("rollout.engine",),
    "gradient_accumulation_steps": _TOKENS,
    "gradient_checkpointing": ("actor.activation_checkpointing",),
    "init_kl_coef": _KL,
    "kl_coef": _KL,
    "kl_loss_coef": _KL,
    "kl_loss_type": ("algorithm.kl.kind",),
    "kl_penalty": ("algorithm.kl.kind",),
    "lam": ("algorithm.advantage.lam",),
    "learning_rate": _LR,
    "load_in_4bit": ("actor.lora.quantise",),
    "log_prob_micro_batch_size_per_gpu": _TOKENS,
    "lora_alpha": ("actor.lora.alpha",),
    "lora_r": ("actor.lora.rank",),
    "lora_rank": ("actor.lora.rank",),
    "loss_agg_mode": ("algorithm.aggregation.mode",),
    "lr": _LR,
    "lr_scheduler_type": ("actor.schedule",),
    "lr_warmup_steps": ("actor.schedule.warmup_steps",),
    "lr_warmup_steps_ratio": ("actor.schedule.warmup_fraction",),
    "max_completion_length": _ANSWER,
    "max_grad_norm": ("actor.max_grad_norm",),
    "max_length": ("data.train.max_sample_tokens",),
    "max_new_tokens": _ANSWER,
    "max_prompt_length": ("data.train.max_prompt_tokens",),
    "max_response_length": _ANSWER,
    "max_skipped_steps": ("run.stop_when.skipped_steps",),
    "max_seq_length": ("data.train.max_sample_tokens",),
    "max_steps": _STEPS,
    "max_tokens": _ANSWER,
    "micro_batch_size": _TOKENS,
    "model_name": _MODEL,
    "model_name_or_path": _MODEL,
    "n": _GROUP,
    "n_gpus_per_node": ("runtime.backend",),
    "n_samples_per_prompt": _GROUP,
    "nnodes": ("runtime.backend",),
    "num_epochs": _EPOCHS,
    "num_generations": _GROUP,
    "num_iterations": ("update.epochs",),
    "num_mini_batches": ("update.minibatches",),
    "num_ppo_epochs": ("update.epochs",),
    "num_train_epochs": _EPOCHS,
    "output_dir": _FOLDER,
    "per_device_train_batch_size": _PROMPTS,
    "ppo_epochs": ("update.epochs",),
    "ppo_max_token_len_per_gpu": _TOKENS,
    "ppo_micro_batch_size_per_gpu": _TOKENS,
    "ppo_mini_batch_size": ("update.minibatches",),
    "pretrain": _MODEL,
    "prompt_key": ("data.train.columns",),
    "ref_model": ("reference.model",),
    "report_to": ("tracking.trackers",),
    "logger": ("tracking.trackers",),
    "reward_funcs": ("reward.components",),
    "reward_function": ("reward.components",),
    "reward_model": ("reward.components",),
    "rollout_batch_size": _PROMPTS,
    "rollout_is": ("algorithm.correction.weights",),
    "save_freq": ("checkpoint.every_steps",),
    "save_steps": ("checkpoint.every_steps",),
    "save_total_limit": ("checkpoint.keep",),
    "seed": ("run.seed",),
    "temperature": ("rollout.sampling.temperature",),
    "tensor_model_parallel_size": ("rollout.tensor_parallel",),
    "test_freq": ("evaluation.every_steps",),
    "top_p": ("rollout.sampling.top_p",),
    "total_epochs": _EPOCHS,
    "total_training_steps": _STEPS,
    "train_batch_size": _PROMPTS,
    "train_files": ("data.train.path",),
    "ulysses_sequence_parallel_size": ("actor.backend.parallel",),
    "use_kl_loss": _KL,
    "use_vllm": ("rollout.backend",),
    "val_files": ("evaluation.sets",),
    "vllm_gpu_memory_utilization": ("rollout.engine",),
    "warmup_ratio": ("actor.schedule.warmup_fraction",),
    "weight_decay": ("actor.optimizer.weight_decay",),
}
"""Last part of a key -> keys of hone that mean the same or take its place. A kind of run has some of them."""

VALUES: Mapping[tuple[str, str], str] = {
    ("loss", "grpo"): "GRPO is algorithm.advantage=grpo with algorithm.loss=ppo, or algorithm.preset=grpo",
    ("loss", "rloo"): "RLOO is algorithm.advantage=rloo with algorithm.loss=ppo",
    ("advantage", "ppo"): "PPO is algorithm.advantage=gae with algorithm.loss=ppo and a critic",
    ("advantage", "dapo"): "DAPO is algorithm.preset=dapo",
    ("loss", "dapo"): "DAPO is algorithm.preset=dapo",
}
"""(last part of a key, value that others give it) -> what it is here."""

_PUSH = "a finished model is uploaded by `hone export RUN OUTPUT --push OWNER/NAME`"
_TRY = "`hone check RUN.yaml` tries a run file without training"
_CONTINUE = "the same command continues the run in run.dir from its last checkpoint"
INSTEAD: Mapping[str, str] = {
    "dry_run": _TRY,
    "hub_model_id": _PUSH,
    "push_to_hub": _PUSH,
    "resume": _CONTINUE,
    "resume_from_checkpoint": _CONTINUE,
    "resume_mode": _CONTINUE,
}
"""Key of another framework -> what one does instead of setting a key."""

COMMANDS: Mapping[str, str] = {
    "deploy": "serve",
    "dpo": "prefer",
    "evaluate": "eval",
    "finetune": "sft",
    "gkd": "distill",
    "grpo": "train",
    "infer": "generate",
    "kto": "prefer",
    "merge": "export",
    "orpo": "prefer",
    "ppo": "train",
    "reward": "reward-model",
    "rl": "train",
    "rloo": "train",
    "rm": "reward-model",
}
"""Command of another framework -> command of hone."""
