"""How much of hone somebody reads who follows one GRPO step on the built-in engine."""

import json
import subprocess
import sys

import pytest

from tests.architecture.step_files import PAGE, Traced, files_in, listed, summary_in

FILES, LINES, CLASSES = 71, 16_000, 92  # ceilings at what was reached; the goal is 55, 12,500 and 60


@pytest.fixture(scope="module")
def traced(root):
    command = [sys.executable, "-m", "tests.architecture.step_files", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr
    return Traced(**json.loads(done.stdout))


def test_a_step_enters_few_files_lines_and_classes(traced):
    assert len(traced.lines) <= FILES, list(traced.lines)
    assert sum(traced.lines.values()) <= LINES
    assert len(traced.classes) <= CLASSES, traced.classes


def test_the_page_lists_the_files_that_a_step_enters(traced):
    page = PAGE.read_text(encoding="utf-8")
    assert files_in(page) == set(traced.lines), "run python -m tests.architecture.step_files --write"
    assert summary_in(page) == f"{FILES} files, {LINES:,} lines, {CLASSES} classes"


def test_what_is_written_into_the_page_can_be_read_back():
    lines = {"hone/a/b.py": 120, "hone/a/c.py": 30, "hone/types.py": 1, "hone/a/d.py": 49}
    text = listed(Traced(lines, lines, ["hone/a/b.py:B"]))
    assert files_in(text) == set(lines)
    assert summary_in(text) == "4 files, 200 lines, 1 classes"
