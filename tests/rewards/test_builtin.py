"""The built-in rewards, called as plain functions."""

import itertools
import json
import sys
import time
from pathlib import Path

import pytest
import reasoning_gym as gym

from hone.rewards.exact_match import exact_match
from hone.rewards.extraction import last_number, marked_number
from hone.rewards.formulas import boxes, plain, prose
from hone.rewards.gsm8k import gsm8k
from hone.rewards.math import math
from hone.rewards.reasoning_gym import reasoning_gym

math_module = sys.modules[math.__module__]


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
        ("#### 12 500 clips", "12500"),
        ("#### 1 2", "1"),
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
        ("#### ٧٢", "72"),
        ("#### ４２", "42"),
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
        ("1,111,1", None),
        ("so 12\u202f500", "12500"),
        ("The train leaves at 12:30 100 miles away", "100"),
        ("May 5 300 people", "300"),
        ("Batches: [ 1 200 300]", "300"),
        ("12:30\u202f100", "100"),
        ("1 0000", "0"),
        ("it is 5²", None),
        ("5 or 1" + ",111" * 50 + ",1", None),
        ("1,000,00", None),
        ("0,111", None),
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
    assert last_number(long) is None  # longer than any answer; a quadratic scan would run into the suite's timeout
    assert last_number("1" * 5_000) is not None
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
    for number in (3, 5):
        assert gsm8k("#### 5 apples and 3 pears", number, {}) == gsm8k("#### 5 or 3", number, {}) == 0.0
    assert gsm8k("#### 5 apples, and that is all", 5, {}) == 1.0


@pytest.mark.parametrize("truth", [
    None, "", "many", True, "no marker 72", "5 or 6", "12:30", "3/4", "x = 5", "5 apples and 3 pears", "#### 5 + 3",
    "2^10", float("nan"), "from 5 to 6",
])  # fmt: skip
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


GAPS = (" ", "\\,", "\\ ", "{,}", "~", "\u2009", "{\\,}", "\\thinspace ")
MATRIX = r"\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}"


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        # a matrix is its own entries only
        (rf"\boxed{{{MATRIX}}}", MATRIX, 1.0),
        (rf"It is ${MATRIX}$.", MATRIX, 1.0),
        (r"\boxed{-7}", MATRIX, 0.0),
        ("-7", MATRIX, 0.0),
        # the last box is the answer; boxes of one answer may also be a set
        (r"So \boxed{42}. No: \boxed{43}.", "43", 1.0),
        (r"So \boxed{42}. No: \boxed{43}.", "42", 0.0),
        (r"\boxed{42}, no wait, it is \boxed{43}", "42", 0.0),
        (r"\boxed{41} or \boxed{42}", "41", 0.0),
        (r"\boxed{1} and \boxed{2}", r"\{1,2\}", 1.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        (r"\fbox{5}", "5", 1.0),
        (r"\boxed 5", "5", 1.0),
        (r"\boxed{5", "5", 0.0),
        (r"\boxed{}", "5", 0.0),
        (r"\boxed{255} are added. The final answer is $10,455$.", "10455", 1.0),
        ("<think>\\boxed{3}</think>It is 4.", "3", 0.0),
        ("<think>\\boxed{3}</think>It is 4.", "4", 1.0),
        # money
        (r"\boxed{18.90}", r"\$18.90", 1.0),
        (r"\boxed{\$18.90}", "18.9", 1.0),
        (r"\boxed{18.91}", r"\$18.90", 0.0),
        (r"The total is $\boxed{32348}$.", r"\$32,\!348", 1.0),
        ("5 cents", r"\$5", 0.0),
        ("So it is $5.", "5 dollars", 1.0),
        ("So it is $5.", "5 cents", 0.0),
        ("The change is -$5.", r"\$5", 0.0),
        ("The change is −$5.", r"-\$5", 1.0),
        ("The change is $-5.", r"-\$5", 1.0),
        ("The change is -5 cents.", "5 cents", 0.0),
        (r"So it is \$0.05.", "5 cents", 1.0),
        (r"\boxed{5\text{ cents}}", "5 dollars", 0.0),
        ("So it costs 5¢.", r"\$5", 0.0),
        ("So it costs 500 cents.", r"\$5", 1.0),
        (r"\boxed{5\text{ cents}}", "$0.05", 1.0),
        (r"\boxed{\$5}", "5 cents", 0.0),
        ("5 cents", "5", 1.0),
        # a system is a list of equations
        ("$x=1,y=2$", r"\begin{cases}x=1\\y=2\end{cases}", 1.0),
        (r"\boxed{\begin{cases} y=2, \\ x=\frac{2}{2} \end{cases}}", "x=1,y=2", 1.0),
        (r"\boxed{\left\{\begin{array}{l}x=1\\y=2\end{array}\right.}", "x=1,y=2", 1.0),
        (r"\boxed{\begin{cases}x=1\\y=3\end{cases}}", "x=1,y=2", 0.0),
        ("It costs $5 and then $10", "10", 1.0),
        ("It costs $5 and then $10", "5", 0.0),
        # spaces between groups of three digits, and no others
        *((rf"\boxed{{1{gap}000}}", "1000", 1.0) for gap in GAPS),
        (r"\boxed{-1 234 567.5}", "-1234567.5", 1.0),
        (r"\boxed{1 000, 2 000}", "2000, 1000", 1.0),
        (r"\boxed{1 000}", "1", 0.0),
        (r"\boxed{1 2}", "12", 0.0),
        (r"\boxed{1\,2}", "12", 0.0),
        (r"\boxed{1\,0001}", "10001", 0.0),
        (r"\boxed{1234 567}", "1234567", 0.0),
        (r"\boxed{[1 200 300]}", "1200300", 0.0),
        (r"\boxed{[ 1 200 300]}", "1200300", 0.0),
        (r"\boxed{\{1\ 200\ 300\}}", "1200300", 0.0),
        (r"\boxed{100,\ 200,\ 300}", "100, 200, 300", 1.0),
        (r"\boxed{(1,\ 200)}", "(1, 200)", 1.0),
        (r"\boxed{\text{Team 2}}", "team 2", 1.0),
        (r"\boxed{\text{Class B2}}", "class B2", 1.0),
        (r"\boxed{Apollo 11!}", "Apollo 11", 1.0),
        (r"\boxed{log n!}", "log n", 0.0),
        (r"\boxed{sin x'}", "sin x", 0.0),
        (r"\boxed{a, c}", "A, C", 1.0),
        (r"\boxed{1 100/201}", "301/201", 1.0),
        (r"\boxed{3.141\,592}", "3.141592", 1.0),
        ("It costs \\$1 000.", "$1000", 1.0),
        ("The answer is 1 000.", "0", 0.0),
        # quotes, tags, mixed numbers, times
        ("The answer is `42`", "42", 1.0),
        ("<answer>42</answer> or 7", "42", 1.0),
        ("**42**", "`42`", 1.0),
        ("about 3½ cups", "3.5", 1.0),
        ("about 3½ cups", "3", 0.0),
        ("3 1/2", "3½", 1.0),
        (r"\boxed{12:30}", "12:30", 1.0),
        (r"\boxed{6:15}", "12:30", 0.0),
        (r"\boxed{2/5}", "12:30", 0.0),
        (r"\boxed{12:30}", "2/5", 0.0),
        ("at 12:30", "12", 0.0),
        ("at 12:30", "12:30", 1.0),
        # a factorial, a date, a power and a set are what they are
        (r"\boxed{5!}", "5", 0.0),
        (r"\boxed{5!}", "120", 1.0),
        (r"\boxed{n!}", "n", 0.0),
        (r"\boxed{2024-01-05}", "2018", 0.0),
        (r"\boxed{2018}", "2024-01-05", 0.0),
        (r"\boxed{2024-01-05}", "2024-01-05", 1.0),
        ("So it is 5².", "5", 0.0),
        ("So it is 5².", "25", 1.0),
        (r"\boxed{\varnothing}", r"\emptyset", 1.0),
        ("The correct option is D.", "D", 1.0),
        # words are no products of letters, letters are
        (r"\boxed{\text{North}}", "north", 1.0),
        (r"\boxed{thorn}", "north", 0.0),
        ("The answer is: south", "north", 0.0),
        ("The answer is (B).", "B", 1.0),
        (r"\boxed{B}", "A", 0.0),
        (r"\boxed{zyx}", "xyz", 1.0),
        ("The answer is Team 2.", "Team 2", 1.0),
        ("The answer is Team 3.", "Team 2", 0.0),
        (r"\boxed{mate 2}", "Team 2", 0.0),
        (r"\boxed{7\text{ and }9}", "9 and 7", 1.0),
        (r"\boxed{\text{The }x\text{-axis}}", "the x-axis", 1.0),
        # variables have a case, options and words have none
        (r"\boxed{2X}", "2x", 0.0),
        (r"\boxed{3x+2Y}", "3x+2y", 0.0),
        (r"\boxed{x+X}", "2x", 0.0),
        (r"\boxed{x^2+c}", "x^2+C", 1.0),
        (r"\boxed{x^2+C}", "x^2+c", 0.0),
        (r"\boxed{c x}", "Cx", 0.0),
        (r"\boxed{\frac{ab}{cd}}", r"\frac{AB}{CD}", 0.0),
        ("It is $2X$.", "2x", 0.0),
        ("The answer is 2x.", "2x", 1.0),
        ("The answer is 2X.", "2x", 0.0),
        (r"\boxed{A=\pi r^2}", r"\pi r^2", 1.0),
        (r"\boxed{\text{(b)}}", "B", 1.0),
        (r"\boxed{No}", "no", 1.0),
        # inequalities in one variable are sets of numbers
        (r"\boxed{x<2}", r"(-\infty,2)", 1.0),
        (r"\boxed{x\le 2}", r"(-\infty,2)", 0.0),
        (r"\boxed{[3,\infty)}", r"x \ge 3", 1.0),
        (r"\boxed{1<x\le 2}", "(1,2]", 1.0),
        (r"\boxed{1<x<2}", "(1,2]", 0.0),
        (r"\boxed{X<2}", "x<2", 0.0),
        (r"\boxed{x+y<2}", r"(-\infty,2)", 0.0),
        (r"\boxed{x<-1 \text{ or } x>2}", r"(-\infty,-1)\cup(2,\infty)", 1.0),
        (r"\boxed{x<-1 \text{ and } x>2}", r"(-\infty,-1)\cup(2,\infty)", 0.0),
        (r"\boxed{x<-1, x>2}", r"x<-1 \text{ or } x>2", 1.0),
        (r"\boxed{\{x \in \mathbb{R} : x < 2\}}", r"(-\infty,2)", 1.0),
        ("The answer is $|x| < 1$.", "(-1,1)", 1.0),
        (r"\boxed{x>2, x<5}", "(2,5)", 1.0),
        (r"\boxed{x \ge 2, x<5}", "(2,5)", 0.0),
        (r"\boxed{(2,5)}", "x>2, x<5", 1.0),
        (r"\boxed{x>2}", "x>2, x<5", 0.0),
        (r"\boxed{x>2, y<5}", "(2,5)", 0.0),
        (r"\boxed{x<-1, x>2}", r"(-\infty,-1)\cup(2,\infty)", 1.0),
        (r"\boxed{x<-1, \text{ or } x>2}", r"(-\infty,-1)\cup(2,\infty)", 1.0),
        ("So x < 2.", r"(-\infty,2)", 1.0),
        ("So x > 2.", r"(-\infty,2)", 0.0),
        ("So y < 2.", "x<2", 0.0),
        ("Hence -1 ≤ x < 2", "[-1,2)", 1.0),
        ("So x < -1 or x > 2.", r"(-\infty,-1)\cup(2,\infty)", 1.0),
        ("So x < 2.", "2", 0.0),
        ("The answer is 5, since x > 3.", "5", 1.0),
        (r"\boxed{x > 1,000}", "x > 1000", 1.0),
        (r"\boxed{x = 1,000}", "x = 1000", 1.0),
        (r"\boxed{x = 1,2}", "x = 12", 0.0),
        (r"\boxed{(x, y) = 1,000}", "1000", 0.0),
        ("So x > 1000.", "x > 1,000", 1.0),
        (r"\boxed{1 < x \le 12,345,678.5}", "(1, 12345678.5]", 1.0),
        (r"\boxed{x>1,000 \text{ or } x<-1,000}", r"(-\infty,-1000)\cup(1000,\infty)", 1.0),
        (r"\boxed{x > 1,000}", "x > 1", 0.0),
        (r"\boxed{x > 1,00}", "x > 100", 0.0),
        (r"\boxed{x \ne 1,200}", r"x \ne 1200", 0.0),
        # percents
        (r"\boxed{33\frac{1}{3}\%}", r"33\frac13\%", 1.0),
        (r"\boxed{\frac{100}{3}\%}", r"33\frac13\%", 1.0),
        (r"\boxed{\frac{1}{3}}", r"33\frac13\%", 1.0),
        (r"\boxed{33\frac{1}{3}\%}", r"\frac13\%", 0.0),
        (r"\boxed{12.5\%}", r"12\frac12\%", 1.0),
        (r"\boxed{6\%}", r"12\frac12\%", 0.0),
        ("The discount is 33 1/3 %.", r"33\frac13\%", 1.0),
        (r"\boxed{12.5\%}", "12.5", 1.0),
        (r"\boxed{12.5}", r"12.5\%", 1.0),
        (r"\boxed{0.125}", r"12.5\%", 1.0),
        (r"\boxed{\text{12.5%}}", "12.5", 1.0),
        (r"\boxed{12.5\%}", "12.5 percent", 1.0),
        (r"\boxed{0.125\%}", r"12.5\%", 0.0),
        (r"\boxed{1250}", r"12.5\%", 0.0),
        # numerals
        (r"\boxed{6.022e23}", r"6.022\times10^{23}", 1.0),
        (r"\boxed{6.022 × 10^{23}}", "6.022e23", 1.0),
        (r"\boxed{6.023\times10^{23}}", r"6.022\cdot 10^{23}", 0.0),
        (r"\boxed{1.6\times10^{-19}\text{ C}}", r"1.6\times10^{-19}", 1.0),
        (r"\boxed{1.6\times10^{-19}}", r"1.6\times10^{-18}", 0.0),
        (r"\boxed{2\times10^{3}x}", "2000x", 1.0),
        (r"\boxed{2\times10^{3^2}}", "2000", 0.0),
        (r"\boxed{\text{3:00 PM}}", r"3\!:\!00\text{ PM}", 1.0),
        (r"\boxed{\frac13}", r"0.\overline{3}", 1.0),
        (r"\boxed{1.2\overline{3}}", r"\frac{37}{30}", 1.0),
        (r"\boxed{0.\overline{09}}", r"0.\overline{9}", 0.0),
        (r"\boxed{0.333}", r"0.\overline{3}", 0.0),
        (r"\boxed{1011_{2}}", "1011_2", 1.0),
        (r"\boxed{1011_3}", "1011_2", 0.0),
        (r"\boxed{413_{(8)}}", "413_5", 0.0),
        (r"\boxed{12:30 \text{ p.m.}}", "12:30 PM", 1.0),
        (r"\boxed{12:30 \text{ a.m.}}", "12:30 PM", 0.0),
        # units
        (r"\boxed{2\sqrt{3}\text{ cm}}", r"2\sqrt3\text{ km}", 0.0),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt3\text{ km}", 1.0),
        (r"\boxed{12\pi\text{ cm}^2}", r"12\pi\text{ square centimeters}", 1.0),
        (r"\boxed{5\text{ square centimeters}}", r"5\text{ cm}^2", 1.0),
        (r"\boxed{5}", "5 apples", 1.0),
        (r"\boxed{5 km}", r"5\text{ m}", 0.0),
        (r"\boxed{10\text{ centimeters}}", "10 cm", 1.0),
        (r"\boxed{90}", r"90^\circ", 1.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{5000 m}", "5 km", 0.0),
        (r"\boxed{5\text{ hrs}}", "5 hours", 1.0),
        (r"\boxed{5\ \mathrm{m\,s^{-1}}}", "5 m/s", 1.0),
        (r"\boxed{60 \text{ miles per hour}}", "60 mph", 1.0),
        (r"\boxed{10 m/s^2}", "10 m/s", 0.0),
        (r"\boxed{100π cm²}", r"100\pi", 1.0),
        (r"\boxed{6}", "6s", 0.0),
        (r"\boxed{25°F}", "25", 1.0),
        # numbers in words
        (r"\boxed{5 million}", "5000000", 1.0),
        (r"\boxed{3 thousand}", "3 million", 0.0),
        ("It is 1.5 million.", "1500000", 1.0),
        (r"\boxed{\text{five}}", "5", 1.0),
        ("The answer is twenty-one.", "21", 1.0),
        (r"\boxed{7}", "Seven Samurai", 0.0),
        ("The answer is minus 5.", "-5", 1.0),
        (r"\boxed{12 dollars and 5 cents}", r"\$12.05", 1.0),
        (r"\boxed{\text{any real number}}", r"\mathbb R", 1.0),
        (r"\boxed{\emptyset}", r"\text{no solution}", 1.0),
        # other spellings of a formula
        (r"\boxed{[[1,2],[3,4]]}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1.0),
        (r"\boxed{[[1,3],[2,4]]}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 0.0),
        ("The matrix is [[1, 2], [3, 4]].", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1.0),
        (r"\boxed{e^{i\pi}}", "-1", 1.0),
        (r"\boxed{e^{i\pi}}", "1", 0.0),
        (r"\boxed{\sin 30^\circ}", "1/2", 1.0),
        (r"\boxed{-0.98803162}", r"\sin 30^\circ", 0.0),
        (r"\boxed{]1;2]}", "(1,2]", 1.0),
        (r"\boxed{]1;2]}", "[1,2]", 0.0),
        (r"\boxed{(0,1)}", r"\{0,1\}", 0.0),
        (r"\boxed{\langle 1,2\rangle}", "(1,2)", 1.0),
        (r"\boxed{0.1\dot{6}}", "1/6", 1.0),
        (r"\boxed{0.333...}", "1/3", 1.0),
        (r"\boxed{2^{0.5}}", r"\sqrt2", 1.0),
        (r"\boxed{x**2+1}", "x^2+1", 1.0),
        (r"\boxed{\color{red}{42}}", "42", 1.0),
        (r"\boxed{∛2}", r"\sqrt[3]{2}", 1.0),
        (r"\boxed{0,5}", "0.5", 1.0),
        (r"\boxed{5,0}", "0.5", 0.0),
        (r"\boxed{4:6}", "2:3", 1.0),
        (r"\boxed{3:2}", "2:3", 0.0),
        ("It is 3 x 10^8.", "3e8", 1.0),
        (r"\boxed{４２}", "42", 1.0),
        ("答案是４２。", "42", 1.0),
        ("So it is 42 <|im_end|>", "42", 1.0),
        ("So boxed{42}.", "42", 1.0),
        ("So boxed{42", "42", 0.0),
        (r"\boxed{\text{The answer is 42}}", "42", 1.0),
        # options
        ("Answer: B) 42", "42", 1.0),
        ("Answer: B) 42", "B", 1.0),
        ("Answer: B) 42", "A", 0.0),
        (r"\boxed{B}", r"\textbf{(B)}\ 42", 1.0),
        (r"\boxed{\textbf{(C)}\ 42}", r"\textbf{(B)}\ 42", 0.0),
        (r"\boxed{A) 1 or B) 2}", "A", 0.0),
        ("So I choose option C.", "C", 1.0),
        (r"\boxed{A, B and D}", "ABD", 1.0),
        # times of a day
        (r"\boxed{9:00\text{ AM}}", "9:00", 1.0),
        (r"\boxed{9:00}", "9:00 PM", 1.0),
        (r"\boxed{9:00\text{ PM}}", "9:00 AM", 0.0),
        (r"\boxed{21:00}", "9 p.m.", 1.0),
        ("It starts at 9 AM.", "9:00 AM", 1.0),
        # numbers of JSON, exactly
        (r"\boxed{0.00001}", 1e-05, 1.0),
        ("it is 1e-5", 1e-05, 1.0),
        (r"\boxed{0}", 1e-07, 0.0),
        (r"\boxed{2e-7}", 1e-07, 0.0),
        (r"\boxed{1.5 \times 10^{16}}", 1.5e16, 1.0),
        (r"\boxed{1.5}", 1.5e16, 0.0),
        (r"\boxed{7}", 7.0, 1.0),
        (r"\boxed{9007199254740992}", 9007199254740993, 0.0),
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0.0),
        (r"\boxed{0.333333}", "1/3", 1.0),
        (r"\boxed{\frac{1}{0}}", "5", 0.0),
    ],
)
def test_math_pays_right_answers_and_no_others(response, truth, value):
    assert math(response, truth, {}) == value


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 20_000,
        "$" * 60_001,
        "1 000" * 20_000 + "/7",
        "1\\," * 20_000,
        "(" * 20_000 + "½" * 20_000,
        "12:30 " * 20_000,
    ],
)
def test_boxes_and_plain_texts_take_time_linear_in_the_text(text):
    assert boxes(text) == ()
    plain(text)
    prose(text)


def test_rewards_agree_on_numbers_of_json():
    numbers = {1e-05: "0.00001", 1.5e16: "15000000000000000", 7.0: "7", -0.25: "-0.25", 12345678901234567: None}
    texts = {truth: text or str(truth) for truth, text in numbers.items()}
    for truth in texts:
        for other, text in texts.items():
            value = float(truth == other)
            assert gsm8k(f"#### {text}", truth, {}) == value
            assert math(f"\\boxed{{{text}}}", truth, {}) == value
            assert exact_match(text, truth, {}) == value


@pytest.mark.parametrize(
    ("response", "wrong", "right"),
    [
        ("3½", 3, 3.5),
        ("3/4", 4, 0.75),
        ("at 12:30", 30, None),
        ("2^10", 10, None),
        ("it is 1e5", 5, 100000),
        ("1.5 × 10^16", 16, 1.5e16),
        ("on 3/4/2024", 2024, None),
    ],
)
def test_gsm8k_reads_whole_numbers_only(response, wrong, right):
    assert gsm8k(response, wrong, {}) == 0.0
    assert right is None or gsm8k(response, right, {}) == 1.0


# The signal may come within a callback of the garbage collector, where Python drops the error; the next one ends it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "answer",
    [
        *("9^{9^{9^9}}", "100000000!", "\\prod_{i=1}^{10^9} i", "\\sum_{i=1}^{9} 9^{9^{i}}", "2^{-10^{12}}"),
        *("\\sqrt[3]{10^{10^{10}}}", "\\sum_{i=1}^{10^{12}} i", "9" * 20_000, "(" * 300 + "x" + ")" * 300),
    ],
    ids=lambda answer: answer[:20],
)
def test_an_answer_that_would_take_long_to_compute_is_wrong_and_not_late(answer, monkeypatch):
    monkeypatch.setattr(math_module, "COMPUTE_S", 0.5)
    began = time.process_time()
    assert math(f"\\boxed{{{answer}}}", "5", {}) == 0.0
    assert time.process_time() - began < 8.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("2^{100000}", "2^{100000}"), ("100!", "100!"), ("2^{2^n}", "4^{2^{n-1}}"), ("\\sum_{k=0}^{n} 2^k", "2^{n+1}-1")],
)
def test_large_numbers_and_powers_of_symbols_are_compared(answer, truth):
    assert math(f"\\boxed{{{answer}}}", truth, {}) == 1.0


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
    assert exact_match("7", 7.0, {}) == exact_match("7.0", 7.0, {}) == exact_match("0.00001", 1e-05, {}) == 1.0
    assert exact_match("7.0", 7, {}) == exact_match("1e16", 1.5e16, {}) == 0.0
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
