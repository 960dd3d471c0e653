"""How much of hone somebody reads who follows one GRPO step on the built-in engine."""

import json
import re
import subprocess
import sys

import pytest

from tests.architecture.step_files import READ

ENTERED, READ_FILES = 72, 58  # files; both were measured; ARCHITECTURE.md says why not 40
IDEA, IDEA_LINES = 20, 5000  # the files of ARCHITECTURE.md that contain the idea of a step


@pytest.fixture(scope="module")
def ran(root):
    """File -> number of its lines that ran in a step."""
    command = [sys.executable, "-m", "tests.architecture.step_files", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_step_enters_few_files(ran):
    assert len(ran) <= ENTERED, sorted(ran)
    assert len([path for path, lines in ran.items() if lines >= READ]) <= READ_FILES, sorted(ran)


def test_the_idea_of_a_step_is_in_few_files(root, ran):
    page = (root / "ARCHITECTURE.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `(hone/\S+\.py)` \|", page, re.M)
    assert 0 < len(files) <= IDEA
    assert sum(len((root / file).read_text(encoding="utf-8").splitlines()) for file in files) <= IDEA_LINES
    assert [file for file in files if ran.get(file, 0) < READ] == []
