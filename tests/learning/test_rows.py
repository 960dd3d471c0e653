"""RL teaches a model from random weights, judged by exact match: a row of the learning table in each run.

Which one changes from day to day, so that every row that reached 99 % in the table has its turn, and is printed.
`HONE_LEARNING_ROWS=grpo-ppo,gpg-gpg` chooses others, `HONE_LEARNING_ROWS=all` takes all.

With log-probs or answers off by one position the mean reward still rises, but exact match does not.
"""

import datetime
import os
import re
from pathlib import Path

import pytest

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.registry import resolve
from tests.learning.conftest import SCRIPT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROWS = resolve(f"{SCRIPT}:ROWS")
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("<!-- learning table: begin -->")[2].partition("<!-- learning table: end -->")[0]
REACHED = re.findall(r"^\| `(\w+)` \| `(\w+)` \|.*\| \d+ \| \d+ \| [\d.]+ \|$", TABLE, re.MULTILINE)
LEARNING = [row for row in ROWS if (row.advantage, row.loss) in REACHED]  # of which the page says how long it took
TURNS = "with one turn, as here, it equals another: tests/algorithms/test_turns.py"
ELSEWHERE = {
    "prime": "trains a process reward model beside the policy: recipes/prime",
    **dict.fromkeys(("mt_grpo", "gigpo", "turn_gae"), TURNS),
}


def chosen(rows, wanted, day):
    """The rows that are named, all of them, or that of the day."""
    if wanted == "all":
        return rows
    if wanted:
        return [resolve(f"{SCRIPT}:row_named")(name.strip()) for name in wanted.split(",")]
    return [rows[day.toordinal() % len(rows)]]


TODAY = chosen(LEARNING, os.environ.get("HONE_LEARNING_ROWS", ""), datetime.datetime.now(datetime.UTC).date())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", TODAY, ids=lambda row: row.name)
def test_the_row_learns_to_reverse_three_characters(row, learns):
    learns(row, row.name)


def test_every_estimator_and_every_loss_has_a_row():
    assert {row.advantage for row in ROWS} == set(ADVANTAGES) - set(ELSEWHERE)
    assert {row.loss for row in ROWS} == set(POLICY_LOSSES)
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_every_row_has_its_day():
    days = [datetime.date(2026, 1, 1) + datetime.timedelta(days=number) for number in range(len(ROWS))]
    assert {row.name for day in days for row in chosen(LEARNING, "", day)} == {row.name for row in LEARNING}
    assert LEARNING
    assert chosen(ROWS, "", days[0]) == chosen(ROWS, "", days[0])
    assert (
        chosen(ROWS, "gpg-gpg, grpo-dro", days[0]) == [row for row in ROWS if row.name in ("gpg-gpg", "grpo-dro")][:2]
    )


def test_the_page_has_every_row():
    assert sorted(REACHED) == sorted((row.advantage, row.loss) for row in ROWS)
