"""Which replica takes which version, with hand-written situations of every kind."""

import pytest

from hone.schedule.seats import NEWEST, Standing, fits, moves, needed


def standing(name, version, *running):
    return Standing(name, version, frozenset(running))


@pytest.mark.parametrize(
    ("version", "versions", "expected"),
    [
        (3, None, True),
        (3, (3, 3), True),
        (2, (3, 3), False),
        (4, (3, 3), False),
        (7, (3, NEWEST), True),
        (-1, None, False),
    ],
)
def test_a_request_fits_a_version_that_was_proven_and_is_in_its_range(version, versions, expected):
    assert fits(version, versions) is expected


def test_with_finish_a_replica_moves_when_its_answers_have_ended_and_another_has_the_rest():
    busy, idle = standing("a", 5, (5, 5)), standing("b", 5)
    assert moves([busy, idle], [], [(5, 5)], [5, 6]) == {"b": 6}


def test_the_last_replica_of_a_version_stays_while_a_draw_is_between_two_turns():
    idle, ahead = standing("a", 5), standing("b", 6)
    assert moves([idle, ahead], [], [(5, 5), (6, 6)], [5, 6]) == {}
    assert moves([idle, ahead], [], [(6, 6)], [5, 6]) == {"a": 6}


def test_one_of_two_idle_replicas_stays_for_a_draw_between_two_turns():
    found = moves([standing("a", 5), standing("b", 5)], [], [(5, 5)], [5, 6])
    assert list(found.values()) == [6]


def test_without_an_end_of_the_range_all_replicas_move_at_once_with_their_answers():
    running = [standing("a", 5, (3, NEWEST)), standing("b", 5, (4, NEWEST))]
    assert moves(running, [], [(3, NEWEST), (4, NEWEST)], [5, 6]) == {"a": 6, "b": 6}


def test_a_replica_that_restarted_helps_the_oldest_requests_first():
    busy, empty = standing("a", 5, (5, 5)), standing("b", -1)
    assert moves([busy, empty], [(5, 5), (6, 6)], [(5, 5), (6, 6)], [5, 6])["b"] == 6, "nobody has 6"
    assert moves([busy, empty], [(5, 5)], [(5, 5)], [5, 6]) == {"b": 5}, "6 has no request yet"


def test_a_version_whose_only_replica_died_is_loaded_again_by_another():
    ahead = standing("b", 6)
    assert moves([ahead], [(5, 5)], [(5, 5), (6, 6)], [5, 6]) == {"b": 5}
    assert moves([standing("b", 6, (6, 6))], [(5, 5)], [(5, 5), (6, 6)], [5, 6]) == {}, "its answers end first"
    assert moves([standing("b", 5)], [(6, 6)], [(6, 6)], [5, 6]) == {"b": 6}, "and comes back"


def test_a_request_for_a_version_that_does_not_exist_yet_moves_nobody():
    assert moves([standing("a", 5)], [(6, 6)], [(6, 6)], [5]) == {}


def test_snapshots_stay_while_a_draw_can_only_be_sampled_from_them():
    assert needed([(4, 4), (5, 5)], [3, 4, 5, 6]) == {4, 5, 6}
    assert needed([(3, NEWEST)], [3, 4, 5, 6]) == {6}
    assert needed([], [3]) == {3}
    assert needed([(1, 1)], []) == set()
