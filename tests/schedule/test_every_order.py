"""No order of events breaks the bound, loses a prompt or stops the run; and the checker finds what would."""

from dataclasses import replace

import pytest

from hone.schedule import seats
from hone.schedule.window import Window
from tests.schedule.model import ENDED, TORN, Broken, Limits, Rules, World, explore


def run(staleness, limits, rules=None, window=Window, one_version=True):
    start = World(window(staleness, 1, steps=limits.draws - limits.drops, one_version=one_version))
    return explore(start, rules or Rules(), limits)


def slow(*given):
    return pytest.param(*given, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("staleness", "limits"),
    [
        (0, Limits(draws=4, deaths=1, crashes=1, drops=1)),
        (1, Limits(draws=4, deaths=1, crashes=1, drops=1)),
        (1, Limits(draws=3, deaths=0, crashes=0, drops=0, joins=1, leaves=1, turns=1)),
        (2, Limits(draws=4, deaths=1, crashes=0, drops=0)),
        (2, Limits(draws=4, deaths=0, crashes=0, drops=0, joins=1, leaves=1)),
        slow(0, Limits(draws=6, deaths=1, crashes=1, drops=1)),
        slow(1, Limits(draws=6, deaths=1, crashes=1, drops=1)),
        slow(1, Limits(draws=4, deaths=0, crashes=0, drops=0, joins=1, leaves=1, turns=1)),
        slow(1, Limits(draws=3, deaths=1, crashes=1, drops=1, joins=1, leaves=1)),
        slow(2, Limits(draws=6, deaths=1, crashes=1, drops=0)),
        slow(2, Limits(draws=5, deaths=2, crashes=1, drops=2)),
        slow(2, Limits(draws=4, deaths=1, crashes=1, drops=1)),
        slow(2, Limits(draws=6, deaths=0, crashes=0, drops=0, joins=1, leaves=1)),
    ],
)
def test_every_order_of_events_ends_well(staleness, limits, capsys):
    states = run(staleness, limits)
    with capsys.disabled():
        print(f"\nstaleness {staleness}, {limits}: {states:,} states")


@pytest.mark.parametrize(
    ("staleness", "limits"),
    [
        (1, Limits(draws=4, deaths=1, crashes=0, drops=1)),
        (1, Limits(draws=3, deaths=0, crashes=1, drops=0, joins=1, leaves=1)),
        slow(2, Limits(draws=4, deaths=1, crashes=1, drops=1)),
        slow(1, Limits(draws=4, deaths=0, crashes=1, drops=0, joins=1, leaves=1)),
        slow(2, Limits(draws=4, deaths=0, crashes=0, drops=0, joins=1, leaves=1, turns=1)),
    ],
)
def test_every_order_ends_well_where_answers_go_on_under_new_weights(staleness, limits, capsys):
    states = run(staleness, limits, one_version=False)
    with capsys.disabled():
        print(f"\nstaleness {staleness}, versions mixed, {limits}: {states:,} states")


class OneTooMany(Window):
    """Draws one more ahead than the bound allows."""

    def room(self, short, step):
        return super().room(short, step) + (step < self.steps)

    def _versions(self, place, short):
        return self.version, self.version


def by_arrival(world):
    """Take the answers that are there, whatever their number."""
    there = [number for number, place, _ in world.answers if place == ENDED]
    return there[: world.short]


def strands(replicas, waiting, held, kept):
    """Every replica moves to the newest version as soon as its requests have ended, whoever still waits."""
    newest = max(kept)
    idle = [one for one in replicas if one.version < newest and not one.running]
    return {one.name: newest for one in idle}


MUTANTS = {
    "the bound is off by one": (
        "are within asynchrony.staleness|would be trained 2 updates after",
        Rules(),
        OneTooMany,
    ),
    "an answer may begin one version too early": (
        "goes on from version 0 to 1",
        Rules(fits=lambda version, versions: seats.fits(version, (versions[0] - 1, versions[1]))),
        Window,
    ),
    "batches are formed by arrival": (r"is taken after draw", Rules(takes=by_arrival), Window),
    "a step without an update does not say so": (
        "cannot end",
        Rules(skipped_version=lambda window, step: window.trained(step)),
        Window,
    ),
    "a replica that restarts gets the live weights": (
        r"says version \d, it has -7",
        Rules(restored_content=lambda world, version: TORN),
        Window,
    ),
    "a seat on a replica that has proven nothing": (
        "from version 0 to -1",
        Rules(fits=lambda version, versions: version == -1 or seats.fits(version, versions)),
        Window,
    ),
    "replicas move while draws need their version": (
        "cannot end",
        Rules(moves=strands, needed=lambda held, kept: {max(kept)}),
        Window,
    ),
    "a resumed run waits for weights that are gone": (
        "cannot end",
        Rules(reopened=lambda window, lost: window),
        Window,
    ),
    "a resumed run forgets the draws that were open": (
        "neither trained nor dropped",
        Rules(reopened=lambda window, lost: replace(window, open=())),
        Window,
    ),
    "a server that leaves takes its answers along": (
        "cannot end",
        Rules(resent=lambda world, index: world),
        Window,
    ),
    "snapshots are kept for good": (
        "3 snapshots are kept, and 2 is the most",
        Rules(needed=lambda held, kept: set(kept)),
        Window,
    ),
}


FOUND_WITH_FOUR_DRAWS = (
    "the bound is off by one",
    "an answer may begin one version too early",
    "a step without an update does not say so",
)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_finds(name):
    message, rules, window = MUTANTS[name]
    draws = 4 if name in FOUND_WITH_FOUR_DRAWS else 3
    with pytest.raises(Broken, match=message) as found:
        run(1, Limits(draws=draws, deaths=1, crashes=1, drops=1, leaves=int("leaves" in name)), rules, window)
    assert ", after " in str(found.value)
