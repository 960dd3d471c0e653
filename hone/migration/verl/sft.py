"""Supervised fine-tuning with verl: a run file of `hone sft`."""

from __future__ import annotations

from hone.migration.migration import Migration
from hone.migration.verl import batch, data, engine

EPOCHS = 4
SAMPLES = 256


def read(migration: Migration) -> None:
    """Read a supervised run."""
    migration.put("kind", "sft", "")
    batch.folder(migration, "gsm8k-sft", "test")
    steps = migration.number("trainer.total_training_steps")
    if steps is not None:
        migration.put("run.steps", int(steps), f"trainer.total_training_steps={steps}")
        migration.drop("trainer.total_epochs", "trainer.total_training_steps ends the run")
    else:
        epochs = migration.number("trainer.total_epochs", default=EPOCHS)
        migration.put("run.epochs", epochs, f"trainer.total_epochs={epochs}")
    migration.copy("trainer.seed", "run.seed", int)
    samples = migration.count("data.train_batch_size", default=SAMPLES)
    migration.put("samples_per_step", samples, f"data.train_batch_size={samples}")
    _data(migration)
    world = engine.devices(migration, 1)
    name = engine.engine_name(migration, "engine.strategy")
    if name == "megatron":
        engine.megatron(migration, "engine", "actor")
    else:
        engine.sharded(migration, "engine", "actor", name, world)
    engine.model(migration, "model")
    engine.memory(
        migration, "engine", "actor", "model.enable_gradient_checkpointing", "model.enable_activation_offload"
    )
    offloads = [migration.truth(name) for name in ("engine.param_offload", "engine.optimizer_offload")]
    if any(offloads):
        migration.put("actor.backend.offload", True, "engine.param_offload, engine.optimizer_offload")
    dynamic = str(migration.options.get("data.use_dynamic_bsz", True)).lower() == "true"
    engine.budget(migration, "actor", "data.max_token_len_per_gpu", dynamic)
    engine.optimizer(migration, "optim", "actor", default_lr=1e-3)
    norm = migration.number("optim.clip_grad", default=1.0)
    migration.put("actor.max_grad_norm", float(norm), f"optim.clip_grad={norm}")
    engine.lora(migration, "model")
    batch.saving(migration)


def _data(migration: Migration) -> None:
    for option, key in (("data.train_files", "data.train"), ("data.val_files", "evaluation.sets.test")):
        files = data.files(migration, option)
        if files and files[0] not in ("None", "null"):
            migration.put(f"{key}.path", files[0], option)
            _rows(migration, key)
        if len(files) > 1:
            migration.decide(f"{option} has {len(files)} files, which verl joins; the file has the first one")
    if "data.train.path" not in migration.settings:
        migration.decide("data.train_files is not set; set data.train.path")
    cut = migration.text("data.truncation", default="error")
    ours = {"error": "error", "right": "truncate"}.get(cut)
    if ours is None:
        migration.decide(f"data.truncation={cut} has no counterpart: data.train.too_long is error, drop or truncate")
    migration.put("data.train.too_long", ours or "drop", f"data.truncation={cut}")


def _rows(migration: Migration, key: str) -> None:
    column = migration.text("data.messages_key", "data.multiturn.messages_key", default="messages")
    if column != "messages":
        migration.put(f"{key}.columns.messages", column, f"data.messages_key={column}")
    limit = int(migration.number("data.max_length", default=1024))
    migration.put(f"{key}.max_sample_tokens", limit, f"data.max_length={limit}")
    rows = migration.number("data.train_max_samples" if key == "data.train" else "data.val_max_samples", default=-1)
    if rows > 0:
        migration.put(f"{key}.max_rows", int(rows), "max_samples")
