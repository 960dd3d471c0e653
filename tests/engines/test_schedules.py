"""Learning-rate schedules, by literal numbers."""

from types import SimpleNamespace

import pytest
import torch

from hone.config import ConfigError, build
from hone.engines.optimizers import Schedule, Update
from hone.engines.settings import EngineConfig, OptimizerConfig, ScheduleConfig


def chosen(**settings):
    return build(EngineConfig, {"schedule": settings}, "test").schedule


def factors(total, **settings):
    schedule = Schedule(chosen(**settings), total)
    return [round(schedule.factor(step), 6) for step in range(total)]


@pytest.mark.parametrize(
    ("settings", "total", "expected"),
    [
        ({"name": "constant"}, 3, [1, 1, 1]),
        ({"name": "constant", "warmup_steps": 4}, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"name": "linear"}, 5, [1, 0.75, 0.5, 0.25, 0]),
        ({"name": "linear", "warmup_steps": 2, "min_ratio": 0.5}, 5, [0.5, 1, 1, 0.75, 0.5]),
        ({"name": "cosine"}, 5, [1, 0.853553, 0.5, 0.146447, 0]),
        ({"name": "cosine", "min_ratio": 0.2, "warmup_steps": 1}, 4, [1, 1, 0.6, 0.2]),
        ({"name": "wsd"}, 1, [1]),
        ({"name": "wsd", "decay_fraction": 0.4}, 10, [1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (
            {"name": "wsd", "warmup_steps": 2, "decay_fraction": 0.5, "min_ratio": 0.5},
            8,
            [0.5, 1, 1, 1, 0.875, 0.75, 0.625, 0.5],
        ),
        ({"name": "linear"}, 1, [1]),
        ({"name": "wsd", "warmup_steps": 2, "decay_fraction": 0.5}, 4, [0.5, 1, 0.5, 0]),
        (
            {"name": "wsd", "warmup_fraction": 0.3, "decay_fraction": 0.7},
            5,
            [0.5, 1, 0.666667, 0.333333, 0],
        ),  # 1.5, 3.5
    ],
    ids=str,
)
def test_the_factor_of_each_step(settings, total, expected):
    assert factors(total, **settings) == expected


def test_steps_after_the_last_keep_its_factor():
    schedule = Schedule(chosen(name="linear", min_ratio=0.1), 5)
    assert schedule.factor(4) == schedule.factor(9) == pytest.approx(0.1)


def test_it_sets_every_group_and_counts_its_steps():
    config = EngineConfig(optimizer=OptimizerConfig(lr=8.0), schedule=ScheduleConfig(warmup_steps=4))
    update = Update(config, 10, in_parts=False)
    update.start(SimpleNamespace(masters={"matrix": torch.zeros(1, 1), "bias": torch.zeros(1)}))
    assert [group["lr"] for group in update.optimizer.param_groups] == [2.0, 2.0]
    update.advance()
    assert [group["lr"] for group in update.optimizer.param_groups] == [4.0, 4.0]


def test_a_decay_that_begins_in_the_warm_up_is_refused_with_the_remedy():
    """Its first step would fall from 1 to 0.4."""
    with pytest.raises(ValueError, match=r"decay_fraction=1 begins .*10 and 5 .*decay_fraction=0.5 or less"):
        factors(10, name="wsd", warmup_steps=5, decay_fraction=1.0)
    with pytest.raises(ValueError, match=r"decay_fraction=0.6 begins"):
        factors(10, name="wsd", warmup_steps=5, decay_fraction=0.6)
    assert factors(10, name="wsd", warmup_steps=5, decay_fraction=0.5) == [0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2, 0]


def test_a_warm_up_of_the_whole_run_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"warmup_steps=5 leaves no step for the cosine .*warmup_fraction=0.1"):
        Schedule(chosen(name="cosine", warmup_steps=5), 5)


def test_a_share_of_the_steps_warms_up_whatever_their_number():
    for total, steps in ((100, 10), (10, 1), (3, 0), (1, 0)):
        assert chosen(name="linear", warmup_fraction=0.1).warmup(total) == steps
    assert chosen(name="linear", warmup_fraction=0.9).warmup(2) == 1  # and one is left for the decay
    with pytest.raises(ConfigError, match=r"schedule: warmup_steps = 5 and warmup_fraction = 0.1 both set the warm-up"):
        chosen(warmup_steps=5, warmup_fraction=0.1)


def test_settings_of_another_schedule_are_refused():
    for name, key in (("constant", "min_ratio"), ("cosine", "decay_fraction")):
        with pytest.raises(ConfigError, match=f"schedule.{key} is a setting of schedule=.*, and schedule is {name}"):
            chosen(name=name, **{key: 0.1})
