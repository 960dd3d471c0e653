"""Phases of a step: hand-computed seconds on a clock that only moves when told."""

import pytest

from hone.tracking.metrics import Timer
from hone.types import Metric, merge_metrics


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def spend(clock, seconds):
    clock.now += seconds


def values(metrics):
    return {name: metric.value for name, metric in metrics.items()}


def test_phases_add_up_to_the_step_and_the_rest_is_the_drivers(clock):
    timer = Timer(clock=clock)
    with timer.step():
        with timer.phase("generate"):
            spend(clock, 4.0)
        spend(clock, 0.5)  # nobody timed this
        with timer.phase("pack"):
            spend(clock, 0.25)
        with timer.phase("backward"):
            spend(clock, 3.25)
    found = values(timer.take(tokens=800))
    assert found == {
        "perf/generate_s": 4.0,
        "perf/pack_s": 0.25,
        "perf/backward_s": 3.25,
        "perf/step_s": 8.0,
        "perf/driver_s": 0.75,
        "perf/driver_fraction": 0.75 / 8.0,
        "perf/trainer_utilisation": 0.5,
        "perf/tokens_per_s": 100.0,
    }


def test_an_inner_phase_stops_the_clock_of_the_outer_one(clock):
    timer = Timer(clock=clock)
    with timer.step(), timer.phase("backward"):
        spend(clock, 1.0)
        with timer.phase("forward"):
            spend(clock, 2.0)
        spend(clock, 4.0)
    found = values(timer.take())
    assert (found["perf/backward_s"], found["perf/forward_s"], found["perf/step_s"]) == (5.0, 2.0, 7.0)
    assert found["perf/driver_s"] == 0.0


def test_time_moved_to_another_phase_leaves_the_sum_alone(clock):
    timer = Timer(clock=clock)
    with timer.step(), timer.phase("generate"):
        spend(clock, 3.0)
        timer.move(1.0, "reward")
        timer.move(99.0, "reward")  # no more than there is
        spend(clock, 0.5)
    found = values(timer.take())
    assert (found["perf/generate_s"], found["perf/reward_s"], found["perf/step_s"]) == (0.5, 3.0, 3.5)


def test_what_happens_between_steps_is_in_no_step(clock):
    timer = Timer(clock=clock)
    with timer.step(), timer.phase("generate"):
        spend(clock, 1.0)
    with timer.phase("evaluate"):
        spend(clock, 10.0)
        with timer.phase("generate"):  # an evaluation's generation is evaluation
            spend(clock, 20.0)
            timer.move(5.0, "reward")
    found = values(timer.take())
    assert found["perf/step_s"] == 1.0
    assert found["perf/generate_s"] == 1.0
    assert found["perf/evaluate_s"] == 30.0
    assert "perf/reward_s" not in found


def test_a_phase_inside_and_outside_of_the_step_keeps_two_names(clock):
    timer = Timer(clock=clock)
    with timer.step(), timer.phase("generate"):
        spend(clock, 1.0)
    with timer.phase("generate"):
        spend(clock, 8.0)
    found = values(timer.take())
    assert (found["perf/generate_s"], found["perf/generate_outside_s"]) == (1.0, 8.0)


def test_taking_starts_anew(clock):
    timer = Timer(clock=clock)
    with timer.step(), timer.phase("generate"):
        spend(clock, 1.0)
    timer.take()
    assert timer.take() == {}


def test_an_error_inside_a_phase_still_ends_it(clock):
    shown = []
    timer = Timer(shown.append, clock=clock)
    with pytest.raises(TypeError), timer.step(), timer.phase("generate"):
        spend(clock, "boom")
    assert shown == ["generate", ""]
    assert values(timer.take())["perf/generate_s"] == 0.0


def test_the_display_is_told_of_inner_and_outer_phases():
    shown = []
    timer = Timer(shown.append)
    with timer.phase("evaluate"), timer.phase("generate"):
        pass
    assert shown == ["evaluate", "generate", "evaluate", ""]


def test_misuse_is_an_error(clock):
    timer = Timer(clock=clock)
    with pytest.raises(RuntimeError, match="outside a phase"):
        timer.move(1.0, "reward")
    with pytest.raises(RuntimeError, match="cannot begin inside"), timer.phase("generate"), timer.step():
        pass


def test_fractions_and_rates_merge_exactly(clock):
    """Two steps of 1 s and 3 s: 0.5 s and 0.5 s of driver, 100 and 500 tokens."""
    timer = Timer(clock=clock)
    parts = []
    for seconds, driver, tokens in ((1.0, 0.5, 100), (3.0, 0.5, 500)):
        with timer.step(), timer.phase("generate"):
            spend(clock, seconds - driver)
            with timer.phase("pack"):
                spend(clock, driver)
        parts.append(timer.take(tokens))
    merged = values(merge_metrics(*parts))
    assert merged["perf/driver_fraction"] == pytest.approx(1.0 / 4.0)
    assert merged["perf/tokens_per_s"] == pytest.approx(600 / 4.0)


def test_each_metric_merges_by_its_own_reducer():
    one = {
        "a": Metric.mean(1.0, 1),
        "b": Metric.sum(2.0),
        "c": Metric.max(3.0),
        "d": Metric.min(4.0),
        "e": Metric.sum(5),
    }
    two = {"a": Metric.mean(4.0, 2), "b": Metric.sum(8.0), "c": Metric.max(1.0), "d": Metric.min(9.0)}
    assert values(merge_metrics(one, two)) == {"a": 3.0, "b": 10.0, "c": 3.0, "d": 4.0, "e": 5}
    with pytest.raises(ValueError, match="cannot merge"):
        merge_metrics({"a": Metric.sum(1)}, {"a": Metric.mean(1)})
