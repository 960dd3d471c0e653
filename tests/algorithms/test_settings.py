"""Settings: presets, contradictions, and that every key is used by somebody."""

import re
import subprocess
import sys

import pytest
import yaml

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.own_parts import Contract, OpenRegistry
from hone.algorithms.presets import PRESETS
from hone.algorithms.settings import (
    AlgorithmConfig,
    CispoSettings,
    GrpoSettings,
    GspoSettings,
    MtGrpoSettings,
    PolicyLossSettings,
    PpoSettings,
)
from hone.config import ConfigError, build, load, require_all_read
from hone.registry import resolve


def built(**data):
    return build(AlgorithmConfig, data, "run.yaml", "algorithm")


def test_settings_are_free_of_torch():
    code = "import sys, hone.algorithms.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("registry", [ADVANTAGES, POLICY_LOSSES], ids=lambda r: r.kind)
def test_every_entry_loads_and_its_settings_carry_its_name(registry):
    assert set(registry.probe().values()) == {""}
    for name in registry:
        assert registry.settings(name).model_fields["name"].default == name
        assert registry.get(name).__name__ == name


def test_selections_exist():
    for name in POLICY_LOSSES:
        selection = POLICY_LOSSES.settings(name)().selection
        assert not selection or callable(resolve(selection))


def test_the_default_is_grpo_with_ppo_clipping():
    assert AlgorithmConfig().advantage == GrpoSettings()
    assert AlgorithmConfig().loss == PpoSettings()


def test_a_preset_fills_what_is_not_set():
    config = built(preset="dapo", loss={"name": "ppo", "clip_high": 0.5})
    assert config.loss == PpoSettings(clip_high=0.5)
    assert built(preset="dapo", loss={"clip_low": 0.1}).loss == PpoSettings(clip_low=0.1, clip_high=0.28)
    assert built(preset="gspo", loss={"clip_high": 0.3}).loss == GspoSettings(clip_high=0.3)
    assert built(preset="dapo", loss="cispo").loss == CispoSettings()
    assert built(preset="dapo", overlong=None).overlong is None
    assert config.overlong.buffer_fraction == 0.2
    assert config.overlong.buffer(20480) == 4096  # as in the paper
    assert built(preset="dapo", overlong={"buffer_tokens": 5}).overlong.buffer(20480) == 5
    assert config.dynamic_sampling.metric == "reward"
    assert config.aggregation.mode == "token_mean"


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_takes_answers_of_any_length(name):
    """Down to a single token, without a further key."""
    for limit in (1, 4, 32768):
        assert Algorithm(AlgorithmConfig(preset=name), 2, max_response_tokens=limit).name == name


def test_presets_are_the_same_from_python_and_from_a_file():
    for name in PRESETS:
        assert AlgorithmConfig(preset=name) == built(preset=name)


def test_a_resolved_preset_reads_back_as_itself():
    config = AlgorithmConfig(preset="vapo")
    data = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json", serialize_as_any=True)))
    assert built(**data) == config


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'dapo'"):
        built(preset="dappo")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"loss": "pppo"}, "did you mean 'ppo'"),
        ({"loss": {"name": "ppo", "clip": 0.1}}, r"algorithm\.loss\.clip'"),
        ({"advantage": {"name": "gdpo"}}, r"weights is required"),
        ({"kl": {"coef": 0.1, "adaptive": {"target": 0.1}}}, "horizon is required"),
        ({"kl": {"coef": 0.1, "adaptive": {"target": 0.1, "horizon": 100}}}, "in_reward"),
        ({"kl": {"kind": "full", "where": "in_reward"}}, "in_loss"),
        ({"aggregation": {"mode": "seq_mean_token_sum_norm"}}, "norm_tokens"),
        ({"aggregation": {"norm_tokens": 10}}, "norm_tokens"),
        ({"correction": {"truncate": 2.0}}, "set weights"),
        ({"correction": {"weights": "token", "truncate": 2.0, "band": [0.5, 2.0]}}, "exclude each other"),
        ({"correction": {"weights": "token", "band": [2.0, 0.5]}}, "low < high"),
        ({"correction": {"old": "rollout", "weights": "token"}}, "the ratio itself"),
        ({"correction": {"old": "rollout", "rejections": [{"high": 2.0, "policy": "old"}]}}, "policy to current"),
        ({"loss": {"name": "top_entropy", "loss": "kl_cov"}}, "kl_cov picks tokens itself"),
        ({"correction": {"rejections": [{"statistic": "k1"}]}}, "low or high"),
        ({"correction": {"rejections": [{"statistic": "k3", "low": 0.1}]}}, "not k3"),
        ({"resample": {"scheme": "mostly_best", "power": 2.0}}, "mostly_best"),
        ({"loss": {"name": "ppo", "dual_clip": 0.5}}, "greater than 1"),
        ({"overlong": {"factor": 2.0}}, "buffer_tokens .* mask: true"),
    ],
)
def test_contradictions_are_one_clear_line(data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        built(**data)
    assert "\n" not in str(caught.value)


EVERYTHING = {
    "gae": "{advantage: {name: gae, lam: 0.9}, value_loss: {clip: 0.1}}",
    "kl": "{kl: {coef: 0.1, where: in_reward, adaptive: {target: 0.1, horizon: 10}}, entropy_coef: 0.1}",
    "dapo": "{preset: dapo, overlong: {buffer_tokens: 5}, dynamic_sampling: {max_draws: 2}, resample: {power: 2.0}}",
    "correction": "{correction: {weights: token, band: [0.5, 2], rejections: [{high: 2.0}]}, positive_nll_coef: 0.1}",
    "norm": "{aggregation: {mode: seq_mean_token_sum_norm, norm_tokens: 9}, loss: {name: kl_cov, share: 0.1}}",
}


@pytest.mark.parametrize("text", list(EVERYTHING.values()), ids=list(EVERYTHING))
def test_the_constructor_reads_every_key(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    loaded = load(AlgorithmConfig, path)
    Algorithm(loaded.config, 1, max_response_tokens=100)
    require_all_read(loaded)


def test_a_critic_setting_without_a_critic_is_an_unused_key(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("value_loss: {clip: 0.1}")
    loaded = load(AlgorithmConfig, path)
    Algorithm(loaded.config, 1)
    with pytest.raises(ConfigError, match=r"value_loss\.clip"):
        require_all_read(loaded)


IGNORED = {
    "kl.kind": "{kl: {kind: k1}}",
    "kl.where": "{kl: {where: in_reward, coef: 0}}",
    "overlong.factor": "{overlong: {mask: true, factor: 2.0}}",
    "advantage.lam": "{advantage: {name: gae, lam: 0.9, length_adaptive_alpha: 0.05}}",
    "dynamic_sampling.skip_zero_variance.target_easy": (
        "{dynamic_sampling: {skip_zero_variance: {explore_step: 0, target_easy: 0.1}}}"
    ),
}


@pytest.mark.parametrize("key", list(IGNORED))
def test_a_key_that_has_no_effect_beside_the_others_is_refused(tmp_path, key):
    path = tmp_path / "run.yaml"
    path.write_text(IGNORED[key])
    loaded = load(AlgorithmConfig, path)
    Algorithm(loaded.config, 1)
    message = rf"no part of this run uses these keys: {re.escape(key)} \(set by .*run.yaml\)"
    with pytest.raises(ConfigError, match=message):
        require_all_read(loaded)


def test_what_a_preset_filled_may_be_without_effect(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("{preset: grpo, kl: {coef: 0}}")
    loaded = load(AlgorithmConfig, path)
    Algorithm(loaded.config, 1)
    require_all_read(loaded)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"advantage": "grpo_pass_k"}, "every advantage would be 0"),
        ({"dynamic_sampling": {}}, "a single answer has none"),
    ],
)
def test_groups_too_small_to_teach_anything_are_refused(data, message):
    built(**data).check_group_size(2)
    with pytest.raises(ValueError, match=rf"update\.samples_per_prompt = 1: .*{message}"):
        built(**data).check_group_size(1)
    built().check_group_size(1)


def test_presets_only_use_keys_that_exist():
    for name, keys in PRESETS.items():
        assert set(keys) < set(AlgorithmConfig.model_fields), name


def test_a_rule_of_an_algorithm_is_read_from_its_settings():
    """Estimators whose step can train group by group, and losses that need importance weights for old tokens."""
    own_group = {name for name in ADVANTAGES if ADVANTAGES.settings(name).own_group}
    assert own_group == {"grpo", "grpo_pass_k", "rloo", "opo", "max_rl", "remax"}
    assert GrpoSettings(scale_by="batch").spans_groups
    assert not GrpoSettings(scale_by="none").spans_groups
    assert MtGrpoSettings().spans_groups
    assert {name for name in POLICY_LOSSES if not POLICY_LOSSES.settings(name).has_ratio} == {"reinforce", "gpg"}


def test_a_part_without_settings_has_the_rules_of_its_base_class():
    contract = Contract(
        "hone.algorithms.settings:PolicyLossSettings", "inputs", "mask", "hone.types:LossOutput", "values"
    )
    registry = OpenRegistry("policy loss", {"bare": "hone.algorithms.losses:ppo"}, contract)
    assert registry.settings("bare") is PolicyLossSettings
