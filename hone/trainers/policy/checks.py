"""Checks of a policy run's settings before a model is built or a server is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from hone.algorithms import ADVANTAGES
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.distillation.losses import Distillation
from hone.algorithms.filtering.group_filter import GREEDY_REWARD
from hone.algorithms.filtering.settings import OVERLONG
from hone.algorithms.objective import FULL_KL
from hone.algorithms.settings import SftSettings
from hone.config import ConfigError
from hone.data.settings import PromptSetConfig
from hone.data.sources.base import check_path
from hone.envs import ENVS
from hone.envs.base import is_single_turn
from hone.envs.settings import AgentSettings, EndpointSettings
from hone.models.loading import folder_of
from hone.models.rotary import longest_position
from hone.models.settings import ModelConfig
from hone.registry import unknown
from hone.rollout.settings import SamplingConfig
from hone.runtime.settings import RaySettings
from hone.schedule.journal import JOURNAL
from hone.schedule.settings import AsynchronyConfig
from hone.trainers.policy.annotators import Stage, check_stages, declared_stages
from hone.trainers.policy.budgets import TokenBudgets, engines_of
from hone.trainers.policy.settings import PolicyRunConfig, learns_from_teachers
from hone.trainers.run.following import check_follow
from hone.workers.rollout import is_batch_invariant, server_shape

WITHOUT_REWARDS = ("chat", "mcp", "python", "search", "shell")  # environments whose turns have no rewards
OBJECTIVE_OUTPUTS = frozenset({"entropy", "sum_pi_squared", FULL_KL})  # of an engine's forward, beyond log-probs

PRODUCED_BY = {"process_rewards": "process_reward"}  # field -> the section of the run file that fills it


def check_settings(config: PolicyRunConfig) -> None:
    """Raise ConfigError for all that can be known to be wrong before a model is built or a server is started."""
    algorithm, distillation = algorithm_of(config), distillation_of(config)
    check_policy_run(config, algorithm, declared_stages(config, algorithm, distillation))
    sets = {f"evaluation.sets.{name}": one for name, one in config.evaluation.sets.items()}
    for key, one in (_training_sets(config) | sets).items():
        check_path(one, key)
    _check_drain(config)
    if config.run.steps is None:  # the data will say
        return
    engines, steps = engines_of(config), optimizer_steps(config)
    schedules = {key: (engines[key].schedule, total) for key, total in steps.items()}
    if config.warm_start is not None:
        schedules["warm_start.actor"] = (config.warm_start.actor.schedule, config.warm_start.steps)
    for schedule, total in schedules.values():
        try:
            schedule.warmup(total)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def check_room(config: PolicyRunConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the longest response alone fills the context of `model`, which would cut every answer."""
    if full := full_context(config.rollout.sampling, model):
        raise ConfigError(f"rollout.sampling.{full}")


def full_context(sampling: SamplingConfig, model: ModelConfig) -> str:
    """Describe how the longest response alone fills the context of `model`; empty: it does not."""
    context, asked = context_of(model), sampling.max_response_tokens
    if context is None or asked < context:
        return ""
    return (
        f"max_response_tokens={asked} leaves no room for a prompt: the model's context is {context} tokens; set it "
        f"below {context}"
    )


def context_of(model: ModelConfig) -> int | None:
    """The longest sequence of a model in tokens; None: it has no limit."""
    read = AutoConfig.from_pretrained(folder_of(model, weights=False), trust_remote_code=model.trust_remote_code)
    return longest_position(read, model.used.context)


def narrow_room(config: PolicyRunConfig, context: int, longest: int) -> str:
    """Describe how far the longest prompt shortens answers, because both share the context; empty: not at all."""
    asked, left = config.rollout.sampling.max_response_tokens, max(context - longest, 0)
    if not context or left >= asked:
        return ""
    return (
        f"the longest prompt, {longest} tokens, leaves {left} of an answer's {asked} tokens, as the model's context is "
        f"{context}: lower rollout.sampling.max_response_tokens or data.train.max_prompt_tokens"
    )


def algorithm_of(config: PolicyRunConfig) -> Algorithm:
    """The algorithm of a run. Raises ConfigError for settings that contradict each other."""
    try:
        longest = config.rollout.sampling.max_response_tokens
        steps_per_batch = config.update.minibatches * config.update.epochs
        return Algorithm(config.algorithm, steps_per_batch, longest, config.run.seed)
    except ValueError as error:
        raise ConfigError(f"algorithm: {error}") from error


def distillation_of(config: PolicyRunConfig) -> Distillation | None:
    """The use of the run's teachers, if it has any."""
    return None if config.distillation is None else Distillation(config.distillation)


def optimizer_steps(config: PolicyRunConfig) -> dict[str, int]:
    """The optimizer steps of each model that is trained, by the key of its engine; `run.steps` has to be known."""
    assert config.run.steps is not None
    each = config.update.minibatches * config.update.epochs
    steps = {"actor": config.run.steps * each}
    if config.critic is not None:  # the actor's schedule begins after the critic's warm-up
        steps["actor"] -= config.critic.warmup_steps * each
        steps["critic.engine"] = config.run.steps * each
    if config.process_reward is not None:
        steps["process_reward.engine"] = config.run.steps * config.update.minibatches
    return steps


def check_policy_run(config: PolicyRunConfig, algorithm: Algorithm, stages: Sequence[Stage]) -> None:
    """Raise ConfigError for parts of a run file that do not fit each other."""
    _check_rewards(config, algorithm)
    _check_critic(config, algorithm)
    _check_reference(config, algorithm)
    _check_process_rewards(config, algorithm)
    _check_teachers(config)
    _check_fields(config, algorithm, stages)
    _check_routing_replay(config, algorithm)
    _check_token_budgets(config)
    _check_rollout_logprobs(config)
    _check_answers_differ(config)
    _check_roles(config, algorithm)
    _check_metric(config, algorithm)
    _check_sync_deadline(config)
    if config.asynchrony is not None and config.asynchrony.stream:
        _check_streaming(config, config.asynchrony, stages)
    if config.asynchrony is not None and config.asynchrony.lend_trainer:
        _check_lending(config, config.asynchrony)


def _check_rewards(config: PolicyRunConfig, algorithm: Algorithm) -> None:
    """Something gives a reward: a component that counts, the environment, or teachers."""
    env, parts = config.episode.env.name, config.reward.components
    if env not in WITHOUT_REWARDS or learns_from_teachers(config):
        return
    if not parts:
        raise ConfigError(f"reward.components: name at least one; the environment {env} gives no reward")
    if any(one.weight for one in parts.values()):
        return
    name = next(iter(parts))
    if not _learns_without_weights(config, algorithm):
        raise ConfigError(
            "reward.components: every weight is 0, so every reward is 0, and the policy learns nothing; "
            f"set reward.components.{name}.weight=1"
        )
    sampling = config.algorithm.dynamic_sampling
    if sampling is not None and sampling.metric == "reward":  # before any penalty
        raise ConfigError(
            "reward.components: every weight is 0, so algorithm.dynamic_sampling, which compares rewards, drops every "
            f"group; set algorithm.dynamic_sampling.metric={name}, or reward.components.{name}.weight=1"
        )


def _learns_without_weights(config: PolicyRunConfig, algorithm: Algorithm) -> bool:
    """Return whether something other than the weighted sum of the components changes the policy."""
    overlong, process, reference = config.algorithm.overlong, config.process_reward, config.reference
    reads = {name.partition("/")[0] for name in algorithm.required_fields}
    return (
        not reads.isdisjoint(f"components.{name}" for name in config.reward.components)  # it weighs them itself
        or (overlong is not None and overlong.punishes)
        or (process is not None and process.outcome != "reward")
        or config.distillation is not None
        or (algorithm.needs_reference and reference is not None and reference.model is not None)
        or isinstance(config.algorithm.loss, SftSettings)
    )


def check_replay(config: PolicyRunConfig, journal: Path) -> None:
    """Raise ConfigError if a run cannot repeat what this journal has."""
    asynchrony, backend = config.asynchrony, config.rollout.backend
    if not journal.is_file():
        raise ConfigError(f"--replay {journal}: there is no such file; name the {JOURNAL} of an asynchronous run")
    if journal.parent.resolve() == Path(config.run.dir).resolve():
        raise ConfigError(f"--replay {journal}: run.dir is the folder of the recorded run; set another run.dir")
    if asynchrony is None or not asynchrony.staleness:
        raise ConfigError(
            "--replay: with asynchrony.staleness = 0 a run depends on its settings alone; run it again without --replay"
        )
    if asynchrony.new_weights == "keep_cache":
        raise ConfigError(
            "--replay with asynchrony.new_weights: keep_cache: its tokens depend on the KV cache of older weights, "
            "which a replay does not have; record a run with recompute or finish"
        )
    if not is_batch_invariant(backend):
        raise ConfigError(
            f"--replay with rollout.backend: {backend}: the tokens of this engine depend on the requests that it "
            "computes together; only the built-in engine can repeat a run (rollout.backend=builtin)"
        )
    if isinstance(config.episode.env, EndpointSettings):
        raise ConfigError(
            f"--replay with episode.env: {config.episode.env.name}: an agent program may send requests in any order, "
            "so they cannot be matched with the record"
        )


def _check_fields(config: PolicyRunConfig, algorithm: Algorithm, stages: Sequence[Stage]) -> None:
    """Every field that the algorithm reads is collected, or filled by a stage."""
    filled = check_stages(stages, _collected(config, algorithm))
    fields = {name for name in algorithm.required_fields if name.partition("/")[0] not in filled}  # x/y: part of x
    missing = sorted(fields | (algorithm.policy_objective().needs - OBJECTIVE_OUTPUTS))
    if missing:
        section = next((f"; add the section `{PRODUCED_BY[one]}: {{}}`" for one in missing if one in PRODUCED_BY), "")
        raise ConfigError(
            f"algorithm {algorithm.name}: needs {', '.join(missing)}, which no part of this run produces "
            f"(there is: {', '.join(sorted(filled))}){section}"
        )


def _collected(config: PolicyRunConfig, algorithm: Algorithm) -> frozenset[str]:
    """The fields of a batch that comes from trajectories."""
    fields = {"rewards", "rollout_logprobs", "weight_versions"}
    fields |= {f"components.{name}" for name in config.reward.components}
    overlong = config.algorithm.overlong
    if overlong is not None and overlong.punishes:
        fields.add(f"components.{OVERLONG}")
    if algorithm.needs_greedy:  # every prompt is then answered greedily, too
        fields.add(f"components.{GREEDY_REWARD}")
        if GREEDY_REWARD in config.reward.components:
            raise ConfigError(
                f"reward.components.{GREEDY_REWARD}: {algorithm.name} uses this name for its baseline; "
                "give the component another name"
            )
    return frozenset(fields)


def _check_critic(config: PolicyRunConfig, algorithm: Algorithm) -> None:
    advantage = config.algorithm.advantage.name
    if config.critic is None and algorithm.needs_values:
        raise ConfigError(
            f"critic: algorithm.advantage {advantage} needs a critic; add the section `critic: {{}}`, on the command "
            "line critic={}"
        )
    if config.critic is None:
        return
    if not algorithm.needs_values:
        raise ConfigError(f"critic: algorithm.advantage {advantage} has no critic; remove the section")
    if config.run.steps is not None and config.critic.warmup_steps >= config.run.steps:
        raise ConfigError(
            f"critic.warmup_steps = {config.critic.warmup_steps} should be less than run.steps = "
            f"{config.run.steps}: the policy would never be trained"
        )


def _check_reference(config: PolicyRunConfig, algorithm: Algorithm) -> None:
    used = algorithm.needs_reference or config.process_reward is not None
    if config.reference is not None and not used:
        raise ConfigError("reference: algorithm.kl.coef is 0, so there is no reference; remove the section")
    if config.reference is not None and config.reference.follow is not None:
        check_follow(config.reference, config.actor, _fixes_reference(config))


def _fixes_reference(config: PolicyRunConfig) -> dict[str, str]:
    """The settings of a run that need a reference which never changes, each with the reason."""
    found = {}
    if config.algorithm.penalty.kind == "full":
        found["algorithm.kl.kind: full"] = (
            "the actor keeps a copy of the reference's head, which would not follow; k1, k2 and k3 need none"
        )
    if config.process_reward is not None:
        found["process_reward"] = "process rewards are defined against the policy before training"
    return found


def _check_process_rewards(config: PolicyRunConfig, algorithm: Algorithm) -> None:
    """The estimator reads process rewards, and their model has an outcome to learn from."""
    if config.process_reward is None:
        return
    if "process_rewards" not in algorithm.required_fields:
        advantage = config.algorithm.advantage.name
        raise ConfigError(f"process_reward: algorithm.advantage {advantage} has no use for it (prime has)")
    known = ["reward", *config.reward.components]
    if config.process_reward.outcome.partition("/")[0] not in known:
        raise ConfigError(unknown("process_reward.outcome", config.process_reward.outcome, known))
    overlong = config.algorithm.overlong
    if config.process_reward.outcome == "reward" and overlong is not None and overlong.punishes:
        parts = " or ".join(f"process_reward.outcome={name}" for name in config.reward.components)
        raise ConfigError(
            "process_reward.outcome = reward should be between 0 and 1, and the penalty of algorithm.overlong makes it "
            f"negative; set {parts or 'the name of a reward component'}, or remove algorithm.overlong"
        )


def _check_teachers(config: PolicyRunConfig) -> None:
    if config.distillation is None or config.distillation.where != "in_reward":
        return
    try:
        config.algorithm.advantage.check_takes_token_rewards("distillation.where: in_reward")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_routing_replay(config: PolicyRunConfig, algorithm: Algorithm) -> None:
    """The routes that are to be replayed come from a forward that this run makes."""
    if config.actor.routing_replay == "old_logprobs" and not algorithm.needs_old_logprobs:
        steps = config.update.minibatches * config.update.epochs
        raise ConfigError(
            f"actor.moe.routing_replay: old_logprobs replays the routes of the forward for old log-probs, and "
            f"{algorithm.name} has no such forward here (update.minibatches x update.epochs = {steps}, "
            f"algorithm.correction.old: {config.algorithm.correction.old}); set none, or rollout"
        )


def _check_token_budgets(config: PolicyRunConfig) -> None:
    """The longest prompt with the longest answer fits into a micro-batch of every model that reads it."""
    limits = {f"{name}.max_prompt_tokens": one.max_prompt_tokens for name, one in _training_sets(config).items()}
    key, prompt = max(limits.items(), key=lambda pair: pair[1] or 0)
    budgets = TokenBudgets(config)
    budgets.check(prompt or 1, f"{key} ({prompt})" if prompt else "a prompt of 1 token or more")
    budgets.check_conversations(config.episode.limits.max_episode_tokens)


def _training_sets(config: PolicyRunConfig) -> dict[str, PromptSetConfig]:
    return {"data.train": config.data.train, **{f"data.mix.{name}": one for name, one in config.data.mix.items()}}


def _check_rollout_logprobs(config: PolicyRunConfig) -> None:
    """A correction compares the trainer's log-probs with the rollout's: both have to be over the whole vocabulary."""
    sampling, correction = config.rollout.sampling, config.algorithm.correction
    filters = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
    chosen = {name: off for name, (value, off) in filters.items() if value != off}
    parts = {
        f"old: {correction.old}": ("old=trainer", correction.old == "rollout"),
        f"weights: {correction.weights}": ("weights=null", correction.weights is not None),
        "rejections": ("rejections=[]", bool(correction.rejections)),
    }
    compared = {part: remedy for part, (remedy, used) in parts.items() if used}
    env = config.episode.env
    if compared and isinstance(env, EndpointSettings) and env.client_sampling:
        remedies = " ".join(f"algorithm.correction.{remedy}" for remedy in compared.values())
        raise ConfigError(
            f"algorithm.correction.{next(iter(compared))} with episode.env.client_sampling = true: requests may sample "
            "by a filter or a JSON schema of their own, and the rollout's log-probs are then not over the whole "
            f"vocabulary as the trainer's are; set episode.env.client_sampling=false, or {remedies}"
        )
    if compared and chosen:
        off = " ".join(f"rollout.sampling.{name}={value:g}" for name, value in chosen.items())
        remedies = " ".join(f"algorithm.correction.{remedy}" for remedy in compared.values())
        raise ConfigError(
            f"algorithm.correction.{next(iter(compared))} with rollout.sampling.{next(iter(chosen))}: the rollout "
            "normalises its log-probs over the tokens that the filter leaves, the trainer over the whole vocabulary, "
            f"so ratios would be below 1 even for fresh samples; set {off}, or {remedies}"
        )


def _check_answers_differ(config: PolicyRunConfig) -> None:
    """Several answers to one prompt are sampled: greedy ones would be the same, and teach nothing."""
    name, samples = config.episode.env.name, config.update.samples_per_prompt
    single_turn = name in ENVS and is_single_turn(ENVS.get(name))
    if single_turn and samples > 1 and config.rollout.sampling.temperature == 0:
        raise ConfigError(
            f"rollout.sampling.temperature = 0 (greedy) with update.samples_per_prompt = {samples}: all answers to a "
            "prompt would be the same; set temperature above 0, or samples_per_prompt=1"
        )


def _check_roles(config: PolicyRunConfig, algorithm: Algorithm) -> None:
    """No baseline is one greedy answer: an episode with several roles has several answers."""
    env = config.episode.env
    if isinstance(env, AgentSettings) and env.roles and algorithm.needs_greedy:
        raise ConfigError(
            f"{env.key_of('roles')}: {algorithm.name} compares with one greedy answer to each prompt, and an episode "
            "with roles has several; choose algorithm.advantage=grpo"
        )


def _check_metric(config: PolicyRunConfig, algorithm: Algorithm) -> None:
    """Dynamic sampling compares something that the rewards have."""
    sampling = config.algorithm.dynamic_sampling
    if sampling is None:
        return
    collected = _collected(config, algorithm)
    parts = sorted(name.removeprefix("components.") for name in collected if name.startswith("components."))
    if sampling.metric.partition("/")[0] not in ("reward", *parts):
        raise ConfigError(unknown("algorithm.dynamic_sampling.metric", sampling.metric, ["reward", *parts]))


def _check_sync_deadline(config: PolicyRunConfig) -> None:
    """No shorter limit ends a run whose weight sync may still succeed."""
    rollout, runtime = config.rollout, config.runtime
    if rollout.backend == "builtin" and rollout.builtin.process == "inside":  # weights are copied, without a deadline
        return
    sync_s = config.weights.timeout_s
    if runtime.stall_timeout_s <= sync_s:
        raise ConfigError(
            f"runtime.stall_timeout_s = {runtime.stall_timeout_s:g} should be more than weights.timeout_s = "
            f"{sync_s:g}, because the run makes no other progress during a sync; raise runtime.stall_timeout_s, or "
            "lower weights.timeout_s"
        )
    backend, silent_s = runtime.backend, config.weights.patience_s
    several = isinstance(backend, RaySettings) and backend.nodes * backend.devices > 1
    if several and runtime.collective_timeout_s <= silent_s:
        raise ConfigError(
            f"runtime.collective_timeout_s = {runtime.collective_timeout_s:g} should be more than {silent_s:g}, a "
            f"third of weights.timeout_s = {sync_s:g}: so long a rank may wait for a silent server, and the other "
            "ranks for that rank; raise runtime.collective_timeout_s, or lower weights.timeout_s"
        )


def _check_drain(config: PolicyRunConfig) -> None:
    """An evaluation waits for the open answers, so the wait has to outlast an episode that takes its whole deadline."""
    asynchrony, timeout_s = config.asynchrony, config.episode.timeout_s
    if asynchrony is None or not asynchrony.staleness or not config.evaluation.sets:
        return
    if asynchrony.drain_timeout_s <= timeout_s:
        raise ConfigError(
            f"asynchrony.drain_timeout_s = {asynchrony.drain_timeout_s:g} is not longer than episode.timeout_s = "
            f"{timeout_s:g}: an evaluation waits for open answers, and one slow episode would end the run. Set "
            f"asynchrony.drain_timeout_s={1.5 * timeout_s:g}, or a shorter episode.timeout_s"
        )


def _check_lending(config: PolicyRunConfig, asynchrony: AsynchronyConfig) -> None:
    """The trainer's device can be a server's in turns, and there are turns."""
    server = server_shape(config.rollout)
    refused = {
        "asynchrony.staleness = 0": (
            asynchrony.staleness == 0,
            "generation and training take turns on one device anyway; set asynchrony.staleness=1",
        ),
        f"runtime.backend: {config.runtime.backend.name}": (
            isinstance(config.runtime.backend, RaySettings),
            "its servers get their devices from the cluster's pools, which the trainer's are not part of; set "
            "runtime.backend=local",
        ),
        str(server): (server.ranks > 1, "the trainer has one device; set rollout.tensor_parallel=1"),
    }
    for what, (is_so, reason) in refused.items():
        if is_so:
            raise ConfigError(f"asynchrony.lend_trainer with {what}: {reason}, or asynchrony.lend_trainer=false")


def _check_streaming(config: PolicyRunConfig, asynchrony: AsynchronyConfig, stages: Sequence[Stage]) -> None:
    """A mini-batch that trains before the rest of its step is there needs nothing from the rest."""
    update, algorithm = config.update, config.algorithm
    colocated = [name for name, one in config.reward.components.items() if one.model and one.model.place == "colocated"]
    stage = ", ".join(stage.name for stage in stages)
    own_group = ", ".join(name for name in ADVANTAGES if ADVANTAGES.settings(name).own_group)
    needs = {
        "asynchrony.staleness = 0": (
            asynchrony.staleness == 0,
            "nothing is generated while the policy trains; set asynchrony.staleness=1",
        ),
        f"update.epochs = {update.epochs}": (
            update.epochs > 1,
            "a second epoch mixes the groups of all mini-batches; set update.epochs=1",
        ),
        "update.minibatches = 1": (
            update.minibatches == 1,
            "the only mini-batch is the whole step; set update.minibatches=2 or more",
        ),
        f"algorithm.correction.old: {algorithm.correction.old}": (
            algorithm.correction.old != "rollout",
            "old log-probs come from a forward before the step's first update; set algorithm.correction.old=rollout",
        ),
        f"algorithm.advantage: {algorithm.advantage.name}": (
            algorithm.advantage.spans_groups,
            "its advantages depend on all groups of the step; set algorithm.advantage to "
            f"{own_group} (grpo with scale_by group or none)",
        ),
        "algorithm.resample": (
            algorithm.resample is not None,
            "it draws from all trajectories of the step; set algorithm.resample=null",
        ),
        f"{stage} (a model that reads the batch before the update)": (
            bool(stages),
            "it reads all groups of the step at once; remove it (for the reference, algorithm.kl.coef=0)",
        ),
        f"reward.components.{next(iter(colocated), '')}.model.place: colocated": (
            bool(colocated),
            "this reward model scores all answers of a step at once; set its place=process",
        ),
    }
    for what, (is_needed, reason) in needs.items():
        if is_needed:
            raise ConfigError(f"asynchrony.stream with {what}: {reason}, or asynchrony.stream=false")
