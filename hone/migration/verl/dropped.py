"""Options of verl that hone does not need, by pattern, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from hone.migration.migration import Migration, plain

_BATCH = "hone packs by tokens: actor.max_tokens_per_microbatch"
_ALWAYS = "hone always does this"
_MEGATRON = "a kernel or layout choice of Megatron-Core; it does not change what is computed"
_REFERENCE = "the reference takes the actor's engine settings"
_SERVER = "a detail of verl's servers"
_LOGS = "hone writes this to the run folder, or shows it in the report"

PATTERNS: Mapping[str, str] = {
    "--config-name": "it names the group of settings, which was read",
    "*.use_dynamic_bsz": _ALWAYS,
    "*.log_prob_use_dynamic_bsz": _ALWAYS,
    "*.use_remove_padding": _ALWAYS,
    "*.balance_batch": _ALWAYS,
    "data.balance_dp_token": _ALWAYS,
    "data.pad_mode": _ALWAYS,
    "*.pad_to_length*": "hone pads nothing",
    "*micro_batch_size*": _BATCH,
    "*.log_prob_max_token_len_per_gpu": _BATCH,
    "*.forward_max_token_len_per_gpu": _BATCH,
    "*.infer_max_token_len_per_gpu": _BATCH,
    "*.max_num_batched_tokens": _SERVER,
    "*.use_fused_kernels": "hone computes log-probs in chunks and needs no fused head",
    "*.fused_kernel_options.*": "hone computes log-probs in chunks and needs no fused head",
    "*.use_liger": "hone has kernels of its own",
    "*.entropy_from_logits*": "hone computes entropy with the log-probs, in chunks (actor.logprob_chunk_tokens)",
    "*.entropy_checkpointing": "hone computes entropy with the log-probs, in chunks",
    "*.calculate_entropy": "hone logs the entropy of every step",
    "*.calculate_log_probs": "the rollout always records log-probs",
    "*.use_torch_compile": "it compiles verl's entropy; hone has actor.backend.compile for the layers",
    "*.tiled_mlp.*": "a memory option of verl's MLP; lower actor.max_tokens_per_microbatch if memory is short",
    "*.use_prefix_grouper": "hone shares the prompts of a group by itself",
    "*.use_shm": "hone reads the model where it is",
    "*.hf_config_path": "hone reads config.json next to the weights",
    "*.external_lib": "plug-ins are installed packages (docs/extend.md)",
    "*.override_config.attention_dropout": "model.use.dropout is 0 here",
    "*.override_config.*_pdrop": "model.use.dropout is 0 here",
    "*.override_config.attn_implementation": "hone has packed attention for every model",
    "*.attn_implementation": "hone has packed attention for every model",
    "*.mtp.*": "hone does not read heads for several tokens; an export does not have them",
    "actor_rollout_ref.rollout.mode": "servers are always asynchronous",
    "actor_rollout_ref.rollout.load_format": "weights always come from the trainer",
    "actor_rollout_ref.rollout.prompt_length": "the limit is data.train.max_prompt_tokens",
    "actor_rollout_ref.rollout.agent.*": "hone plays episodes without a pool of agent workers",
    "actor_rollout_ref.actor.checkpoint.*": "a checkpoint here always has model, optimizer and state",
    "critic.checkpoint.*": "a checkpoint here always has model, optimizer and state",
    "checkpoint.*": "a checkpoint here always has model, optimizer and state",
    "*.wrap_policy.*": "hone shards by layer",
    "*.reshard_after_forward": "hone reshards after the forward",
    "*.forward_prefetch": "FSDP2 prefetches by itself",
    "*.use_orig_params": "FSDP2 has no such option",
    "*.enable_full_shard": "hone shards over all ranks unless parallel.shard is set",
    "*.enable_fsdp_offload": "see actor.backend.offload",
    "*.mixed_precision.*": "actor.compute_dtype; gradients are reduced in float32",
    "*.fsdp_config.dtype": "actor.compute_dtype is bfloat16 where the device has it",
    "*.megatron.dtype": "actor.compute_dtype is bfloat16 where the device has it",
    "*.seed": "run.seed is the seed of everything",
    "*.data_loader_seed": "run.seed is the seed of everything",
    "*.actor.shuffle": "mini-batches are whole groups in draw order",
    "*.turbo_config.*": "options of fsdp_turbo, which hone does not have",
    "*.module_patches": "options of fsdp_turbo, which hone does not have",
    "*.fsdp_config.fsdp_size": "the engine shards over all its ranks",
    "*.use_mbridge": "hone converts weights by itself",
    "*.vanilla_mbridge": "hone converts weights by itself",
    "*.use_dist_checkpointing": "hone loads Hugging Face weights directly",
    "*.dist_checkpointing_path": "hone loads Hugging Face weights directly",
    "*.dist_checkpointing_prefix": "hone loads Hugging Face weights directly",
    "*.use_distributed_optimizer": _ALWAYS,
    "*.use_megatron_fsdp": _MEGATRON,
    "*.dynamic_context_parallel": _MEGATRON,
    "*.max_seqlen_per_dp_cp_rank": _MEGATRON,
    "*.optim.*dtype": "the optimizer state is in the dtype of the weights",
    "optim": "the group of optimizer options, which was read",
    "engine": "the group of engine options, which was read",
    "model_engine": "the group of engine options, which was read",
    "*.profiler.*": "hone profiles single steps: profile.steps",
    "global_profiler.*": "hone profiles single steps: profile.steps",
    "trainer.profile_interval": "hone profiles single steps: profile.steps",
    "trainer.log_val_generations": _LOGS,
    "trainer.rollout_data_dir": _LOGS,
    "trainer.validation_data_dir": _LOGS,
    "trainer.device": "hone finds the kind of device",
    "trainer.worker_env.*": "set environment variables where Ray starts",
    "trainer.use_legacy_worker_impl": "an internal choice of verl",
    "trainer.use_v1": "an internal choice of verl",
    "trainer.default_hdfs_dir": "hone writes to the file system",
    "ray_kwargs.*": "runtime.backend has Ray's address; environments of servers are rollout.python",
    "data.filter_overlong_prompts_workers": "rows are measured as they are read",
    "data.*num_workers": "rows are read as they are needed",
    "data.return_*": _ALWAYS,
    "data.trust_remote_code": "model.trust_remote_code",
    "data.val_batch_size": "held-out prompts are sent as servers are free",
    "data.gen_batch_size": "prompts are drawn as they are needed",
    "data.*_key": "the columns are those of verl's files",
    "data.image_patch_size": "the processor of the model knows it",
    "data.max_response_length": "rollout.sampling.max_response_tokens",
    "data.validation_shuffle": "held-out sets keep their order",
    "data.use_shm": "hone reads files where they are",
    "data.ignore_input_ids_mismatch": "hone renders conversations as a whole",
    "data.enable_thinking_default": "data.chat.options has the template's variables",
    "reward.num_workers": "reward.workers",
    "reward.reward_kwargs.*": "an option of the reward manager that is off here",
    "reward_model.*": "the reward model is off",
    "reward.reward_model.*": "the reward model is off",
    "reward.reward_manager.*": "reward functions are named in reward.components",
    "reward.custom_reward_function.*": "no own function is set",
    "custom_reward_function.*": "no own function is set",
    "transfer_queue.*": "a part of verl that hone does not have",
    "skip.*": "a debugging aid of verl",
    "hydra.*": "Hydra's own options",
}


GROUPS: tuple[tuple[str, str, str], ...] = (
    (
        "actor_rollout_ref.ref.",
        _REFERENCE,
        "strategy use_torch_compile optim.* profiler.* fsdp_config.* megatron.* veomni.* torchtitan.* automodel.* "
        "engine.* entropy_checkpointing rollout_n router_replay.* ulysses_sequence_parallel_size model.*",
    ),
    (
        "actor_rollout_ref.rollout.",
        _SERVER,
        "checkpoint_engine.custom_backend_module checkpoint_engine.engine_kwargs* disable_log_stats do_sample "
        "enable_sleep_mode layered_summon logprobs_mode moe_load_balance_metrics_interval moe_tensor_parallel_size "
        "multi_stage_wake_up over_sample_rate prometheus.* scheduling_policy skip_tokenizer_init "
        "standalone_gpu_memory_utilization trace.* limit_images engine_kwargs max_parallel_calls dtype",
    ),
    (
        "actor_rollout_ref.actor.",
        "a detail of verl's trainer",
        "rollout_n strategy use_rollout_log_probs torch_compile* fsdp_config.strategy fsdp_config.forward_only "
        "megatron.forward_only megatron.pad_bshd_to_minibatch_max megatron.dist_ckpt_optim_fully_reshardable "
        "megatron.distrib_optim_fully_reshardable_mem_efficient megatron.override_ddp_config* "
        "megatron.override_mcore_model_config* veomni.activation_gpu_limit veomni.basic_modules veomni.ckpt_manager "
        "veomni.*_implementation veomni.enable_reentrant veomni.force_use_huggingface veomni.forward_only "
        "veomni.init_device veomni.load_checkpoint_path veomni.mixed_precision torchtitan.activation_checkpoint "
        "torchtitan.attn_type torchtitan.data_parallel_* torchtitan.forward_only torchtitan.max_seq_len "
        "torchtitan.mixed_precision torchtitan.spmd_backend optim.override_optimizer_config",
    ),
    (
        "trainer.",
        "a detail of verl's trainer",
        "del_local_ckpt_after_load esi_redundant_time max_critic_ckpt_to_keep ray_wait_register_center_timeout "
        "v1.sync v1.*_async.num_warmup_batches v1.separate_async.hybrid_rollout.* v1.sampler.* v1.trainer_mode "
        "v1.separate_async.parameter_sync_step",
    ),
    (
        "async_training.",
        "a detail of verl's scheduler",
        "dynamic_schedule_* use_dynamic_resource_scheduling use_trainer_do_validate compute_prox_log_prob "
        "checkpoint_engine.* require_batches",
    ),
    (
        "critic.",
        "a detail of verl's critic",
        "enable fsdp.* grad_clip loss_agg_mode loss_scale_factor megatron.* model.* nccl_timeout rollout_n profiler.* "
        "optim.clip_grad strategy veomni.* torchtitan.*",
    ),
    (
        "engine.",
        "a detail of verl's engine",
        "strategy activation_checkpointing attention_backend_override backend_config.* distributed_strategy "
        "forward_only fsdp_size full_determinism impl_cfg.* model_dtype offload_policy use_torch_compile "
        "use_orig_params grad_offload param_offload optimizer_offload dtype",
    ),
    ("model.", "a detail of verl's model loader", "override_config lora.type tokenizer_path custom_chat_template"),
)
"""Prefix of options, the reason to drop them, and their names below it."""

_OPTIMIZER = "where the optimizer state lies and in which precision; hone has actor.backend.offload"
OPTIMIZER: Mapping[str, str] = {
    **dict.fromkeys(
        [
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "offload_fraction",
            "overlap_cpu_optimizer_d2h_h2d",
            "use_precision_aware_optimizer",
            "decoupled_weight_decay",
            "main_grads_dtype",
            "master_weights",
            "store_param_remainders",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
        ],
        _OPTIMIZER,
    ),
    **dict.fromkeys(
        [
            "optimizer",
            "optimizer_impl",
            "name",
            "decay_type",
            "eps",
            "use_checkpoint_opt_param_scheduler",
            "weight_decay_incr_style",
            "use_layer_wise_distributed_optimizer",
        ],
        "hone trains with AdamW unless actor.optimizer.name is set",
    ),
    **dict.fromkeys(
        [
            "min_lr_factor",
            "lr_min",
            "lr_start",
            "lr_decay_ratio",
            "init_lr_ratio",
            "lr_wsd_decay_steps",
            "lr_wsd_decay_style",
        ],
        "the schedule has no such part here",
    ),
}
"""Last part of an optimizer's option -> reason."""

KERNELS = frozenset(
    [
        "apply_dsa_kernel_fusion",
        "apply_rope_fusion",
        "attention_backend",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "context_parallel_algo",
        "context_parallel_size",
        "deallocate_pipeline_outputs",
        "dsa_indexer_use_sparse_loss",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "moe_enable_deepep",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_dtype",
        "moe_shared_expert_overlap",
        "moe_token_dispatcher_type",
        "persist_layer_norm",
        "recompute_modules",
        "tensor_model_parallel_size",
        "use_distributed_optimizer",
        "use_flash_attn",
        "use_fused_mhc",
        "use_fused_rmsnorm",
        "use_fused_swiglu",
        "use_naive_l2norm",
        "sequence_parallel",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
    ]
)
"""Options of Megatron's transformer that change speed or memory only, or that a reader takes."""

ARCHITECTURE = frozenset(["normalization", "swiglu", "multi_latent_attention", "max_position_embeddings"])
"""Options of Megatron's transformer that the model's config.json has."""

LOSSES: Mapping[str, str] = dict.fromkeys(
    ["tau_pos", "tau_neg", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"],
    "an option of a loss that this run does not use",
)
SWITCHES: Mapping[str, str] = {"qat": "enable", "disaggregation": "enabled", "sandbox_fusion": "url"}
"""Section -> the option that turns it on. The rest of a section that is off needs no counterpart."""

MUON = "the optimizer is not Muon"

_OFF = frozenset(("", "false", "0", "0.0", "none", "null", "{}", "[]"))

OFF = (
    "*.full_determinism",
    "*.loss_scale_factor",
    "*.router_replay.*_file",
    "*.ignore_eos",
    "*.quantization_config_file",
    "*.override_config",
    "*.override_optimizer_config",
    "*.override_transformer_config.fp8",
    "*.override_transformer_config.dsa_indexer_loss_coeff",
    "*.override_transformer_config.moe_router_bias_update_rate",
    "actor_rollout_ref.rollout.mtp",
    "actor_rollout_ref.rollout.qat",
    "data.custom_cls.name",
    "data.apply_chat_template_kwargs",
    "data.function_tool_path",
    "data.mm_processor_kwargs",
    "trainer.val_only",
)
"""Options that need no counterpart if they are off or not set."""

_OPTIMIZER_NAME = "set actor.optimizer.name, or critic.engine.optimizer.name; the file trains with AdamW"
_CRITIC = "hone trains the critic on the actor's mini-batches with the actor's aggregation, and all of its weights"
ONLY: Mapping[str, tuple[str, str]] = {
    "actor_rollout_ref.actor.optim.optimizer": ("adam adamw", _OPTIMIZER_NAME),
    "critic.optim.optimizer": ("adam adamw", _OPTIMIZER_NAME),
    "optim.optimizer": ("adam adamw", _OPTIMIZER_NAME),
    "*.lr_wsd_decay_steps": ("off", "the length of the decay is another here; see the schedule wsd"),
    "*.num_cycles": ("0.5", "hone's cosine is half a cycle"),
    "actor_rollout_ref.model.mtp.enable_train": ("off", "hone trains no heads for several tokens"),
    "*.override_config.*dropout": ("off", "hone trains without dropout unless model.use.dropout is set"),
    "actor_rollout_ref.rollout.do_sample": ("true", "verl's answers are greedy; set rollout.sampling.temperature"),
    "data.video_key": ("videos", "hone reads the column videos"),
    "trainer.v1.sampler.custom_sampler.path": ("off", "a sampler of one's own is code, which has no counterpart"),
    "trainer.v1.sampler.sync_refill_failed_groups": ("off", "hone never draws a new prompt for one that failed"),
    "critic.model.lora_rank": ("off", _CRITIC),
}
"""Option that may be dropped at its usual value only -> that value, and what to decide at another."""


def drop_the_rest(migration: Migration) -> None:
    """Drop every option that is left and is known to need no counterpart. Others stay unknown."""
    for name, value in migration.unknown.items():
        wrong = next(
            (said for pattern, (usual, said) in ONLY.items() if fnmatchcase(name, pattern) and not _is(value, usual)),
            "",
        )
        reason = _reason(name, value) or _switched_off(name, migration)
        if wrong:
            migration.decide(f"{name}={plain(value)}: {wrong}", name)
        elif reason:
            migration.drop(name, reason)


def _is(value: Any, usual: str) -> bool:
    return str(value).strip().lower() in (_OFF if usual == "off" else usual.split())


def _reason(name: str, value: Any) -> str:
    """Reason to drop an option; empty if it is not known."""
    parts = name.split(".")
    if "override_transformer_config" in parts[:-1]:
        if parts[-1] in KERNELS:
            return _MEGATRON
        if parts[-1] in ARCHITECTURE:
            return "config.json of the model says it"
    elif ("optim" in parts or "override_optimizer_config" in parts) and parts[-1] in OPTIMIZER:
        return OPTIMIZER[parts[-1]]
    for pattern, reason in PATTERNS.items():
        if fnmatchcase(name, pattern):
            return reason
    for prefix, reason, leaves in GROUPS:
        if name.startswith(prefix) and any(fnmatchcase(name.removeprefix(prefix), leaf) for leaf in leaves.split()):
            return reason
    known = any(fnmatchcase(name, pattern) for pattern in OFF)
    return "it is off or not set" if known and str(value).strip().lower() in _OFF else ""


def _switched_off(name: str, migration: Migration) -> str:
    """Reason to drop an option of a section, a loss, a filter or an optimizer that is not used."""
    *path, last = name.split(".")
    if last in LOSSES:
        return LOSSES[last]
    if last.startswith("muon_") and str(migration.options.get(".".join([*path, "optimizer"]), "adam")) != "muon":
        return MUON
    if "pf_ppo" in path or last == "norm_adv_by_std_in_grpo":
        return "an option of an algorithm that this run does not use"
    for section, switch in SWITCHES.items():
        if section in path:
            base = ".".join(path[: path.index(section) + 1])
            if str(migration.options.get(f"{base}.{switch}", "")).strip().lower() in _OFF:
                return f"{base} is off"
    return ""
