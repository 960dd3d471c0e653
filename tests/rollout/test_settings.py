"""Settings of rollouts: torch-free, and translated into requests as they stand."""

import subprocess
import sys

import pytest

from hone.config import ConfigError, build
from hone.rollout.settings import RolloutConfig, SamplingConfig
from hone.types import SamplingParams


def test_sampling_settings_become_a_request():
    config = SamplingConfig(max_response_tokens=7, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, stop=("a", "b"))
    assert config.params(seed=11) == SamplingParams(7, 0.5, 3, 0.9, 0.1, ("a", "b"), seed=11)


def test_every_request_field_that_a_run_may_set_is_read():
    config = SamplingConfig()
    config.params(0)
    assert config._reads == set(SamplingConfig.model_fields)


def test_settings_import_no_torch():
    code = "import sys, hone.rollout.settings; assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"builtin": {"slot": 4}}, "did you mean 'builtin.slots'"),
        ({"backend": "bultin"}, "did you mean 'builtin'"),
        ({"sampling": {"stop": ["x", ""]}}, "sampling.stop"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
    ],
)
def test_bad_settings_are_refused_by_name(data, message):
    with pytest.raises(ConfigError, match=message):
        build(RolloutConfig, data, source="run.yaml")
