"""Gymnasium by the contract of environments."""

import pytest

from hone.testing import EnvironmentContract

LAKE = {"id": "FrozenLake-v1", "options": {"render_mode": "ansi", "is_slippery": False}}


class TestGymnasium(EnvironmentContract):
    settings = {**LAKE, "actions": ["left", "down", "right", "up"]}  # noqa: RUF012
    answers = ("right", "right", "down", "down", "down", "right")
    rows = ({"prompt": "Walk to G.", "walkthrough": answers},)
    max_turns = 30
    rewards = (0.0,) * 5 + (1.0,)

    def make(self):
        pytest.importorskip("gymnasium", reason="comes with hone-environments[gymnasium]")
        return "gymnasium"
