"""Devices, training engine, optimizer and memory of a verl run."""

from __future__ import annotations

from collections.abc import Mapping

from hone.migration.migration import Migration, number, plain

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"

ENGINES: Mapping[str, str] = {
    "fsdp": "fsdp2",
    "fsdp2": "fsdp2",
    "megatron": "megatron",
    "veomni": "veomni",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
}
SCHEDULES: Mapping[str, str] = {"constant": "constant", "cosine": "cosine", "linear": "linear", "WSD": "wsd"}
DTYPES: Mapping[str, str] = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
BUDGETS: Mapping[str, int] = {
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "data.max_token_len_per_gpu": 8192,
}
"""Option of a token budget -> verl's default."""


def read(migration: Migration) -> None:
    """Read how the policy, the critic and the reference are trained, and on what."""
    world = devices(migration, 8)
    engine = engine_name(migration, f"{ACTOR}.strategy", f"{ACTOR}.fsdp_config.strategy")
    if engine == "megatron":
        megatron(migration, f"{ACTOR}.megatron", "actor")
    else:
        sharded(migration, ACTOR, "actor", engine, world)
    model(migration, MODEL)
    memory(migration, ACTOR, "actor", f"{MODEL}.enable_gradient_checkpointing", f"{MODEL}.enable_activation_offload")
    budget(migration, "actor", f"{ACTOR}.ppo_max_token_len_per_gpu", _is_on(migration, f"{ACTOR}.use_dynamic_bsz"))
    optimizer(migration, f"{ACTOR}.optim", "actor", default_lr=1e-6)
    norm = migration.number(f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad", default=1.0)
    migration.put("actor.max_grad_norm", float(norm), f"grad_clip={norm}")
    lora(migration, MODEL)
    other = migration.text("actor_rollout_ref.ref.model.path")
    if "algorithm.kl.coef" in migration.settings and other not in ("", str(migration.options.get(f"{MODEL}.path"))):
        migration.put("reference.model.path", other, "actor_rollout_ref.ref.model.path")
    _critic(migration)
    _mixture(migration)
    timeout = migration.value("actor_rollout_ref.nccl_timeout")
    if timeout is not None:
        migration.put("runtime.collective_timeout_s", float(timeout), f"nccl_timeout={timeout}")


def devices(migration: Migration, default: int) -> int:
    """Set nodes and devices of the trainer; returns their product."""
    names = ("--nproc_per_node", "trainer.n_gpus_per_node"), ("--nnodes", "trainer.nnodes")  # torchrun's come first
    here, nodes = (int(migration.number(*both, default=one)) for both, one in zip(names, (default, 1), strict=True))
    if here * nodes > 1:
        said = [next((name for name in both if name in migration), both[1]) for both in names]
        migration.put("runtime.backend.name", "ray", "several devices")
        migration.put("runtime.backend.devices", here, f"{said[0]}={here}")
        migration.put("runtime.backend.nodes", nodes, f"{said[1]}={nodes}")
    return here * nodes


def engine_name(migration: Migration, *names: str) -> str:
    """Set the training engine; returns its name here."""
    group = migration.text("model_engine", "engine", default="")
    config = migration.text("--config-name")
    said = migration.text(*names, default="")
    said = said or (group if group not in ("", "dp") else "") or ("megatron" if "megatron" in config else "fsdp")
    if said not in ENGINES:
        migration.decide(f"the training engine {said} has no counterpart ({', '.join(sorted(set(ENGINES.values())))})")
    engine = ENGINES.get(said, "fsdp2")
    migration.put("actor.backend.name", engine, f"strategy {said}")
    return engine


def model(migration: Migration, base: str) -> None:
    """Set the model and how it is loaded."""
    path = migration.text(f"{base}.path")
    if path:
        migration.put("model.path", path, f"{base}.path")
    else:
        migration.decide(f"{base}.path is not set; set model.path")
    migration.copy(f"{base}.tokenizer_path", "model.tokenizer")
    if migration.truth(f"{base}.trust_remote_code"):
        migration.notes.append(
            "the script lets a model run code that comes with it; the file does not. Most models need none: set "
            "model.trust_remote_code=true if loading asks for it, and you trust the model"
        )
    for name in ("override_config", "override_config.model_config"):
        migration.copy(f"{base}.{name}.max_position_embeddings", "model.use.context", int)
    if migration.truth("actor_rollout_ref.actor.freeze_vision_tower"):
        migration.put("model.use.vision.freeze_tower", True, "actor.freeze_vision_tower=True")
    stored = migration.text(f"{ACTOR}.fsdp_config.model_dtype", "engine.model_dtype")
    if stored in DTYPES and DTYPES[stored] != "float32":
        migration.put("model.dtype", DTYPES[stored], f"fsdp_config.model_dtype={stored}")
        migration.notes.append(
            "model.dtype: bfloat16 stores the weights that the optimizer updates in 16 bits, as verl does here; "
            "float32 loses no small updates"
        )


def memory(migration: Migration, base: str, role: str, checkpointing: str, offloading: str) -> None:
    """Set recomputation of activations, and what waits in CPU memory."""
    recomputes = migration.truth(checkpointing, default=True)
    name = f"{base}.megatron.override_transformer_config"
    granularity = migration.text(f"{name}.recompute_granularity", default="null")
    if granularity == "selective":
        migration.put(f"{role}.activation_checkpointing", "selective", f"recompute_granularity={granularity}")
    elif granularity == "full" or recomputes:
        offload = migration.truth(offloading)
        migration.put(f"{role}.activation_checkpointing", "offload" if offload else True, "gradient checkpointing")
    for part in ("recompute_method", "recompute_num_layers"):
        migration.drop(f"{name}.{part}", "hone recomputes every layer")
    places = [
        f"{base}.{section}.{what}_offload"
        for section in ("fsdp_config", "megatron", "veomni", "torchtitan", "fsdp")
        for what in ("param", "optimizer", "grad")
    ]
    places += [f"{base}.fsdp_config.offload_policy"]
    given = [place for place in places if place in migration]
    taken = [migration.truth(place) for place in given]
    if any(taken):
        engine = "actor.backend" if role == "actor" else f"{role}.backend"
        migration.put(f"{engine}.offload", True, ", ".join(place.rpartition(".")[2] for place in given))


def sharded(migration: Migration, base: str, role: str, engine: str, world: int) -> None:
    """Set the parallel dimensions of FSDP2, VeOmni, torchtitan and Automodel."""
    sizes = {
        "sequence": (
            f"{base}.ulysses_sequence_parallel_size",
            f"{base}.fsdp_config.ulysses_sequence_parallel_size",
            f"{base}.veomni.ulysses_parallel_size",
            "engine.ulysses_sequence_parallel_size",
        ),
        "tensor": (f"{base}.torchtitan.tensor_parallel_size", f"{base}.automodel.tp_size", "engine.tp_size"),
        "expert": (
            f"{base}.veomni.expert_parallel_size",
            f"{base}.torchtitan.expert_parallel_size",
            f"{base}.automodel.ep_size",
            "engine.ep_size",
        ),
    }
    for key, names in sizes.items():
        size = int(migration.number(*names, default=1))
        if size > 1:
            migration.put(f"{role}.backend.parallel.{key}", size, f"{names[0]}={size}")
    group = int(
        migration.number(f"{base}.fsdp_config.fsdp_size", f"{base}.veomni.fsdp_size", "engine.fsdp_size", default=-1)
    )
    if 0 < group < world and world % group == 0 and engine in ("fsdp2", "veomni"):
        migration.put(f"{role}.backend.parallel.replicate", world // group, f"{world} devices / fsdp_size={group}")
        migration.put(f"{role}.backend.parallel.shard", group, f"fsdp_size={group}")
    if migration.truth(f"{base}.use_torch_compile", default=True) and f"{base}.use_torch_compile" in migration:
        migration.notes.append(
            "use_torch_compile compiles verl's entropy; hone has actor.backend.compile for the layers"
        )


def megatron(migration: Migration, base: str, role: str) -> None:
    """Set the parallel dimensions of Megatron-Core."""
    sizes = {
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "virtual_pipeline": "virtual_pipeline_model_parallel_size",
        "context": "context_parallel_size",
        "expert": "expert_model_parallel_size",
        "expert_tensor": "expert_tensor_parallel_size",
    }
    tensor = 1
    for key, name in sizes.items():
        size = int(migration.number(f"{base}.{name}", default=1) or 1)
        tensor = size if key == "tensor" else tensor
        if size > 1:
            migration.put(f"{role}.backend.parallel.{key}", size, f"{name}={size}")
    sequence = migration.truth(
        f"{base}.sequence_parallel", f"{base}.override_transformer_config.sequence_parallel", default=True
    )
    if tensor > 1 and sequence:
        migration.put(f"{role}.backend.parallel.sequence", True, "sequence_parallel")
    layout = [
        f"{base}.override_transformer_config.{name}"
        for name in (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    ]
    given = [name for name in layout if name in migration]
    if given:
        said = ", ".join(f"{name.rpartition('.')[2]}={migration.options[name]}" for name in given)
        migration.decide(f"{said}: set {role}.backend.parallel.layers, the number of layers of each stage", *given)


def _is_on(migration: Migration, name: str) -> bool:
    return str(migration.options.get(name)).lower() == "true"


def budget(migration: Migration, role: str, name: str, dynamic: bool) -> None:
    """Set the cap of a micro-batch in tokens.

    verl's budget is that of one device, and the devices that share a sequence add theirs. Without dynamic batches verl
    ignores it and takes a number of answers. No sequence is longer than the cap here.
    """
    size = 1
    for part in ("sequence", "context"):
        line = migration.settings.get(f"{role}.backend.parallel.{part}")
        size *= 1 if line is None or line.value is True else int(line.value)
    if name.startswith("data."):
        micro, longest = "data.micro_batch_size_per_gpu", int(migration.number("data.max_length", default=1024))
    else:
        micro = f"{name.rpartition('.')[0]}.ppo_micro_batch_size_per_gpu"
        longest = sum(int(migration.number(f"data.max_{part}_length", default=512)) for part in ("prompt", "response"))
    tokens = int(migration.number(name, default=BUDGETS[name])) * size
    source = f"{name}={tokens // size} x {size} devices of a sequence"
    answers = migration.options.get(micro)
    if not dynamic and answers not in (None, "null", "None"):
        rows = migration.count(micro, default=1)
        tokens, source = rows * longest, f"{micro}={rows} x {longest} tokens; verl ignores its budget"
    if tokens < longest:
        tokens, source = longest, f"{source}; the longest sequence has {longest}"
    migration.put(f"{role}.max_tokens_per_microbatch", tokens, source)


def optimizer(migration: Migration, base: str, role: str, default_lr: float) -> None:
    """Set learning rate, schedule and weight decay."""
    rate = migration.number(f"{base}.lr", default=default_lr)
    migration.put(f"{role}.optimizer.lr", float(rate), f"{base}.lr={rate}")
    decay = migration.number(f"{base}.weight_decay", default=0.01)
    migration.put(f"{role}.optimizer.weight_decay", float(decay), f"{base}.weight_decay={decay}")
    betas = migration.value(f"{base}.betas")
    if isinstance(betas, list) and len(betas) == 2:
        migration.put(f"{role}.optimizer.betas", [float(beta) for beta in betas], f"{base}.betas")
    said = migration.text(
        f"{base}.lr_scheduler_type",
        f"{base}.lr_decay_style",
        f"{base}.lr_scheduler",
        f"{base}.warmup_style",
        default="constant",
    )
    schedule = SCHEDULES.get(said)
    if schedule is None:
        migration.decide(f"{base}: the schedule {said} has no counterpart ({', '.join(SCHEDULES.values())})")
        schedule = "constant"
    migration.put(f"{role}.schedule.name", schedule, f"schedule {said}")
    steps = int(migration.number(f"{base}.lr_warmup_steps", default=-1))
    share = float(migration.number(f"{base}.lr_warmup_steps_ratio", default=0.0))
    if steps > 0:
        migration.put(f"{role}.schedule.warmup_steps", steps, f"lr_warmup_steps={steps}")
    elif share > 0:
        migration.put(f"{role}.schedule.warmup_fraction", share, f"lr_warmup_steps_ratio={share}")
    floor = migration.number(f"{base}.min_lr_ratio", default=None)
    lowest = migration.number(f"{base}.min_lr", default=None)
    floor = floor if floor is not None else None if lowest is None or not rate else float(lowest) / float(rate)
    if floor and schedule != "constant":
        migration.put(f"{role}.schedule.min_ratio", float(floor), "min_lr_ratio")
    for name in ("lr_decay_steps", "total_training_steps", "lr_warmup_init", "zero_indexed_step"):
        what = "the schedule is constant" if schedule == "constant" else "hone decays over the whole run"
        migration.drop(f"{base}.{name}", what)
    if schedule != "cosine":
        migration.drop(f"{base}.num_cycles", "the schedule is not a cosine")


def lora(migration: Migration, base: str) -> None:
    """Set the LoRA adapter, in verl's two spellings."""
    rank = int(migration.number(f"{base}.lora_rank", f"{base}.lora.rank", default=0))
    if rank > 0:
        migration.put("actor.lora.rank", rank, f"lora_rank={rank}")
        alpha = migration.number(f"{base}.lora_alpha", f"{base}.lora.alpha", default=16)
        migration.put("actor.lora.alpha", float(alpha), f"lora_alpha={alpha}")
        targets = migration.value(f"{base}.target_modules", default="all-linear")
        migration.put("actor.lora.targets", targets, f"target_modules={targets}")
        excluded = migration.value(f"{base}.exclude_modules")
        if isinstance(excluded, list):
            migration.put("actor.lora.exclude", excluded, "exclude_modules")
        elif excluded not in (None, "null", "None"):
            migration.decide(f"{base}.exclude_modules={excluded} is a pattern; name layers in actor.lora.exclude")
        adapter = migration.text(f"{base}.lora_adapter_path", f"{base}.lora.adapter_path")
        if adapter:
            migration.put("actor.lora.path", adapter, "lora_adapter_path")
        if migration.truth(f"{base}.lora.merge"):
            migration.put("actor.lora.sync", "merged", "lora.merge=True")
    for name in [name for name in migration.options if name.startswith(f"{base}.lora")]:
        migration.drop(name, "no adapter is trained" if rank == 0 else "hone's adapter has no such option")
    for name in (f"{base}.target_modules", f"{base}.exclude_modules"):
        migration.drop(name, "no adapter is trained")


def _critic(migration: Migration) -> None:
    """Read PPO's value model."""
    if migration.options.get("algorithm.adv_estimator", "gae") != "gae":
        for name in [name for name in migration.options if name.startswith("critic.")]:
            migration.drop(name, "the estimator needs no critic")
        migration.drop("trainer.critic_warmup", "the estimator needs no critic")
        return
    path = migration.text("critic.model.path")
    if path and path != str(migration.options.get(f"{MODEL}.path", "")):
        migration.put("critic.model.path", path, "critic.model.path")
    strategy = migration.text("critic.strategy", default="")
    engine = ENGINES.get(strategy) or migration.settings["actor.backend.name"].value
    migration.put("critic.engine.backend.name", engine, f"critic.strategy={strategy or 'the actor’s'}")
    if engine == "megatron":
        megatron(migration, "critic.megatron", "critic.engine")
    else:
        sharded(migration, "critic", "critic.engine", engine, 1)
    memory(
        migration,
        "critic",
        "critic.engine",
        "critic.model.enable_gradient_checkpointing",
        "critic.model.enable_activation_offload",
    )
    optimizer(migration, "critic.optim", "critic.engine", default_lr=1e-5)
    dynamic = "critic.use_dynamic_bsz" if "critic.use_dynamic_bsz" in migration else f"{ACTOR}.use_dynamic_bsz"
    budget(migration, "critic.engine", "critic.ppo_max_token_len_per_gpu", _is_on(migration, dynamic))
    warmup = int(migration.number("trainer.critic_warmup", default=0))
    migration.put("critic.warmup_steps", warmup, f"trainer.critic_warmup={warmup}")
    clip = migration.number("critic.cliprange_value", default=0.5)
    migration.put("algorithm.value_loss.clip", float(clip), f"critic.cliprange_value={clip}")
    if "critic.grad_clip" in migration or "critic.optim.clip_grad" in migration:
        norm = migration.number("critic.grad_clip", "critic.optim.clip_grad", default=1.0)
        migration.put("critic.engine.max_grad_norm", float(norm), f"critic.grad_clip={norm}")
    usual = {"ppo_mini_batch_size": "256", "ppo_epochs": "1", "loss_agg_mode": "token-mean"}
    for part, default in usual.items():
        name, actor = f"critic.{part}", plain(migration.options.get(f"{ACTOR}.{part}", default))
        said = plain(migration.options.get(name, actor))
        if said != actor and not said.startswith("${oc.select:"):
            migration.decide(f"{name}={said} is not the actor's {actor}; hone trains both in the same way", name)
    for part in (*usual, "use_dynamic_bsz", "shuffle"):
        migration.drop(f"critic.{part}", "the critic trains on the actor's mini-batches")


def _mixture(migration: Migration) -> None:
    """Read load balancing and routing replay of a mixture of experts."""
    mode = migration.text(
        f"{ACTOR}.router_replay.mode",
        f"{ACTOR}.megatron.router_replay.mode",
        f"{ACTOR}.veomni.router_replay.mode",
        default="disabled",
    )
    replay = {"R2": "old_logprobs", "R3": "rollout"}.get(mode)
    if replay:
        migration.put("actor.moe.routing_replay", replay, f"router_replay.mode={mode}")
    migration.drop(
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        "the rollout records experts if routing_replay is rollout",
    )
    base = f"{ACTOR}.megatron.override_transformer_config"
    balances = migration.text(f"{base}.moe_router_load_balancing_type", default="") != "none"
    for theirs, ours in (("moe_aux_loss_coeff", "router_aux_loss_coef"), ("moe_z_loss_coeff", "router_z_loss_coef")):
        coef = migration.number(f"{base}.{theirs}", default=0.0)
        if coef and balances:
            migration.put(f"actor.moe.{ours}", number(coef), f"{theirs}={coef}")
