"""Every order of what can happen to two results: asked for again, resolved twice, fetched, dropped, too old."""

import asyncio
from types import SimpleNamespace

import pytest

from hone.service import futures as module
from hone.service.futures import Futures, Outcome
from hone.service.protocol.refusals import BadRequest, Busy, Gone

KEPT_S, MOST = 10.0, 10
REQUEST, RESULT = 3, 4  # bytes
IDS = {"a": "one", "b": "two"}  # request -> tenant
VERBS = ("open", "again", "other", "resolve", "resolve twice", "ask", "fetch", "announce", "strange")
EVENTS = [*((verb, name) for verb in VERBS for name in IDS), ("later", ""), ("forget", ""), ("room", "one")]


class Wanted:
    """The results as they should be: request -> (state, whether it was fetched, whether it is old)."""

    def __init__(self, known=()):
        self.known = dict(known)
        self.announced = set()  # those whose size was told

    def key(self):
        return tuple(sorted(self.known.items())), tuple(sorted(self.announced & self.known.keys()))

    def held(self, name):
        return {"": 0, "pending": REQUEST}.get(self.known.get(name, ("",))[0], RESULT)

    def do(self, verb, name):
        """The answer to an event."""
        state, _, old = self.known.get(name, ("", False, False))
        match verb:
            case "open" | "again":
                if not state:
                    self.known[name] = ("pending", False, False)
                    self.announced.discard(name)
                return not state
            case "other":
                return "refused" if state else "not tried"
            case "resolve" | "resolve twice":
                if state == "pending":
                    self.known[name] = ("first" if verb == "resolve" else "second", False, False)
            case "ask":
                return {"": "gone", "pending": None}.get(state, state)
            case "strange":
                return "gone"
            case "fetch":
                if state in ("first", "second"):
                    self.known[name] = (state, True, old)
            case "announce":
                first = state in ("first", "second") and name not in self.announced
                self.announced |= {name} if first else set()
                return first
            case "later":
                self.known = {
                    one: (state, fetched, state != "pending") for one, (state, fetched, _) in self.known.items()
                }
            case "forget":
                gone = sorted(one for one, (_, _, old) in self.known.items() if old)
                self.known = {one: value for one, value in self.known.items() if one not in gone}
                return gone
            case "room":  # for as much as fits if nothing else is there
                if "a" in self.known and not self.known["a"][1]:
                    return "busy"
                return [self.known.pop("a") and "a"] if "a" in self.known else []
        return None


async def do(futures, clock, verb, name):
    """The same with the real ones."""
    match verb:
        case "open" | "again":
            return futures.open(name, IDS[name], digest="x", size=REQUEST)
        case "other":
            try:
                return futures.open(name, IDS[name], digest="y") if name in futures._entries else "not tried"
            except BadRequest:
                return "refused"
        case "resolve" | "resolve twice":
            text = "first" if verb == "resolve" else "second"
            futures.resolve(name, Outcome(bytes(RESULT), text))
        case "ask" | "strange":
            try:
                found = await futures.wait(name, IDS[name] if verb == "ask" else "nobody", 0)
            except Gone:
                return "gone"
            return found and found.media
        case "fetch":
            if await do(futures, clock, "ask", name):  # perhaps it has gone since this client was told the result
                futures.note_fetched(name)
        case "announce":
            return bool(await do(futures, clock, "ask", name)) and futures.announce(name)
        case "later":
            clock[0] += 2 * KEPT_S
        case "forget":
            return sorted(futures.forget_old())
        case "room":
            try:
                return futures.make_room("one", MOST)
            except Busy:
                return "busy"
    return None


async def explore(kind, clock):
    """Compare every event in every state that can be reached; returns their number."""
    seen, paths = {Wanted().key()}, [()]
    for path in paths:
        for event in EVENTS:
            wanted, futures, clock[0] = Wanted(), kind(KEPT_S, MOST), 0.0
            for each in (*path, event):
                expected, found = wanted.do(*each), await do(futures, clock, *each)
            assert found == expected, (*path, event)
            for name, tenant in IDS.items():
                assert await do(futures, clock, "ask", name) == wanted.do("ask", name), (*path, event)
                assert futures._held[tenant] == wanted.held(name), (*path, event)
            if wanted.key() not in seen:
                seen.add(wanted.key())
                paths.append((*path, event))
    return len(seen)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_every_order_of_events_gives_the_results_that_it_should(clock, capsys):
    states = asyncio.run(explore(Futures, clock))
    with capsys.disabled():
        print(f"\n{states} states of two results")
    assert states > 50


class KeepsForEver(Futures):
    def forget_old(self):
        return []


class ForgetsWhatWaits(Futures):
    def forget_old(self):
        found = super().forget_old()
        for name in [name for name, one in self._entries.items() if one.outcome is None]:
            found.append(name)
            self._drop(name)
        return found


class TellsStrangers(Futures):
    async def wait(self, request_id, tenant, timeout_s):
        return await super().wait(request_id, IDS[request_id], timeout_s)


class TakesTheLastResult(Futures):
    def resolve(self, request_id, outcome):
        if request_id in self._entries:
            self._entries[request_id].outcome = None
        super().resolve(request_id, outcome)


class RunsAgain(Futures):
    def open(self, request_id, tenant, anew=False, digest="", size=0):
        return super().open(request_id, tenant, True, digest, size)


class TakesOtherContent(Futures):
    def open(self, request_id, tenant, anew=False, digest="", size=0):
        known = self._entries.get(request_id)
        return super().open(request_id, tenant, anew, known.digest if known else digest, size)


class DropsWhatNobodyFetched(Futures):
    def resolve(self, request_id, outcome):
        super().resolve(request_id, outcome)
        if request_id in self._entries:
            self._entries[request_id].fetched = True


class CountsWhatIsGone(Futures):
    def _drop(self, request_id):
        self._entries.pop(request_id)


class CountsEverybody(Futures):
    def make_room(self, tenant, size):
        self._held[tenant] = self._held.total()
        return super().make_room(tenant, size)


MUTANTS = [
    KeepsForEver,
    ForgetsWhatWaits,
    TellsStrangers,
    TakesTheLastResult,
    RunsAgain,
    TakesOtherContent,
    DropsWhatNobodyFetched,
    CountsWhatIsGone,
    CountsEverybody,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_exploration_finds_what_is_wrong(mutant, clock):
    with pytest.raises((AssertionError, KeyError)):
        asyncio.run(explore(mutant, clock))
