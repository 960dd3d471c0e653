"""hone's names for keys and commands of verl, TRL, OpenRLHF and transformers, for errors about unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
_LOW, _HIGH = "algorithm.loss.clip_low", "algorithm.loss.clip_high"
_CHECKPOINTING = ("actor.activation_checkpointing",)
_SAVE = ("checkpoint.every_steps",)
_EVALUATE = ("evaluation.every_steps",)
_TRACKERS = ("tracking.trackers",)
_DEVICES = ("runtime.backend",)
_PARALLEL = ("actor.backend.parallel",)
_ENGINE = ("rollout.engine",)
_SCHEDULE = ("actor.schedule",)
_REWARDS = ("reward.components",)

Options = Mapping[str, tuple[str, ...]]
"""Option of a framework, in full -> keys of hone that mean the same or take its place; a kind of run has some."""

VERL: Options = {
    "algorithm.adv_estimator": ("algorithm.advantage",),
    "algorithm.gamma": ("algorithm.advantage.gamma",),
    "algorithm.lam": ("algorithm.advantage.lam",),
    "algorithm.kl_ctrl.kl_coef": _KL,
    "algorithm.kl_penalty": ("algorithm.kl.kind",),
    "algorithm.rollout_correction.rollout_is": ("algorithm.correction.weights",),
    "actor_rollout_ref.actor.clip_ratio": (_LOW, _HIGH),
    "actor_rollout_ref.actor.clip_ratio_high": (_HIGH,),
    "actor_rollout_ref.actor.clip_ratio_low": (_LOW,),
    "actor_rollout_ref.actor.entropy_coeff": ("algorithm.entropy_coef",),
    "actor_rollout_ref.actor.grad_clip": ("actor.max_grad_norm",),
    "actor_rollout_ref.actor.kl_loss_coef": _KL,
    "actor_rollout_ref.actor.kl_loss_type": ("algorithm.kl.kind",),
    "actor_rollout_ref.actor.loss_agg_mode": ("algorithm.aggregation.mode",),
    "actor_rollout_ref.actor.optim.lr": _LR,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": _SCHEDULE,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ("actor.schedule.warmup_steps",),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": ("actor.schedule.warmup_fraction",),
    "actor_rollout_ref.actor.optim.weight_decay": ("actor.optimizer.weight_decay",),
    "actor_rollout_ref.actor.ppo_epochs": ("update.epochs",),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _TOKENS,
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("update.minibatches",),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _PARALLEL,
    "actor_rollout_ref.actor.use_kl_loss": _KL,
    "actor_rollout_ref.model.custom_chat_template": ("data.chat_template",),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _CHECKPOINTING,
    "actor_rollout_ref.model.lora_alpha": ("actor.lora.alpha",),
    "actor_rollout_ref.model.lora_rank": ("actor.lora.rank",),
    "actor_rollout_ref.model.path": _MODEL,
    "actor_rollout_ref.rollout.gpu_memory_utilization": _ENGINE,
    "actor_rollout_ref.rollout.n": _GROUP,
    "actor_rollout_ref.rollout.name": ("rollout.backend",),
    "actor_rollout_ref.rollout.temperature": ("rollout.sampling.temperature",),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ("rollout.tensor_parallel",),
    "actor_rollout_ref.rollout.top_p": ("rollout.sampling.top_p",),
    "custom_reward_function.path": _REWARDS,
    "data.filter_overlong_prompts": ("data.train.too_long",),
    "data.max_prompt_length": ("data.train.max_prompt_tokens",),
    "data.max_response_length": _ANSWER,
    "data.prompt_key": ("data.train.columns",),
    "data.shuffle": ("data.shuffle",),
    "data.tokenizer": ("model.tokenizer",),
    "data.train_batch_size": _PROMPTS,
    "data.train_files": ("data.train.path",),
    "data.val_files": ("evaluation.sets",),
    "trainer.default_local_dir": _FOLDER,
    "trainer.experiment_name": _FOLDER,
    "trainer.logger": _TRACKERS,
    "trainer.n_gpus_per_node": _DEVICES,
    "trainer.nnodes": _DEVICES,
    "trainer.save_freq": _SAVE,
    "trainer.test_freq": _EVALUATE,
    "trainer.total_epochs": _EPOCHS,
    "trainer.total_training_steps": _STEPS,
}

TRL: Options = {
    "adam_beta1": ("actor.optimizer.betas",),
    "adam_beta2": ("actor.optimizer.betas",),
    "beta": ("loss.beta", *_KL),
    "bf16": ("actor.compute_dtype",),
    "chat_template_path": ("data.chat_template",),
    "dataset_name": ("data.train.path", "data.train.source"),
    "entropy_coef": ("algorithm.entropy_coef",),
    "epsilon": (_LOW, _HIGH),
    "epsilon_high": (_HIGH,),
    "eval_steps": _EVALUATE,
    "gradient_accumulation_steps": (*_PROMPTS, *_TOKENS),
    "gradient_checkpointing": _CHECKPOINTING,
    "learning_rate": _LR,
    "load_in_4bit": ("actor.lora.quantise",),
    "lora_alpha": ("actor.lora.alpha",),
    "lora_r": ("actor.lora.rank",),
    "lr_scheduler_type": _SCHEDULE,
    "max_completion_length": _ANSWER,
    "max_grad_norm": ("actor.max_grad_norm",),
    "max_length": ("data.train.max_sample_tokens",),
    "max_prompt_length": ("data.train.max_prompt_tokens",),
    "max_steps": _STEPS,
    "model_name_or_path": _MODEL,
    "model_revision": ("model.revision",),
    "num_generations": _GROUP,
    "num_iterations": ("update.epochs",),
    "num_train_epochs": _EPOCHS,
    "output_dir": _FOLDER,
    "per_device_train_batch_size": _PROMPTS,
    "report_to": _TRACKERS,
    "reward_funcs": _REWARDS,
    "save_steps": _SAVE,
    "save_total_limit": ("checkpoint.keep",),
    "seed": ("run.seed",),
    "temperature": ("rollout.sampling.temperature",),
    "top_p": ("rollout.sampling.top_p",),
    "use_vllm": ("rollout.backend",),
    "vllm_gpu_memory_utilization": _ENGINE,
    "warmup_ratio": ("actor.schedule.warmup_fraction",),
    "warmup_steps": ("actor.schedule.warmup_steps",),
    "weight_decay": ("actor.optimizer.weight_decay",),
}

OPENRLHF: Options = {
    "actor.adam.lr": _LR,
    "actor.adam.weight_decay": ("actor.optimizer.weight_decay",),
    "actor.entropy_coef": ("algorithm.entropy_coef",),
    "actor.eps_clip": (_LOW, _HIGH),
    "actor.gradient_checkpointing_enable": _CHECKPOINTING,
    "actor.max_norm": ("actor.max_grad_norm",),
    "actor.model_name_or_path": _MODEL,
    "algo.advantage.estimator": ("algorithm.advantage",),
    "algo.advantage.gamma": ("algorithm.advantage.gamma",),
    "algo.advantage.lambd": ("algorithm.advantage.lam",),
    "algo.kl.init_coef": _KL,
    "ckpt.output_dir": _FOLDER,
    "ckpt.save_steps": _SAVE,
    "data.max_len": ("data.train.max_prompt_tokens", "data.train.max_sample_tokens", *_ANSWER),
    "ds.ring_attn_size": _PARALLEL,
    "rollout.batch_size": _PROMPTS,
    "rollout.max_new_tokens": _ANSWER,
    "rollout.n_samples_per_prompt": _GROUP,
    "rollout.temperature": ("rollout.sampling.temperature",),
    "train.max_tokens_per_gpu": _TOKENS,
    "train.num_episodes": _EPOCHS,
    "train.seed": ("run.seed",),
    "vllm.gpu_memory_utilization": _ENGINE,
    "vllm.tensor_parallel_size": ("rollout.tensor_parallel",),
}

TABLES: Mapping[str, Options] = {"verl": VERL, "TRL": TRL, "OpenRLHF": OPENRLHF}
"""Framework -> its options, for errors about unknown keys and for `hone.migration`."""

_COMMON: Options = {
    "actor_learning_rate": _LR,
    "advantage_estimator": ("algorithm.advantage",),
    "batch_size": _PROMPTS,
    "cliprange": (_LOW, _HIGH),
    "custom_reward_function": _REWARDS,
    "dataset": ("data.train.path",),
    "deepspeed": ("actor.backend",),
    "early_stopping": ("run.stop_when",),
    "early_stopping_patience": ("run.stop_when.no_better_for",),
    "eval_strategy": _EVALUATE,
    "evaluation_strategy": _EVALUATE,
    "expert_parallel": ("actor.backend.parallel.expert",),
    "fp16": ("actor.compute_dtype",),
    "fsdp_size": _PARALLEL,
    "generate_max_len": _ANSWER,
    "init_kl_coef": _KL,
    "log_prob_micro_batch_size_per_gpu": _TOKENS,
    "max_skipped_steps": ("run.stop_when.skipped_steps",),
    "max_seq_length": ("data.train.max_sample_tokens",),
    "max_tokens": _ANSWER,
    "micro_batch_size": _TOKENS,
    "model_name": _MODEL,
    "num_epochs": _EPOCHS,
    "num_mini_batches": ("update.minibatches",),
    "num_ppo_epochs": ("update.epochs",),
    "ppo_micro_batch_size_per_gpu": _TOKENS,
    "pipeline_parallel": ("actor.backend.parallel.pipeline",),
    "pretrain": _MODEL,
    "ref_model": ("reference.model",),
    "reward_function": _REWARDS,
    "reward_model": _REWARDS,
    "rollout_batch_size": _PROMPTS,
    "run_name": _FOLDER,
    "save_checkpoints": _SAVE,
    "sequence_parallel": ("actor.backend.parallel.sequence",),
    "tensor_parallel": ("actor.backend.parallel.tensor", "rollout.tensor_parallel"),
}
"""Further names, of older versions and of several frameworks."""

_AMBIGUOUS = frozenset({"name", "path"})  # last parts that many keys of hone have


def _by_last_part(tables: Iterable[Options]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for option, keys in (pair for table in tables for pair in table.items()):
        leaf = option.rpartition(".")[2]
        if leaf not in _AMBIGUOUS:
            found[leaf] = tuple(dict.fromkeys((*found.get(leaf, ()), *keys)))
    return found


KEYS: Options = _by_last_part((_COMMON, *TABLES.values()))
"""Last part of an option -> the keys that may be meant."""

_PAIRS = "is learnt from pairs of answers: hone prefer"
VALUES: Mapping[tuple[str, str], str] = {
    ("loss", "grpo"): "GRPO is algorithm.advantage=grpo with algorithm.loss=ppo, or algorithm.preset=grpo",
    ("loss", "rloo"): "RLOO is algorithm.advantage=rloo with algorithm.loss=ppo",
    ("advantage", "ppo"): "PPO is algorithm.advantage=gae with algorithm.loss=ppo and a critic",
    ("advantage", "dapo"): "DAPO is algorithm.preset=dapo",
    ("loss", "dapo"): "DAPO is algorithm.preset=dapo",
    **{
        ("loss", name): f"{name.upper()} {_PAIRS} RUN.yaml loss={name}"
        for name in ("dpo", "ipo", "simpo", "orpo", "kto")
    },
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


def keys_meant(name: str) -> tuple[str, ...]:
    """The keys of hone that another framework's `name` may mean: the whole of it (`run.name`), or its last part."""
    words = name.replace("-", "_").replace(" ", "_")
    return KEYS.get(words.replace(".", "_"), ()) or KEYS.get(words.rpartition(".")[2], ())


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
