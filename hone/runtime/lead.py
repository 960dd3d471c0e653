"""Work that only the first rank can do, and for which it needs the others: a rollout that gets weights from all ranks.

    rank 0:  run(work) -- work ----- calls a role ---------- work goes on ---------- its result
                                          | told                   | still at work       | told
    others:  run(work) -- listen -- make the same call -------- listen ------------ the same result

Everything else of a run is the same on every rank (`hone.runtime.ranks`). The others never wait longer than
`runtime.collective_timeout_s` without a sign of life, however long the work takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from hone.runtime import ranks
from hone.runtime.base import RankLost
from hone.runtime.codec import decode, encode
from hone.runtime.watchdog import progress

R = TypeVar("R")
BEAT_S = 1.0  # between two signs of life
JOIN_S = 60.0  # longest wait for the last of them, which may be on its way to a slow rank
_STILL, _CALL, _RESULT, _FAILED = b"", b"C", b"R", b"F"


class Led(Protocol):
    """A role of this process, whose calls the first rank may tell to the others."""

    role: str

    def call(self, method: str, *arguments: Any) -> Any: ...


class Lead:
    """Leads on the first rank, follows on the others; alone it only runs the work."""

    def __init__(self) -> None:
        self._voice = threading.RLock()  # one word at a time: the sign of life comes from a thread of its own
        self._stream: Iterator[Any] | None = None  # of which the other ranks take every element
        self._in_call = False

    def run(self, work: Callable[[], R]) -> R:
        """What `work` returns on the first rank, on every rank.

        Its errors are raised on the first rank; the others raise RankLost. Raises TypeError for a result that
        `hone.runtime.codec` does not know.
        """
        if ranks.ranks() == 1:
            return work()
        if not ranks.is_first():
            followed: R = self._follow()
            return followed
        try:
            with self._leading(), self._beating():
                result = work()
                told = encode(result)
            self._tell(_RESULT + told)
        except Exception:
            if not self._in_call:  # else the others stand in the middle of that call, and hear nothing
                with suppress(RankLost, RuntimeError):
                    self._tell(_FAILED)
            raise
        return result

    # ------------------------------------------------------------------------------------------------ the first rank

    @contextmanager
    def calling(self, role: str, method: str, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Tell the others to make this call too; nothing else is said before it has ended."""
        with self._voice:
            self._tell(_CALL + encode((role, method, arguments)))
            self._in_call = True
            yield
            self._in_call = False  # an error leaves it set

    def whole(self, stream: Iterator[Any]) -> Iterator[Any]:
        """A stream that is taken to its end whatever becomes of it here: the others take part in each element.

        Called within `calling`, so that no sign of life comes between.
        """
        self._stream = stream
        return self._taken(stream)

    def _taken(self, stream: Iterator[Any]) -> Iterator[Any]:
        try:
            with ranks.answered("in the middle of a stream"):
                # `yield from` would close the stream with this generator, and the rest of it has to be taken
                for one in stream:  # noqa: UP028
                    yield one
        finally:
            if self._stream is stream:  # else the rest was taken when the next word was said
                self._end_stream()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with ranks.answered("at the end of a stream"):
                for _ in stream:
                    pass

    def _tell(self, message: bytes) -> None:
        with self._voice, ranks.answered("telling the other ranks"):
            self._end_stream()
            ranks.tell(message)

    @contextmanager
    def _leading(self) -> Iterator[None]:
        global _leader
        before, _leader = _leader, self
        try:
            yield
        finally:
            _leader = before

    @contextmanager
    def _beating(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), name="signs of life to other ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(timeout=JOIN_S)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            if not self._voice.acquire(blocking=False):
                continue  # it is speaking: that is one
            try:
                if self._stream is None:
                    ranks.tell(_STILL)
            except RuntimeError:
                return  # a rank is lost: the next word fails too, and is the one that says so
            finally:
                self._voice.release()

    # ---------------------------------------------------------------------------------------------------- the others

    def _follow(self) -> Any:
        while True:
            with ranks.answered("waiting for the first rank's work"):
                message = ranks.hear()
            kind, content = message[:1], message[1:]
            progress()  # the first rank's own watchdog says whether its work goes on
            if kind == _STILL:
                continue
            if kind == _RESULT:
                return decode(content)
            if kind == _FAILED:
                raise RankLost(
                    f"rank {ranks.rank()} of {ranks.ranks()} gave up: the first rank failed, and has said why"
                )
            role, method, arguments = decode(content)
            result = _roles[role].call(method, *arguments)
            if isinstance(result, Iterator):
                with ranks.answered(f"in {method} of role {role}"):
                    for _ in result:
                        pass


_leader: Lead | None = None
_roles: WeakValueDictionary[str, Led] = WeakValueDictionary()


def leader() -> Lead | None:
    """Who has to be told of calls that this process makes; None while every rank makes them by itself."""
    return _leader


def enrol(group: Led) -> None:
    """Make a role known by its name, on every rank; a later one of the same name takes its place."""
    _roles[group.role] = group
