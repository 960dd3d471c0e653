"""Advantages, loss, KL, rollout correction and group filters of a verl run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.migration.migration import Migration, number

ADVANTAGES: Mapping[str, str] = {
    "gae": "gae",
    "gdpo": "gdpo",
    "gpg": "gpg",
    "grpo": "grpo",
    "grpo_passk": "grpo_pass_k",
    "grpo_vectorized": "grpo",
    "opo": "opo",
    "optimal_token_baseline": "optimal_token_baseline",
    "prime": "prime",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "tir_optimal_token_baseline",
}
LOSSES: Mapping[str, str] = {
    "vanilla": "ppo",
    "cispo": "cispo",
    "clip_cov": "clip_cov",
    "dppo_kl": "dppo_kl",
    "dppo_tv": "dppo_tv",
    "dro": "dro",
    "geo_mean": "gmpo",
    "gpg": "gpg",
    "gspo": "gspo",
    "kl_cov": "kl_cov",
    "sapo": "sapo",
}
OWN_MEAN = ("gspo", "gmpo")
"""Losses that verl averages over sequences, whatever `loss_agg_mode` says."""

CLIPPED = ("ppo", "gspo", "cispo", "clip_cov", "gmpo", "dppo_tv")
KL_KINDS: Mapping[str, str] = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3", "full": "full"}
LEVELS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def read(migration: Migration, kind: str) -> None:
    """Read the algorithm."""
    _advantage(migration)
    loss = _loss(migration)
    _aggregation(migration, loss)
    _kl(migration)
    migration.copy(f"{ACTOR}.entropy_coeff", convert=number)
    _correction(migration, kind)
    _filter(migration)
    if migration.truth("algorithm.use_pf_ppo"):
        scheme = {"pow": "power", "max_min": "best_and_worst", "max_random": "mostly_best"}
        method = migration.text("algorithm.pf_ppo.reweight_method", default="pow")
        migration.put("algorithm.resample.scheme", scheme.get(method, "power"), f"pf_ppo.reweight_method={method}")
        if method == "pow":
            migration.put(
                "algorithm.resample.power",
                migration.number("algorithm.pf_ppo.weight_pow", default=2.0),
                "algorithm.pf_ppo.weight_pow",
            )


def _advantage(migration: Migration) -> None:
    said = migration.text("algorithm.adv_estimator", default="gae")
    ours = ADVANTAGES.get(said)
    if ours is None:
        migration.decide(
            f"algorithm.adv_estimator={said} has no counterpart; `hone list advantages` has the names, and a function "
            "of your own can be registered",
            "algorithm.adv_estimator",
        )
        return
    source = f"algorithm.adv_estimator={said}"
    migration.put("algorithm.advantage.name", ours, source)
    if ours == "grpo":
        scaled = migration.truth("algorithm.norm_adv_by_std_in_grpo", default=True)
        migration.put(
            "algorithm.advantage.scale_by", "group" if scaled else "none", f"norm_adv_by_std_in_grpo={scaled}"
        )
    if ours in ("gae", "reinforce_pp", "prime"):
        migration.copy("algorithm.gamma", convert=number)
    if ours == "gae":
        migration.copy("algorithm.lam", convert=number)
    if ours == "gdpo":
        _gdpo(migration)
    for name in ("algorithm.gamma", "algorithm.lam"):
        migration.drop(name, f"the estimator {ours} does not use it")
    migration.drop(f"{ACTOR}.calculate_sum_pi_squared", "the estimator asks for it by itself")


def _gdpo(migration: Migration) -> None:
    keys = migration.value("algorithm.gdpo_reward_keys", default=[])
    weights = migration.value("algorithm.gdpo_reward_weights", default=[])
    names = [str(key) for key in keys] if isinstance(keys, list) else []
    factors = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    migration.put("algorithm.advantage.weights", dict(zip(names, map(float, factors), strict=True)), "gdpo_reward_keys")
    migration.decide(
        f"gdpo compares reward components {', '.join(names) or '(none is named)'}: define them by these names in "
        "reward.components"
    )


def _loss(migration: Migration) -> str:
    said = migration.text(f"{ACTOR}.policy_loss.loss_mode", default="vanilla")
    ours = LOSSES.get(said)
    if ours is None:
        migration.decide(
            f"{ACTOR}.policy_loss.loss_mode={said} has no counterpart (hone list losses)",
            f"{ACTOR}.policy_loss.loss_mode",
        )
        return "ppo"
    migration.put("algorithm.loss.name", ours, f"policy_loss.loss_mode={said}")
    if ours in CLIPPED:
        _clip(migration, ours)
    if ours == "sapo":
        migration.copy(f"{ACTOR}.tau_pos", "algorithm.loss.tau_positive", number)
        migration.copy(f"{ACTOR}.tau_neg", "algorithm.loss.tau_negative", number)
        migration.copy(f"{ACTOR}.policy_loss.tau_pos", "algorithm.loss.tau_positive", number)
        migration.copy(f"{ACTOR}.policy_loss.tau_neg", "algorithm.loss.tau_negative", number)
    if ours == "dppo_kl":
        _divergence(migration)
    if ours in ("dppo_kl", "dppo_tv"):
        ceiling = migration.number(f"{ACTOR}.clip_ratio_c", default=3.0)
        migration.put("algorithm.loss.truncate", float(ceiling), f"clip_ratio_c={ceiling}")
    if ours == "dro":
        migration.copy(f"{ACTOR}.policy_loss.dro_beta", "algorithm.loss.beta", number)
    if ours == "clip_cov":
        for theirs, key in (("clip_cov_ratio", "share"), ("clip_cov_lb", "cov_low"), ("clip_cov_ub", "cov_high")):
            migration.copy(f"{ACTOR}.policy_loss.{theirs}", f"algorithm.loss.{key}", number)
    if ours == "kl_cov":
        migration.copy(f"{ACTOR}.policy_loss.kl_cov_ratio", "algorithm.loss.share", number)
        coef = migration.number(f"{ACTOR}.policy_loss.ppo_kl_coef", default=0.1)
        migration.put("algorithm.loss.coef", coef, f"policy_loss.ppo_kl_coef={coef}")
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        migration.drop(f"{ACTOR}.{name}", f"the loss {ours} has no such bound")
    return ours


def _divergence(migration: Migration) -> None:
    """Set the largest KL of a token, which verl's `dppo_kl` reads from the options of clipping."""
    both = migration.number(f"{ACTOR}.clip_ratio", default=0.2)
    low = migration.number(f"{ACTOR}.clip_ratio_low", default=both)
    high = migration.number(f"{ACTOR}.clip_ratio_high", default=both)
    migration.put("algorithm.loss.threshold", float(min(low, high)), f"clip_ratio_low={low}, clip_ratio_high={high}")
    if low != high:
        migration.decide(
            f"{ACTOR}.clip_ratio_low={low} and clip_ratio_high={high} bound dppo_kl on two sides; hone has one bound, "
            "algorithm.loss.threshold. The file takes the smaller"
        )


def _clip(migration: Migration, loss: str) -> None:
    both = migration.number(f"{ACTOR}.clip_ratio", default=0.2)
    low = migration.number(f"{ACTOR}.clip_ratio_low", default=both)
    high = migration.number(f"{ACTOR}.clip_ratio_high", default=both)
    migration.put("algorithm.loss.clip_low", float(low), f"clip_ratio_low={low}")
    migration.put("algorithm.loss.clip_high", float(high), f"clip_ratio_high={high}")
    if loss == "ppo":
        dual = migration.number(f"{ACTOR}.clip_ratio_c", default=3.0)
        migration.put("algorithm.loss.dual_clip", float(dual), f"clip_ratio_c={dual}")
    if loss == "cispo" and float(low) > 1:
        migration.put("algorithm.loss.clip_low", 1.0, f"clip_ratio_low={low}: no lower bound")


def _aggregation(migration: Migration, loss: str) -> None:
    said = migration.text(f"{ACTOR}.loss_agg_mode", default="token-mean")
    if loss in OWN_MEAN:
        migration.put("algorithm.aggregation.mode", "seq_mean_token_mean", f"verl averages {loss} over sequences")
        return
    mode = said.replace("-", "_")
    known = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
    if mode not in known:
        migration.decide(
            f"{ACTOR}.loss_agg_mode={said} has no counterpart ({', '.join(known)})", f"{ACTOR}.loss_agg_mode"
        )
        return
    migration.put("algorithm.aggregation.mode", mode, f"loss_agg_mode={said}")
    if mode == "seq_mean_token_sum_norm":
        factor = migration.number(f"{ACTOR}.loss_scale_factor")
        length = int(factor or migration.number("data.max_response_length", default=512))
        migration.put("algorithm.aggregation.norm_tokens", length, "loss_scale_factor, or the longest response")


def _kl(migration: Migration) -> None:
    in_loss = migration.truth(f"{ACTOR}.use_kl_loss")
    in_reward = migration.truth("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        migration.decide(
            "verl adds a KL term to the loss and to the reward; hone has one (algorithm.kl.where). The file keeps the "
            "one in the loss"
        )
    if in_loss:
        kind = migration.text(f"{ACTOR}.kl_loss_type", default="low_var_kl")
        _penalty(migration, "in_loss", kind, migration.number(f"{ACTOR}.kl_loss_coef", default=0.001), "kl_loss_coef")
    elif in_reward:
        kind = migration.text("algorithm.kl_penalty", default="kl")
        coef = migration.number("algorithm.kl_ctrl.kl_coef", default=0.001)
        _penalty(migration, "in_reward", kind, coef, "kl_ctrl.kl_coef")
        if migration.text("algorithm.kl_ctrl.type", default="fixed") == "adaptive":
            target = migration.number("algorithm.kl_ctrl.target_kl", default=0.1)
            horizon = migration.number("algorithm.kl_ctrl.horizon", default=10000)
            migration.put("algorithm.kl.adaptive.target", float(target), "kl_ctrl.target_kl")
            migration.put("algorithm.kl.adaptive.horizon", int(horizon), "kl_ctrl.horizon")
    reason = "verl uses it only with its KL term, which is off"
    for name in (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"):
        migration.drop(name, reason)
    for name in ("type", "target_kl", "horizon"):
        migration.drop(f"algorithm.kl_ctrl.{name}", reason)


def _penalty(migration: Migration, where: str, said: str, coef: Any, source: str) -> None:
    straight = "+" if said.endswith("+") else ""
    base = said.removesuffix("+")
    kind = KL_KINDS.get(base, base)
    migration.put("algorithm.kl.where", where, "")
    migration.put("algorithm.kl.kind", f"{kind}{straight}", f"kl type {said}")
    migration.put("algorithm.kl.coef", float(coef), f"{source}={coef}")


# ------------------------------------------------------------------------------------------------ rollout correction


def _correction(migration: Migration, kind: str) -> None:
    samples = migration.truth(f"{ACTOR}.use_rollout_log_probs", default=kind == "fully_async")
    bypass = migration.truth(
        f"{CORRECTION}.bypass_mode", f"{CORRECTION}.bypass_old_logprob_for_rollout", default=samples
    )
    weights = migration.text(f"{CORRECTION}.rollout_is", "algorithm.rollout_is", default="null")
    weighs = weights not in ("null", "None", "none", "")
    if bypass:
        migration.put("algorithm.correction.old", "rollout", "verl's ratio is against the rollout's log-probs")
        kind_of_loss = migration.text(f"{CORRECTION}.loss_type", default="ppo_clip")
        if kind_of_loss == "reinforce":
            _reinforce(migration, weights if weighs else "")
        elif kind_of_loss != "ppo_clip":
            name = f"{CORRECTION}.loss_type"
            migration.decide(f"{name}={kind_of_loss} has no counterpart (ppo_clip, reinforce)", name)
        elif weighs:
            migration.notes.append(
                f"{CORRECTION}.rollout_is={weights} has no effect in verl's bypass mode with ppo_clip"
            )
    elif weighs:
        migration.put("algorithm.correction.weights", weights, f"rollout_is={weights}")
        _threshold(migration)
    elif "asynchrony.staleness" in migration.settings:
        migration.put(
            "algorithm.correction.old", "rollout", "older tokens are clipped against the weights that sampled"
        )
        migration.notes.append(
            "verl's asynchronous trainer recomputes old log-probs with newer weights; hone takes the rollout's "
            "(algorithm.correction.old: rollout), so that the ratio covers the staleness"
        )
    migration.drop(f"{CORRECTION}.rollout_is_threshold", "no importance weights are used")
    migration.drop(f"{CORRECTION}.rollout_is_batch_normalize", "no importance weights are used")
    migration.drop(f"{CORRECTION}.loss_type", "verl reads it in its bypass mode only")
    _rejections(migration)


def _reinforce(migration: Migration, weights: str) -> None:
    """Set the loss of verl's bypass mode that is -w A log p, with w = min(p / p_rollout, threshold).

    For weights of tokens that is CISPO with no lower bound; without weights it is `gpg`.
    """
    for key in [key for key in migration.settings if key.startswith("algorithm.loss.")]:
        del migration.settings[key]
    source = f"{CORRECTION}.loss_type=reinforce"
    if not weights:
        migration.put("algorithm.loss.name", "gpg", f"{source}: -A log p")
        return
    options = [f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")]
    normalizes = migration.truth(options[2])
    bound = migration.text(options[1], "algorithm.rollout_is_threshold", default="2.0").strip("'\"")
    migration.put("algorithm.loss.name", "cispo", f"{source}: -w A log p, w = p / p_rollout up to {bound}")
    migration.put("algorithm.loss.clip_low", 1.0, "no lower bound")
    ceiling = _ceiling(bound)
    if weights == "token" and not normalizes and ceiling is not None:
        migration.put("algorithm.loss.clip_high", ceiling - 1, f"rollout_is_threshold={bound}, minus 1")
        return
    migration.put("algorithm.loss.clip_high", 1.0 if ceiling is None else ceiling - 1, f"rollout_is_threshold={bound}")
    migration.decide(
        f"{source} with rollout_is={weights}, rollout_is_threshold={bound}, rollout_is_batch_normalize={normalizes}: "
        "hone's nearest loss is cispo, which bounds the ratio of each token; the file takes it. For the weights of "
        "whole sequences or normalized ones set algorithm.correction.old=trainer and algorithm.correction.weights, "
        "and algorithm.loss.name=gpg: they compare the policy before the update with the rollout",
        *[option for option in options if option in migration],
    )


def _ceiling(text: str) -> float | None:
    """Upper bound of the weights if it is one number of at least 1, else None."""
    try:
        bound = float(text)
    except ValueError:
        return None
    return bound if bound >= 1 else None


def _threshold(migration: Migration) -> None:
    name = f"{CORRECTION}.rollout_is_threshold"
    text = migration.text(name, "algorithm.rollout_is_threshold", default="2.0").strip("'\"")
    low, separator, high = text.partition("_")
    if separator:
        migration.put("algorithm.correction.band", [float(low), float(high)], f"rollout_is_threshold={text}")
    else:
        migration.put("algorithm.correction.truncate", float(text), f"rollout_is_threshold={text}")
    if migration.truth(f"{CORRECTION}.rollout_is_batch_normalize"):
        migration.put("algorithm.correction.normalize", True, "rollout_is_batch_normalize=True")


def _rejections(migration: Migration) -> None:
    said = migration.text(f"{CORRECTION}.rollout_rs", default="null").strip("'\"")
    bounds = migration.text(f"{CORRECTION}.rollout_rs_threshold", default="null").strip("'\"")
    if said in ("null", "None", "none", ""):
        migration.drop(f"{CORRECTION}.rollout_rs_threshold", "nothing is rejected")
        return
    names, limits = said.split(","), bounds.split(",")
    rules = [_rule(name.strip(), limit.strip()) for name, limit in zip(names, limits, strict=False)]
    if None in rules or len(names) != len(limits):
        migration.decide(
            f"{CORRECTION}.rollout_rs={said} with rollout_rs_threshold={bounds}: set algorithm.correction.rejections",
            f"{CORRECTION}.rollout_rs",
            f"{CORRECTION}.rollout_rs_threshold",
        )
        return
    migration.put("algorithm.correction.rejections", rules, f"rollout_rs={said}, rollout_rs_threshold={bounds}")


def _rule(name: str, limit: str) -> dict[str, Any] | None:
    """One rejection rule, such as seq_mean_k1 with 0.6_1.6; None if it has no counterpart."""
    level, _, statistic = name.rpartition("_")
    low, separator, high = limit.partition("_")
    if level not in LEVELS or statistic not in ("k1", "k2", "k3"):
        return None
    try:
        bounds = [float(low), float(high)] if separator else [float(limit)]
    except ValueError:
        return None
    rule: dict[str, Any] = {"statistic": statistic, "level": LEVELS[level]}
    if statistic != "k1":
        return {**rule, "high": bounds[-1]}
    return {**rule, "low": bounds[0] if separator else 1 / bounds[0], "high": bounds[-1]}


def _filter(migration: Migration) -> None:
    """Read DAPO's filter of groups without variance."""
    if not migration.truth("algorithm.filter_groups.enable"):
        for name in ("metric", "max_num_gen_batches", "max_inflight_gen_batches"):
            migration.drop(f"algorithm.filter_groups.{name}", "the filter is off")
        return
    metric = migration.text("algorithm.filter_groups.metric", default="reward")
    ours = (
        "reward" if metric in ("acc", "score", "reward", "seq_reward", "seq_final_reward", "null", "None") else metric
    )
    migration.put("algorithm.dynamic_sampling.metric", ours, f"filter_groups.metric={metric}")
    if ours not in ("reward",):
        migration.decide(f"algorithm.filter_groups.metric={metric}: name a reward component of this file")
    draws = int(migration.number("algorithm.filter_groups.max_num_gen_batches", default=0))
    if draws > 0:
        migration.put("algorithm.dynamic_sampling.max_draws", draws, f"filter_groups.max_num_gen_batches={draws}")
    drawn, trained = migration.number("data.gen_batch_size"), migration.number("data.train_batch_size", default=1024)
    if drawn and drawn > trained and "asynchrony.staleness" not in migration.settings:
        migration.put("algorithm.dynamic_sampling.oversample", drawn / trained, "gen_batch_size / train_batch_size")
