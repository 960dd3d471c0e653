"""Parts of a verl run that most scripts do not have: distillation, tools, profiles."""

from __future__ import annotations

from hone.migration.migration import Migration

ROLLOUT = "actor_rollout_ref.rollout"


def read(migration: Migration) -> None:
    """Read distillation, turns with tools, and profiles."""
    _distillation(migration)
    _turns(migration)
    _profile(migration)


def _distillation(migration: Migration) -> None:
    options = [name for name in migration.options if name.startswith("distillation.")]
    if not migration.truth("distillation.enabled"):
        for name in options:
            migration.drop(name, "distillation is off")
        return
    paths = {
        name: value
        for name, value in migration.options.items()
        if name.startswith("distillation.teacher_models.") and name.endswith("model_path")
    }
    for name in paths:
        teacher = name.split(".")[2]
        migration.put(f"distillation.teachers.{teacher}.model.path", migration.text(name), name)
    if len(paths) > 1:
        key = migration.text("distillation.teacher_key", default="data_source")
        migration.put("distillation.teacher_field", key, "several teachers: the column that names each row's")
    rewards = migration.truth("distillation.distillation_loss.use_task_rewards", default=True)
    migration.put("distillation.task_coef", 1.0 if rewards else 0.0, f"distillation_loss.use_task_rewards={rewards}")
    mode = migration.text("distillation.distillation_loss.loss_mode", default="k1")
    if mode == "forward_kl_topk":
        migration.put("distillation.loss.name", "forward_top_k", f"distillation_loss.loss_mode={mode}")
        topk = migration.number("distillation.distillation_loss.topk", default=16)
        migration.put("distillation.loss.k", int(topk), f"distillation_loss.topk={topk}")
    migration.drop("distillation.distillation_loss.topk", "the estimate needs no top-k")
    migration.decide(
        f"distillation with loss_mode={mode}: read the section distillation of `hone config --explain distillation`, "
        "and choose its loss; verl's clamps of losses and log-probs have no counterpart",
        "distillation.distillation_loss.loss_max_clamp",
        "distillation.distillation_loss.log_prob_min_clamp",
        "distillation.distillation_loss.use_policy_gradient",
    )
    for name in options:
        migration.drop(
            name, "placement and engine of the teacher; here a teacher takes the actor's settings unless set"
        )


def _turns(migration: Migration) -> None:
    base = f"{ROLLOUT}.multi_turn"
    given = [name for name in migration.options if name.startswith(base)]
    tools = migration.text(f"{base}.tool_config_path", "data.tool_config_path", default="null")
    loop = migration.text(f"{ROLLOUT}.agent.default_agent_loop", default="single_turn_agent")
    has_turns = migration.truth(f"{base}.enable") or tools not in ("null", "None") or loop != "single_turn_agent"
    if has_turns:
        migration.copy(f"{base}.max_assistant_turns", "episode.max_turns", int)
        has_tools = "without tools" if tools in ("", "null", "None") else f"with the tools of {tools}"
        migration.decide(
            f"the agent loop {loop} {has_tools}: write an environment (docs/envs.md) and set "
            "episode.env; `hone env check` plays it without a model",
            *[name for name in given if name not in migration.mapped],
        )
    for name in given:
        migration.drop(name, "there are no turns" if not has_turns else "an option of verl's agent loop")


def _profile(migration: Migration) -> None:
    steps = migration.value("global_profiler.steps")
    if isinstance(steps, list) and steps:
        migration.put("profile.steps", steps, "global_profiler.steps")
