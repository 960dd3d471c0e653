"""Choices and loops of a bash script: `if`, `case`, `&&`, `for` and `while`."""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hone.migration.shell.arithmetic import Unknown
from hone.migration.shell.conditions import holds
from hone.migration.shell.found import Noted
from hone.migration.shell.holes import holes, shown
from hone.migration.shell.words import Scope, Words

MAX_STATEMENTS = 20_000
_COUNTED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%&|^]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")


class Jump(Exception):
    """`exit`, `return`, `break` or `continue`: what follows is not run."""

    def __init__(self, name: str, argument: str = "") -> None:
        super().__init__(name)
        self.name = name
        self.succeeds = int(argument) == 0 if argument.isdigit() else None
        self.levels = int(argument) if argument.isdigit() else 1


class Flow(Noted, ABC):
    """A reader that knows which statements are run, and how often."""

    def __init__(self, scope: Scope, source: bytes, parse: Callable[[bytes], Any]) -> None:
        super().__init__(scope, source)
        self.words = Words(scope, source, parse)

    @abstractmethod
    def block(self, nodes: Sequence[Any]) -> bool | None:
        """Read statements in order; returns whether the last one succeeded, or None if that cannot be told."""

    @abstractmethod
    def statement(self, node: Any) -> bool | None:
        """Read one statement; returns whether it succeeds, or None if that cannot be told."""

    def _list(self, node: Any) -> bool | None:
        left, right = (child for child in node.children if child.is_named)
        first = self.statement(left)
        either = any(child.type == "||" for child in node.children)
        if first is None:  # a command that is run: it is taken to succeed
            self._choice(left, "is taken to succeed", right)
            try:
                return None if either else self.statement(right)
            except Jump as jump:
                self._note(node, f"may end here ({jump.name}); it is read as if it went on")
                return None
        return self.statement(right) if first != either else first

    def _if_statement(self, node: Any) -> bool | None:
        branches: list[tuple[Any, list[Any]]] = []  # (the node that holds the condition, what follows `then`)
        for holder in [node, *[child for child in node.children if child.type == "elif_clause"]]:
            then = next(child for child in holder.children if child.type == "then")
            body = [one for one in holder.children if one.start_byte >= then.end_byte]
            branches.append((holder, [one for one in body if one.type not in ("elif_clause", "else_clause", "fi")]))
        for holder, body in branches:
            then = next(child for child in holder.children if child.type == "then")
            condition = [one for one in holder.children if one.is_named and one.end_byte <= then.start_byte]
            chosen = self.block(condition)
            if chosen is None:
                self._leave_out(
                    holder, "depends on a condition that only running tells; none of its branches is taken", node
                )
                return None
            if chosen:
                return self.block(body)
        last = next((child for child in node.children if child.type == "else_clause"), None)
        return True if last is None else self.block(last.children)

    def _case_statement(self, node: Any) -> bool | None:
        value = self.words.text(node.child_by_field_name("value"))
        if holes(value):
            self._leave_out(node, f"chooses by {shown(value)}, which only running tells; no branch is taken")
            return None
        result: bool | None = True
        falls = False
        for item in (child for child in node.children if child.type == "case_item"):
            end = next(child for child in item.children if child.type == ")")
            patterns = [one for one in item.children if one.is_named and one.end_byte <= end.start_byte]
            if falls or any(fnmatch.fnmatchcase(value, self.words.pattern(one)) for one in patterns):
                result = self.block([one for one in item.children if one.start_byte >= end.end_byte])
                falls = item.children[-1].type == ";&"
                if item.children[-1].type not in (";&", ";;&"):
                    break
        return result

    def _for_statement(self, node: Any) -> bool | None:
        name = node.child_by_field_name("variable").text.decode()
        body = node.child_by_field_name("body")
        given = [child for child in node.children if child.is_named and child.end_byte <= body.start_byte][1:]
        words = [word for child in given for word in self.words.fields(child)]
        if not any(child.type == "in" for child in node.children):
            words = list(self.scope.arguments)
        if any(holes(word) for word in words):
            self._leave_out(node, "loops over values that only running tells; it is left out")
            return None
        for word in words:
            self.scope.put(name, word)
            if not self._round(body):
                break
        return True

    def _while_statement(self, node: Any) -> bool | None:
        body = node.child_by_field_name("body")
        condition = [child for child in node.children if child.is_named and child.end_byte <= body.start_byte]
        until = node.children[0].type == "until"
        while True:
            went_on = self.block(condition)
            if went_on is None:
                self._leave_out(node, "is not read")
                return None
            if went_on == until:
                return True
            if not self._round(body):
                return True

    def _round(self, body: Any) -> bool:
        """Read the body of a loop once; returns whether the loop goes on."""
        try:
            self.block(body.children)
        except Jump as jump:
            if jump.name not in ("break", "continue"):
                raise
            if jump.levels > 1:
                jump.levels -= 1
                raise
            return jump.name == "continue"
        return True

    def _test_command(self, node: Any) -> bool | None:
        if node.children and node.children[0].type == "((":
            try:
                return bool(self.words.computed(node))
            except Unknown:
                self._forget([found[1] or found[2] for found in _COUNTED.finditer(node.text.decode())])
                return None
        return holds(self.words, next(child for child in node.children if child.is_named))
