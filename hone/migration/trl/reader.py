"""Migration of TRL's options: GRPO, RLOO, SFT, DPO and reward models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hone.composition import from_yaml
from hone.migration.migration import Migration, number, plain
from hone.migration.shell.holes import holes, shown
from hone.migration.trl.dropped import DECISIONS, DROPPED, OFF

LENGTHS: Mapping[str, int] = {"async_grpo": 2048}
"""Kind -> longest answer if none is given; of the others it is 512."""

SCHEDULES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}

RATES: Mapping[str, float] = {"sft": 2e-5, "reward": 1e-4}
"""Kind -> learning rate if none is given; of the others it is 1e-6."""

HONE_KINDS: Mapping[str, str] = {
    "grpo": "rl",
    "async_grpo": "rl",
    "rloo": "rl",
    "sft": "sft",
    "dpo": "prefer",
    "kto": "prefer",
    "orpo": "prefer",
    "reward": "reward_model",
}
POLICY = ("grpo", "async_grpo", "rloo")
BATCH = 8
LONGEST = 1024  # tokens of a supervised sample
EPOCHS = 3
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")

AGGREGATIONS: Mapping[str, str] = {
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
}
OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "AdamW8bit"),
    "adafactor": "Adafactor",
    "sgd": "SGD",
}
DPO_LOSSES: Mapping[str, str] = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "sft": "sft"}


def migrate_trl(
    kind: str, options: Mapping[str, Any], notes: list[str], devices: int = 1, choices: Sequence[str] = ()
) -> Migration:
    """Return the migration of one training with TRL on so many devices."""
    migration = Migration(options, framework="TRL", notes=notes, decisions=list(choices))
    migration.put("kind", HONE_KINDS[kind], "")
    devices = max(devices, migration.count("num_processes", default=1))
    _run(migration, kind)
    _model(migration)
    _data(migration, kind)
    batch = _batch(migration, kind, devices)
    if kind in POLICY:
        _policy(migration, kind, batch, devices)
    elif kind == "dpo":
        _preference(migration)
    elif kind in ("kto", "orpo"):
        migration.put("loss.name", kind, f"{kind.upper()}Trainer")
        migration.put("loss.beta", float(migration.number("beta", default=0.1)), "beta")
        for name, key in (("desirable_weight", "desirable"), ("undesirable_weight", "undesirable")):
            migration.copy(name, f"loss.{key}", number)
    elif kind == "reward":
        migration.copy("center_rewards_coefficient", "loss.centring", number)
    _training(migration, kind)
    _length(migration, kind)
    if devices > 1:
        migration.put("runtime.backend.name", "ray", "several devices")
        migration.put("runtime.backend.devices", devices, f"{devices} processes")
    unread = [name for name in migration.unknown if name.startswith("**")]
    if unread:
        migration.decide(
            f"{', '.join(unread)}: only running the script tells these options; they may set what the file marks as "
            "TRL's default, so compare each",
            *unread,
        )
    for name, value in migration.unknown.items():
        if name in DROPPED:
            migration.drop(name, DROPPED[name])
        elif name in OFF and (value is None or value is False or value == ""):
            migration.drop(name, OFF[name])
        elif name in DECISIONS:
            migration.decide(f"{name}={plain(value)}: {DECISIONS[name]}", name)
    return migration


def _run(migration: Migration, kind: str) -> None:
    folder = migration.text("output_dir", default=f"runs/{kind}")
    migration.put("run.dir", folder, "output_dir")
    migration.put("run.seed", int(migration.number("seed", default=42)), "seed")
    said = migration.value("report_to", default="none")
    names = said if isinstance(said, list) else [said]
    trackers = [{"name": name} for name in names if name in TRACKERS]
    migration.put(
        "tracking.trackers", [{"name": "console"}, *trackers, {"name": "jsonl"}], "report_to; jsonl feeds the report"
    )
    for name in [str(name) for name in names if name not in (*TRACKERS, "none", "all", None)]:
        migration.decide(f"report_to names {shown(name)}, which hone has no tracker for ({', '.join(TRACKERS)})")


def _model(migration: Migration) -> None:
    path = migration.text("model_name_or_path")
    if path:
        migration.put("model.path", path, "model")
    else:
        migration.decide("no model is named; set model.path")
    if migration.truth("trust_remote_code"):
        migration.notes.append(
            "the script lets a model run code that comes with it; the file does not. Most models need none: set "
            "model.trust_remote_code=true if loading asks for it, and you trust the model"
        )
    migration.copy("model_revision")
    _init_arguments(migration, _mapping(migration, "model_init_kwargs"))
    if migration.truth("cast_lm_head_to_fp32"):
        migration.put("actor.head_dtype", "float32", "cast_lm_head_to_fp32=True")
    if migration.truth("use_peft", default="lora_r" in migration):
        _adapter(migration)


def _mapping(migration: Migration, name: str) -> Mapping[str, Any]:
    """Take an option that is a mapping, or one as text; of another value nothing is taken."""
    value = migration.options.get(name)
    if isinstance(value, str) and value.lstrip().startswith("{") and not holes(value):
        try:
            value = from_yaml(value)
        except (yaml.YAMLError, ValueError):
            return {}
    if not isinstance(value, Mapping):
        return {}
    migration.value(name)
    return value


def _init_arguments(migration: Migration, extra: Mapping[str, Any]) -> None:
    dtype = str(extra.get("dtype", extra.get("torch_dtype", ""))).removeprefix("torch.")
    if dtype in ("bfloat16", "float32"):
        migration.put("model.dtype", dtype, "model_init_kwargs dtype")
    if extra.get("revision"):
        migration.put("model.revision", str(extra["revision"]), "model_init_kwargs revision")
    rest = sorted(set(extra) - {"dtype", "torch_dtype", "revision", "attn_implementation", "use_cache", "device_map"})
    if rest:
        migration.decide(f"model_init_kwargs has {', '.join(rest)}, which hone does not pass on")


def _adapter(migration: Migration) -> None:
    own = migration.options.get("peft_config") == "LoraConfig"  # else --use_peft, whose defaults are ModelConfig's
    if own:
        migration.value("peft_config")
    defaults = {"rank": 8, "alpha": 8, "dropout": 0.0} if own else {"rank": 16, "alpha": 32, "dropout": 0.05}
    for key, name in (("rank", "lora_r"), ("alpha", "lora_alpha"), ("dropout", "lora_dropout")):
        found = migration.number(name, default=defaults[key])
        source = f"{name}={found}" if name in migration else f"default of {'LoraConfig' if own else 'ModelConfig'}"
        if found or key != "dropout":
            migration.put(f"actor.lora.{key}", int(found) if key == "rank" else float(found), source)
    if migration.options.get("lora_target_modules") is None:
        migration.notes.append(
            "lora_target_modules is not set: PEFT then adapts the layers that it lists for the type of model (q_proj "
            "and v_proj of most); the run file adapts all linear layers, unless actor.lora.targets names some"
        )
    targets = migration.value("lora_target_modules")
    if targets is not None:
        listed = targets if isinstance(targets, list) or targets == "all-linear" else [targets]
        migration.put("actor.lora.targets", listed, "lora_target_modules")
    for name, key in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if migration.truth(name):
            migration.put(f"actor.lora.{key}", True, f"{name}=True")
    saved = migration.value("lora_modules_to_save")
    if isinstance(saved, list) and saved:
        migration.put("actor.lora.modules_to_save", saved, "lora_modules_to_save")
    if migration.truth("load_in_4bit"):
        kind = migration.text("bnb_4bit_quant_type", default="nf4")
        migration.put("actor.lora.quantise.kind", kind, f"bnb_4bit_quant_type={kind}")
        migration.put("actor.lora.quantise.double", migration.truth("use_bnb_nested_quant"), "use_bnb_nested_quant")


# ------------------------------------------------------------------------------------------------------------ data


def _data(migration: Migration, kind: str) -> None:
    _rows(migration, "dataset", "data.train", "train")
    evaluates = migration.text("eval_strategy", default="no") != "no"
    if any(name.startswith("eval_dataset") for name in migration.options) or (
        evaluates and "dataset_name" in migration
    ):
        _rows(migration, "eval_dataset", "evaluation.sets.test", migration.text("dataset_test_split", default="test"))
    every = migration.number("eval_steps", default=0)
    if evaluates:
        migration.put(
            "evaluation.every_steps", int(every) if every >= 1 else 0, f"eval_steps={every}; 0: at start and end"
        )
    field = migration.text("dataset_text_field", default="text")
    if kind == "sft" and "dataset_text_field" in migration and field != "text":
        migration.put("data.train.columns.completion", field, f"dataset_text_field={field}")
    unlimited = "max_length" in migration and migration.value("max_length") is None
    if kind not in POLICY and not unlimited:
        length = migration.number("max_length", default=LONGEST)
        migration.put("data.train.max_sample_tokens", int(length), f"max_length={length}")
        migration.put("data.train.too_long", "truncate" if kind == "sft" else "drop", "TRL cuts longer samples")
    migration.copy("max_prompt_length", convert=int)
    migration.copy("chat_template_path")
    if kind == "sft":
        _learnt_tokens(migration)
    extra = _mapping(migration, "chat_template_kwargs")
    if extra:
        migration.put("data.chat.options", dict(extra), "chat_template_kwargs")
    shuffles = migration.truth("shuffle_dataset", default=True)
    if not shuffles:
        migration.put("data.shuffle", False, "shuffle_dataset=False")


def _learnt_tokens(migration: Migration) -> None:
    """hone learns the answers; TRL all tokens, unless the rows have completions or the options say so."""
    said = {name: migration.options.get(name) for name in ("assistant_only_loss", "completion_only_loss")}
    for name, value in said.items():
        if value is True:
            migration.drop(name, "hone always does this")
    if said["completion_only_loss"] is False:
        reason = DECISIONS["completion_only_loss"]
        migration.decide(f"completion_only_loss=False: {reason}", "completion_only_loss")
    elif True not in said.values():
        migration.notes.append(
            "without assistant_only_loss TRL learns all tokens of a conversation, hone the assistant's; of rows with "
            "prompt and completion both learn the completion"
        )


def _rows(migration: Migration, prefix: str, key: str, split: str) -> None:
    files = migration.value(f"{prefix}_files")
    name = migration.text(f"{prefix}_name", *(["dataset_name"] if prefix != "dataset" else []))
    subset = migration.text(f"{prefix}_config", *(["dataset_config"] if prefix != "dataset" else []))
    split = migration.text(f"{prefix}_split", *(["dataset_train_split"] if prefix == "dataset" else []), default=split)
    changed = migration.text(f"{prefix}_changed")
    if name in ("json", "parquet", "csv") and isinstance(files, str):
        migration.put(f"{key}.path", files, f"{prefix} files")
        return _changed(migration, key, changed)
    mixed = migration.options.get("datasets")
    if prefix == "dataset" and isinstance(mixed, list) and mixed and isinstance(mixed[0], Mapping):
        migration.value("datasets")
        name, subset = str(mixed[0].get("path", "")), str(mixed[0].get("name") or "")
        split = str(mixed[0].get("split", split))
        rest = sorted(set(mixed[0]) - {"path", "name", "split"})
        if len(mixed) > 1 or rest:
            named = [plain(one.get("path")) if isinstance(one, Mapping) else plain(one) for one in mixed[1:]]
            migration.decide(f"datasets: add {', '.join([*named, *rest])} to data.mix or data.train")
    if not name:
        migration.decide(f"no data set is named for {key}; set {key}.path")
        return None
    migration.put(f"{key}.path", name, prefix)
    migration.put(f"{key}.source.name", "hf", "load_dataset")
    migration.put(f"{key}.source.split", split, f"{prefix} split")
    if subset and subset != "None":
        migration.put(f"{key}.source.subset", subset, f"{prefix} configuration")
    return _changed(migration, key, changed)


def _changed(migration: Migration, key: str, changed: str) -> None:
    if changed:
        migration.decide(
            f"the script changes the rows of {key} ({' '.join(shown(changed).split())[:160]}): write this as templates "
            f"({key}.prompt_template, {key}.ground_truth_template), or as a function of source: python"
        )


# ------------------------------------------------------------------------------------------------------------ step


def _batch(migration: Migration, kind: str, devices: int) -> int:
    """Samples of one optimizer step, which TRL counts on each device and in each accumulation step."""
    here = migration.count("per_device_train_batch_size", default=BATCH)
    accumulated = migration.count("gradient_accumulation_steps", default=1)
    samples = here * accumulated * devices
    if kind not in POLICY:
        migration.put(
            "samples_per_step",
            samples,
            f"per_device_train_batch_size={here} x gradient_accumulation_steps={accumulated} x {devices} devices",
        )
    return samples


def _policy(migration: Migration, kind: str, batch: int, devices: int) -> None:
    group = migration.count("num_generations", default=2 if kind == "rloo" else 8)
    here = migration.count("per_device_train_batch_size", default=BATCH)
    accumulated = migration.count("gradient_accumulation_steps", default=1)
    syncs = migration.count("weight_sync_steps", default=1)
    steps = int(migration.number("steps_per_generation", default=accumulated * syncs) or accumulated * syncs)
    answers = int(migration.number("generation_batch_size", default=here * devices * steps) or here * devices * steps)
    if answers % group:
        migration.decide(f"{answers} answers per generation are no whole groups of num_generations={group}")
    migration.put(
        "update.prompts_per_step",
        max(1, answers // group),
        f"{answers} answers per generation / num_generations={group}",
    )
    migration.put("update.samples_per_prompt", group, f"num_generations={group}")
    migration.put(
        "update.minibatches", max(1, round(answers / batch)), f"{answers} answers / {batch} of one optimizer step"
    )
    epochs = migration.count("num_iterations", default=1)
    migration.put("update.epochs", epochs, f"num_iterations={epochs}")
    _loss(migration, kind)
    _sampling(migration, kind)
    ahead = kind == "async_grpo"
    stale = migration.number("max_staleness", default=4 if ahead else None)
    if stale:
        migration.put("asynchrony.staleness", int(stale), f"max_staleness={stale}")
        if ahead:
            migration.put("asynchrony.new_weights", "keep_cache", "AsyncGRPOTrainer pauses its server and goes on")
        migration.put(
            "algorithm.correction.old", "rollout", "older tokens are clipped against the weights that sampled"
        )
    _rewards(migration)


def _loss(migration: Migration, kind: str) -> None:
    length = int(migration.number("max_completion_length", default=LENGTHS.get(kind, 512)))
    if kind == "rloo":
        migration.put("algorithm.advantage.name", "rloo", "RLOOTrainer")
    else:
        scale = migration.text("scale_rewards", default="group").lower()
        ours = {"true": "group", "false": "none"}.get(scale, scale)
        migration.put("algorithm.advantage.name", "grpo", "GRPOTrainer")
        migration.put("algorithm.advantage.scale_by", ours, f"scale_rewards={scale}")
    said = migration.text("loss_type", default="grpo" if kind == "rloo" else "dapo")
    sequence = migration.text("importance_sampling_level", default="token") == "sequence"
    loss = "gspo" if sequence else said if said in ("cispo", "sapo") else "ppo"
    if sequence and said in ("cispo", "sapo"):
        migration.decide(
            f"importance_sampling_level=sequence with loss_type={said}: hone's {said} has ratios of tokens"
        )
    migration.put("algorithm.loss.name", loss, f"loss_type={said}")
    if loss in ("ppo", "gspo", "cispo"):
        low = float(migration.number("epsilon", default=0.2))
        high = float(migration.number("epsilon_high", default=low) or low)
        migration.put("algorithm.loss.clip_low", 1.0 if loss == "cispo" else low, f"epsilon={low}")
        migration.put(
            "algorithm.loss.clip_high", high - 1 if loss == "cispo" and high > 1 else high, f"epsilon_high={high}"
        )
    delta = migration.number("delta")
    if delta and loss == "ppo":
        migration.put("algorithm.loss.dual_clip", float(delta), f"delta={delta}")
    elif delta and loss == "gspo":
        migration.decide(f"delta={delta}: hone's gspo has no upper bound of the ratio", "delta")
    if loss == "sapo":
        migration.copy("sapo_temperature_pos", "algorithm.loss.tau_positive", number)
        migration.copy("sapo_temperature_neg", "algorithm.loss.tau_negative", number)
    mode = AGGREGATIONS.get(said, "token_mean")
    if said not in (*AGGREGATIONS, "cispo", "sapo"):
        migration.decide(f"loss_type={said} has no counterpart ({', '.join(AGGREGATIONS)}, cispo, sapo)", "loss_type")
    migration.put("algorithm.aggregation.mode", mode, f"loss_type={said}")
    if mode == "seq_mean_token_sum_norm":
        migration.put("algorithm.aggregation.norm_tokens", length, f"max_completion_length={length}")
    _penalties(migration, kind)


def _penalties(migration: Migration, kind: str) -> None:
    beta = float(migration.number("beta", default=0.05 if kind == "rloo" else 0.0))
    if beta > 0:
        where, estimator = ("in_reward", "k1") if kind == "rloo" else ("in_loss", "k3")
        migration.put("algorithm.kl.where", where, "")
        migration.put("algorithm.kl.kind", estimator, f"the KL of {kind.upper()}Trainer")
        migration.put("algorithm.kl.coef", beta, f"beta={beta}")
    migration.copy("entropy_coef", convert=number)
    if migration.truth("mask_truncated_completions"):
        migration.put("algorithm.overlong.mask", True, "mask_truncated_completions=True")
    if migration.truth("sync_ref_model"):
        steps, mixup = (
            migration.number("ref_model_sync_steps", default=512),
            migration.number("ref_model_mixup_alpha", default=0.6),
        )
        migration.put("reference.follow.every_steps", int(steps), f"ref_model_sync_steps={steps}")
        migration.put("reference.follow.mixup", float(mixup), f"ref_model_mixup_alpha={mixup}")
    share = float(migration.number("top_entropy_quantile", default=1.0))
    if share < 1:
        for key in [key for key in migration.settings if key.startswith("algorithm.loss.")]:
            line = migration.settings.pop(key)
            migration.settings[key.replace("algorithm.loss.", "algorithm.loss.loss.")] = line
        migration.put("algorithm.loss.name", "top_entropy", f"top_entropy_quantile={share}")
        migration.put("algorithm.loss.share", share, f"top_entropy_quantile={share}")


def _sampling(migration: Migration, kind: str) -> None:
    length = int(migration.number("max_completion_length", default=LENGTHS.get(kind, 512)))
    migration.put("rollout.sampling.max_response_tokens", length, f"max_completion_length={length}")
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = migration.number(name)
        if value is not None:
            migration.put(f"rollout.sampling.{name}", value, f"{name}={value}")
    extra = migration.options.get("generation_kwargs")
    if isinstance(extra, Mapping) and set(extra) == {"stop"}:
        stop = _mapping(migration, "generation_kwargs")["stop"]
        migration.put("rollout.sampling.stop", stop if isinstance(stop, list) else [stop], "generation_kwargs stop")
    if migration.options.get("repetition_penalty") in (1, 1.0):
        migration.drop("repetition_penalty", "1 is off")
    if kind == "async_grpo":
        migration.put("rollout.backend", "vllm", "AsyncGRPOTrainer")
        budget = migration.number("token_budget", default=0)
        if budget > 0:
            migration.put("actor.max_tokens_per_microbatch", int(budget), f"token_budget={budget}")
        return
    if not migration.truth("use_vllm"):
        return
    migration.put("rollout.backend", "vllm", "use_vllm=True")
    tensor = int(migration.number("vllm_tensor_parallel_size", default=1))
    migration.put("rollout.tensor_parallel", tensor, f"vllm_tensor_parallel_size={tensor}")
    share = migration.number("vllm_gpu_memory_utilization", default=0.3)
    migration.put("rollout.engine.gpu_memory_utilization", float(share), f"vllm_gpu_memory_utilization={share}")
    migration.copy("vllm_max_model_length", "rollout.engine.max_model_len", int)
    if migration.text("vllm_mode", default="colocate") == "server":
        migration.notes.append(
            "vllm_mode=server: hone starts its servers itself; give them devices with runtime.backend.pools"
        )
    if migration.truth("vllm_importance_sampling_correction", default=True):
        _correction(migration)


def _correction(migration: Migration) -> None:
    mode = migration.text("vllm_importance_sampling_mode", default="sequence_mask")
    level, _, what = mode.partition("_")
    high = float(migration.number("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", default=3.0))
    low = migration.number("vllm_importance_sampling_clip_min", default=0.0)
    migration.put("algorithm.correction.weights", level, f"vllm_importance_sampling_mode={mode}")
    if what == "mask":
        migration.put("algorithm.correction.band", [float(low), high], f"vllm_importance_sampling_clip_max={high}")
    else:
        migration.put("algorithm.correction.truncate", high, f"vllm_importance_sampling_clip_max={high}")


def _rewards(migration: Migration) -> None:
    given = migration.value("reward_funcs", default=[])
    weights = migration.value("reward_weights", default=None)
    functions = given if isinstance(given, list) else [given]
    factors = weights if isinstance(weights, list) and len(weights) == len(functions) else [1.0] * len(functions)
    for function, weight in zip(functions, factors, strict=True):
        names = holes(str(function))
        name = names[0] if names else str(function)
        key = "".join(letter for letter in name.rpartition(".")[2] if letter.isalnum() or letter == "_") or "reward"
        if names and name.isidentifier():
            target = f"FILE.py:{name}"
            migration.decide(
                f"reward.components.{key}: copy the function {name} to a file that trains nothing, and name it here; "
                "its signature may stay as it is"
            )
        else:
            target = "FILE.py:FUNCTION"
            kind = "" if name.startswith("trl.rewards.") else "a model, or made when the script runs, or "
            migration.decide(
                f"reward.components.{key}: {shown(name)} is {kind}a reward of TRL; `hone list rewards` has the rewards "
                "here"
            )
        migration.put(f"reward.components.{key}.reward", target, "reward_funcs")
        migration.put(f"reward.components.{key}.weight", float(number(weight)), "reward_weights")
    if not functions:
        migration.put("reward.components.score.reward", "FILE.py:FUNCTION", "")
        migration.decide("no reward is named; set reward.components")


def _preference(migration: Migration) -> None:
    said = migration.value("loss_type", default=["sigmoid"])
    names = said if isinstance(said, list) else [said]
    smoothing = float(migration.number("label_smoothing", default=0.0))
    beta = float(migration.number("beta", default=0.1))
    ours = DPO_LOSSES.get(str(names[0])) if len(names) == 1 else None
    if ours is None:
        migration.decide(
            f"loss_type={names}: set loss ({', '.join(sorted(set(DPO_LOSSES.values())))}); several are loss: combined"
        )
        return
    ours = "cdpo" if ours == "dpo" and smoothing > 0 else ours
    migration.put("loss.name", ours, f"loss_type={names[0]}")
    if ours != "sft":
        migration.put("loss.beta", beta, f"beta={beta}")
    if ours in ("cdpo", "robust"):
        migration.put("loss.label_smoothing", smoothing, f"label_smoothing={smoothing}")
    if migration.truth("sync_ref_model"):
        migration.put(
            "reference.follow.every_steps",
            int(migration.number("ref_model_sync_steps", default=512)),
            "ref_model_sync_steps",
        )
        migration.put(
            "reference.follow.mixup",
            float(migration.number("ref_model_mixup_alpha", default=0.6)),
            "ref_model_mixup_alpha",
        )
        migration.put("reference.logprobs", "live", "the reference moves")


# -------------------------------------------------------------------------------------------------------- training


def _training(migration: Migration, kind: str) -> None:
    rate = float(migration.number("learning_rate", default=RATES.get(kind, 1e-6)))
    migration.put("actor.optimizer.lr", rate, f"learning_rate={rate}")
    migration.put("actor.optimizer.weight_decay", float(migration.number("weight_decay", default=0.0)), "weight_decay")
    betas = [float(migration.number("adam_beta1", default=0.9)), float(migration.number("adam_beta2", default=0.999))]
    if betas != [0.9, 0.999]:
        migration.put("actor.optimizer.betas", betas, "adam_beta1, adam_beta2")
    migration.put("actor.max_grad_norm", float(migration.number("max_grad_norm", default=1.0)), "max_grad_norm")
    optimizer = migration.text("optim", default="adamw_torch_fused")
    if optimizer in OPTIMIZERS:
        migration.put("actor.optimizer.name", OPTIMIZERS[optimizer], f"optim={optimizer}")
    elif not optimizer.startswith("adamw_") or "bit" in optimizer:
        migration.decide(f"optim={optimizer}: set actor.optimizer.name", "optim")
    said = migration.text("lr_scheduler_type", default="constant" if kind == "async_grpo" else "linear")
    ours = SCHEDULES.get(said)
    if ours is None:
        migration.decide(
            f"lr_scheduler_type={said} has no counterpart (constant, cosine, linear, wsd)", "lr_scheduler_type"
        )
    migration.put("actor.schedule.name", ours or "constant", f"lr_scheduler_type={said}")
    if said.startswith("cosine_with_min_lr"):
        floors = _mapping(migration, "lr_scheduler_kwargs")
        try:
            floor = number(floors["min_lr"]) / rate if "min_lr" in floors else number(floors["min_lr_rate"])
            migration.put("actor.schedule.min_ratio", round(float(floor), 9), "lr_scheduler_kwargs")
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            migration.decide(f"lr_scheduler_type={said}: set actor.schedule.min_ratio", "lr_scheduler_kwargs")
    steps, share = migration.number("warmup_steps", default=0), migration.number("warmup_ratio", default=0.0)
    if steps and steps >= 1:
        migration.put("actor.schedule.warmup_steps", int(steps), f"warmup_steps={steps}")
    elif steps or share:
        migration.put("actor.schedule.warmup_fraction", float(steps or share), "warmup_ratio")
    recomputes = migration.truth("gradient_checkpointing", default=True)
    if recomputes:
        offloads = migration.truth("activation_offloading")
        migration.put("actor.activation_checkpointing", "offload" if offloads else True, "gradient_checkpointing=True")
    if migration.truth("bf16", default=True):
        migration.put("actor.compute_dtype", "bfloat16", "bf16=True")
    elif migration.truth("fp16"):
        migration.decide(
            "fp16=True: hone trains in float32 or bfloat16; the file leaves actor.compute_dtype: auto", "fp16"
        )
    coef = migration.number("router_aux_loss_coef")
    if coef:
        migration.put("actor.moe.router_aux_loss_coef", float(coef), f"router_aux_loss_coef={coef}")
    saving = migration.number("save_steps", default=500)
    migration.put("checkpoint.every_steps", int(saving) if saving >= 1 else 500, f"save_steps={saving}")
    migration.copy("save_total_limit", convert=int)


def _length(migration: Migration, kind: str) -> None:
    steps = int(migration.number("max_steps", default=-1))
    if steps <= 0:
        epochs = migration.number("num_train_epochs", default=EPOCHS)
        migration.put("run.epochs", epochs, f"num_train_epochs={epochs}")
        return
    migration.drop("num_train_epochs", "max_steps ends the run")
    if kind in POLICY:
        each = migration.settings["update.minibatches"].value * migration.settings["update.epochs"].value
        migration.put(
            "run.steps", math.ceil(steps / each), f"max_steps={steps} optimizer steps / {each} of one generation"
        )
    else:
        migration.put("run.steps", steps, f"max_steps={steps}")
