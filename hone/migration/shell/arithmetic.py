"""Arithmetic of bash: integers, the operators of C, variables by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

LIMIT = 2**63  # bash computes in 64 bits; a larger result would wrap


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


BINARY: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
    "%": lambda left, right: left - right * _quotient(left, right),
    "**": _power,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda left, right: bool(left and right),
    "||": lambda left, right: bool(left or right),
}

UNARY: Mapping[str, Callable[[int], int]] = {"-": operator.neg, "+": operator.pos, "!": operator.not_}


def evaluated(node: Any, value: Callable[[Any], int]) -> int:
    """Compute an expression; `value` computes its variables and numbers. Raises Unknown."""
    named = [child for child in node.children if child.is_named]
    if node.type in ("arithmetic_expansion", "parenthesized_expression", "test_command", "compound_statement"):
        if len(named) != 1:
            raise Unknown(node.text.decode())
        return evaluated(named[0], value)
    if node.type == "binary_expression" and len(named) == 2:
        sign = node.children[1].text.decode()
        if sign not in BINARY:
            raise Unknown(node.text.decode())
        result = int(BINARY[sign](evaluated(named[0], value), evaluated(named[1], value)))
        if abs(result) >= LIMIT:
            raise Unknown(node.text.decode())
        return result
    if node.type == "unary_expression":
        sign = node.children[0].text.decode()
        if sign not in UNARY:
            raise Unknown(node.text.decode())
        return int(UNARY[sign](evaluated(node.children[-1], value)))
    if node.type == "ternary_expression" and len(named) == 3:
        return evaluated(named[1] if evaluated(named[0], value) else named[2], value)
    if node.type in ("number", "word", "variable_name", "simple_expansion", "expansion", "string"):
        return value(node)
    raise Unknown(node.text.decode())
