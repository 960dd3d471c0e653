"""Text that reward functions print is in the record of the answer that they scored."""

import pytest

from hone.rewards.hosting.printed import HEAD, TAIL, Printed

PRINTING = """
import asyncio, copy, logging, os, sys, threading

logging.basicConfig(stream=sys.stderr, format="%(message)s")

def plain(response, ground_truth, row):
    print("scoring", response, file=copy.copy(sys.stdout))
    logging.warning("odd: %s", response)
    other = threading.Thread(target=lambda: print("of a thread"))
    other.start()
    other.join()
    if response == "bad":
        raise ValueError("no")
    return 1.0

def silent(response, ground_truth, row):
    return 0.5

def together(responses, ground_truth, row):
    print(len(responses), "answers")
    return [0.0 for _ in responses]

def flood(response, ground_truth, row):
    for _ in range(300):
        sys.stdout.writelines(["x" * 500, "y" * 500])
    return 0.0

here = None

async def waiting(response, ground_truth, row):
    global here
    here = here or asyncio.Barrier(2)
    await here.wait()
    print("before", response)
    await here.wait()
    print("after", response)
    return 0.0
"""


@pytest.fixture
def printing(tmp_path):
    path = tmp_path / "printing.py"
    path.write_text(PRINTING)
    return lambda *names: {name: {"reward": f"{path}:{name}", "weight": 1.0} for name in names}


def test_an_answer_has_what_each_function_printed_for_it(score, group, printing):
    (scored,), _ = score(printing("plain", "silent", "together"), [group(["one", "bad"])])
    one, bad = scored.trajectories
    assert dict(one.printed) == {"plain": "scoring one\nodd: one\n", "together": "2 answers\n"}
    assert dict(bad.printed) == {"plain": "scoring bad\nodd: bad\n", "together": "2 answers\n"}
    assert "ValueError: no" in bad.error


def test_coroutines_that_wait_at_the_same_time_do_not_mix(score, group, printing):
    (scored,), _ = score(printing("waiting"), [group(["one", "two"])])
    assert [dict(answer.printed) for answer in scored.trajectories] == [
        {"waiting": "before one\nafter one\n"},
        {"waiting": "before two\nafter two\n"},
    ]


def test_the_beginning_and_the_end_of_a_flood_are_kept(score, group, printing):
    (scored,), _ = score(printing("flood"), [group(["one"])])
    text = scored.trajectories[0].printed["flood"]
    assert text.startswith("x" * 500 + "y" * 500 + "\n... (298,000 characters are left out) ...\n")
    assert text.endswith("\n" + "x" * 500 + "y" * 500)
    printed = Printed()
    printed.add("a" * (HEAD + TAIL))
    assert str(printed) == "a" * (HEAD + TAIL)
