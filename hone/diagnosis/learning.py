"""Rules about learning: entropy, KL, gradients, the gap between rollout and trainer, rewards against evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from hone.diagnosis.evidence import Evidence, Finding, Weight
from hone.diagnosis.trends import RECENT, Curve, correlation


def _from_to(curve: Curve) -> str:
    return f"{curve.beginning():.3g} -> {curve.end():.3g} (steps {curve[0].step} to {curve[-1].step})"


def entropy_collapse(run: Evidence) -> Iterator[Finding]:
    """The policy's entropy fell to a small share of its beginning."""
    entropy = run.curve("train/entropy")
    if entropy.long and entropy.beginning() > 0.05 and entropy.end() < 0.15 * entropy.beginning():
        tries: tuple[str, ...] = (
            "a higher algorithm.loss.clip_high (DAPO: 0.28)",
            "a lower actor.optimizer.lr",
            "algorithm.kl.coef above 0",
            "algorithm.entropy_coef=0.001",
        )
        meaning = "Answers of a group become the same, so groups lose their variance and learning stops."
        if run.is_solved:
            meaning = "The policy is certain, and nearly all answers are right: the task is learnt, or too easy."
            tries = ("read answers in the report", "harder prompts", "held-out prompts: evaluation.sets")
        weight: Weight = "note" if run.is_solved else "hurts"
        seen = f"train/entropy {_from_to(entropy)}"
        yield Finding(weight, "entropy collapse", seen, meaning, tries, ("train/entropy",))


def entropy_explosion(run: Evidence) -> Iterator[Finding]:
    """The policy's entropy grew several times."""
    entropy = run.curve("train/entropy")
    if entropy.long and entropy.end() > max(1.0, 4 * entropy.beginning()):
        tries = ("a lower actor.optimizer.lr", "algorithm.entropy_coef=0", "algorithm.kl.coef above 0")
        meaning = "The policy drifts to noise: too large steps, or an entropy bonus that wins over the reward."
        yield Finding(
            "hurts", "entropy explosion", f"train/entropy {_from_to(entropy)}", meaning, tries, ("train/entropy",)
        )


def kl_blow_up(run: Evidence) -> Iterator[Finding]:
    """The KL to the reference grew far beyond its beginning."""
    for name in ("train/reference_kl", "train/kl_loss"):
        kl = run.curve(name)
        if kl.long and kl.end() > max(0.5, 10 * abs(kl.beginning())):
            tries = (
                "a lower actor.optimizer.lr",
                "a higher algorithm.kl.coef",
                "the last checkpoint before the growth",
            )
            meaning = "The policy left the reference; it often writes text that only the reward likes."
            yield Finding("hurts", "the KL to the reference blew up", f"{name} {_from_to(kl)}", meaning, tries, (name,))
            return


def gradient_spikes(run: Evidence) -> Iterator[Finding]:
    """The gradient norm jumps, or steps were skipped."""
    skipped = sum(point.value for point in run.curve("train/skipped_steps"))
    spikes = run.curve("train/grad_norm").spikes(10.0)
    if skipped or len(spikes) >= 3:
        steps = ", ".join(str(point.step) for point in spikes[:5])
        parts = [f"{skipped:.0f} optimizer steps skipped for a gradient that is not finite"] if skipped else []
        parts += [f"train/grad_norm above 10 times its usual value in steps {steps}"] if spikes else []
        tries = ("read the rollouts of these steps", "a lower actor.optimizer.lr", "actor.schedule.warmup_steps=10")
        meaning = "Single batches pull hard: very long or strange answers, a ratio far from 1, or too large a step."
        yield Finding("hurts", "gradient spikes", "; ".join(parts), meaning, tries, ("train/grad_norm", "train/ratio"))


def no_gradient(run: Evidence) -> Iterator[Finding]:
    """Nothing was learnt in the last steps."""
    norms = run.curve("train/grad_norm").last(RECENT)
    if len(norms) == RECENT and all(point.value == 0 for point in norms):
        tries = (
            "rewards: do they differ within a group?",
            "the loss mask: excluded answers, generation marks of the chat template",
        )
        seen = f"train/grad_norm is 0 in the last {RECENT} steps"
        meaning = "Every advantage is 0, or no token has a loss, so the weights stay as they are."
        yield Finding("hurts", "the gradient is 0", seen, meaning, tries, ("train/grad_norm",))


def rollout_gap(run: Evidence) -> Iterator[Finding]:
    """Rollout and trainer disagree about log-probs, from the start or more and more."""
    gap = run.curve("correction/mean_abs_difference")
    if not gap.long:
        return
    least = 0.1 if run.setting("asynchrony.staleness", 0) else 0.02  # the first steps have no old weights
    grows = gap.end() > max(least, 3 * gap.beginning())
    if not (grows or gap.end() > 0.1):
        return
    causes = list(_causes_of_gap(run, gap.end()))
    meaning = (
        f"Both sides should give the same log-probs. Likely, from the metrics and settings: {causes[0][0]}."
        if causes
        else "Both sides should give the same log-probs; without another sign, a gap is precision or the kernels."
    )
    tries = [remedy for _, remedy in causes]
    tries += ["actor.head_dtype=float32", "algorithm.correction.weights=token algorithm.correction.truncate=2"]
    seen = f"correction/mean_abs_difference {_from_to(gap)} nats"
    title = "the gap between rollout and trainer grows" if grows else "rollout and trainer disagree"
    yield Finding(
        "hurts", title, seen, meaning, tuple(tries), ("correction/mean_abs_difference", "correction/outside_band")
    )


def _causes_of_gap(run: Evidence, gap: float) -> Iterator[tuple[str, str]]:
    """Causes of a gap that the run shows signs of, and what to try; the surest first."""
    probe, largest = (run.curve(f"correction/{name}") for name in ("probe_max_abs_difference", "max_abs_difference"))
    top_k = run.setting("rollout.sampling.top_k") or 0
    if run.setting("rollout.sampling.top_p", 1.0) < 1 or top_k > 0 or run.setting("rollout.sampling.min_p", 0.0) > 0:
        yield (
            "the sampling support, because sampling cuts the vocabulary",
            "rollout.sampling.top_p=1 rollout.sampling.top_k=0 rollout.sampling.min_p=0",
        )
    if len(probe) >= 3 and probe.end() > 0.05:
        yield "the weights, because the probe differs after a sync", "weights.verify=probe names the tensors"
    if run.curve("train/routes_replaced") or run.curve("train/router_entropy"):
        yield "the router, because experts are chosen twice", "actor.moe.routing_replay=rollout"
    updates = run.setting("update.minibatches", 1) * run.setting("update.epochs", 1)
    if run.setting("algorithm.correction.old", "") == "rollout" and updates > 1:
        yield (
            f"the step's own updates, because each of its {updates} is compared with the rollout",
            "update.minibatches=1 update.epochs=1, or algorithm.correction.old=trainer",
        )
    if run.setting("asynchrony.staleness", 0):
        yield "old weights, because answers are drawn ahead", "compare with asynchrony.staleness=0"
    if len(largest) >= 3 and largest.end() > max(5.0, 20 * gap):
        yield (
            "tokenisation or the end token, because single tokens differ by far",
            "in the report, sort answers by max gap and look at their coloured tokens",
        )
    dtypes = {str(run.setting("actor.compute_dtype", "")), str(run.setting("rollout.builtin.dtype", ""))} - {"", "auto"}
    if len(dtypes) > 1:
        yield f"precision, because the sides compute in {' and '.join(sorted(dtypes))}", "one dtype on both sides"


def dominating_reward(run: Evidence) -> Iterator[Finding]:
    """One part of the reward makes nearly all of the differences within groups."""
    known = [name.split("/") for name in run.names("rollout/")]
    parts = {one[2]: run.curve("/".join(one)).last(RECENT) for one in known if one[1:-1] == ["reward_spread"]}
    parts.pop("overlong_penalty", None)  # the algorithm's, for a few answers
    components = run.setting("reward.components", {})  # a name may have a dot
    weights = {name: abs(components.get(name, {}).get("weight", 1.0)) for name in parts}
    spreads = {name: weights[name] * curve.level() for name, curve in parts.items() if len(curve) >= 3}
    total = sum(spreads.values())
    if len([name for name in spreads if weights[name]]) < 2 or total <= 0:
        return
    name = max(spreads, key=lambda one: spreads[one])
    share = spreads[name] / total
    if share > 0.9:
        tries = (
            f"a lower reward.components.{name}.weight",
            "algorithm.advantage.name=gdpo (each part is normalised alone)",
            "remove parts that no answer gets or all get",
        )
        steps = len(parts[name])
        seen = f"{name}, of {len(spreads)} parts, makes {share:.0%} of the spread within groups (last {steps} steps)"
        meaning = "Advantages follow this part alone, so the policy does not learn from the others."
        yield Finding(
            "note",
            "one part of the reward dominates",
            seen,
            meaning,
            tries,
            (f"rollout/reward_spread/{name}", f"reward/{name}"),
        )


def rewards_at_odds(run: Evidence) -> Iterator[Finding]:
    """The reward rises while one of its parts falls."""
    total = run.curve("reward/mean")
    if not total.long or total.end() <= total.beginning():
        return
    others = {
        "reward/mean",
        "reward/max",
        "reward/min",
        "reward/scored",
        "reward/failed",
        "reward/timeouts",
        "reward/worker_restarts",
    }
    for name in run.names("reward/"):
        part = run.curve(name)
        if name in others or not part.long:
            continue
        fell = part.beginning() - part.end()
        if fell > 0.1 * max(abs(part.beginning()), 0.1) and correlation(total, part) < -0.5:
            tries = (
                "read answers with a high reward in the report",
                "a higher weight of the falling part",
                "algorithm.kl.coef above 0",
            )
            seen = f"reward/mean {_from_to(total)}, {name} {_from_to(part)}"
            meaning = "The policy may have found a way to the reward that the task does not want (reward hacking)."
            yield Finding(
                "hurts",
                "a part of the reward falls while the reward rises",
                seen,
                meaning,
                tries,
                ("reward/mean", name),
            )


def evaluation_falls(run: Evidence) -> Iterator[Finding]:
    """Held-out scores fall while the training reward rises."""
    total = run.curve("reward/mean")
    if not total.long or total.end() <= total.beginning():
        return
    score = str(run.setting("evaluation.score", "") or "")
    names = [score] if score else [name for name in run.names("eval/") if name.endswith("/reward")]
    for name in names:
        held_out = run.curve(name)
        if len(held_out) < 3:
            continue
        best = max(held_out, key=lambda point: point.value)
        last = held_out[-1]
        bound = best.value - 0.1 * max(abs(best.value), 0.1)
        low = min(point.value for point in held_out if point.step >= best.step)
        has_fallen = max(held_out[-2].value, last.value) < bound  # twice: one fall may be chance
        if has_fallen and last.value < (best.value + low) / 2:  # it has not recovered half of the fall
            which = f"checkpoint near step {best.step}" if best.step else "model before training"
            tries = (
                f"the {which} is the best one (checkpoint.keep_best)",
                "fewer passes over the data",
                "algorithm.kl.coef above 0",
                "read held-out answers: the reward may be hacked",
            )
            seen = (
                f"{name} {best.value:.3g} at step {best.step}, {last.value:.3g} at step {last.step}; "
                f"reward/mean {_from_to(total)}"
            )
            meaning = "The policy overfits the training prompts, or the reward."
            yield Finding(
                "hurts", "held-out scores fall while the reward rises", seen, meaning, tries, (name, "reward/mean")
            )


def stale_at_the_bound(run: Evidence) -> Iterator[Finding]:
    """Nearly every step trains tokens as old as allowed."""
    bound, oldest = run.setting("asynchrony.staleness", 0), run.curve("schedule/staleness")
    if bound and oldest.long and oldest.end() > 0.9 * bound and bound > 1:
        tries = ("asynchrony.new_weights=recompute", "fewer prompts open: a lower asynchrony.staleness is as fast here")
        seen = f"schedule/staleness {oldest.end():.2f} of at most {bound}"
        meaning = "Generation is far ahead of training, so all tokens are as old as allowed."
        yield Finding("note", "tokens are as old as allowed", seen, meaning, tries, ("schedule/staleness",))


RULES = (
    entropy_collapse,
    entropy_explosion,
    kl_blow_up,
    gradient_spikes,
    no_gradient,
    rollout_gap,
    dominating_reward,
    rewards_at_odds,
    evaluation_falls,
    stale_at_the_bound,
)
