"""The environments that need no service, by the contract."""

import json
from pathlib import Path

import pytest

from hone.testing import EnvironmentContract
from tests.sandboxes.available import skip_without

HERE = Path(__file__).parent
WORD = {"task": "spell_backward", "entry": {"question": "Juan?", "answer": "nauJ", "metadata": {}}}


class TestChat(EnvironmentContract):
    answers = ("4",)

    def make(self):
        return "chat"


class TestTools(EnvironmentContract):
    settings = {"tools": [f"{HERE / 'my_tools.py'}:Calculator"]}  # noqa: RUF012
    answers = ("4",)

    def make(self):
        return "tools"


class TestGymClass(EnvironmentContract):
    answers = ("1", "five", "3")
    rewards = (-2.0, 0.0, 0.0)

    def make(self):
        return f"{HERE / 'gym_classes.py'}:Guess"


class TestOldGymClass(EnvironmentContract):
    answers = ("1", "3")
    rewards = (-2.0, 0.0)

    def make(self):
        return f"{HERE / 'gym_classes.py'}:Old"


class TestMcp(EnvironmentContract):
    settings = {  # noqa: RUF012
        "servers": {"test": {"command": ["python", str(HERE / "mcp_server.py"), "piped"], "tools": ["add"]}}
    }
    answers = ("4",)

    def make(self):
        return "mcp"


class TestSearch(EnvironmentContract):
    answers = ("Paris",)

    @pytest.fixture(autouse=True)
    def _corpus(self, tmp_path):
        pytest.importorskip("bm25s", reason="comes with hone-rl[search]")
        rows = [{"title": "Louvre", "text": "A museum in Paris."}, {"title": "Prado", "text": "A museum in Madrid."}]
        path = tmp_path / "corpus.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self.settings = {"corpus": {"path": str(path)}}

    def make(self):
        return "search"


class TestPython(EnvironmentContract):
    answers = ("4",)

    def make(self):
        skip_without("landlock")
        return "python"


class TestPuzzles(EnvironmentContract):
    rows = ({"prompt": "Juan?", "ground_truth": "nauJ", **WORD},)
    answers = ("Juan", "nauJ")

    def make(self):
        pytest.importorskip("reasoning_gym", reason="comes with hone-rl[tasks]")
        return "reasoning_gym"
