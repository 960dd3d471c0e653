"""Migration of OpenRLHF's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from hone.composition import ConfigError
from hone.migration.flags import flags_of
from hone.migration.migration import Migration, number
from hone.migration.openrlhf.names import NAMES
from hone.migration.shell.script import read_script

MODULES: Mapping[str, str] = {
    "train_ppo_ray": "rl",
    "train_sft": "sft",
    "train_dpo": "prefer",
    "train_rm": "reward_model",
}
ESTIMATORS: Mapping[str, str] = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}
SCHEDULES: Mapping[str, str] = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
}
RATES: Mapping[str, float] = {"rl": 1e-6, "sft": 5e-6, "prefer": 1e-6, "reward_model": 9e-6}

DROPPED: Mapping[str, str] = {
    "ds.packing_samples": "hone always packs",
    "*.micro_batch_size": "hone packs by tokens: actor.max_tokens_per_microbatch",
    "train.dynamic_batch_enable": "hone packs by tokens: actor.max_tokens_per_microbatch",
    "rollout.max_tokens_per_gpu": "one budget: actor.max_tokens_per_microbatch",
    "rollout.vllm_generate_batch_size": "prompts are drawn as they are needed",
    "ds.zero_stage": "FSDP2 shards weights, gradients and optimizer state",
    "ds.*": "a detail of DeepSpeed",
    "vllm.sync_*": "hone chooses the transport: weights.transport",
    "vllm.enable_sleep": "rollout.sleep_while_training is auto",
    "train.colocate_*": "roles share devices unless runtime.backend.pools gives them their own",
    "train.full_determinism_enable": "runtime.deterministic",
    "ckpt.*": "a checkpoint always has everything, and hone export writes a Hugging Face folder",
    "logger.*": "hone writes this to the run folder, or shows it in the report",
    "*.gradient_checkpointing_reentrant": "hone chooses the form of recomputation",
    "*.adam.eps": "AdamW's own, 1e-8",
    "*.muon.*": "the optimizer is not Muon",
    "*.optim": "hone trains with AdamW unless actor.optimizer.name is set",
    "data.dataloader_num_workers": "rows are read as they are needed",
    "data.disable_fast_tokenizer": "hone has fast tokenizers only",
    "data.apply_chat_template": "a prompt is rendered by the chat template",
    "critic.*": "the estimator needs no critic",
    "reward.*_nodes": "a reward model is colocated or has its own process",
    "reward.num_gpus_per_node": "a reward model is colocated or has its own process",
    "reward.offload": "a reward model is colocated or has its own process",
    "reward.clip_range": "hone does not clip rewards; write it into the reward if they leave [-10, 10]",
    "ref.*": "the reference takes the actor's engine settings",
    "local_rank": "hone starts its ranks itself",
    "use_ms": "data.train.source names the hub",
    "algo.kl.horizon": "the coefficient is fixed",
    "address": "Ray's own option; runtime.backend.address",
    "runtime_env_json": "Ray's own option",
    "working_dir": "Ray's own option",
    "module": "the launcher's own option",
    "data.max_images_per_prompt": "a prompt may have any number of images",
    "*.attn_implementation": "hone has packed attention for every model",
    "data.multiturn": "a conversation is rendered as a whole",
}
"""Pattern of an option -> reason to drop it."""


def migrate_openrlhf(text: str, variables: Mapping[str, str]) -> Migration:
    """Return the migration of a script, or one command, of OpenRLHF. Raises ConfigError."""
    found = read_script(text, variables, [])
    launches = [(kind, words) for words in found.commands if (kind := _kind(words))]
    if not launches:
        unread = "".join(f"\n{note}" for note in found.notes)
        raise ConfigError(f"the script starts no trainer of OpenRLHF (openrlhf.cli.{', '.join(MODULES)}){unread}")
    kind, words = launches[0]
    notes = found.other_notes
    if len(launches) > 1:
        notes.append(f"the script starts {len(launches)} trainers; this is the first: {kind}")
    options = {NAMES.get(name, name): value for name, value in flags_of(words).items()}
    migration = Migration(options, framework="OpenRLHF", notes=notes, decisions=list(found.choices))
    migration.put("kind", kind, "")
    _run(migration, kind)
    _data(migration, kind)
    if kind == "rl":
        _policy(migration)
    else:
        samples = migration.count("train.batch_size", default=128)
        migration.put("samples_per_step", samples, f"train.batch_size={samples}")
        _other_losses(migration, kind)
    _training(migration, kind)
    if kind == "rl":
        _places(migration)
    for name in migration.unknown:
        reason = next((reason for pattern, reason in DROPPED.items() if fnmatchcase(name, pattern)), "")
        if reason:
            migration.drop(name, reason)
    return migration


def _kind(words: Sequence[str]) -> str:
    for word in words:
        last = word.removesuffix(".py").replace("/", ".").rpartition(".")[2]
        if last in MODULES and "openrlhf" in word:
            return MODULES[last]
    return ""


def _run(migration: Migration, kind: str) -> None:
    migration.put("run.dir", migration.text("ckpt.output_dir", default=f"runs/{kind}"), "ckpt.output_dir")
    migration.put("run.seed", int(migration.number("train.seed", default=42)), "train.seed")
    path = migration.text("actor.model_name_or_path", "model.model_name_or_path", "pretrain")
    if path:
        migration.put("model.path", path, "actor.model_name_or_path")
    else:
        migration.decide("no model is named; set model.path")
    other = migration.text("ref.model_name_or_path") if kind in ("rl", "prefer") else ""
    if other not in ("", "None", path):
        migration.put("reference.model.path", other, "ref.model_name_or_path")
    trackers: list[dict[str, Any]] = [{"name": "console"}]
    if "logger.wandb.key" in migration or "logger.wandb.project" in migration:
        trackers.append(
            {"name": "wandb", "project": migration.text("logger.wandb.project", default="openrlhf_train_ppo")}
        )
    if "logger.tensorboard_dir" in migration:
        trackers.append({"name": "tensorboard"})
    migration.put("tracking.trackers", [*trackers, {"name": "jsonl"}], "jsonl feeds the report")
    saving = migration.number("ckpt.save_steps", default=-1)
    if saving > 0:
        migration.put("checkpoint.every_steps", int(saving), f"ckpt.save_steps={saving}")
    kept = migration.number("ckpt.max_num", default=3)
    migration.put("checkpoint.keep", int(kept), f"ckpt.max_num={kept}")
    every = migration.number("eval.steps", default=-1)
    migration.put("evaluation.every_steps", max(0, int(every)), f"eval.steps={every}; 0: at start and end")


def _data(migration: Migration, kind: str) -> None:
    option = "data.prompt_dataset" if kind == "rl" else "data.dataset"
    names = migration.text(option)
    if not names:
        migration.decide(f"{option} is not set; set data.train.path")
    first, *more = names.split(",")
    if more:
        migration.decide(f"{option} names {len(more) + 1} data sets; add the others to data.mix with their weights")
    if first:
        _rows(migration, "data.train", first, migration.text("data.prompt_split", "data.split", default="train"))
    held_out = migration.text("eval.dataset")
    if held_out:
        _rows(migration, "evaluation.sets.test", held_out, migration.text("eval.split", default="train"))
    rows = int(migration.number("data.max_samples", default=100_000_000))
    if rows < 100_000_000:
        migration.put("data.train.max_rows", rows, f"data.max_samples={rows}")
    template = migration.text("data.input_template")
    if template and template != "None":
        migration.decide(
            f"data.input_template={template!r}: write it as a Jinja2 template in data.train.prompt_template"
        )


def _rows(migration: Migration, key: str, name: str, split: str) -> None:
    migration.put(f"{key}.path", name.rpartition("@")[2], "data set")
    if not name.endswith((".jsonl", ".parquet")):
        migration.put(f"{key}.source.name", "hf", "load_dataset")
        migration.put(f"{key}.source.split", split, "split")
    kind = str(migration.settings["kind"].value)
    whole = kind == "sft" and migration.text("data.output_key") in ("", "None")  # a column has whole conversations
    for option, column, default in (
        ("data.input_key", "messages" if whole else "prompt", "input"),
        ("data.label_key", "ground_truth", ""),
        ("data.output_key", "completion", ""),
        ("data.chosen_key", "chosen", ""),
        ("data.rejected_key", "rejected", ""),
        ("data.image_key", "images", ""),
    ):
        column_name = migration.text(option, default=default)
        if column_name not in ("", "None", column) and (default == "" or kind in ("rl", "sft")):
            migration.put(f"{key}.columns.{column}", column_name, f"{option}={column_name}")


def _policy(migration: Migration) -> None:
    prompts = migration.count("rollout.batch_size", default=1024)
    group = migration.count("rollout.n_samples_per_prompt", default=1)
    samples = migration.count("train.batch_size", default=128)
    migration.put("update.prompts_per_step", prompts, f"rollout.batch_size={prompts} prompts")
    migration.put("update.samples_per_prompt", group, f"rollout.n_samples_per_prompt={group}")
    if prompts * group % samples:
        migration.decide(
            f"train.batch_size={samples} does not divide {prompts} x {group} answers; set update.minibatches"
        )
    else:
        migration.put(
            "update.minibatches",
            prompts * group // samples,
            f"{prompts} x {group} answers / train.batch_size={samples}",
        )
    epochs = int(migration.number("train.max_epochs", default=1))
    migration.put("update.epochs", epochs, f"train.max_epochs={epochs}")
    migration.put("run.epochs", migration.number("train.num_episodes", default=1), "train.num_episodes")
    _algorithm(migration)
    _rollout(migration)
    _reward(migration)


def _algorithm(migration: Migration) -> None:
    said = migration.text("algo.advantage.estimator", default="gae")
    migration.put("algorithm.advantage.name", ESTIMATORS.get(said, "grpo"), f"algo.advantage.estimator={said}")
    if said in ("group_norm", "dr_grpo"):
        scaled = said == "group_norm" and not migration.truth("algo.advantage.no_std_norm")
        migration.put("algorithm.advantage.scale_by", "group" if scaled else "none", f"algo.advantage.estimator={said}")
    if said == "gae":
        migration.copy("algo.advantage.lambd", convert=number)
    if said in ("gae", "reinforce"):
        migration.copy("algo.advantage.gamma", convert=number)
    migration.drop("algo.advantage.lambd", "the estimator has no lambda")
    migration.drop("algo.advantage.gamma", "the estimator does not discount")
    loss = migration.text("actor.policy_loss_type", default="ppo")
    migration.put("algorithm.loss.name", loss, f"actor.policy_loss_type={loss}")
    both = migration.value("actor.eps_clip_low_high")
    clip = float(migration.number("actor.eps_clip", default=0.2))
    low, high = (
        (float(number(both[0])), float(number(both[1]))) if isinstance(both, list) and len(both) == 2 else (clip, clip)
    )
    migration.put("algorithm.loss.clip_low", low, "actor.eps_clip")
    migration.put("algorithm.loss.clip_high", high, "actor.eps_clip")
    dual = migration.number("actor.dual_clip")
    if dual and loss == "ppo":
        migration.put("algorithm.loss.dual_clip", float(dual), f"actor.dual_clip={dual}")
    entropy = migration.number("actor.entropy_coef", default=0.0)
    migration.put("algorithm.entropy_coef", float(entropy), f"actor.entropy_coef={entropy}")
    coef = float(migration.number("algo.kl.init_coef", default=0.01))
    kind = migration.text("algo.kl.estimator", default="k1")
    if coef > 0:
        migration.put(
            "algorithm.kl.where", "in_loss" if migration.truth("algo.kl.use_loss") else "in_reward", "algo.kl.use_loss"
        )
        migration.put("algorithm.kl.kind", kind, f"algo.kl.estimator={kind}")
        migration.put("algorithm.kl.coef", coef, f"algo.kl.init_coef={coef}")
    for name in ("algo.kl.estimator", "algo.kl.use_loss"):
        migration.drop(name, "the KL coefficient is 0")
    if migration.truth("algo.dynamic_filtering_enable"):
        migration.put("algorithm.dynamic_sampling.metric", "reward", "algo.dynamic_filtering_enable")
        said_range = migration.value("algo.dynamic_filtering_range", default=[0, 1])
        migration.notes.append(
            f"dynamic_filtering_range={said_range}: hone drops groups in which all rewards are the same"
        )
    _correction(migration)


def _correction(migration: Migration) -> None:
    if not migration.truth("algo.advantage.is_correction_enable"):
        return
    kind = migration.text("algo.advantage.is_correction_type", default="tis")
    bounds = migration.value("algo.advantage.is_correction_threshold", default=[0.5, 5.0])
    low, high = (float(number(bounds[0])), float(number(bounds[1]))) if isinstance(bounds, list) else (0.5, 5.0)
    migration.put("algorithm.correction.weights", "token", f"is_correction_type={kind}")
    if kind == "tis":
        migration.put("algorithm.correction.truncate", high, "is_correction_threshold")
    else:
        migration.put("algorithm.correction.band", [low, high], "is_correction_threshold")
    if kind == "seq-mask-tis":
        migration.decide("is_correction_type=seq-mask-tis masks whole sequences: see algorithm.correction.rejections")


def _rollout(migration: Migration) -> None:
    whole = int(migration.number("data.max_len", default=2048))
    length = migration.number("rollout.max_new_tokens")
    migration.put(
        "rollout.sampling.max_response_tokens", int(length or whole), "rollout.max_new_tokens, or data.max_len"
    )
    longest = migration.number("prompt_max_len")
    if longest:
        migration.put("data.train.max_prompt_tokens", int(longest), f"prompt_max_len={longest}")
    elif length and whole > length:
        migration.put("data.train.max_prompt_tokens", whole - int(length), "data.max_len - rollout.max_new_tokens")
    for name in ("temperature", "top_p"):
        migration.copy(f"rollout.{name}", f"rollout.sampling.{name}", number)
    servers = migration.number("vllm.num_engines")
    if servers and servers > 0:
        migration.put("rollout.backend", "vllm", "vLLM engines")
        migration.put("rollout.replicas", int(servers), f"vllm.num_engines={servers}")
        tensor = migration.count("vllm.tensor_parallel_size", default=1)
        migration.put("rollout.tensor_parallel", tensor, f"vllm.tensor_parallel_size={tensor}")
        share = float(migration.number("vllm.gpu_memory_utilization", default=0.95))
        migration.put("rollout.engine.gpu_memory_utilization", share, f"vllm.gpu_memory_utilization={share}")
        for name in ("enforce_eager", "enable_prefix_caching"):
            if migration.truth(f"vllm.{name}"):
                migration.put(f"rollout.engine.{name}", True, f"vllm.{name}")
    if migration.truth("actor.freeze_visual_encoder"):
        migration.put("model.use.vision.freeze_tower", True, "actor.freeze_visual_encoder")
    if migration.truth("train.async_enable"):
        size = int(migration.number("train.async_queue_size", default=1))
        migration.put("asynchrony.staleness", size, f"train.async_queue_size={size}")
        if "algorithm.correction.weights" not in migration.settings:
            source = "older tokens are clipped against the weights that sampled"
            migration.put("algorithm.correction.old", "rollout", source)
        if migration.truth("train.partial_rollout_enable"):
            migration.put("asynchrony.new_weights", "recompute", "train.partial_rollout_enable")
    temperature, samples = (
        migration.number("eval.temperature", default=0.6),
        migration.number("eval.n_samples_per_prompt", default=4),
    )
    if "evaluation.sets.test.path" in migration.settings:
        migration.put("evaluation.sampling.temperature", float(temperature), f"eval.temperature={temperature}")
        migration.put("evaluation.samples", int(samples), f"eval.n_samples_per_prompt={samples}")


def _reward(migration: Migration) -> None:
    agent = migration.text("train.agent_func_path")
    remote = migration.text("reward.remote_url")
    model = migration.text("reward.model_name_or_path")
    if agent:
        migration.put("reward.components.score.reward", "FILE.py:FUNCTION", "train.agent_func_path")
        migration.decide(
            f"train.agent_func_path={agent}: write an environment (docs/envs.md) and set episode.env, or a reward"
        )
    elif remote.endswith(".py"):
        migration.put("reward.components.score.reward", f"{remote}:reward_func", "reward.remote_url")
        migration.decide(
            f"reward.remote_url={remote}: its reward_func(queries, prompts, labels) takes lists; write it for one"
        )
    elif remote:
        migration.put("reward.components.score.reward", "FILE.py:FUNCTION", "reward.remote_url")
        migration.decide(f"reward.remote_url={remote}: write an async reward function that asks this address")
    elif model:
        migration.put("reward.components.model.model.path", model, "reward.model_name_or_path")
    else:
        migration.put("reward.components.score.reward", "FILE.py:FUNCTION", "")
        migration.decide("no reward is named; set reward.components")
    if float(migration.number("reward.stop_properly_penalty_coef", default=0.0)):
        migration.decide(
            "reward.stop_properly_penalty_coef: algorithm.overlong has a penalty near the limit, or a mask"
        )
    buffer = migration.number("reward.overlong_buffer_len")
    if buffer:
        migration.put("algorithm.overlong.buffer_tokens", int(buffer), f"reward.overlong_buffer_len={buffer}")
        factor = migration.number("reward.overlong_penalty_factor", default=1.0)
        migration.put("algorithm.overlong.factor", float(factor), f"reward.overlong_penalty_factor={factor}")
    if migration.truth("reward.normalize_enable"):
        migration.decide("reward.normalize_enable: hone does not whiten rewards; write it into the reward")


def _other_losses(migration: Migration, kind: str) -> None:
    if kind == "prefer":
        beta = float(migration.number("dpo.beta", "model.beta", "beta", default=0.1))
        name = "ipo" if migration.truth("dpo.ipo_enable", "ipo") else "dpo"
        smoothing = float(migration.number("dpo.label_smoothing", default=0.0))
        if smoothing and name == "dpo":
            name = "cdpo"
            migration.put("loss.label_smoothing", smoothing, f"dpo.label_smoothing={smoothing}")
        migration.put("loss.name", name, "")
        migration.put("loss.beta", beta, f"beta={beta}")
        coef = float(migration.number("dpo.nll_loss_coef", default=0.0))
        if coef:
            migration.decide(
                f"dpo.nll_loss_coef={coef}: set loss: combined, with the parts {name} and sft and their weights",
                "dpo.nll_loss_coef",
            )
    length = int(migration.number("data.max_len", default=2048))
    migration.put("data.train.max_sample_tokens", length, f"data.max_len={length}")
    migration.put("run.epochs", migration.number("train.max_epochs", default=2), "train.max_epochs")


def _training(migration: Migration, kind: str) -> None:
    base = "actor" if kind == "rl" else "model"
    rate = float(migration.number(f"{base}.adam.lr", "adam.lr", default=RATES[kind]))
    migration.put("actor.optimizer.lr", rate, f"{base}.adam.lr={rate}")
    decay = float(migration.number(f"{base}.adam.weight_decay", "adam.weight_decay", default=0.0))
    migration.put("actor.optimizer.weight_decay", decay, f"{base}.adam.weight_decay={decay}")
    betas = migration.value(f"{base}.adam.betas", "adam.betas", default=[0.9, 0.95])
    if isinstance(betas, list) and len(betas) == 2:
        migration.put("actor.optimizer.betas", [float(number(beta)) for beta in betas], f"{base}.adam.betas={betas}")
    said = migration.text(f"{base}.lr_scheduler", "lr_scheduler", default="cosine_with_min_lr")
    migration.put("actor.schedule.name", SCHEDULES.get(said, "constant"), f"{base}.lr_scheduler={said}")
    share = float(migration.number(f"{base}.lr_warmup_ratio", "lr_warmup_ratio", default=0.03))
    if share:
        migration.put("actor.schedule.warmup_fraction", share, f"{base}.lr_warmup_ratio={share}")
    if said == "cosine_with_min_lr":
        floor = float(migration.number(f"{base}.min_lr_ratio", "min_lr_ratio", default=0.1))
        migration.put("actor.schedule.min_ratio", floor, f"{base}.min_lr_ratio={floor}")
    norm = float(migration.number(f"{base}.max_norm", "max_norm", default=1.0))
    migration.put("actor.max_grad_norm", norm, f"{base}.max_norm={norm}")
    if migration.truth(f"{base}.gradient_checkpointing_enable", "gradient_checkpointing"):
        migration.put("actor.activation_checkpointing", True, "gradient_checkpointing")
    tokens = migration.number("train.max_tokens_per_gpu", default=16192)
    migration.put("actor.max_tokens_per_microbatch", int(tokens), f"train.max_tokens_per_gpu={tokens}")
    coef = float(migration.number(f"{base}.aux_loss_coef", default=0.0))
    if coef:
        migration.put("actor.moe.router_aux_loss_coef", coef, f"{base}.aux_loss_coef={coef}")
    if migration.truth("ds.adam_offload"):
        migration.put("actor.backend.offload", True, "ds.adam_offload")
    rank = int(migration.number("ds.lora.rank", default=0))
    if rank:
        migration.put("actor.lora.rank", rank, f"ds.lora.rank={rank}")
        migration.put("actor.lora.alpha", float(migration.number("ds.lora.alpha", default=16)), "ds.lora.alpha")
        if migration.truth("ds.load_in_4bit"):
            migration.put("actor.lora.quantise.kind", "nf4", "ds.load_in_4bit")
    ring, tensor = (
        int(migration.number("ds.ring_attn_size", default=1)),
        int(migration.number("ds.tensor_parallel_size", default=1)),
    )
    if ring > 1:
        migration.put("actor.backend.parallel.sequence", ring, f"ds.ring_attn_size={ring}")
    if tensor > 1:
        migration.put("actor.backend.parallel.tensor", tensor, f"ds.tensor_parallel_size={tensor}")


def _places(migration: Migration) -> None:
    """Set the number of devices of the actor, and of rollout servers that have devices of their own."""
    here = migration.count("actor.num_gpus_per_node", default=8)
    nodes = migration.count("actor.num_nodes", default=1)
    shares = migration.truth("train.colocate_all") and not migration.truth("train.async_enable")
    replicas = migration.settings.get("rollout.replicas")
    servers = 0 if shares or replicas is None else int(replicas.value)
    if here * nodes > 1 or servers:
        migration.put("runtime.backend.name", "ray", "several devices")
        migration.put("runtime.backend.devices", here, f"actor.num_gpus_per_node={here}")
        migration.put("runtime.backend.nodes", nodes, f"actor.num_nodes={nodes}")
    if servers:
        _own_devices(migration, servers, max(here, 8))


def _own_devices(migration: Migration, servers: int, machine: int) -> None:
    """Give servers a pool of exactly their devices, on machines with at most `machine`."""
    tensor = int(migration.settings["rollout.tensor_parallel"].value)
    nodes = -(-servers // (machine // tensor)) if tensor <= machine else -(-servers * tensor // machine)
    devices, rest = divmod(servers * tensor, nodes)
    said = f"{servers} engines x {tensor} GPUs of their own, as OpenRLHF places them"
    if rest or (tensor <= machine and devices % tensor):
        migration.decide(
            f"{said}: {servers * tensor} GPUs are no equal parts of machines with {machine}; set "
            "runtime.backend.pools.rollout.devices (of each machine) and nodes"
        )
        return
    migration.put("runtime.backend.pools.rollout.devices", devices, said)
    migration.put("runtime.backend.pools.rollout.nodes", nodes, f"{devices} GPUs on each")
    if nodes > 1:
        migration.notes.append(
            f"the servers' {servers * tensor} GPUs are written as {nodes} machines with {devices} each, because the "
            "script does not say how many a machine has; runtime.backend.pools.rollout has other numbers"
        )
