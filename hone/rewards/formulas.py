"""Read the answer of a mathematical task in a text: its box, its form, and number, unit or words apart from formulas.

    response --answer_part--> the part after the thoughts, or in <answer> tags --boxes--> content of the last box
    content or ground truth --plain--> text without dollars, quotes, units of money, and with fractions in LaTeX

Everything here takes time linear in the text, which a policy wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from hone.data.answers import between_tags
from hone.rewards.answers.notation import in_latex, matrices, radians, repeating
from hone.rewards.answers.numerals import dollars_and_cents, signed
from hone.rewards.answers.units import number, with_unit_in_text
from hone.rewards.answers.words import CLOCK, unwrapped_words
from hone.rewards.extraction import VULGAR, joined

_MARKS = re.compile(
    r"(?P<box>(?:\\{1,4}(?:boxed|fbox|framebox)|(?<![A-Za-z\\])boxed)\s{0,9}\{)|\\{1,4}boxed\s{1,9}(?P<bare>[^\s$,;{}\\]{1,200})|\\.|[{}]",
    re.DOTALL,
)
_FINAL = re.compile(r"final answer(?: is|:)", re.IGNORECASE)
_LONGEST_JOIN = 80  # characters between two boxes of one answer
_MOST_JOINED = 50
_MOST_NUMBERS = 200  # in powers of ten, that are spelled out: each can grow to 1,000 digits
_SCIENTIFIC = re.compile(r"(?<![\w.\\])\d{1,400}(?:\.\d{1,400})?[eE][-+]?\d{1,3}(?!\w)")
_TIMES_TEN = re.compile(  # 1.5\times10^{16}, 1.5 x 10^16, 1.5×10¹⁶
    r"(?<![\w.,\\^_])(\d{1,40}(?:\.\d{1,40})?)\s?(?:\\(?:times|cdot)|[x×*·])\s{0,3}10\s?"
    r"(?:\^\s?(?:\{\s?([-−]?\d{1,3})\s?\}|([-−]?\d{1,3}))|([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{1,4}))(?!\s?[\^!\d⁰¹²³⁴⁵⁶⁷⁸⁹⁻])"
)
_RATIO = re.compile(r"\d+(?:\s*:\s*\d+)+")
_MIXED = re.compile(r"(?<![\w./\\^{])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w/.])")
_DIGITS = r"\s?(\d|\{\d{1,9}\})"  # of a fraction: \frac13 is \frac{1}{3}
_PERCENT = re.compile(rf"(?<![\w./\\^{{)}}])(?:(\d{{1,9}})\s?)?\\[dt]?frac{_DIGITS}{_DIGITS}\s?\\?%")
_MIXED_PERCENT = re.compile(rf"{_MIXED.pattern}\s?\\?%")
_CASES = re.compile(  # a system of equations, row by row
    r"(?:\\left\s?\\\{\s?)?\\begin\s?\{(?:cases|aligned|align\*?|gathered|array)\}(?:\{[lcr]{1,3}\})?"
    r"((?:(?!\\(?:begin|end)\b)[^&]){1,2000})\\end\s?\{[a-z]{1,9}\*?\}(?:\s?\\right\s?\.)?"
)
_REPEATING = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{0,40})\\overline\s?\{(\d{1,40})\}(?![\d_])")
_BASED = re.compile(r"\d[\dA-Fa-f]{0,400}_(?:\{\(?)?(\d{1,2})\)?\}?")
_MONEY = re.compile(r"\\\$|[£€¥₹]|\b(?:dollars?|usd)\b", re.IGNORECASE)
_AMOUNT = r"(?<![\d.,])([\d,]++(?:\.\d++)?+)"
_MINUS = r"((?<![\w)\]}.%])[-−])?"  # between two amounts it is no sign
_CENTS = re.compile(rf"{_MINUS}{_AMOUNT}\s?(?:cents?\b|¢)", re.IGNORECASE)
_DOLLARS = re.compile(
    rf"{_MINUS}(?:(?<![\d.,])\\?[$€£]\s?([-−]?[\d,]++(?:\.\d++)?+)|{_AMOUNT}\s?dollars?\b)", re.IGNORECASE
)
_TAG = re.compile(r"</?[A-Za-z][\w-]{0,30}>")
_TOKEN = re.compile(r"<\|[\w.-]{1,40}\|>")  # a special one, which a response may have kept
_LABEL = re.compile(  # of the answer itself, in a box
    r"(\\text\s?\{\s?)?(?:(?:the|my|final|correct)\s){0,3}answer\s?(?:is\b|:|=)\s?:?\s{0,3}(\}\s?)?", re.IGNORECASE
)
_STARS = re.compile(r"(?<=[\w)}\]])\*\*(?=[\w({-])")  # a power, x**2; not the stars around **bold** text
_EAST_ASIAN_LETTER = "[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_EAST_ASIAN = re.compile(rf"(?<={_EAST_ASIAN_LETTER})(?=[-\d$\\])|(?<=\d)(?={_EAST_ASIAN_LETTER})")
_SPELLINGS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ",
    "°": r"^\circ ",
})  # fmt: skip
_VULGAR = {sign: f"\\frac{{{over}}}{{{under}}}" for sign, (over, under) in VULGAR.items()}
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")
_DEGREES = {"√": "", "∛": "[3]", "∜": "[4]"}  # of roots
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SQUARE = re.compile(r"(?<![\w.,^])(\d++)([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]++)")


def answer_part(response: str) -> str:
    """The part of a response that is its answer: after the thoughts, and in the last `<answer>` tags if it has some.

    >>> answer_part("<think>3?</think>It is <answer>`4`</answer>.")
    '`4`'
    """
    after = response.rpartition("</think>")[2]
    text = after if after.strip() else response
    tagged = between_tags(text, "answer")
    return dollars_and_cents(_TOKEN.sub(" ", text if tagged is None else tagged))


def after_final(text: str) -> str | None:
    """The text after "final answer is" or "final answer:"; None without them.

    >>> after_final("So the Final Answer: 4"), after_final("So 4")
    (' 4', None)
    """
    found = _FINAL.search(text)
    return None if found is None else text[found.end() :]


def boxes(text: str) -> tuple[str, ...]:
    """Contents of the last box, and of those before it in the same sentence; of a box in a box, the inner one.

    A box that is not closed is no answer: () if the last one is. () also without a box.

    >>> boxes(r"So \\boxed{42}. No: \\boxed{\\frac{1}{2}}"), boxes(r"\\boxed{1} and \\boxed{2}"), boxes(r"\\boxed{4")
    (('\\\\frac{1}{2}',), ('1', '2'), ())
    """
    return tuple(content for content, _ in placed_boxes(text))


def placed_boxes(text: str) -> list[tuple[str, int]]:
    """The boxes of `boxes`, each with the place after its end."""
    found: list[tuple[str, int]] = []
    open_braces: list[_Brace] = []
    open_boxes: list[_Brace] = []
    for mark in _MARKS.finditer(text):
        if mark["box"] or mark[0] == "{":
            brace = _Brace(mark.start(), mark.end(), bool(mark["box"]))
            open_braces.append(brace)
            open_boxes += [brace] if brace.box else []
        elif mark[0] == "}" and open_braces and (brace := open_braces.pop()).box:
            open_boxes.pop()
            content = text[brace.end : mark.start()] if brace.inner is None else brace.inner
            if open_boxes:
                open_boxes[-1].inner = content
            else:
                found = [*_joined(found, text, brace.start), (content, mark.end())]
        elif mark["bare"] and not open_boxes:  # \boxed 5, as some solutions have it
            found = [*_joined(found, text, mark.start()), (mark["bare"].rstrip("."), mark.end())]
    return [] if open_boxes else found


@dataclass(slots=True)
class _Brace:
    """An open brace."""

    start: int
    end: int
    box: bool
    inner: str | None = None  # content of the last box within


def _joined(before: list[tuple[str, int]], text: str, start: int) -> list[tuple[str, int]]:
    """The boxes before, if the next one belongs to the same answer: after a comma, "and", "or" or no word at all."""
    if not before or start - before[-1][1] > _LONGEST_JOIN or len(before) > _MOST_JOINED:
        return []
    between = text[before[-1][1] : start]
    if re.search(r"[.!?](?:\s|$)|\n\s*\n", between):
        return []
    listed = re.search(r"[,;]|\b(?:and|or)\b", between) or not re.search("[a-z]", re.sub(r"\\[a-z]+", "", between))
    return before if listed else []


def plain(text: str) -> str:
    """A formula without what surrounds it: dollars, quotes, tags, units of money, gaps of thousands.

    >>> plain(r"$\\$32,\\!348.50$."), plain("`3½`"), plain("<b>1.5e3</b>")
    ('32348.50', '3\\\\frac{1}{2}', '1500')
    """
    text = _TAG.sub(" ", _STARS.sub("^", text).replace("**", "").replace("`", " ")).strip()
    while (inner := _unwrapped(text)) != text:
        text = inner
    text = in_latex(signed(_unlabelled(text)))
    text = re.sub(r"\\?[$£€¥₹]|(?<![\d,])\\!|\\!(?!\d)", "", text).replace("¢", " cents")
    text = _CASES.sub(_equations, text)
    text = joined(text)
    text = _fractions(text)
    text = _REPEATING.sub(_as_fraction, repeating(text))
    text = _ROOT.sub(lambda found: rf"\sqrt{_DEGREES[found[1]]}{{{found[2] or found[3]}}}", text)
    text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_POWERS)}}}", text)
    text = _spelled_out(text.translate(_SPELLINGS))
    text = text.replace(r"\varnothing", r"\emptyset")
    text = radians(re.sub(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree\b)", r"^\\circ ", text))
    return with_unit_in_text(text.strip().removesuffix(".").strip())


def _unlabelled(text: str) -> str:
    """The text without "The answer is" before it."""
    found = _LABEL.match(text)
    if found is None or found.end() == len(text):
        return text
    return text[found.end() : -1] if found[1] and not found[2] and text.endswith("}") else text[found.end() :]


def _equations(found: re.Match[str]) -> str:
    """A system of equations as a list; other rows stay as they are."""
    rows = [row.strip(" ,;\n") for row in found[1].split("\\\\")]
    equations = [row for row in rows if row]
    return ", ".join(equations) if all("=" in row for row in equations) else found[0]


def _as_fraction(found: re.Match[str]) -> str:
    """Write `0.1\\overline{6}` as `\\frac{15}{90}`."""
    whole, before, again = found.groups()
    under = (10 ** len(again) - 1) * 10 ** len(before)
    return f"\\frac{{{int(whole + before + again) - int(whole + before or '0')}}}{{{under}}}"


def _spelled_out(text: str) -> str:
    """Write numbers with powers of ten as digits, which are exact: math-verify has 15 digits of a decimal."""
    text = _TIMES_TEN.sub(_digits, text, count=_MOST_NUMBERS)
    return _SCIENTIFIC.sub(lambda found: format(Decimal(found[0]), "f"), text, count=_MOST_NUMBERS)


def _digits(found: re.Match[str]) -> str:
    power = (found[2] or found[3] or found[4].translate(_POWERS)).replace("−", "-")
    return format(Decimal(f"{found[1]}e{power}"), "f") if power.rpartition("-")[2] else found[0]


def is_money(text: str) -> bool:
    """Return whether a text is in dollars or another currency: a dollar that surrounds no formula is one.

    >>> is_money(r"\\$5"), is_money("$5"), is_money("5 dollars"), is_money("$5$"), is_money("5 cents")
    (True, True, True, False, False)
    """
    return _MONEY.search(text) is not None or text.replace("\\$", "").count("$") % 2 == 1


def cents_at_the_end(text: str) -> Fraction | None:
    """The number of cents, if the last number of a text is one of cents.

    >>> cents_at_the_end("It costs 5 cents."), cents_at_the_end("5 cents is $0.05")
    (Fraction(5, 1), None)
    """
    *_, last = (None, *_CENTS.finditer(text))
    if last is None or any(character.isdigit() for character in text[last.end() :]):
        return None
    return _signed(last[1], last[2])


def dollars_at_the_end(text: str) -> Fraction | None:
    """The amount, if the last number of a text is one of dollars or another currency.

    >>> dollars_at_the_end("It costs $0.05."), dollars_at_the_end("$5 each, so 3")
    (Fraction(1, 20), None)
    """
    *_, last = (None, *_DOLLARS.finditer(text))
    if last is None or not is_money(text) or any(character.isdigit() for character in text[last.end() :]):
        return None
    return _signed(last[1], last[2] or last[3])


def _signed(minus: str | None, amount: str) -> Fraction | None:
    found = number(amount.replace("−", "-"))
    return -found if found is not None and minus else found


def prose(text: str) -> str:
    """A text of words and formulas, in which no number hides: in quotes, tags, `3½`, `12:30` or 1e-5."""
    text = _TAG.sub(" ", text.replace("`", " ")).replace("\\$", "")
    if len(re.findall(r"(?<!\\)\$", text)) % 2:  # not all of them can surround formulas: those before numbers are money
        text = re.sub(r"\$(?=\s?\d)", "", text)
    text = joined(text)
    text = _spelled_out(signed(matrices(_EAST_ASIAN.sub(" ", text.replace("−", "-")))))
    text = re.sub(
        rf"(?:(?<!\d)(\d+))?\s?([{''.join(_VULGAR)}])", lambda one: f" ${one[1] or ''}{_VULGAR[one[2]]}$ ", text
    )
    text = _MIXED_PERCENT.sub(lambda one: f" ${_fractions(one[0])}$ ", text)
    text = _PERCENT.sub(_percent, _MIXED.sub(r" $\1\\frac{\2}{\3}$ ", text))
    text = _SQUARE.sub(lambda one: f" ${one[1]}^{{{one[2].translate(_POWERS)}}}$ ", text)
    return CLOCK.sub(" (a time) ", text)


def percentage(text: str) -> Fraction | None:
    """The number before the percent sign that ends a plain text; None for anything else.

    >>> percentage(r"12.5\\%"), percentage("12.5")
    (Fraction(25, 2), None)
    """
    text = unwrapped_words(text)
    return number(text[:-1].removesuffix("\\")) if text.endswith("%") else None


def base_of(text: str) -> str:
    """The base in which a plain text is a number, "" where it names none.

    >>> base_of("1011_2"), base_of("2A_{16}"), base_of("x_2")
    ('2', '16', '')
    """
    found = _BASED.fullmatch(text)
    return found[1] if found else ""


def clock_or_ratio(text: str) -> tuple[int, ...] | None:
    """The numbers of 12:30 or 3:2; None for anything else."""
    found = _RATIO.fullmatch(text)
    return tuple(int(part) for part in text.split(":")) if found and len(text) < 40 else None


def _unwrapped(text: str) -> str:
    """The text without one pair of what may surround a whole formula."""
    for begin, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ('"', '"'), ("“", "”")):
        bare = text.removesuffix(".").rstrip() if text.startswith(begin) else text
        inside = bare[len(begin) : -len(end)]
        whole = bare.startswith(begin) and bare.endswith(end) and len(bare) >= len(begin) + len(end)
        one = begin not in inside and end not in inside.replace("\\$", "") and not inside.endswith("\\")
        if whole and one:
            return inside.strip()
    return text


def _fractions(text: str) -> str:
    """`3½` and `3 1/2` as mixed numbers in LaTeX."""
    text = re.sub(rf"\s?([{''.join(_VULGAR)}])", lambda found: _VULGAR[found[1]], text)
    return _PERCENT.sub(_percent, _MIXED.sub(r"\1\\frac{\2}{\3}", text))


def _percent(found: re.Match[str]) -> str:
    """Write `33\\frac13\\%` as `\\frac{100}{3}\\%`, because math-verify reads 1/3 % of it."""
    over, under = (int(one.strip("{}")) for one in found.groups()[1:])
    return f"\\frac{{{int(found[1] or 0) * under + over}}}{{{under}}}\\%"


__all__ = [
    "after_final",
    "answer_part",
    "base_of",
    "boxes",
    "cents_at_the_end",
    "clock_or_ratio",
    "dollars_at_the_end",
    "is_money",
    "percentage",
    "plain",
    "prose",
]
