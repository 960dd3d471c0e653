"""A prompt is trained exactly once, or dropped with a reason."""

import pytest

from hone.schedule.window import LedgerError, PromptLedger


def test_every_draw_ends_trained_or_dropped():
    ledger = PromptLedger()
    ledger.drawn([0, 1, 2])
    ledger.finished([2, 0, 1])
    ledger.trained([0, 1])
    with pytest.raises(LedgerError, match=r"draws \[2\] were neither"):
        ledger.require_settled()
    ledger.dropped([2], "zero variance")
    ledger.require_settled()
    assert ledger.counts == {"drawn": 3, "trained": 2, "open": 0, "dropped: zero variance": 1}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([("drawn", [0]), ("finished", [0]), ("trained", [0]), ("trained", [0])], "not open"),
        ([("drawn", [0]), ("trained", [0])], "is in flight, expected it finished"),
        ([("drawn", [0]), ("drawn", [0])], "skipped or repeated"),
        ([("drawn", [0, 2])], "skipped or repeated"),
        ([("finished", [5])], "not open"),
    ],
)
def test_a_transition_that_is_not_in_the_picture_raises(events, message):
    ledger = PromptLedger()
    *before, (verb, draws) = events
    for earlier, earlier_draws in before:
        getattr(ledger, earlier)(earlier_draws)
    with pytest.raises(LedgerError, match=message):
        getattr(ledger, verb)(draws)


def test_the_state_survives_a_checkpoint():
    ledger = PromptLedger()
    ledger.drawn(range(4))
    ledger.finished([1, 3])
    ledger.dropped([3], "failed")
    again = PromptLedger()
    again.load_state_dict(ledger.state_dict())
    assert again.counts == ledger.counts
    again.trained([1])
    again.drawn([4])


def test_a_skipped_draw_is_settled_without_being_played():
    ledger = PromptLedger()
    ledger.drawn([0, 1, 2])
    ledger.skipped([1], "expected to teach nothing")
    ledger.finished([0, 2])
    with pytest.raises(LedgerError, match="draw 2 is finished, expected it in flight"):
        ledger.skipped([2], "too late")
    ledger.trained_all_finished()
    assert ledger.counts == {"drawn": 3, "trained": 2, "open": 0, "dropped: expected to teach nothing": 1}


def test_draws_that_are_put_back_are_drawn_again_with_the_same_numbers():
    ledger = PromptLedger()
    ledger.drawn(range(6))
    ledger.skipped([1, 4], "expected to teach nothing")
    ledger.finished([0, 2])
    ledger.put_back(3, 1, "expected to teach nothing")  # draws 3 and 5 were played, draw 4 was skipped
    assert ledger.counts == {"drawn": 3, "trained": 0, "open": 2, "dropped: expected to teach nothing": 1}
    ledger.drawn([3])
    with pytest.raises(LedgerError, match="draw 2 is finished, expected it in flight"):
        ledger.put_back(2)
    with pytest.raises(LedgerError, match="draws 1 to 3 go back to the data, but of these only 2 are open and 0 were"):
        ledger.put_back(1)
