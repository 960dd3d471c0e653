"""One restart policy: so many within a window, with growing pauses."""

from hone.processes.restarts import Restarts


def restarted(policy):
    """Whether it was restarted, and was ready again."""
    taken = policy.take()
    if taken:
        policy.worked()
    return taken


def test_deaths_now_and_then_are_restarted_for_ever_and_a_burst_is_given_up():
    times = [0.0, 60.0, 101.0, 161.0, 170.0, 201.0, 202.0]
    policy = Restarts(2, 100.0, clock=iter(times).__next__)
    assert [restarted(policy) for _ in times] == [True, True, True, True, False, True, False]
    assert policy.total == 5
    assert str(policy) == "2 restarts within 100 s"


def test_pauses_grow_within_the_window_and_begin_again_after_it():
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 200.0]
    policy = Restarts(9, 100.0, clock=iter(times).__next__)
    pauses = [restarted(policy) and policy.pause_s for _ in times]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.0]


def test_failures_in_a_row_count_however_long_each_takes():
    times = [0.0, 600.0, 1200.0, 1800.0]
    policy = Restarts(2, 100.0, clock=iter(times).__next__)
    assert [policy.take() for _ in range(3)] == [True, True, False]
    policy.worked()
    assert policy.take()


def test_none_is_none():
    assert not Restarts(0, 100.0).take()
