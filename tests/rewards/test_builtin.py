"""The built-in rewards, called as plain functions."""

import itertools
import json
from pathlib import Path

import pytest
import reasoning_gym as gym

from hone.rewards.exact_match import exact_match
from hone.rewards.extraction import last_number, marked_number
from hone.rewards.gsm8k import gsm8k
from hone.rewards.math import math
from hone.rewards.reasoning_gym import reasoning_gym


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("####72", "72"),
        ("work\n####  72 clips", "72"),
        ("#### 1,234", "1234"),
        ("#### 12,345,678.50", "12345678.5"),
        ("#### $15", "15"),
        ("#### \\$15.25", "15.25"),
        ("#### -3", "-3"),
        ("#### −3", "-3"),
        ("#### +3", "3"),
        ("#### -$3", "-3"),
        ("#### $-3", "-3"),
        ("#### .5", "0.5"),
        ("#### 72.", "72"),
        ("#### 72, which is right", "72"),
        ("#### 007", "7"),
        ("#### 50%", "50"),
        ("#### 1{,}000", "1000"),
        ("#### 5\n#### 6", "6"),
        ("#### 5\n#### none", "5"),
        ("#### 5 and 6", "5"),
        ("#### seventy-two", None),
        ("####\n72", None),
        ("### 72", None),
        ("the answer is 72", None),
        ("#### 3/4", None),
        ("#### 5 + 3 = 8", None),
        ("#### 3:30", None),
        ("#### 1,00", None),
        ("#### 1.2.3", None),
        ("#### ٧٢", None),
        ("", None),
    ],
)
def test_marked_number(text, number):
    found = marked_number(text)
    assert found == (None if number is None else pytest.approx(float(number))), text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 72.", "72"),
        ("It is 72", "72"),
        ("first 5, then 6, so 11 apples", "11"),
        ("\\boxed{72}", "72"),
        ("**72**", "72"),
        ("total: $1,234.50!", "1234.5"),
        ("= -5", "-5"),
        ("x=-5", "-5"),
        ("10-3", "3"),
        ("(4)-3", "3"),
        ("a range of 2-9", "9"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("...5", "5"),
        ("it is .25", "0.25"),
        ("v1.2.3", None),
        ("no number", None),
        ("only - and $ and , and .", None),
    ],
)
def test_last_number(text, number):
    found = last_number(text)
    assert found == (None if number is None else pytest.approx(float(number))), text


def test_extraction_takes_time_linear_in_the_text():
    long = "1" * 200_000 + ",," + "-$." * 100_000 + "#" * 100_000
    assert last_number(long) is not None  # a quadratic scan of this would run into the suite's timeout
    assert marked_number(long) is None


def test_gsm8k_compares_decimals_exactly():
    assert gsm8k("#### 1,000", "#### 1000", {}) == 1.0
    assert gsm8k("#### 1000.00", 1000, {}) == 1.0
    assert gsm8k("#### 0.1", "0.10", {}) == 1.0
    assert gsm8k("#### 72.0000001", 72, {}) == 0.0
    assert gsm8k("#### 9007199254740993", "9007199254740992", {}) == 0.0  # equal as floats
    assert gsm8k(f"#### -{10**30}1", f"-{10**30}2", {}) == 0.0  # more digits than a decimal context keeps
    assert gsm8k("the answer is 72", "48+24=<<48+24=72>>72\n#### 72", {}, extraction="strict") == 0.0
    assert gsm8k("the answer is 72", "48+24=<<48+24=72>>72\n#### 72", {}, extraction="flexible") == 1.0
    assert gsm8k("#### 72\nNext question: 5", 72, {}) == 1.0
    assert gsm8k("", 0, {}) == 0.0


@pytest.mark.parametrize("truth", [None, "", "many", True, "no marker 72"])
def test_gsm8k_refuses_a_ground_truth_that_is_no_number(truth):
    with pytest.raises(ValueError, match="ground truth"):
        gsm8k("#### 72", truth, {})


def test_gsm8k_gives_every_solution_of_the_data_set_full_marks():
    path = Path(__file__).parents[3] / "shared/data/gsm8k/train.jsonl"
    if not path.is_file():
        pytest.skip("the GSM8K file is not on this machine")
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(answers) > 7000
    assert all(gsm8k(answer, answer, {}, extraction="strict") == 1.0 for answer in answers)
    assert sum(gsm8k(a, b, {}) for a, b in itertools.pairwise(answers)) < 0.05 * len(answers)


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        ("1/2", "\\frac{1}{2}", 1.0),
        ("The answer is $\\frac{1}{2}$.", "0.5", 1.0),
        ("\\boxed{0.5}", "1/2", 1.0),
        ("\\boxed{0.5}", 0.5, 1.0),
        ("first 3, then \\boxed{\\frac{2}{4}}", "$\\frac{1}{2}$", 1.0),
        ("$2\\sqrt{2}$", "\\sqrt{8}", 1.0),
        ("$\\{1,2\\}$", "\\boxed{\\{2,1\\}}", 1.0),
        ("$x^2+2x+1$", "(x+1)^2", 1.0),
        ("\\boxed{0.51}", "1/2", 0.0),
        ("I do not know", "1/2", 0.0),
        ("", 7, 0.0),
        ("1,000", "1000", 1.0),
        pytest.param(f"\\boxed{{{'1' * 5000}}}", 7, 0.0, id="more digits than Python reads by default"),
        pytest.param("7" * 5000, 7, 0.0, id="the same, without a box"),
    ],
)
def test_math(response, truth, value):
    assert math(response, truth, {}) == value


def test_math_refuses_a_ground_truth_without_mathematics():
    with pytest.raises(ValueError, match="should contain a mathematical expression"):
        math("5", "", {})


def test_exact_match():
    assert exact_match(" 1 2 3\n", "1 2 3", {}) == 1.0
    assert exact_match("1  2 3", "1 2 3", {}) == 0.0
    assert exact_match("1  2\t3", "1 2 3", {}, collapse_spaces=True) == 1.0
    assert exact_match("Paris.", "paris", {}) == 0.0
    assert exact_match("Paris.", "paris", {}, ignore_case=True) == 0.0
    assert exact_match("Paris.", "paris", {}, ignore_case=True, ignore_punctuation=True) == 1.0
    assert exact_match("b", ["a", "b"], {}) == 1.0
    assert exact_match("7", 7, {}) == 1.0
    assert exact_match("", "", {}) == 1.0
    assert exact_match("<answer> x </answer><answer>y</answer>", "y", {}, tag="answer") == 1.0
    assert exact_match("y", "y", {}, tag="answer") == 0.0
    assert exact_match("</answer>y<answer>", "y", {}, tag="answer") == 0.0


@pytest.mark.parametrize("truth", [None, [], [None], {"a": 1}])
def test_exact_match_refuses_a_missing_ground_truth(truth):
    with pytest.raises(ValueError, match="ground truth"):
        exact_match("x", truth, {})


@pytest.mark.parametrize("task", ["number_sorting", "countdown", "chain_sum", "gcd", "basic_arithmetic"])
def test_reasoning_gym_scores_by_the_tasks_own_verifier(task):
    for entry in gym.create_dataset(task, size=3, seed=5):
        entry = json.loads(json.dumps(entry))  # what crosses to the worker process
        stored = {**entry, "task": task, "entry": entry}
        for row in (stored, entry):
            assert reasoning_gym(entry["answer"], row) == 1.0
            assert reasoning_gym("nonsense", row) < 0.1
            assert reasoning_gym(f"<a>{entry['answer']}</a>", row, tag="a") == 1.0
            assert reasoning_gym(entry["answer"], row, tag="a") < 0.1


@pytest.mark.parametrize(
    ("task", "answer"), [("prime_factorization", "two x three"), ("game_of_life", "{}"), ("boxnet", "[[1]]")]
)
def test_an_answer_that_a_verifier_cannot_read_scores_0(task, answer):
    entry = json.loads(json.dumps(gym.create_dataset(task, size=1, seed=5)[0]))
    assert reasoning_gym(answer, entry) == 0.0


def test_a_row_whose_own_answer_a_verifier_cannot_read_is_an_error():
    row = {"question": "?", "answer": "no number", "metadata": {"source_dataset": "prime_factorization"}}
    with pytest.raises(ValueError, match="no number"):
        reasoning_gym("words", row)


def test_reasoning_gym_names_what_is_missing():
    with pytest.raises(ValueError, match=r"is not a Reasoning Gym problem.*found question"):
        reasoning_gym("1", {"question": "1+0?"})
    with pytest.raises(ValueError, match="did you mean 'countdown'"):
        reasoning_gym("1", {"task": "countdwn", "entry": {"answer": "1"}})
