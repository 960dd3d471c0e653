"""Length of a run, shape of a step, staleness, and where a verl run keeps its files."""

from __future__ import annotations

import math

from hone.migration.migration import Migration

EPOCHS = 30
PROMPTS = 1024
MINI_BATCH = 256
DEVICES = 8
TRACKERS = ("console", "wandb", "tensorboard", "mlflow", "trackio")
"""Loggers of verl that hone has under the same name."""

ACTOR = "actor_rollout_ref.actor"


def read(migration: Migration, kind: str) -> None:
    """Read the run's length, its step and its files."""
    migration.put("kind", "rl", "")
    folder(migration, "verl_examples", "gsm8k")
    if kind == "fully_async":
        _fully_asynchronous(migration)
    else:
        _length(migration)
        _step(migration)
        if kind == "one_step_off":
            _staleness(migration, 1, "verl's one-step-off trainer")
    _v1(migration)
    saving(migration)


def folder(migration: Migration, project: str, experiment: str) -> None:
    """Set the run folder and the trackers, whose project is verl's project."""
    project = migration.text("trainer.project_name", default=project)
    experiment = migration.text("trainer.experiment_name", default=experiment)
    given = migration.text("trainer.default_local_dir")
    migration.put("run.dir", given or f"runs/{experiment}", "trainer.default_local_dir" if given else "")
    loggers = migration.value("trainer.logger", default=["console", "wandb"])
    names = loggers if isinstance(loggers, list) else [loggers]
    known = [{"name": name} for name in dict.fromkeys(map(str, names)) if name in TRACKERS]
    for one in known:
        if one["name"] in ("wandb", "trackio"):
            one["project"] = project
        if one["name"] == "mlflow":
            one["experiment"] = project
    for name in [str(name) for name in names if name not in TRACKERS]:
        migration.decide(f"trainer.logger names {name}, which hone has no tracker for ({', '.join(TRACKERS)})")
    migration.put("tracking.trackers", [*known, {"name": "jsonl"}], "trainer.logger; jsonl feeds the report")


def _length(migration: Migration) -> None:
    steps = migration.number("trainer.total_training_steps")
    epochs = migration.number("trainer.total_epochs", default=EPOCHS)
    if steps is not None:
        migration.put("run.steps", int(steps), f"trainer.total_training_steps={steps}")
        migration.drop("trainer.total_epochs", "trainer.total_training_steps ends the run")
    else:
        migration.put("run.epochs", epochs, f"trainer.total_epochs={epochs}")


def _step(migration: Migration) -> None:
    prompts = migration.count("data.train_batch_size", default=PROMPTS)
    mini = migration.count(f"{ACTOR}.ppo_mini_batch_size", default=MINI_BATCH)
    migration.put("update.prompts_per_step", prompts, f"data.train_batch_size={prompts}")
    _group(migration)
    if mini > 0 and prompts % mini == 0:
        migration.put(
            "update.minibatches",
            prompts // mini,
            f"data.train_batch_size={prompts} / actor.ppo_mini_batch_size={mini}, both in prompts",
        )
    else:
        name = f"{ACTOR}.ppo_mini_batch_size"
        migration.decide(
            f"{name}={mini} does not divide data.train_batch_size={prompts}; set update.minibatches, the number of "
            "optimizer steps in one pass",
            *([name] if name in migration else []),
        )


def _group(migration: Migration) -> None:
    name = "actor_rollout_ref.rollout.n"
    answers = migration.count(name, default=1)
    migration.put("update.samples_per_prompt", answers, f"rollout.n={answers}")
    migration.copy(f"{ACTOR}.ppo_epochs")


def _fully_asynchronous(migration: Migration) -> None:
    """Read the trainer that takes prompts one by one: a step here is the stretch between two weight syncs there."""
    mini = migration.count(f"{ACTOR}.ppo_mini_batch_size", default=MINI_BATCH)
    batches = migration.count("async_training.require_batches", default=1)
    trigger = migration.count("async_training.trigger_parameter_sync_step", default=4)
    prompts = mini * batches * trigger
    migration.put(
        "update.prompts_per_step",
        prompts,
        f"ppo_mini_batch_size={mini} x require_batches={batches} x trigger_parameter_sync_step={trigger}: the prompts "
        "between two weight syncs",
    )
    _group(migration)
    migration.put(
        "update.minibatches", trigger * batches, f"optimizer steps between two weight syncs, of {mini} prompts"
    )
    total = migration.number("rollout.total_rollout_steps")
    if total is not None:
        migration.put(
            "run.steps", math.ceil(total / prompts), f"rollout.total_rollout_steps={total} / {prompts} prompts"
        )
        migration.drop("trainer.total_epochs", "rollout.total_rollout_steps ends the run")
        migration.drop("trainer.total_training_steps", "rollout.total_rollout_steps ends the run")
    else:
        _length(migration)
    for name in ("data.train_batch_size", "data.gen_batch_size"):
        migration.drop(name, "the fully asynchronous trainer takes prompts one by one, as hone's asynchronous runs do")
    threshold = float(migration.number("async_training.staleness_threshold", default=0.1))
    if threshold > 0:
        _staleness(migration, math.ceil(threshold), f"async_training.staleness_threshold={threshold}")
        if threshold != math.ceil(threshold):
            migration.notes.append(
                f"async_training.staleness_threshold={threshold} is the share of a sync interval that may be generated "
                f"ahead; asynchrony.staleness counts weight syncs, so it is rounded up to {math.ceil(threshold)}"
            )
    name = "async_training.partial_rollout"
    if migration.truth(name, default=True) and threshold > 0:
        migration.put("asynchrony.new_weights", "recompute", f"{name}=True: answers go on under new weights")


def _staleness(migration: Migration, staleness: int, source: str) -> None:
    migration.put("asynchrony.staleness", staleness, source)


def _v1(migration: Migration) -> None:
    """Read the modes of verl's V1 trainer, whose default is synchronous.

    A step there draws one batch and trains one, and weights are published after each step. So the batches drawn before
    the first step are how far generation is ahead, and `max_off_policy_threshold` versions, the current one included,
    are the bound.
    """
    mode = migration.text("trainer.v1.trainer_mode", default="sync")
    if mode not in ("colocate_async", "separate_async"):
        if mode != "sync":
            migration.decide(
                f"trainer.v1.trainer_mode={mode} has no counterpart (sync, colocate_async, separate_async); set "
                "asynchrony.staleness",
                "trainer.v1.trainer_mode",
            )
        return
    bound = migration.count("trainer.v1.sampler.max_off_policy_threshold", default=8)
    ahead = int(migration.number(f"trainer.v1.{mode}.num_warmup_batches", default=1))
    staleness = min(ahead, bound - 1)
    if staleness > 0:
        _staleness(
            migration,
            staleness,
            f"trainer.v1.trainer_mode={mode}: {ahead} batches ahead, and fewer than {bound} versions",
        )
        migration.put("asynchrony.new_weights", "recompute", "V1 goes on with interrupted answers under new weights")
    if mode == "separate_async":
        _parameter_sync(migration)
    strategy = migration.text("trainer.v1.sampler.max_off_policy_strategy", default="drop")
    if strategy == "drop":
        migration.notes.append("verl drops answers that are too old; hone waits before they become too old")


def _parameter_sync(migration: Migration) -> None:
    """Check that a batch is what verl trains between two weight syncs, as verl asserts."""
    sync = migration.count("trainer.v1.separate_async.parameter_sync_step", default=4)
    prompts = migration.count("data.train_batch_size", default=PROMPTS)
    mini = migration.count(f"{ACTOR}.ppo_mini_batch_size", default=MINI_BATCH)
    if prompts != sync * mini:
        migration.decide(
            f"data.train_batch_size={prompts} is not trainer.v1.separate_async.parameter_sync_step={sync} x "
            f"{ACTOR}.ppo_mini_batch_size={mini}, which verl refuses; set update.prompts_per_step and "
            "update.minibatches"
        )


def saving(migration: Migration) -> None:
    every = migration.number("trainer.save_freq", default=-1)
    if every > 0:
        migration.put("checkpoint.every_steps", int(every), f"trainer.save_freq={every}")
    else:
        migration.notes.append("verl saves no checkpoint; hone always does (checkpoint.every_steps: 50)")
    kept = migration.value("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep")
    if kept is not None:
        migration.put("checkpoint.keep", int(kept), f"trainer.max_actor_ckpt_to_keep={kept}")
    elif every > 0:
        migration.notes.append("verl keeps every checkpoint; hone keeps the newest 2 and the best (checkpoint.keep)")
    testing = migration.number("trainer.test_freq", default=-1)
    migration.put("evaluation.every_steps", max(0, int(testing)), f"trainer.test_freq={testing}; 0: at start and end")
    migration.drop("trainer.val_before_train", "hone evaluates before and after training if there are held-out sets")
    resume = migration.text("trainer.resume_mode", default="auto")
    path = migration.text("trainer.resume_from_path", default="null")
    if resume == "resume_path" or path not in ("null", "None", ""):
        migration.decide(
            f"trainer.resume_from_path={path} continues a checkpoint of verl, which hone cannot read; export it as a "
            "Hugging Face folder and set model.path",
            "trainer.resume_from_path",
        )
    elif resume == "disable":
        migration.notes.append("trainer.resume_mode=disable: hone continues a run folder; start with --restart instead")
