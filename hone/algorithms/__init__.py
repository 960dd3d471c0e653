"""The mathematics: from rewards and log-probs to per-token losses. Pure functions of tensors, no side effects.

    Batch --advantages.py--> Batch with advantages --losses.py (through objective.py)--> per-token loss
                                    aggregation.py: what each token's loss is multiplied with before the sum

`algorithm.py` holds `Algorithm`, the one door through which a trainer uses all of this. This file imports no torch:
it only says which names exist.
"""

from hone.registry import Entry, Registry


def _entries(module: str, settings: str = "settings", /, **names: str) -> dict[str, Entry]:
    """name=settings class: the function carries the registry name."""
    package = "hone.algorithms"
    return {name: Entry(f"{package}.{module}:{name}", f"{package}.{settings}:{cls}") for name, cls in names.items()}


ADVANTAGES = Registry(
    "advantage estimator",
    {
        **_entries(
            "advantages",
            gae="GaeSettings",
            grpo="GrpoSettings",
            grpo_pass_k="GrpoPassKSettings",
            gdpo="GdpoSettings",
            rloo="RlooSettings",
            reinforce_pp="ReinforcePpSettings",
            reinforce_pp_baseline="ReinforcePpBaselineSettings",
            remax="RemaxSettings",
            opo="OpoSettings",
            gpg="GpgAdvantageSettings",
            max_rl="MaxRlSettings",
        ),
        **_entries(
            "token_baseline",
            optimal_token_baseline="OptimalTokenBaselineSettings",
            tir_optimal_token_baseline="TirOptimalTokenBaselineSettings",
        ),
        **_entries("process_reward", "process_reward_settings", prime="PrimeSettings"),
    },
)

POLICY_LOSSES = Registry(
    "policy loss",
    {
        **_entries(
            "losses",
            ppo="PpoSettings",
            reinforce="ReinforceSettings",
            gspo="GspoSettings",
            cispo="CispoSettings",
            sft="SftSettings",
        ),
        **_entries(
            "more_losses",
            sapo="SapoSettings",
            dppo_tv="DppoTvSettings",
            dppo_kl="DppoKlSettings",
            gmpo="GmpoSettings",
            clip_cov="ClipCovSettings",
            kl_cov="KlCovSettings",
            dro="DroSettings",
            gpg="GpgSettings",
        ),
    },
)

PREFERENCE_LOSSES = Registry(
    "preference loss",
    _entries(
        "preference",
        "preference_settings",
        dpo="DpoSettings",
        ipo="IpoSettings",
        hinge="HingeSettings",
        robust="RobustSettings",
        cdpo="CdpoSettings",
        simpo="SimpoSettings",
        orpo="OrpoSettings",
        kto="KtoSettings",
    ),
)

REWARD_MODEL_LOSSES = Registry(
    "reward-model loss",
    _entries("preference", "preference_settings", bradley_terry="BradleyTerrySettings", process="ProcessSettings"),
)

DISTILLATION_LOSSES = Registry(
    "distillation loss",
    _entries(
        "distillation",
        "distillation_settings",
        reverse_kl="SampledKlSettings",
        forward_top_k="ForwardTopKSettings",
        reverse_top_k="ReverseTopKSettings",
    ),
)

__all__ = ["ADVANTAGES", "DISTILLATION_LOSSES", "POLICY_LOSSES", "PREFERENCE_LOSSES", "REWARD_MODEL_LOSSES"]
