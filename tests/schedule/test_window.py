"""How many prompts are drawn ahead, from which versions they are answered, and what a checkpoint keeps."""

import pytest

from hone.config import ConfigError
from hone.schedule.seats import NEWEST
from hone.schedule.window import Enough, ScheduleError, Window


def ranges(window):
    return [(one.number, one.versions) for one in window.open]


def test_without_staleness_a_step_draws_what_it_takes():
    window = Window(staleness=0, per_step=4, steps=3)
    assert window.room(4, step=1) == 4
    window = window.admitted(range(4), 1, 4).taken(3)
    assert window.room(1, step=1) == 0, "one group of the four is still open"
    window = window.taken(1).trained(1)
    assert (window.version, window.versions, window.room(4, step=2)) == (1, (1,), 4)


def test_nothing_is_drawn_that_would_be_trained_after_the_last_step():
    window = Window(staleness=2, per_step=2, steps=4)
    admitted = []
    for step in range(1, 5):
        room = window.room(2, step)
        first = sum(admitted)
        window = window.admitted(range(first, first + room), step, 2).taken(2).trained(step)
        admitted.append(room)
    assert admitted == [6, 2, 0, 0]
    assert window.open == ()


def test_a_dropped_group_is_replaced_from_those_ahead_and_one_is_drawn_for_it():
    window = Window(staleness=1, per_step=2, steps=9).admitted(range(4), 1, 2).taken(2)
    assert window.room(1, step=1) == 1  # one of the two was dropped: draw 2 takes its place
    window = window.admitted([4], 1, 1).taken(1)
    assert [one.number for one in window.open] == [3, 4]


def test_mixed_answers_begin_with_no_version_that_is_too_old_when_they_are_trained():
    window = Window(staleness=2, per_step=1, steps=9, one_version=False, versions=(3, 4, 5))
    window = window.admitted([0, 1, 2], 6, 1)
    # Trained in steps 6, 7 and 8, on versions 5, 6 and 7: the oldest that each may have is two updates before.
    assert ranges(window) == [(0, (3, NEWEST)), (1, (4, NEWEST)), (2, (5, NEWEST))]
    with pytest.raises(ScheduleError, match="would be trained 3 steps later"):
        window.admitted([3], 6, 1)


def test_age_counts_updates_and_not_numbers():
    window = Window(staleness=2, per_step=1, steps=9).trained(1).trained(4)  # steps 2 and 3 had no update
    assert window.ages([0, 1, 4]) == {0: 2, 1: 1, 4: 0}
    with pytest.raises(ScheduleError, match="version 0 were about to be trained, but only the versions 1, 4, 5 "):
        window.trained(5).ages([0, 5])


def test_a_checkpoint_keeps_the_queue_and_a_smaller_bound_is_refused_while_it_is_open():
    window = Window(staleness=2, per_step=1, steps=9).admitted(range(3), 1, 1).taken(1).trained(1)
    state = window.state_dict()
    assert Window(staleness=2, per_step=1, steps=9).restored(state) == window
    assert ranges(Window(staleness=3, per_step=1, steps=9).restored(state)) == ranges(window)
    with pytest.raises(
        ConfigError, match=r"= 1 and .* draw 2 would be trained 2 updates .*; set asynchrony.staleness=2 "
    ):
        Window(staleness=1, per_step=1, steps=9).restored(state)
    assert ranges(window.reopened({2})) == [(1, (0, 0)), (2, (1, 1))]


def test_smaller_steps_are_refused_where_they_would_train_an_open_draw_too_late():
    window = Window(staleness=1, per_step=4, steps=9).admitted(range(8), 1, 4).taken(4).trained(1)
    state = window.state_dict()
    with pytest.raises(ConfigError, match=r"prompts_per_step = 2, draw 6 would be .* update.prompts_per_step=4 as"):
        Window(staleness=1, per_step=2, steps=9).restored(state)
    assert Window(staleness=2, per_step=2, steps=9).restored(state).open == window.open
    assert Window(staleness=1, per_step=6, steps=9).restored(state).open == window.open


@pytest.mark.parametrize("one_version", [True, False])
def test_no_more_draws_are_open_than_the_bound_allows(one_version):
    """What is kept in memory: the step's own draws, and `staleness` batches."""
    window = Window(staleness=2, per_step=2, steps=9, one_version=one_version).admitted(range(6), 1, 2)
    with pytest.raises(ScheduleError, match=r"would be trained 3 steps later; .* = 2, 6 draws may be open"):
        window.admitted([6], 1, 2)


def test_draws_that_a_step_did_not_need_are_withdrawn_without_staleness_only():
    window = Window(staleness=0, per_step=2, steps=3).admitted(range(4), 1, 4).taken(3).withdrawn()
    assert window.open == ()
    assert [one.number for one in window.admitted([3], 2, 2).open] == [3]
    with pytest.raises(ScheduleError, match="4 draws are withdrawn, but with staleness 1 they stay"):
        Window(staleness=1, per_step=2, steps=3).admitted(range(4), 1, 2).withdrawn()


def test_groups_are_enough_in_draw_order():
    enough = Enough(2, keeps=str.isupper)
    assert enough.first(["A", "b", "c", "D", "E", "f"]) == ["A", "b", "c", "D"]
    assert enough.first(["a", "B", "c"]) == ["a", "B", "c"]
