"""A small package with the interface of TextWorld that hone's program uses: a game is a file with its walkthrough."""

import json
import os
import time
from types import SimpleNamespace

__version__ = "0"
TITLE = " __/\\__ \n|  $$  |\n\n"


class EnvInfos:
    def __init__(self, **wanted):
        self.wanted = wanted


def start(game, infos):
    print("a game begins")
    with open(game, encoding="utf-8") as file:
        return Game(json.load(file))


class Game:
    def __init__(self, about):
        self._about = about
        self._solved = 0

    def seed(self, seed):
        self._seed = seed

    def reset(self):
        return self._state(TITLE + f"Welcome to {self._about['name']}.")

    def step(self, command):
        if command == "die":
            os._exit(3)
        if command == "hang":
            time.sleep(600)
        if command == "raise":
            raise ValueError("no such thing")
        right = command == self._about["walkthrough"][self._solved]
        self._solved += right
        state = self._state("Done." if right else "That's not a verb I recognise.")
        return state, state.score, state.won

    def close(self):
        pass

    def _state(self, text):
        whole = self._about["walkthrough"]
        won = self._solved == len(whole)
        return SimpleNamespace(
            feedback=f"{text}\n\n\n\nYou look.\n\n> " + " " * 60 + f"-= Room =-{self._solved}/{len(whole)}",
            admissible_commands=[] if won else ["look", whole[self._solved]],
            score=self._solved,
            max_score=len(whole),
            won=won,
        )
