"""The plan of a replay: which weights sampled each token of a recorded run.

    schedule.jsonl --> RecordedRun --> RecordedDraw --rest(request)--> the router asks for tokens of each version
                         |
                         `-- needs(version): its snapshot stays until every draw that used it has ended

An answer of one version has one span. With `recompute` an answer has several, and the router asks for each of them as
a request of its own: the KV cache is computed again at the same tokens as in the recorded run. Draws that the record
does not have, because its run stopped early, are answered as in any run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.types import VersionSpans

COMPARED = ("version", "admitted", "taken", "dropped", "spans", "batch")


class ReplayError(RuntimeError):
    """A replay does not do what the record says."""


class RecordedDraw:
    """The recorded answers to one prompt, and how much of each has been sampled again."""

    def __init__(self, draw: int, answers: Sequence[VersionSpans]) -> None:
        self._draw = draw
        self._answers = answers
        self._sampled = [0] * len(answers)

    def rest(self, request_id: str) -> VersionSpans:
        """The spans that a request continues with; its name ends in `<sample>/<turn>`.

        Raises ReplayError if the recorded answer has ended.
        """
        sample, turn = _place(request_id)
        if turn == 0:  # an episode that is played again begins anew
            self._sampled[sample] = 0
        rest = _after(self._answers[sample], self._sampled[sample])
        if not rest:
            raise ReplayError(
                f"answer {sample} to draw {self._draw} goes on after the {self._sampled[sample]} tokens that the "
                "record has of it; an answer that failed in the recorded run cannot be replayed"
            )
        return rest

    def sampled(self, request_id: str, tokens: int) -> None:
        """Note how many tokens a request has sampled."""
        self._sampled[_place(request_id)[0]] += tokens


class RecordedRun:
    """Record of a run, by step and by draw."""

    def __init__(self, path: Path, records: Collection[Mapping[str, Any]]) -> None:
        self._path = path
        self._records = {record["step"]: record for record in records}
        self._answers: dict[int, list[VersionSpans]] = {
            int(draw): [tuple((version, tokens) for version, tokens in answer) for answer in answers]
            for record in records
            for draw, answers in record["spans"].items()
        }
        self._using: dict[int, set[int]] = {}  # version -> the draws that still need it
        for draw, answers in self._answers.items():
            for version in {version for answer in answers for version, _ in answer}:
                self._using.setdefault(version, set()).add(draw)

    @property
    def last_step(self) -> int:
        """The last step that the record has; 0: none."""
        return max(self._records, default=0)

    def draw(self, number: int) -> RecordedDraw | None:
        """The answers to a draw; None: the record does not have it."""
        answers = self._answers.get(number)
        return None if answers is None else RecordedDraw(number, answers)

    def ended(self, number: int) -> None:
        """Note that a draw has all its answers again."""
        for version in {version for answer in self._answers.get(number, ()) for version, _ in answer}:
            self._using[version].discard(number)

    def needs(self, version: int) -> bool:
        """Return whether a draw that has not ended uses this version."""
        return bool(self._using.get(version))

    def resumed(self, version: int, still_open: Collection[int], first_new: int) -> None:
        """Continue a replay after a checkpoint of `version`, whose draws before `first_new` have ended.

        Raises ReplayError if a later draw, or one of `still_open`, needs older weights, which are gone.
        """
        for number in [number for number in self._answers if number < first_new and number not in still_open]:
            self.ended(number)
        if older := sorted(one for one, draws in self._using.items() if one < version and draws):
            raise ReplayError(
                f"the replay cannot continue from weight version {version}: draw {min(self._using[older[0]])} needs "
                f"version {older[0]}, which no checkpoint has; begin the replay again with --restart"
            )

    def check(self, record: Mapping[str, Any]) -> None:
        """Compare a step of the replay with the record. Raises ReplayError with the first field that differs."""
        recorded = self._records.get(record["step"])
        if recorded is None:
            return
        found = json.loads(json.dumps(record))
        for name in COMPARED:
            if found.get(name) != recorded.get(name):
                raise ReplayError(
                    f"step {record['step']} of the replay differs from {self._path} in {name!r}: expected "
                    f"{_short(recorded.get(name))}, found {_short(found.get(name))}; a replay needs the same settings, "
                    "data, versions of hone and torch, and kind of machine"
                )


def _place(request_id: str) -> tuple[int, int]:
    _, sample, turn = request_id.rsplit("/", 2)
    return int(sample), int(turn)


def _after(spans: VersionSpans, tokens: int) -> VersionSpans:
    """The spans without their first `tokens` tokens."""
    for place, (version, count) in enumerate(spans):
        if tokens < count:
            return ((version, count - tokens), *spans[place + 1 :])
        tokens -= count
    return ()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


__all__ = ["RecordedDraw", "RecordedRun", "ReplayError"]
