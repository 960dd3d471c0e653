"""Arithmetic of bash: integers, the operators of C, variables by name."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LIMIT = 2**63  # bash computes in 64 bits; a larger result would wrap

MAX_TOKENS = 2_000
MAX_DEPTH = 30
"""Parentheses, and operators of one sign, within others."""


class Unknown(Exception):
    """An expression that cannot be computed without running the script."""


def _quotient(left: int, right: int) -> int:
    if right == 0:
        raise Unknown("division by 0")
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _power(left: int, right: int) -> int:
    if not 0 <= right < 64:
        raise Unknown(f"{left} ** {right}")
    return int(left**right)


def _shifted(left: int, right: int) -> int:
    if not 0 <= right < 64:
        raise Unknown(f"{left} << {right}")
    return left << right


BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda left, right: bool(left or right)),
    "&&": (2, lambda left, right: bool(left and right)),
    "|": (3, operator.or_),
    "^": (4, operator.xor),
    "&": (5, operator.and_),
    "==": (6, operator.eq),
    "!=": (6, operator.ne),
    "<": (7, operator.lt),
    ">": (7, operator.gt),
    "<=": (7, operator.le),
    ">=": (7, operator.ge),
    "<<": (8, _shifted),
    ">>": (8, lambda left, right: left >> right if 0 <= right < 64 else _shifted(left, right)),
    "+": (9, operator.add),
    "-": (9, operator.sub),
    "*": (10, operator.mul),
    "/": (10, _quotient),
    "%": (10, lambda left, right: left - right * _quotient(left, right)),
    "**": (11, _power),
}
"""Sign -> how tightly it binds, and what it computes."""

UNARY: Mapping[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
    "~": operator.invert,
}

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|\+\+|--|<<=|>>=|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|[-+*/%&|^<>=!~?:,()])\s*"
)


@dataclass(slots=True)
class Variables:
    """The ways in which an expression reads a variable and sets one."""

    value: Callable[[str], int]
    put: Callable[[str, int], None]


def evaluated(text: str, variables: Variables) -> int:
    """Compute an expression in which `$X` is expanded. Raises Unknown."""
    tokens: list[str] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or len(tokens) > MAX_TOKENS:
            raise Unknown(text)
        tokens.append(found[1])
        at = found.end()
    if not tokens:
        return 0
    reader = _Reader(text, tokens, variables)
    result = reader.list_of()
    if reader.tokens[reader.at :]:
        raise Unknown(text)
    return result


class _Reader:
    """Computes while it reads; `runs` is false in what is read but not computed, such as `X` in `0 && X`."""

    def __init__(self, text: str, tokens: list[str], variables: Variables) -> None:
        self.text = text
        self.tokens = tokens
        self.variables = variables
        self.at = 0
        self.runs = True
        self.depth = 0

    def next(self, offset: int = 0) -> str:
        place = self.at + offset
        return self.tokens[place] if place < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.next()
        if not token or (expected and token != expected):
            raise Unknown(self.text)
        self.at += 1
        return token

    def list_of(self) -> int:
        result = self.choice()
        while self.next() == ",":
            self.take()
            result = self.choice()
        return result

    def choice(self) -> int:
        """An assignment, `A ? B : C`, or what binds tighter."""
        name, sign = self.next(), self.next(1)
        if name.isidentifier() and sign.endswith("=") and sign not in ("==", "!=", "<=", ">="):
            self.at += 2
            value = self.nested(self.choice)
            if sign != "=":
                value = self.computed(sign[:-1], self.variable(name), value)
            self.set(name, value)
            return value
        condition = self.operation(1)
        if self.next() != "?":
            return condition
        self.take()
        first = self.when(bool(condition), self.list_of)
        self.take(":")
        second = self.when(not condition, self.choice)
        return first if condition else second

    def operation(self, level: int) -> int:
        """Operators that bind at least as tightly as `level`."""
        left = self.signed()
        while self.next() in BINARY and BINARY[self.next()][0] >= level:
            sign = self.take()
            tightness = BINARY[sign][0]
            needed = not ((sign == "||" and left) or (sign == "&&" and not left))
            inner = tightness if sign == "**" else tightness + 1
            right = self.when(needed, lambda inner=inner: self.operation(inner))  # type: ignore[misc]
            left = self.computed(sign, left, right)
        return left

    def signed(self) -> int:
        token = self.take()
        if token in ("++", "--") and self.next().isidentifier():
            return self.counted(self.take(), token)[1]
        if token in UNARY:
            return int(UNARY[token](self.nested(self.signed)))
        if token == "(":
            value = self.nested(self.list_of)
            self.take(")")
            return value
        if token.isidentifier():
            if self.next() in ("++", "--"):
                return self.counted(token, self.take())[0]
            return self.variable(token)
        return number(token)

    # -------------------------------------------------------------------------------------------------- effects

    def when(self, needed: bool, read: Callable[[], int]) -> int:
        before, self.runs = self.runs, self.runs and needed
        try:
            return self.nested(read)
        finally:
            self.runs = before

    def nested(self, read: Callable[[], int]) -> int:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unknown(self.text)
        value = read()
        self.depth -= 1
        return value

    def computed(self, sign: str, left: int, right: int) -> int:
        if not self.runs:
            return 0
        result = int(BINARY[sign][1](left, right))
        if abs(result) >= LIMIT:
            raise Unknown(self.text)
        return result

    def variable(self, name: str) -> int:
        return self.variables.value(name) if self.runs else 0

    def set(self, name: str, value: int) -> None:
        if self.runs:
            self.variables.put(name, value)

    def counted(self, name: str, sign: str) -> tuple[int, int]:
        """Value of a variable before and after `++` or `--`."""
        before = self.variable(name)
        after = before + (1 if sign == "++" else -1)
        self.set(name, after)
        return before, after


def number(text: str) -> int:
    """Convert a number as bash writes it. Raises Unknown."""
    try:
        return int(text, 8 if re.fullmatch("-?0[0-7]+", text) else 0)
    except ValueError as error:
        raise Unknown(text) from error
