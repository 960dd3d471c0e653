"""Play games of TextWorld: a program for the Python that has this package, not hone's.

    stdin   {"id": 1, "method": "load", "params": {"games": ["game.z8"]}}                -> {"version": "1.7.0"}
            {"id": 2, "method": "start", "params": {"episode": 1, "game": "game.z8", "seed": 7}}
            {"id": 3, "method": "step", "params": {"episode": 1, "command": "open box"}}
            {"id": 4, "method": "close", "params": {"episode": 1}}
    stdout  {"id": 2, "result": {"text", "commands", "score", "max_score", "done"}}
            {"id": 3, "error": {"message": ...}}

One JSON object in a line each way, answered in order: a step takes about a millisecond. What TextWorld prints goes to
standard error, hone's log.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import sys
from typing import Any

STATUS = re.compile(r">[ \t]*-= ")  # the prompt and the line of the room's name and the score, up to ` =-14/1`
LETTERS = re.compile(r"[A-Za-z0-9]")


class Games:
    """The open episodes."""

    def __init__(self) -> None:
        self._textworld: Any = None
        self._open: dict[int, Any] = {}

    def answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "load":
            return self._load(params["games"])
        episode = int(params["episode"])
        if method == "start":
            return self._start(episode, str(params["game"]), int(params["seed"]))
        if method == "step":
            state, _, done = self._open[episode].step(str(params["command"]))
            return _told(state, done)
        if episode in self._open:  # else it could not be started
            self._open.pop(episode).close()
        return {}

    def _load(self, games: list[str]) -> dict[str, Any]:
        self._textworld = importlib.import_module("textworld")
        for game in games:
            self._start(0, game, 0)
            self._open.pop(0).close()
        return {"version": self._textworld.__version__}

    def _start(self, episode: int, game: str, seed: int) -> dict[str, Any]:
        infos = self._textworld.EnvInfos(
            feedback=True, admissible_commands=True, score=True, max_score=True, won=True, lost=True
        )
        self._open[episode] = env = self._textworld.start(game, infos)
        env.seed(seed % 2**32)
        return _told(env.reset(), False)


def _told(state: Any, done: bool) -> dict[str, Any]:
    """Return the message to hone about a state."""
    lines = _without_prompt(state.feedback).splitlines()
    while lines and not LETTERS.search(lines[0]):  # the title is drawn in lines and slashes
        lines.pop(0)
    return {
        "text": re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip(),
        "commands": list(state.admissible_commands or ()),
        "score": float(state.score or 0),
        "max_score": float(state.max_score or 0),
        "done": bool(done),
    }


def _without_prompt(feedback: str) -> str:
    """The feedback without the prompt and the status line at its end, in linear time: it may repeat the command."""
    *before, last = feedback.rstrip().split("\n")
    begun = STATUS.search(last)
    _, closed, score = last.rpartition(" =-")
    if begun and closed and len(score.split()) <= 1:
        return "\n".join([*before, last[: begun.start()]])
    return "\n".join([*before, last.removesuffix(">")])


def main() -> None:
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    games = Games()
    with channel.makefile("rwb") as lines:
        for line in lines:
            message = json.loads(line)
            if "id" not in message:  # a request was cancelled, and is answered already
                continue
            try:
                told: dict[str, Any] = {"result": games.answer(message["method"], message["params"])}
            except Exception as error:  # noqa: BLE001  foreign code; one episode's failure must not end the others
                told = {"error": {"message": f"{type(error).__name__}: {error}"}}
            lines.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **told}).encode() + b"\n")
            lines.flush()


if __name__ == "__main__":
    sys.path[:1] = []  # this folder, whose modules are hone's
    main()
