"""Other spellings of the same formula, in the LaTeX that math-verify reads.

`[[1,2],[3,4]]` is a matrix, `]1,2[` an open interval, `\\sin 30^\\circ` the sine of an angle in degrees, `0.333...` and
`0.\\dot{3}` are `0.\\overline{3}`; the look of a formula (`\\bf`, `\\color{red}`) says nothing.
"""

from __future__ import annotations

import re

_LOOKS = re.compile(
    r"\\(?:textcolor|color)\s?\{[^{}]{1,40}\}"
    r"|\\(?:bf|it|rm|sf|tt|displaystyle|textstyle|scriptstyle|large|Large|huge|Huge|normalsize|small)(?![A-Za-z])"
)
_ROW = r"\[[^\[\]]{1,400}\]"
_ROWS = re.compile(rf"\[\s?({_ROW}(?:\s?,\s{{0,4}}{_ROW}){{0,40}})\s?\]")
_ONE_ROW = re.compile(r"\[([^\[\]]*)\]")
_BETWEEN = r"[^\[\](),;]{1,100}"
_INTERVAL = re.compile(rf"([\[\](])({_BETWEEN}[,;]{_BETWEEN})([\[\])])")
_FUNCTION = re.compile(r"(?:\\|(?<![A-Za-z]))(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_PARTS = re.compile(r"([=,;<>])")
_DEGREES = re.compile(
    r"(?<![\w.,])(\d{1,9}(?:\.\d{1,9})?)\s?\^\s?\{?\s?\\circ\s?\}?(?!\s?(?:\\[a-z]{2,6}\s?\{)?[CF]\b)"
)
_DOTTED = re.compile(r"(?<![\d.])(\d{0,40}\.\d{0,40})\\dot\s?\{?(\d)\}?(?:(\d{0,40})\\dot\s?\{?(\d)\}?)?(?!\d)")
_IN_BRACKETS = re.compile(r"(?<![\d.\w])(\d{1,40}\.\d{0,40})\((\d{1,40})\)(?![\d(])")
_GOES_ON = re.compile(r"(?<![\d.])(\d{1,40}\.\d{0,40}?)(\d)\2{2,40}\s?(?:\.\.\.|…|\\[lcd]?dots\b)(?!\d)")
_MATHBB = re.compile(r"\\mathbb\s([A-Z])\b")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_NAMED = (
    (re.compile(r"(?:for\s)?(?:all|any|every)\sreal(?:\snumbers?|s)?(?:\s[a-z])?|all\sreals"), r"\mathbb{R}"),
    (re.compile(r"(?:there\s(?:is|are)\s)?no\s(?:real\s)?solutions?|(?:the\s)?empty\sset"), r"\emptyset"),
)


def in_latex(text: str) -> str:
    """A plain formula without its looks, and with other spellings as LaTeX.

    >>> in_latex("[[1,2],[3,4]]"), in_latex("]1,2]"), in_latex(r"{\\bf 4}"), in_latex("2pi")
    ('\\\\begin{pmatrix}1&2\\\\\\\\3&4\\\\end{pmatrix}', '(1,2]', '{ 4}', '2\\\\pi ')
    """
    text = _MATHBB.sub(r"\\mathbb{\1}", _LOOKS.sub("", text)).replace(r"\langle", "(").replace(r"\rangle", ")")
    text = _ROWS.sub(_matrix, _PI.sub(r"\\pi ", text))
    if text[:1] in ("[", "]", "(") and text[-1:] in ("[", "]", ")"):
        text = _INTERVAL.sub(_interval, text)
    return text


def matrices(text: str) -> str:
    """A text with matrices for lists of rows; in dollars, unless the text has its own.

    >>> matrices("It is [[1,2],[3,4]].")
    'It is $\\\\begin{pmatrix}1&2\\\\\\\\3&4\\\\end{pmatrix}$.'
    """
    mark = "" if "$" in text or "\\(" in text or "\\[" in text else "$"
    return _ROWS.sub(lambda found: f"{mark}{_matrix(found)}{mark}" if _matrix(found) != found[0] else found[0], text)


def repeating(text: str) -> str:
    """A text with repeating decimals as `\\overline`.

    >>> repeating(r"0.1\\dot{6}"), repeating("0.(09)"), repeating("0.1666..."), repeating("3.14159...")
    ('0.1\\\\overline{6}', '0.\\\\overline{09}', '0.1\\\\overline{6}', '3.14159...')
    """
    text = _DOTTED.sub(lambda one: rf"{one[1]}\overline{{{one[2]}{one[3] or ''}{one[4] or ''}}}", text)
    return _GOES_ON.sub(r"\1\\overline{\2}", _IN_BRACKETS.sub(r"\1\\overline{\2}", text))


def radians(text: str) -> str:
    """A formula with the angles of its functions in radians, for which math-verify takes all.

    >>> radians(r"2\\sin 30^\\circ"), radians(r"30^\\circ")
    ('2\\\\sin {(\\\\frac{30\\\\pi}{180})}', '30^\\\\circ')
    """
    parts = [_DEGREES.sub(_as_radians, part) if _FUNCTION.search(part) else part for part in _PARTS.split(text)]
    return "".join(parts)


def named_set(text: str) -> str:
    """The set of numbers that words name, in LaTeX; "" for other words.

    >>> named_set("all real numbers"), named_set("no solution"), named_set("none")
    ('\\\\mathbb{R}', '\\\\emptyset', '')
    """
    return next((formula for words, formula in _NAMED if words.fullmatch(text)), "") if len(text) < 60 else ""


def _as_radians(found: re.Match[str]) -> str:
    return rf"{{(\frac{{{found[1]}\pi}}{{180}})}}"


def _matrix(found: re.Match[str]) -> str:
    """Rows of one length as a matrix; others stay as they are."""
    rows = [row.split(",") for row in _ONE_ROW.findall(found[1])]
    if len({len(row) for row in rows}) != 1 or len(rows) == len(rows[0]) == 1:
        return found[0]
    return r"\begin{pmatrix}" + r"\\".join("&".join(row) for row in rows) + r"\end{pmatrix}"


def _interval(found: re.Match[str]) -> str:
    """An interval whose open ends are brackets that face outwards, with parentheses."""
    left, inside, right = found.groups()
    return ("(" if left == "]" else left) + inside.replace(";", ",") + (")" if right == "[" else right)


__all__ = ["in_latex", "matrices", "named_set", "radians", "repeating"]
