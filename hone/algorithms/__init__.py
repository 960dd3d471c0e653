"""From rewards and log-probs to per-token losses, in pure functions of tensors.

    Batch --advantages--> Batch with advantages --losses (through objective)--> per-token loss
                                    aggregation: the weight of each token's loss in the sum

Trainers use this package through `Algorithm` (`algorithm`). In reading order: `advantages`, with `turns` and
`token_baseline` (more estimators) and `segments` (sums over sequences); `aggregation`; `objective` and `losses`; `kl`;
`correction` (rollout against trainer); `selection` (tokens that a loss treats differently); `filtering/` (which groups
are trained on); `settings`, `presets` (the settings of papers), `own_parts` (parts from a user's file). Other losses:
`preference/`, `distillation/`, `process_reward/`, and `summed_losses` (of a training service). This file registers the
names and imports no torch.
"""

from hone.algorithms.own_parts import Contract, OpenRegistry
from hone.registry import Entry, Registry


def _entries(module: str, settings: str = "settings", /, **names: str) -> dict[str, Entry]:
    """name=settings class: the function carries the registry name."""
    package = "hone.algorithms"
    return {name: Entry(f"{package}.{module}:{name}", f"{package}.{settings}:{cls}") for name, cls in names.items()}


ADVANTAGES = OpenRegistry(
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
        **_entries("turns", mt_grpo="MtGrpoSettings", gigpo="GigpoSettings", turn_gae="TurnGaeSettings"),
        **_entries("process_reward.losses", "process_reward.settings", prime="PrimeSettings"),
    },
    Contract(
        settings="hone.algorithms.settings:AdvantageSettings",
        argument="batch: Batch",
        mask="loss_mask",
        result="hone.algorithms.advantages:Advantages",
        values="advantages",
    ),
)

POLICY_LOSSES = OpenRegistry(
    "policy loss",
    _entries(
        "losses",
        ppo="PpoSettings",
        reinforce="ReinforceSettings",
        gspo="GspoSettings",
        cispo="CispoSettings",
        sft="SftSettings",
        sapo="SapoSettings",
        dppo_tv="DppoTvSettings",
        dppo_kl="DppoKlSettings",
        gmpo="GmpoSettings",
        clip_cov="ClipCovSettings",
        kl_cov="KlCovSettings",
        dro="DroSettings",
        gpg="GpgSettings",
        top_entropy="TopEntropySettings",
    ),
    Contract(
        settings="hone.algorithms.settings:PolicyLossSettings",
        argument="inputs: LossInputs",
        mask="mask",
        result="hone.types:LossOutput",
        values="values",
    ),
)

PREFERENCE_LOSSES = Registry(
    "preference loss",
    _entries(
        "preference.losses",
        "preference.settings",
        dpo="DpoSettings",
        ipo="IpoSettings",
        hinge="HingeSettings",
        robust="RobustSettings",
        cdpo="CdpoSettings",
        simpo="SimpoSettings",
        orpo="OrpoSettings",
        kto="KtoSettings",
        sft="ChosenSftSettings",
        combined="CombinedSettings",
    ),
)

REWARD_MODEL_LOSSES = Registry(
    "reward-model loss",
    _entries(
        "preference.losses", "preference.settings", bradley_terry="BradleyTerrySettings", process="ProcessSettings"
    ),
)

DISTILLATION_LOSSES = Registry(
    "distillation loss",
    _entries(
        "distillation.losses",
        "distillation.settings",
        reverse_kl="SampledKlSettings",
        forward_top_k="ForwardTopKSettings",
        reverse_top_k="ReverseTopKSettings",
    ),
)

__all__ = ["ADVANTAGES", "DISTILLATION_LOSSES", "POLICY_LOSSES", "PREFERENCE_LOSSES", "REWARD_MODEL_LOSSES"]
