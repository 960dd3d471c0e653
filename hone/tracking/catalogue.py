"""The catalogue: every metric that a run may record, with its unit, its reducer and its meaning.

`hone list metrics` prints it, and the reference of the documentation is made from it. A name in angle brackets stands
for any text: `perf/<phase>_s` describes `perf/sleep_s`. A name without brackets is looked up first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from hone.types import Reducer

MEAN, SUM, MAX, MIN = Reducer.MEAN, Reducer.SUM, Reducer.MAX, Reducer.MIN


@dataclass(frozen=True, slots=True)
class Described:
    """A metric, or a family of metrics. `own`: the user's run file or environment chooses the name in brackets."""

    name: str
    unit: str  # empty: a number without a unit, such as a ratio or a reward
    reducer: Reducer
    meaning: str
    own: bool = False


def describe_metric(name: str) -> Described | None:
    """The entry of a metric; None if the catalogue has none.

    >>> describe_metric("perf/sleep_s").name
    'perf/<phase>_s'
    """
    if (exact := _by_name().get(name)) is not None:
        return exact
    return next((one for pattern, one in _families() if pattern.fullmatch(name)), None)


@cache
def _by_name() -> dict[str, Described]:
    return {one.name: one for one in METRICS}


@cache
def _families() -> list[tuple[re.Pattern[str], Described]]:
    """Families as patterns. The ones with the most fixed text come first; names that users choose come last."""
    found = [one for one in METRICS if "<" in one.name]
    found.sort(key=lambda one: (one.own, -len(re.sub("<.*?>", "", one.name))))
    return [(re.compile(re.sub("<.*?>", "[^/]+", re.escape(one.name))), one) for one in found]


def _lengths(which: str, of: str) -> tuple[Described, ...]:
    name = f"rollout/{which}_length"
    return (
        Described(name, "tokens", MEAN, f"mean length of {of}"),
        Described(f"{name}_p50", "tokens", MEAN, f"median length of {of}"),
        Described(f"{name}_p90", "tokens", MEAN, f"90th percentile of the length of {of}"),
        Described(f"{name}_max", "tokens", MAX, f"largest length of {of}"),
    )


def _optimizer(role: str, model: str) -> tuple[Described, ...]:
    """Return the metrics that the optimizer steps of every role record."""
    return (
        Described(f"{role}/loss", "", SUM, f"loss of {model} that is differentiated, with all its terms"),
        Described(f"{role}/grad_norm", "", MEAN, f"gradient norm of {model} before clipping"),
        Described(f"{role}/lr", "", MEAN, f"learning rate of {model}"),
        Described(
            f"{role}/skipped_steps", "steps", SUM, f"optimizer steps of {model} skipped for a non-finite gradient"
        ),
        Described(
            f"perf/{role}/rank_speed/<rank>",
            "share",
            MEAN,
            f"speed of a rank (from 0) in {model} over the others' median",
        ),
    )


_REWARD = (
    Described("reward/mean", "", MEAN, "reward of the step's answers, before filters; failed answers are left out"),
    Described("reward/max", "", MAX, "largest reward of the step's answers"),
    Described("reward/min", "", MIN, "smallest reward of the step's answers"),
    Described("reward/<component>", "", MEAN, "one component of the reward, before its weight", own=True),
    Described("reward/<component>/<part>", "", MEAN, "a part that a reward function returned by name", own=True),
    Described(
        "rollout/reward_spread/<component>", "", MEAN, "standard deviation of a component within a group", own=True
    ),
    Described("reward/scored", "answers", SUM, "answers that were scored"),
    Described("reward/failed", "answers", SUM, "answers whose reward failed; they are not trained on"),
    Described("reward/timeouts", "calls", SUM, "reward calls that took longer than their timeout_s"),
    Described("reward/worker_restarts", "processes", SUM, "reward processes that were started again"),
)

_ROLLOUT = (
    Described("rollout/trajectories", "answers", SUM, "answers of the step, failed ones included"),
    Described("rollout/response_length", "tokens", MEAN, "sampled tokens of an answer"),
    Described("rollout/response_length_max", "tokens", MAX, "sampled tokens of the longest answer"),
    Described("rollout/truncated_fraction", "share", MEAN, "answers that were cut at a length limit"),
    Described(
        "rollout/zero_variance_fraction", "share", MEAN, "groups whose answers all have the same reward: no advantage"
    ),
    *_lengths("drawn", "all answers, also failed and dropped ones"),
    *_lengths("failed", "answers that failed"),
    *_lengths("trained", "answers that are trained on"),
    Described("rollout/status/<status>", "answers", SUM, "answers with this status: ok, truncated, reward_failed ..."),
    Described("rollout/groups_dropped", "groups", SUM, "groups that filters or failures removed"),
    Described("rollout/epoch", "passes", MAX, "pass over the training data, from 0"),
    Described("rollout/prompts_too_long", "prompts", MAX, "prompts left out so far, because they exceed the limit"),
    Described("rollout/prompts_put_back", "prompts", SUM, "prompts of an oversampled draw that were not needed"),
    Described(
        "rollout/prompts_used", "prompts", SUM, "prompts of an oversampled draw whose groups were kept or dropped"
    ),
    Described("rollout/prompts_skipped", "prompts", SUM, "prompts not generated, because no variance was expected"),
    Described(
        "rollout/explore_easy", "probability", MEAN, "the current explore, for prompts whose answers all succeed"
    ),
    Described("rollout/explore_hard", "probability", MEAN, "the current explore, for prompts whose answers all fail"),
    Described("rollout/prompts_without_variance", "prompts", MAX, "prompts whose last group had no variance"),
    Described("rollout/greedy_reward", "", MEAN, "reward of the greedy answers (remax)"),
    Described("rollout/greedy_response_length", "tokens", MEAN, "sampled tokens of the greedy answers"),
    Described("rollout/greedy_failed", "answers", SUM, "greedy answers that failed; their groups are dropped"),
    Described("rollout/turns", "completions", MEAN, "completions of an episode"),
    Described("rollout/turns_max", "completions", MAX, "completions of the longest episode"),
    Described("rollout/observation_tokens", "tokens", MEAN, "tokens that the environment sent after the prompt"),
    Described("rollout/tracks_per_episode", "trajectories", MEAN, "trajectories that one episode gave"),
    Described("rollout/roles/<role>/trajectories", "", SUM, "trajectories of a role that an agent's requests named"),
    Described("rollout/roles/<role>/reward", "", MEAN, "mean reward of a role's trajectories"),
    Described("rollout/tools/<tool>/calls", "calls", SUM, "calls of a tool"),
    Described("rollout/tools/<tool>/errors", "calls", SUM, "calls that ended with an error or had wrong arguments"),
    Described("rollout/tools/<tool>/timeouts", "calls", SUM, "calls that took too long"),
    Described("rollout/tools/<tool>/seconds", "s", MEAN, "time of a call"),
    Described("rollout/calls/broken", "calls", SUM, "tool calls that could not be parsed"),
    Described("rollout/calls/unknown", "calls", SUM, "calls of a tool that does not exist"),
    Described("rollout/calls/refused", "calls", SUM, "calls beyond max_calls_per_turn"),
    Described("rollout/<figure>", "", MEAN, "a figure of the environment, with a reducer that it chooses", own=True),
    Described("rollout/tokens", "tokens", SUM, "tokens that the engine sampled"),
    Described("rollout/lent_tokens", "tokens", SUM, "tokens that the server on the trainer's device sampled"),
    Described("rollout/prefill_tokens", "tokens", SUM, "prompt tokens that the engine computed"),
    Described("rollout/shared_prompt_tokens", "tokens", SUM, "prompt tokens computed once for several samples"),
    Described("rollout/cached_prompt_tokens", "tokens", SUM, "prompt tokens whose KV was found in the prefix cache"),
    Described("rollout/recomputed_tokens", "tokens", SUM, "tokens computed again, because new weights arrived"),
    Described("rollout/requests", "requests", SUM, "requests that ended"),
    Described("rollout/aborted", "requests", SUM, "requests that ended by an abort"),
    Described("rollout/requests_resent", "requests", SUM, "requests that the router sent to another replica"),
    Described("rollout/batch_size", "requests", MEAN, "requests that the built-in engine decodes at once"),
    Described("rollout/kv_cache_bytes", "bytes", MAX, "size of the built-in engine's KV cache"),
    Described("rollout/replicas_serving", "replicas", MIN, "replicas that take requests, or are receiving weights"),
    Described("rollout/replica_restarts", "replicas", SUM, "servers that were started again"),
)


def _mixture(role: str) -> tuple[Described, ...]:
    """Of a mixture of experts that is trained."""
    return (
        Described(
            f"{role}/expert_load_max_over_mean", "", MEAN, "load of the busiest expert over the mean; 1 is balanced"
        ),
        Described(
            f"{role}/expert_load_worst_layer", "", MAX, "load of the busiest expert over the mean, in the worst layer"
        ),
        Described(f"{role}/experts_unused", "share", MEAN, "experts that got no token"),
        Described(f"{role}/router_entropy", "nats", MEAN, "entropy of the router; log(experts) is uniform"),
        Described(f"{role}/router_aux_loss", "", MEAN, "balance loss of the router, before its coefficient"),
        Described(f"{role}/router_z_loss", "", MEAN, "z loss of the router, before its coefficient"),
        Described(f"{role}/indexer_loss", "", MEAN, "divergence of attention from its indexer, before its coefficient"),
        Described(
            f"{role}/routes_replaced", "share", MEAN, "replayed expert choices that differ from the router's own"
        ),
    )


_POLICY = (
    *_optimizer("train", "the trained model (the actor)"),
    Described("train/policy_loss", "", MEAN, "policy loss per token, without KL and entropy terms"),
    Described("train/ratio", "", MEAN, "probability under the current policy divided by the old one, per token"),
    Described("train/approx_kl", "nats/token", MEAN, "k3 estimate of the KL from the old to the current policy"),
    Described("train/clip_fraction_low", "share", MEAN, "tokens that the lower clip bound stops"),
    Described("train/clip_fraction_high", "share", MEAN, "tokens that the upper clip bound stops"),
    Described("train/clip_fraction_dual", "share", MEAN, "tokens that dual clipping bounds"),
    Described("train/covariance_fraction", "share", MEAN, "tokens that clip_cov or kl_cov picked by their covariance"),
    Described("train/entropy_fraction", "share", MEAN, "tokens that the entropy selection picked"),
    Described("train/entropy", "nats/token", MEAN, "entropy of the policy"),
    Described("train/kl_loss", "nats/token", MEAN, "KL to the reference in the loss, before its coefficient"),
    Described("train/reference_kl", "nats/token", MEAN, "KL to the reference before the update"),
    Described("train/kl_coef", "", MEAN, "coefficient of the KL, after the step's adaptation"),
    Described("train/skipped_updates", "steps", SUM, "steps that trained nothing, because filters left no group"),
    Described("train/distillation_loss", "nats/token", MEAN, "divergence from the teacher in the loss"),
    Described("train/teacher_kl", "nats/token", MEAN, "KL from the student to the teacher, on sampled tokens (k1)"),
    *_mixture("train"),
)

_SUPERVISED = (
    Described("train/nll", "nats/token", MEAN, "sft: loss per trained token"),
    Described("train/tokens", "tokens", SUM, "tokens of the step's samples, prompts included"),
    Described("train/preference_loss", "", MEAN, "loss of a pair, a judged answer, or a step"),
    Described(
        "train/preference_accuracy", "share", MEAN, "pairs whose chosen answer is ahead; without pairs: right verdicts"
    ),
    Described("train/preference_margin", "", MEAN, "implicit reward or score of the chosen minus the rejected answer"),
    Described("train/chosen_reward", "", MEAN, "implicit reward of chosen (for kto: good) answers"),
    Described("train/rejected_reward", "", MEAN, "implicit reward of rejected (for kto: bad) answers"),
    Described("train/chosen_logprob", "nats", MEAN, "summed log-prob of chosen (for kto: good) answers"),
    Described("train/rejected_logprob", "nats", MEAN, "summed log-prob of rejected (for kto: bad) answers"),
    Described("train/chosen_score", "", MEAN, "reward model's score of chosen answers"),
    Described("train/rejected_score", "", MEAN, "reward model's score of rejected answers"),
    Described("train/kto_baseline", "nats", MEAN, "KTO's estimate of the KL to the reference"),
    Described("train/kto_left_out", "prompts", SUM, "prompts that KTO's baseline leaves out for lack of room"),
)

_CRITIC = (
    *_optimizer("critic", "the critic"),
    *_mixture("critic"),
    Described("critic/value_loss", "", MEAN, "clipped squared error of the values, halved"),
    Described("critic/clip_fraction", "share", MEAN, "tokens at which the value clip decides the loss"),
    Described("critic/value", "", MEAN, "value of a token"),
    Described("critic/return", "", MEAN, "return of a token"),
    Described("critic/explained_variance", "", MEAN, "share of the returns' variance that the values explain; 1 best"),
    *_optimizer("process_reward", "the process reward model"),
    *_mixture("process_reward"),
    Described("process_reward/cross_entropy", "nats", MEAN, "cross-entropy of its verdict on an answer's outcome"),
    Described("process_reward/accuracy", "share", MEAN, "answers whose outcome the summed rewards predict"),
    Described("process_reward/mean", "", MEAN, "process reward of a token"),
)

_CORRECTION = (
    Described("correction/kl", "nats/token", MEAN, "k1 estimate of KL(rollout, trainer); near 0 if they agree"),
    Described("correction/k3", "nats/token", MEAN, "k3 estimate of KL(rollout, trainer), never negative"),
    Described("correction/mean_abs_difference", "nats", MEAN, "absolute gap between trainer and rollout log-probs"),
    Described(
        "correction/max_abs_difference", "nats", MAX, "largest gap between trainer and rollout log-prob of a token"
    ),
    Described("correction/outside_band", "share", MEAN, "tokens whose ratio trainer/rollout leaves the band"),
    Described("correction/chi2_token", "", MEAN, "chi-squared divergence per token"),
    Described("correction/chi2_sequence", "", MEAN, "chi-squared divergence per sequence"),
    Described("correction/ess", "share", MEAN, "effective sample size of the tokens; 1 if both sides agree"),
    Described("correction/trainer_perplexity", "", MEAN, "perplexity of the answers under the trainer"),
    Described("correction/rollout_perplexity", "", MEAN, "perplexity of the answers under the rollout"),
    Described("correction/log_perplexity_difference", "nats", MEAN, "rollout minus trainer log-prob, per sequence"),
    Described("correction/weight", "", MEAN, "importance weight of a token, after truncation"),
    Described("correction/rejected", "share", MEAN, "tokens that rejection rules removed before the update"),
    Described("correction/masked", "share", MEAN, "tokens that rules on the current policy mask in the loss"),
    Described("correction/probe_max_abs_difference", "nats", MAX, "gap on the probe text after a weight sync"),
)

_WEIGHTS = (
    Described("weights/version", "", MAX, "weight version that every replica has acknowledged"),
    Described("weights/bytes", "bytes", SUM, "bytes sent; with delta, the bytes that travelled"),
    Described("weights/tensors", "tensors", MAX, "tensors sent"),
    Described("weights/buckets", "buckets", MAX, "buckets sent"),
    Described("weights/replicas", "replicas", MAX, "replicas that received the weights"),
    Described("weights/remote_gap", "nats", MEAN, "a service trains: gap of rollout to trainer on a probe"),
    Described("weights/remote_moved", "nats", MEAN, "the same gap of the rollout before: how far the update moved it"),
    Described("weights/senders", "processes", MAX, "processes that sent the weights: training ranks, or the driver"),
)

_SCHEDULE = (
    Described("schedule/staleness", "updates", MEAN, "age of the trained tokens"),
    Described("schedule/staleness_max", "updates", MAX, "age of the oldest trained token"),
    Described("schedule/spans_per_answer", "spans", MEAN, "runs of tokens of one weight version in an answer"),
    Described("schedule/staleness_<age>", "share", MEAN, "trained tokens of this age"),
    Described("schedule/draws_ahead", "prompts", SUM, "prompts that are open when the update begins"),
)

_PERF = (
    Described("perf/step_s", "s", MEAN, "the whole step, without evaluation and checkpoints"),
    Described("perf/generate_s", "s", MEAN, "generation"),
    Described("perf/trainer_wait_s", "s", MEAN, "asynchronous: time in which the trainer waits for answers"),
    Described("perf/lent_s", "s", SUM, "asynchronous: time in which the server on the trainer's device was awake"),
    Described("perf/unused_groups_ended", "groups", SUM, "complete groups among rollout/prompts_put_back"),
    Described("perf/reward_s", "s", MEAN, "rewards that were computed after the last answer ended"),
    Described("perf/forward_s", "s", MEAN, "forwards for log-probs and values"),
    Described("perf/backward_s", "s", MEAN, "optimizer steps: forward, backward and update"),
    Described("perf/weight_sync_s", "s", MEAN, "weight sync"),
    Described("perf/evaluate_s", "s", MEAN, "evaluation; not part of a step"),
    Described("perf/save_checkpoint_s", "s", MEAN, "checkpoints; not part of a step"),
    Described("perf/<phase>_s", "s", MEAN, "another phase of a step, by its name"),
    Described("perf/<phase>_outside_s", "s", MEAN, "the same phase, outside a step"),
    Described("perf/driver_s", "s", MEAN, "the step without generation, waiting, rewards, forwards and backwards"),
    Described("perf/driver_fraction", "share", MEAN, "perf/driver_s as a share of the step"),
    Described("perf/tokens_per_s", "tokens/s", MEAN, "tokens of the batch, prompts included, over the step's time"),
    Described("perf/rollout_tokens_per_s", "tokens/s", MEAN, "sampled tokens over the engine's time at work"),
    Described("perf/slowest_replica", "", MAX, "number of the replica that generates most slowly, from 0"),
    Described("perf/slowest_replica_speed", "share", MIN, "its tokens over its time with requests, against the others"),
    Described("perf/rollout_busy_seconds", "s", SUM, "time at work of the rollout engines"),
    Described("perf/trainer_utilisation", "share", MEAN, "step without generation, rewards, waiting for answers"),
    Described("perf/rollout_utilisation", "share", MEAN, "time in which a replica had a request, mean over replicas"),
    Described("perf/rollout_idle_s", "s", SUM, "time in which a replica had no request, mean over replicas"),
    Described("perf/reward_call_seconds", "s", MEAN, "time of a reward call"),
    Described("perf/reward_call_max_seconds", "s", MAX, "time of the longest reward call"),
    Described("perf/reward_group_seconds", "s", MEAN, "time until a group is scored, waiting included"),
    Described("perf/weight_transfer_seconds", "s", MEAN, "weight sync from the first pause to the last receipt"),
    Described("perf/weight_sync_gb_per_s", "GB/s", MEAN, "bytes of a weight sync over its time"),
    Described("perf/publication_hidden_fraction", "share", MEAN, "weight sync that the trainer did not wait for"),
    Described("perf/draws_ended_ahead", "prompts", SUM, "open prompts whose answers have all arrived"),
    Described("perf/remote_prefilled_tokens", "tokens", SUM, "a service trains: tokens of prompts that it has read"),
    Described("perf/remote_sampled_tokens", "tokens", SUM, "a service trains: tokens that it has sampled"),
    Described("perf/remote_trained_tokens", "tokens", SUM, "a service trains: tokens of its forwards and backwards"),
    Described("perf/remote_cost", "", SUM, "the cost of these tokens, by the prices in the run file"),
    Described("perf/trackers_failed", "trackers", SUM, "trackers that were switched off after a failure"),
    Described("perf/rollouts_left_out", "rollouts", SUM, "rollouts that no longer fit into rollouts.jsonl.gz"),
)

_EVAL = (
    Described("eval/<set>/reward", "", MEAN, "reward of the answers to a held-out set"),
    Described("eval/<set>/response_length", "tokens", MEAN, "sampled tokens of an answer"),
    Described("eval/<set>/truncated", "share", MEAN, "answers that reached the limit of tokens"),
    Described("eval/<set>/<role>/reward", "", MEAN, "reward of one role's answers, in runs with several roles"),
    Described("eval/<set>/<role>/response_length", "tokens", MEAN, "sampled tokens of one role's answer"),
    Described("eval/<set>/<role>/truncated", "share", MEAN, "one role's answers that reached the limit of tokens"),
    Described("eval/<set>/failed", "answers", SUM, "answers that could not be scored; they count nowhere else"),
    Described("eval/<set>/loss", "", MEAN, "supervised runs: the training loss on a held-out set"),
    Described("eval/<set>/accuracy", "share", MEAN, "preferences and reward models: pairs or verdicts that are right"),
    Described("eval/<set>/margin", "", MEAN, "preferences and reward models: chosen minus rejected"),
    Described("eval/<set>/<component>", "", MEAN, "one component of the reward on a held-out set", own=True),
    Described("eval/<set>/<component>/<part>", "", MEAN, "a part that a reward function returned by name", own=True),
    Described("eval/<set>/<role>/<component>/<part>", "", MEAN, "a part of the reward of one role", own=True),
    Described("eval/<set>/<component>/mean@<n>", "", MEAN, "mean over n answers to each prompt", own=True),
    Described("eval/<set>/<component>/best@<n>", "", MEAN, "highest score among n answers to each prompt", own=True),
    Described(
        "eval/<set>/<component>/maj@<n>", "", MEAN, "score of the most frequent of n answers to each prompt", own=True
    ),
    Described(
        "eval/<set>/<component>/pass@<n>",
        "",
        MEAN,
        "chance that n answers have a right one (rewards of 0 and 1)",
        own=True,
    ),
    Described("eval/<set>/<component>/<part>/<of>@<n>", "", MEAN, "the same of a part: mean, best ...", own=True),
    Described("eval/<set>/<role>/<component>/<part>/<of>@<n>", "", MEAN, "the same of a part of one role", own=True),
)

METRICS = (
    *_REWARD,
    *_ROLLOUT,
    *_POLICY,
    *_SUPERVISED,
    *_CRITIC,
    *_CORRECTION,
    *_WEIGHTS,
    *_SCHEDULE,
    *_PERF,
    *_EVAL,
)
"""Every metric, in the order of the reference: rewards, rollout, training, weight sync, time, evaluation."""
