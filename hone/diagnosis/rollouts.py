"""Rules about answers and their rewards: failures, zeros, lengths, groups without variance, the data."""

from __future__ import annotations

from collections.abc import Iterator

from hone.diagnosis.evidence import Evidence, Finding
from hone.diagnosis.trends import RECENT


def rewards_fail(run: Evidence) -> Iterator[Finding]:
    """A share of the answers could not be scored."""
    failed, scored = run.curve("reward/failed"), run.curve("reward/scored")
    bad, good = (sum(point.value for point in curve.last(RECENT)) for curve in (failed, scored))
    if bad and bad > 0.02 * (bad + good):
        late = sum(point.value for point in run.curve("reward/timeouts").last(RECENT))
        tries = ["raise reward.components.<name>.timeout_s, or reward.workers"] if late else []
        tries += ["read rewards/functions-*.log", "hone score on the answers in rollouts.jsonl.gz"]
        steps = min(RECENT, len(failed))
        seen = f"{bad:.0f} of {bad + good:.0f} answers of the last {steps} steps, {late:.0f} calls were late"
        meaning = "Failed answers are not trained on, so the policy learns from the others only."
        yield Finding("hurts", "rewards fail", seen, meaning, tuple(tries), ("reward/failed", "reward/timeouts"))


def every_reward_is_zero(run: Evidence) -> Iterator[Finding]:
    """No recent answer had a reward."""
    most, least = run.curve("reward/max").last(RECENT), run.curve("reward/min").last(RECENT)
    if len(most) >= 3 and all(point.value == 0 for point in (*most, *least)):
        tries = (
            "read answers in the report: format, language, end of the answer",
            "hone score with a right answer by hand",
            "easier prompts, or a supervised warm start (warm_start)",
        )
        seen = f"reward/max is 0 in the last {len(most)} steps"
        meaning = "The reward expects another format, answers are cut, or the task is too hard for the model."
        yield Finding("hurts", "every reward is 0", seen, meaning, tries, ("reward/mean",))


def answers_are_cut(run: Evidence) -> Iterator[Finding]:
    """Many answers end at the length limit."""
    cut, length = run.curve("rollout/truncated_fraction"), run.curve("rollout/response_length")
    if len(cut) >= 3 and cut.last(RECENT).level() > 0.3:
        limit = run.setting("rollout.sampling.max_response_tokens")
        grew = length.long and length.end() > 2 * length.beginning()
        if run.is_solved and not grew:
            return  # the answers are as long as the task wants
        tries = [f"rollout.sampling.max_response_tokens={2 * limit}"] if isinstance(limit, int) else []
        tries += ["algorithm.overlong.buffer_fraction=0.2 (a penalty near the limit)", "the chat template's end token"]
        seen = f"{cut.last(RECENT).level():.0%} of the answers reach {limit} tokens" + (
            f"; length {length.beginning():.0f} -> {length.end():.0f}" if grew else ""
        )
        meaning = (
            "Answers grow until they are cut."
            if grew
            else "The limit is too small, or the model does not end its answers."
        )
        title = "answers grow to the limit" if grew else "answers are cut at the limit"
        yield Finding(
            "hurts", title, seen, meaning, tuple(tries), ("rollout/truncated_fraction", "rollout/response_length")
        )


def answers_explode(run: Evidence) -> Iterator[Finding]:
    """Answers became several times as long."""
    length = run.curve("rollout/response_length")
    if length.long and length.end() > max(3 * length.beginning(), 16):
        tries = (
            "read the longest answers in the report: do they repeat themselves?",
            "algorithm.overlong.buffer_fraction=0.2 (a penalty near the limit)",
            "a loss that does not favour long answers: algorithm.aggregation.mode=token_mean",
        )
        seen = f"rollout/response_length {length.beginning():.0f} -> {length.end():.0f} tokens"
        meaning = "Long answers pay, or the policy has lost its end token. Steps become slow, and answers will be cut."
        yield Finding("note", "answers grow several times", seen, meaning, tries, ("rollout/response_length",))


def answers_shrink(run: Evidence) -> Iterator[Finding]:
    """Answers became very short."""
    length = run.curve("rollout/response_length")
    if length.long and length.beginning() > 16 and length.end() < 0.25 * length.beginning():
        tries = (
            "read answers in the report",
            "a loss that does not favour short answers: algorithm.aggregation.mode=token_mean",
        )
        seen = f"rollout/response_length {length.beginning():.0f} -> {length.end():.0f} tokens"
        meaning = "Short answers pay: the reward can be had without the work, or the loss favours them."
        yield Finding("note", "answers shrink", seen, meaning, tries, ("rollout/response_length",))


def groups_without_variance(run: Evidence) -> Iterator[Finding]:
    """Most groups have one reward for all answers, so they teach nothing."""
    alike = run.curve("rollout/zero_variance_fraction").last(RECENT)
    if run.setting("algorithm.advantage.name") == "gae":
        return  # a critic is the baseline, not the group
    if run.setting("update.samples_per_prompt", 2) > 1 and len(alike) >= 3 and alike.level() > 0.7:
        easy = run.is_solved
        tries = ["algorithm.dynamic_sampling={} (replace such groups)", "a larger update.samples_per_prompt"]
        tries += ["harder prompts"] if easy else ["easier prompts", "a higher rollout.sampling.temperature"]
        seen = f"{alike.level():.0%} of the groups of the last {len(alike)} steps"
        meaning = "Nearly all answers are right." if easy else "All answers are wrong, or equal."
        yield Finding(
            "hurts", "groups without variance", seen, meaning, tuple(tries), ("rollout/zero_variance_fraction",)
        )


def data_repeats(run: Evidence) -> Iterator[Finding]:
    """The training rows have been seen many times."""
    epoch = run.curve("rollout/epoch")
    if epoch and epoch[-1].value >= 5:
        tries = ("more prompts", "watch the held-out score: run.steps may be lower")
        seen = f"pass {epoch[-1].value + 1:.0f} over the training data at step {epoch[-1].step}"
        meaning = "The same prompts are answered again; the policy may learn them by heart."
        yield Finding("note", "the data repeat", seen, meaning, tries, ("rollout/epoch",))


def prompts_left_out(run: Evidence) -> Iterator[Finding]:
    """Many prompts are longer than the limit."""
    left, answers = run.curve("rollout/prompts_too_long"), run.curve("rollout/trajectories")
    used = sum(point.value for point in answers) / max(1, run.setting("update.samples_per_prompt", 1))
    if left and left[-1].value > 0.2 * (left[-1].value + used):
        seen = f"{left[-1].value:.0f} prompts were left out, about {used:.0f} were used"
        tries = ("a higher data.train.max_prompt_tokens",)
        meaning = "The run trains on the short prompts only."
        yield Finding("note", "many prompts are too long", seen, meaning, tries, ("rollout/prompts_too_long",))


RULES = (
    rewards_fail,
    every_reward_is_zero,
    answers_are_cut,
    answers_explode,
    answers_shrink,
    groups_without_variance,
    data_repeats,
    prompts_left_out,
)
