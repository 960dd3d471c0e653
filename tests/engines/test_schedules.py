"""Learning-rate schedules, by literal numbers."""

from types import SimpleNamespace

import pytest
import torch

from hone.config import Loaded, forget_reads, unread
from hone.engines.optimizers import Schedule, Update
from hone.engines.settings import EngineConfig, OptimizerConfig, ScheduleConfig


def factors(total, **settings):
    schedule = Schedule(ScheduleConfig(**settings), total)
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
        ({"name": "wsd", "decay_fraction": 0.4}, 10, [1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (
            {"name": "wsd", "warmup_steps": 2, "decay_fraction": 0.5, "min_ratio": 0.5},
            8,
            [0.5, 1, 1, 1, 0.875, 0.75, 0.625, 0.5],
        ),
        ({"name": "linear"}, 1, [1]),
    ],
    ids=str,
)
def test_the_factor_of_each_step(settings, total, expected):
    assert factors(total, **settings) == expected


def test_steps_after_the_last_keep_its_factor():
    schedule = Schedule(ScheduleConfig(name="linear", min_ratio=0.1), 5)
    assert schedule.factor(4) == schedule.factor(9) == pytest.approx(0.1)


def test_it_sets_every_group_and_counts_its_steps():
    config = EngineConfig(optimizer=OptimizerConfig(lr=8.0), schedule=ScheduleConfig(warmup_steps=4))
    update = Update(config, 10, in_parts=False)
    update.start(SimpleNamespace(masters={"matrix": torch.zeros(1, 1), "bias": torch.zeros(1)}))
    assert [group["lr"] for group in update.optimizer.param_groups] == [2.0, 2.0]
    update.advance()
    assert [group["lr"] for group in update.optimizer.param_groups] == [4.0, 4.0]


def test_a_warm_up_of_the_whole_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps=5 leaves nothing of 5 steps"):
        Schedule(ScheduleConfig(name="cosine", warmup_steps=5), 5)


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("constant", ["min_ratio", "decay_fraction"]), ("cosine", ["decay_fraction"]), ("wsd", [])],
)
def test_settings_that_a_schedule_does_not_use_stay_unread(name, ignored):
    config = ScheduleConfig(name=name, min_ratio=0.1, decay_fraction=0.2)
    loaded = Loaded(config, {"name": "f.yaml", "min_ratio": "f.yaml", "decay_fraction": "f.yaml"})
    forget_reads(config)
    Schedule(config, 10)
    assert unread(loaded) == ignored
