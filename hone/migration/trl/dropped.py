"""Options of TRL without a counterpart: those that can be dropped, and those that need a decision."""

from __future__ import annotations

from collections.abc import Mapping

_ALWAYS = "hone always does this"
_LOGS = "hone writes this to the run folder, or shows it in the report"
_SERVER = "hone starts its servers itself"
_BATCH = "hone packs by tokens: actor.max_tokens_per_microbatch"


def _each(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


DROPPED: Mapping[str, str] = {
    **_each(
        "packing padding_free eval_packing packing_strategy pad_to_multiple_of pad_token ds3_gather_for_generation",
        _ALWAYS,
    ),
    **_each(
        "remove_unused_columns dataloader_num_workers dataloader_pin_memory dataloader_drop_last dataset_num_proc "
        "dataset_kwargs dataloader_prefetch_factor dataloader_persistent_workers",
        "rows are read as they are needed",
    ),
    **_each(
        "logging_steps logging_strategy logging_first_step log_completions log_unique_prompts log_multimodal "
        "num_completions_to_print log_level disable_tqdm include_num_input_tokens_seen logging_dir",
        _LOGS,
    ),
    **_each("run_name project trackio_space_id", "a run is named after its folder"),
    **_each(
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
        "vllm_model_impl vllm_enable_sleep_mode vllm_mode",
        _SERVER,
    ),
    **_each(
        "per_device_eval_batch_size eval_accumulation_steps auto_find_batch_size use_liger_kernel use_liger_loss "
        "group_by_length",
        _BATCH,
    ),
    **_each(
        "attn_implementation use_cache cache_implementation use_transformers_paged "
        "use_transformers_continuous_batching transformers_continuous_batching_config",
        "hone has packed attention for every model",
    ),
    **_each("gradient_checkpointing_kwargs", "hone chooses the form of recomputation"),
    **_each("bf16_full_eval fp16_full_eval tf32 torch_compile half_precision_backend", "a detail of TRL's trainer"),
    **_each(
        "save_strategy save_only_model save_safetensors save_on_each_node load_best_model_at_end "
        "metric_for_best_model greater_is_better",
        "checkpoint.keep_best keeps the best one; a checkpoint always has everything",
    ),
    **_each(
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo log_completions_hub_repo",
        "hone export writes the folder to upload",
    ),
    **_each(
        "do_train do_eval eval_strategy evaluation_strategy eval_on_start eval_delay",
        "held-out sets are measured at start and end",
    ),
    **_each("lora_task_type lora_bias peft.inference_mode lora_target_parameters", "hone's adapter has no such option"),
    **_each("processing_class tokenizer", "the tokenizer is the model's; model.tokenizer names another"),
    **_each(
        "ddp_find_unused_parameters ddp_timeout ddp_backend ddp_bucket_cap_mb local_rank deepspeed fsdp fsdp_config",
        "ranks shard as actor.backend says",
    ),
    **_each("dtype torch_dtype", "actor.compute_dtype is bfloat16 where the device has it"),
    **_each("disable_dropout", "model.use.dropout is 0 here"),
    **_each("precompute_ref_log_probs precompute_ref_batch_size", "reference.logprobs is precomputed by default"),
    **_each("truncation_mode", "hone cuts the end of a supervised sample, and never a prompt"),
    **_each("data_seed full_determinism", "run.seed is the seed of everything"),
    **_each(
        "max_inflight_tasks queue_maxsize request_timeout weight_sync_timeout heartbeat_stale_after_s "
        "fork_threshold_tokens ignore_data_skip",
        "the schedule bounds open answers and has deadlines of its own",
    ),
    **_each("num_generations_eval", "evaluation.sampling has its own answers"),
    **_each("dataset_train_split dataset_test_split dataset_streaming", "the data set's split was read"),
}
"""Option -> reason to drop it."""

DECISIONS: Mapping[str, str] = {
    "args": "the script makes the trainer's settings when it runs; migrate the command or the YAML that has them",
    "peft_config": "the script makes the adapter when it runs; set actor.lora",
    "config": "this file has more options, and is neither here nor beside the script: put it there and migrate again",
    "use_bias_correction_kl": "hone's KL has no importance weight",
    "repetition_penalty": "hone's sampling has no such penalty",
    "generation_kwargs": "see rollout.sampling, and rollout.engine for options of a server",
    "optim_args": "see actor.optimizer.options",
    "quantization_config": "set actor.lora.quantise to train an adapter on 4-bit weights",
    "rollout_worker": "set rollout.backend",
    "callbacks": "hone has no callbacks; metrics are in the run folder, trackers in tracking.trackers",
    "compute_metrics": "write a reward of weight 0, which is only logged",
    "environment_factory": "write an environment (docs/envs.md) and set episode.env",
    "rollout_func": "write an environment (docs/envs.md) and set episode.env",
    "tools": "write an environment with tools (docs/envs.md) and set episode.env",
    "max_tool_calling_iterations": "set episode.max_turns with an environment",
    "ref_model": "set reference.model",
    "data_collator": "hone packs rows itself; express what it does as templates of data.train",
    "formatting_func": "express it as a template: data.train.prompt_template, data.train.answer_template",
    "assistant_only_loss": "the loss covers the answers of a conversation in hone, here all tokens",
    "completion_only_loss": "the loss covers the answers; to learn the prompt too, put it into the answer",
    "loss_weights": "set loss: combined with parts and weights",
    "use_weighting": "hone has no WPO weights",
    "ld_alpha": "hone has no length desensitisation",
    "off_policy_mask_threshold": "see algorithm.correction.rejections",
    "multi_objective_aggregation": "normalize_then_sum is algorithm.advantage: gdpo",
    "use_adaptive_entropy": "hone's entropy_coef is constant",
    "resume_from_checkpoint": "hone cannot read TRL's checkpoints; export the model and set model.path",
    "neftune_noise_alpha": "hone adds no noise to embeddings",
    "label_smoothing_factor": "hone has no label smoothing in supervised training",
    "vllm_structured_outputs_regex": "hone does not constrain the sampling",
    "eos_token": "the tokenizer's end token is used; set model.tokenizer to a folder that has yours",
}
"""Option -> what has to be decided."""

OFF: Mapping[str, str] = _each(
    "accelerator_config activation_offloading args assistant_only_loss batch_eval_metrics bf16 "
    "bnb_4bit_quant_storage callbacks cast_lm_head_to_fp32 center_rewards_coefficient chat_template_kwargs "
    "chat_template_path completion_only_loss compute_metrics config data_collator "
    "dataloader_multiprocessing_context dataset_config dataset_name ddp_broadcast_buffers ddp_static_graph "
    "delta do_predict enable_jit_checkpoint environment_factory eos_token epsilon_high eval_steps "
    "eval_use_gather_object formatting_func fp16 generation_batch_size generation_kwargs hub_always_push "
    "hub_revision ignore_bias_buffers label_names label_smoothing_factor ld_alpha liger_kernel_config "
    "load_in_4bit load_in_8bit lora_modules_to_save lora_target_modules loss_weights lr_scheduler_kwargs "
    "mask_truncated_completions max_tool_calling_iterations min_p model_init_kwargs model_name_or_path "
    "multi_objective_aggregation neftune_noise_alpha normalize_advantages off_policy_mask_threshold optim_args "
    "optim_target_modules output_dir parallelism_config peft_config prediction_loss_only quantization_config "
    "ref_model repetition_penalty restore_callback_states_from_checkpoint resume_from_checkpoint "
    "reward_clip_range reward_weights rollout_func rollout_worker router_aux_loss_coef save_total_limit "
    "shuffle_dataset steps_per_generation sync_ref_model token_budget tools torch_compile_backend "
    "torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_static_space_id trust_remote_code "
    "use_adaptive_entropy use_bias_correction_kl use_bnb_nested_quant use_cpu use_dora use_peft use_rslora "
    "use_vllm use_weighting vllm_importance_sampling_cap vllm_importance_sampling_clip_min "
    "vllm_max_model_length vllm_structured_outputs_regex",
    "it is off or not set",
)
"""Option that None or False turns off, by TRL's defaults -> reason to drop it then."""
