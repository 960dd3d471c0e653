"""Mathematical equivalence, checked with the math-verify package (https://github.com/huggingface/Math-Verify).

    response --answer_part, boxes--> the last box, or else a text of words and formulas
    both sides --plain--> number, time, words: compared here, exactly
                          anything else: parsed and compared by math-verify

math-verify reads a word as a product of letters, 12:30 as 2/5, numbers below 1e-6 as 0, X as x, and leaves units out.
So what is no formula never gets there, and its verdict is checked.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import inf, isclose
from types import FrameType
from typing import Any

from math_verify import parse, verify
from sympy import Basic, Expr, Float, I, Mul, Pow, Product, Rational, Set, Symbol, factorial
from sympy.concrete.expr_with_limits import ExprWithLimits

from hone.rewards.answers.choices import choice, chosen, letters_of_options
from hone.rewards.answers.inequalities import inequality_at_the_end, solutions
from hone.rewards.answers.notation import named_set
from hone.rewards.answers.numerals import dollars_and_cents, in_digits, scaled
from hone.rewards.answers.times import time_of_day, times
from hone.rewards.answers.units import Quantity, number, quantity, unit_at_the_end
from hone.rewards.answers.words import clocks, dates, has_numbers_and_names, is_words, letters, unwrapped_words, words
from hone.rewards.extraction import in_ascii, joined, spelled
from hone.rewards.formulas import (
    after_final,
    answer_part,
    base_of,
    boxes,
    cents_at_the_end,
    clock_or_ratio,
    dollars_at_the_end,
    is_money,
    percentage,
    placed_boxes,
    plain,
    prose,
)

# math-verify's own timeouts would score a comparison as wrong that is late because the machine is busy, so they are off
# (and the warning about that is silenced). COMPUTE_S and the deadline of the reward process replace them.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)

DELIMITERS = ("$", "\\(", "\\[")
NEAR = Fraction(1, 10**6)  # numbers that are written as decimals may differ by this
COMPUTE_S = 5.0  # of processor time for one answer; usual ones take less than 0.2 s
MOST_DIGITS = 100_000  # of a number: powers are computed in one go, which nothing interrupts
LOG_2 = 0.30103
SAME_SIZE = 1e-3  # relative difference above which numbers differ, whatever math-verify says of small ones


@dataclass(frozen=True, slots=True)
class Truth:
    """A ground truth: as plain text, and parsed."""

    text: str
    parsed: tuple[Any, ...]  # (): compared as text only
    money: bool = False  # in dollars or another currency, of which cents are hundredths


def math(response: str, ground_truth: Any, row: Mapping[str, Any]) -> float:
    """1.0 if the response's final answer equals the ground truth mathematically, else 0.0.

    The answer is the last `\\boxed{...}` (boxes joined by commas only may also be a set), else the last formula or
    number; in tags `<answer>` if the response has them, and after its thoughts. The ground truth is a number, or text:
    LaTeX with or without `$` or `\\boxed`, a plain expression, or words, which are compared as words.
    """
    truth = _expected(dollars_and_cents(in_ascii(spelled(ground_truth))))
    try:
        with _limited():
            return float(_is_right(truth, joined(in_ascii(answer_part(response)))))
    except _TooMuch:
        return 0.0


def _is_right(truth: Truth, answer: str) -> bool:
    boxed = placed_boxes(answer)
    if boxed and (final := after_final(answer[boxed[-1][1] :])) is not None:
        return _answers(truth, final)
    if boxed:
        contents = [content for content, _ in boxed]
        candidates = [contents[-1], *([", ".join(contents)] if len(contents) > 1 else [])]
        return any(_equal(truth, plain(one), is_money(one)) for one in candidates)
    if "boxed{" in answer:
        return False  # the answer breaks off within its box
    return _answers(truth, answer)


class _TooMuch(BaseException):
    """An answer takes too long to compare; not an Exception, because math-verify catches those."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raise _TooMuch when the block has taken COMPUTE_S of processor time, which other processes do not use up.

    In another thread than the main one the block is not limited: its caller has a deadline.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooMuch

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, COMPUTE_S, 0.5)  # again: parsers that recover from errors swallow one
    try:
        yield
    finally:
        try:
            signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
        finally:  # also if the last signal came on the way here
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


@functools.lru_cache(maxsize=1024)
def _expected(text: str) -> Truth:
    """The ground truth as one formula, or, of a sentence, the formulas in it. Raises ValueError for no mathematics."""
    truth = _truth(text)
    if not truth.text or not (truth.parsed or _is_text(truth.text)):
        raise ValueError(f"the ground truth should contain a mathematical expression, found {text[:80]!r}")
    return truth


def _truth(text: str) -> Truth:
    boxed = boxes(text)
    whole = plain(", ".join(boxed) if boxed else text)
    if boxed or not any(mark in whole for mark in DELIMITERS):
        return Truth(whole, () if _is_text(whole) else _formula(whole), is_money(text))
    return Truth(text.strip(), _parse(prose(text)))


def _is_text(text: str) -> bool:
    """Return whether a plain text is compared here, and not by math-verify."""
    named = has_numbers_and_names(text) and quantity(text) is None
    return clock_or_ratio(text) is not None or is_words(text) or named


def _equal(truth: Truth, answer: str, money: bool = False) -> bool:
    """Return whether a plain answer, the content of a box, equals the truth; `money`: it was one of dollars."""
    if not answer:
        return False
    if words(truth.text) == words(answer):
        return True
    if (by_name := _named(truth, answer)) is not None:
        return by_name
    expected, found = _quantities(truth.text, answer)
    if expected is not None and found is not None:
        if truth.money != money and (found if truth.money else expected).unit == "cent":
            cents, dollars = (found, expected) if truth.money else (expected, found)
            return _near(dollars.value, cents.value / 100)
        is_product = expected.may_be_product and not found.unit
        return not is_product and any(_near(*pair) for pair in expected.values(found))
    if expected is not None and expected.value.denominator > 1 and answer.count(",") == 1:
        comma = number(answer.replace(",", "."))  # 0,5 is 0.5 to those who write a comma
        if comma is not None and comma == expected.value:
            return True
    for exact, share in ((expected, percentage(answer)), (found, percentage(truth.text))):
        if exact is not None and share is not None and exact.unit in ("", "percent"):  # 12.5% is 12.5, and 0.125
            return _near(exact.value, share) or (not exact.unit and _near(exact.value, share / 100))
    if len({base_of(truth.text), base_of(answer)} - {""}) > 1:
        return False  # which math-verify does not read
    if _is_text(truth.text):
        return _same_ratio(truth.text, answer)
    if is_words(answer) and (dates(answer) or (clocks(answer) and ":" not in truth.text)):
        return False  # 12:30 is not 2/5, and a date no difference
    units = {unit_at_the_end(truth.text), unit_at_the_end(answer)} - {""}
    if len(units) > 1:
        return False
    if truth.text.startswith(r"\{") and answer[:1] in ("(", "["):
        return False  # an interval or a tuple, which math-verify takes for the set of its two numbers
    return _verified(truth, _formula(answer)) or _same_solutions(truth, answer)


def _named(truth: Truth, answer: str) -> bool | None:
    """Return whether answers are equal that have a name: a time, the letter of an option, all real numbers.

    None if they are none of these.
    """
    ours, theirs = (time_of_day(unwrapped_words(text)) for text in (truth.text, answer))
    if ours is not None and theirs is not None:
        return ours.equals(theirs)
    option, given = choice(truth.text), choice(answer)
    if option is not None and given is not None:
        return option.letter == given.letter and _equal(_truth(option.says), plain(given.says))
    if given is not None:
        return words(truth.text) == given.letter.lower() or _equal(truth, plain(given.says))
    if option is not None:
        return words(answer) == option.letter.lower() or _equal(_truth(option.says), answer)
    if letters_of_options(truth.text) and letters_of_options(answer):
        return letters_of_options(truth.text) == letters_of_options(answer)
    sets = [named_set(words(text)) for text in (truth.text, answer)]
    if not any(sets):
        return None
    return _verified(_truth(sets[0]) if sets[0] else truth, _formula(sets[1] or answer))


def _quantities(truth: str, answer: str) -> tuple[Quantity | None, Quantity | None]:
    """Both texts as numbers with a unit; numbers in words count if the other text is in digits."""
    expected, found = quantity(truth), quantity(answer)
    if expected is not None and found is None:
        found = quantity(in_digits(unwrapped_words(answer)))
    elif found is not None and expected is None:
        expected = quantity(in_digits(unwrapped_words(truth)))
        if expected is not None and expected.unit != found.unit:
            return None, found  # Seven Samurai is not 7
    return expected, found


def _same_ratio(truth: str, answer: str) -> bool:
    """Return whether an answer is a ratio: 2:3 is 4:6 and 2/3, but 12:30 may be a time."""
    ours, theirs = clock_or_ratio(truth), clock_or_ratio(answer)
    if ours is None or len(ours) != 2 or not ours[1] or clocks(truth) or clocks(answer):
        return ours is not None and ours == theirs
    if theirs is not None:
        return len(theirs) == 2 and ours[0] * theirs[1] == ours[1] * theirs[0]
    return not is_words(answer) and _verified(_truth(f"{ours[0]}/{ours[1]}"), _formula(answer))


def _answers(truth: Truth, response: str) -> bool:
    """Return whether a response without a box gives the truth."""
    whole = plain(response)
    if len(whole) <= 4 * len(truth.text) + 40 and _equal(truth, whole, is_money(response)):
        return True
    expected = quantity(truth.text)
    if expected is not None and (truth.money or expected.unit == "cent"):
        value = expected.value if truth.money else expected.value / 100
        if truth.money and (cents := cents_at_the_end(response)) is not None:
            return _near(value, cents / 100)
        if (dollars := dollars_at_the_end(response)) is not None:
            return _near(value, dollars)
    time = time_of_day(unwrapped_words(truth.text))
    if time is not None:
        found = times(response)
        return bool(found) and time.equals(found[-1])
    if (_is_text(truth.text) or len(words(truth.text)) == 1) and any(
        _is_said(truth, plain(one)) for one in _said(response)
    ):
        return True
    if _is_text(truth.text):
        return False
    said = inequality_at_the_end(_last_line(response))
    if said is not None and not _after_answer(response):
        return _equal(truth, plain(said))
    written = prose(response)
    if any(_verified(truth, _parse(text)) for text in dict.fromkeys((written, scaled(written)))):
        return True
    said_so = [plain(one) for one in _after_answer(response)]
    return any(_equal(truth, one) for one in said_so if expected is None or choice(one) or _has_no_digit(one))


def _is_said(truth: Truth, text: str) -> bool:
    """Return whether a plain text is a truth in words, or the option of its letter."""
    option = choice(text)
    letter = option.letter if option else chosen(text)
    return words(text) == words(truth.text) or letter.lower() == words(truth.text)


def _has_no_digit(text: str) -> bool:
    return not any(map(str.isdigit, text))


_BEFORE = ("answer is", "answer:", "Answer:", "option is", "choice is")


def _said(response: str) -> list[str]:
    """Return the answer in words of a response without a box: its last line, or the text after "answer is" or "="."""
    last = _last_line(response)
    return [last, *([last.rpartition("=")[2]] if "=" in last else []), *_after_answer(response)]


def _after_answer(response: str) -> list[str]:
    """The text after "answer is" in the last line, and what is bold there."""
    last = _last_line(response)
    bold = last.split("**")
    return [last.rpartition(mark)[2] for mark in _BEFORE if mark in last] + (bold[-2:-1] if len(bold) > 2 else [])


def _last_line(response: str) -> str:
    return next((line for line in reversed(response.splitlines()) if line.strip()), "")


def _near(expected: Fraction, found: Fraction) -> bool:
    """Return whether two decimals are the same number: exactly, unless one of them has digits after the point."""
    if expected.denominator == found.denominator == 1:
        return expected == found
    return abs(expected - found) <= NEAR * min(Fraction(1), abs(expected))


def _verified(truth: Truth, found: tuple[Any, ...]) -> bool:
    """Return whether math-verify finds them equal. A comparison that fails shows no equality."""
    if any(isinstance(one, Basic) and _digits(one) > MOST_DIGITS for one in found):
        return False
    expected = truth.parsed
    if not verify(list(expected), list(found), timeout_seconds=None, allow_set_relation_comp=True):
        expected, found, before = _exact(expected), _exact(found), (expected, found)
        if (expected, found) == before or not verify(list(expected), list(found), timeout_seconds=None):
            return False
    ours, theirs = _cases(truth.parsed, found), _cases(found, truth.parsed)
    if ours != theirs and not (ours ^ theirs == {"c", "C"} and "C" in ours and _is_integral(truth.parsed)):
        return False
    pairs = [(one, other) for one in expected for other in found if not {type(one), type(other)} & {str}]
    return any(_same_size(one, other) for one, other in pairs) or not pairs


def _exact(parsed: tuple[Any, ...]) -> tuple[Any, ...]:
    """Formulas with fractions for decimals, and the imaginary unit for `i`, which math-verify reads as a variable."""
    return tuple(
        one.xreplace({decimal: Rational(str(decimal)) for decimal in one.atoms(Float)}).subs(
            {symbol: I for symbol in one.free_symbols if str(symbol) == "i"}
        )
        if isinstance(one, Basic)
        else one
        for one in parsed
    )


def _cases(parsed: tuple[Any, ...], other: tuple[Any, ...]) -> set[str]:
    """The variables of a formula, in the case in which it was written, that both formulas have in some case."""
    shared = set.intersection(*({name for one in side for name in _variables(one)} for side in (parsed, other)))
    text = " ".join(one for one in parsed if isinstance(one, str))
    return {letter for letter in letters(text) if letter.lower() in shared}


def _is_integral(parsed: tuple[Any, ...]) -> bool:
    """Return whether `C` is only added to a formula: a constant of integration, for which people write `c`, too."""
    formulas = [one for one in parsed if isinstance(one, Expr)]
    return any(str(c) == "c" and c not in (one - c).free_symbols for one in formulas for c in one.free_symbols)


def _variables(parsed: Any) -> set[str]:
    """The variables of one letter, with an index or without; math-verify has them in lower case."""
    return {str(one)[0] for one in getattr(parsed, "free_symbols", ()) if str(one)[1:2] in ("", "_")}


def _same_solutions(truth: Truth, answer: str) -> bool:
    """Return whether inequalities in one variable have the solutions of others, or are a set of numbers."""
    expected = solutions(truth.text, _formula)
    if expected is None and not any(isinstance(one, Set) for one in truth.parsed):
        return False
    found = solutions(answer, _formula)
    if expected is None and found is None:
        return False
    if expected is not None and found is not None and expected.variable != found.variable:
        return False
    ours = list(truth.parsed) if expected is None else [expected.numbers]
    theirs = list(_formula(answer)) if found is None else [found.numbers]
    return bool(verify(ours, theirs, timeout_seconds=None))


def _same_size(expected: Any, found: Any) -> bool:
    """Return whether two parsed expressions may be equal: False for numbers that differ by more than `SAME_SIZE`.

    math-verify compares six digits after the point, so numbers below 1e-6 are all 0 to it.
    """
    try:
        one, other = (complex(side.doit().evalf(30)) for side in (expected, found))
    except Exception:  # noqa: BLE001  sets, matrices, equations, text: sympy raises anything
        return True
    if isclose(abs(one), 100 * abs(other)) or isclose(100 * abs(one), abs(other)):
        return True  # 9% for 9
    return abs(one - other) <= SAME_SIZE * max(abs(one), abs(other))


def _digits(value: Basic, of_symbol: float = 0.0) -> float:
    """At most about how many digits the numbers have that arise when an expression is computed; infinity: too many.

    `of_symbol`: how many a symbol has, which a sum or a product counts up.
    """
    if isinstance(value, Rational):
        return LOG_2 * max(int(value.p).bit_length(), int(value.q).bit_length())
    if isinstance(value, ExprWithLimits):
        counted = max(_digits(one) for limit in value.limits for one in limit)
        inside = [_digits(value.function, max(of_symbol, counted)), counted]
    else:
        inside = [_digits(one, of_symbol) for one in value.args] or [of_symbol if isinstance(value, Symbol) else 0.0]
    if isinstance(value, Pow | Product | factorial):
        return max(*inside, inside[0] * 10 ** inside[-1] if inside[-1] < 100 else inf)
    return sum(inside) if isinstance(value, Mul) else max(inside)


def _formula(text: str) -> tuple[Any, ...]:
    """A plain text that is one formula, as math-verify parses it; (): it cannot."""
    before, _, last = text.rpartition("=")  # x = 1,000 is x = 1000
    if not before.endswith("!") and "," not in before and number(last.strip()) is not None:
        text = text.replace(",", "")
    return _parse(f"\\boxed{{{text}}}")


def _parse(text: str) -> tuple[Any, ...]:
    return tuple(parse(text, parsing_timeout=None))
