"""Presets: the keys of `AlgorithmConfig` for each paper's method.

A run file with `preset: dapo` sets only what differs: the preset is a layer below it, like a file in `defaults:`.
`docs/algorithms.md` gives the source of each constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {  # DeepSeekMath, arXiv 2402.03300
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo"},
        "aggregation": {"mode": "seq_mean_token_mean"},
        "kl": {"kind": "k3", "where": "in_loss", "coef": 0.04},
    },
    "dr_grpo": {  # arXiv 2503.20783; for the paper's exact scale set aggregation to seq_mean_token_sum_norm
        "advantage": {"name": "grpo", "scale_by": "none"},
        "loss": {"name": "ppo"},
        "aggregation": {"mode": "seq_mean_token_sum"},
    },
    "dapo": {  # arXiv 2503.14476
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": {"mode": "token_mean"},
        "overlong": {"buffer_fraction": 0.2, "factor": 1.0},
        "dynamic_sampling": {"metric": "reward"},
    },
    "vapo": {  # arXiv 2504.05118; value pretraining and group sampling are settings of the trainer
        "advantage": {"name": "gae", "length_adaptive_alpha": 0.05, "critic_lam": 1.0},
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": {"mode": "token_mean"},
        "positive_nll_coef": 0.1,
    },
    "ppo": {  # arXiv 1707.06347, 2203.02155
        "advantage": {"name": "gae"},
        "loss": {"name": "ppo"},
        "kl": {"kind": "k1", "where": "in_reward", "coef": 0.001},
    },
    "pf_ppo": {  # arXiv 2409.06957; drawn by |reward|^2, as in the code published with it
        "advantage": {"name": "gae"},
        "loss": {"name": "ppo"},
        "kl": {"kind": "k1", "where": "in_reward", "coef": 0.001},
        "resample": {"scheme": "power", "power": 2.0},
    },
    "gspo": {  # arXiv 2507.18071
        "advantage": {"name": "grpo"},
        "loss": {"name": "gspo"},
    },
    "cispo": {  # arXiv 2506.13585
        "advantage": {"name": "grpo"},
        "loss": {"name": "cispo"},
        "aggregation": {"mode": "token_mean"},
    },
    "rloo": {  # arXiv 2402.14740
        "advantage": {"name": "rloo"},
        "loss": {"name": "reinforce"},
        "aggregation": {"mode": "seq_mean_token_sum"},
        "kl": {"kind": "k1", "where": "in_reward", "coef": 0.03},
    },
    "reinforce_pp": {  # arXiv 2501.03262
        "advantage": {"name": "reinforce_pp"},
        "loss": {"name": "ppo"},
        "kl": {"kind": "k1", "where": "in_reward", "coef": 0.001},
    },
    "gmpo": {  # arXiv 2507.20673
        "advantage": {"name": "grpo"},
        "loss": {"name": "gmpo"},
    },
    "prime": {  # arXiv 2502.01456; the process reward model is the run's section `process_reward`
        "advantage": {"name": "prime", "gamma": 1.0},
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": {"mode": "token_mean"},
        "dynamic_sampling": {"metric": "reward"},
    },
    "decoupled_ppo": {  # arXiv 2505.24298: behaviour policy from the rollout, proximal policy recomputed
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo"},
        "correction": {"old": "trainer", "weights": "token", "truncate": 2.0},
    },
}
