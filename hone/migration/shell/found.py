"""Commands that a reader found in a script, and notes about what it did not read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.migration.shell.holes import hole, holes
from hone.migration.shell.words import Scope

_USED = re.compile(r"\$\{?#?([A-Za-z_]\w*)")
"""Use of a variable."""

_SETS = re.compile(r"\b([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=(?!=)")
_ADDS = re.compile(r"""\b([A-Za-z_]\w*)(?:\+=(?:\(|["']\s)|=\(?\s*["']?\$\{?\1(?:\[[@*]\])?\}?["']?\s)""")
"""Assignments, and those that add words to a variable: `A+=(x)`, `A=("${A[@]}" x)`, `A="$A x"`."""


@dataclass(slots=True)
class Commands:
    """Commands of a script in the order in which it starts them, and notes about what was not read."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    """Notes that a person has to decide, because they can change the arguments of a command."""

    @property
    def other_notes(self) -> list[str]:
        """Notes that are no choices."""
        return [note for note in self.notes if not any(choice.startswith(note) for choice in self.choices)]


class Noted:
    """A reader that notes what it leaves out."""

    def __init__(self, scope: Scope, source: bytes) -> None:
        self.scope = scope
        self.found = Commands()
        self.text = source.decode()
        self.uses = Counter(_USED.findall(self.text))
        self.line = 1  # on which the source begins in the script

    def _forget(self, names: Sequence[str]) -> None:
        """Note that only running tells the values of variables, except of those that `--set` gives."""
        for name in names:
            is_list = isinstance(self.scope.get(name), list) or f"{name}=(" in self.text or f"{name}+=(" in self.text
            self.scope.put(name, self.scope.given.get(name, hole(f"${{{name}[@]}}" if is_list else f"${name}")))

    def _note(self, node: Any, problem: str, unread: Any = None) -> None:
        """Note that a part of the script, `unread`, is left out."""
        self.found.notes.append(sentence_of(node, problem, self.line))
        self._choice(node, problem, unread or node)

    def _leave_out(self, node: Any, problem: str, unread: Any = None) -> None:
        """Note that a part of the script is left out: only running tells what it sets.

        A list of words to which it only adds keeps those that are known.
        """
        part = unread or node
        self._note(node, problem, part)
        text = part.text.decode()
        sets, adds = Counter(_SETS.findall(text)), Counter(_ADDS.findall(text))
        for name in assigned_in(part):
            old, rest = self.scope.get(name), hole(f"the rest of ${name}")
            if not old or not adds[name] or sets[name] != adds[name]:
                self._forget([name])
            else:
                self.scope.put(name, [*old, rest] if isinstance(old, list) else f"{old} {rest}")

    def _choice(self, node: Any, problem: str, unread: Any) -> None:
        """Note a choice if `unread` sets variables that the rest of the script uses."""
        assigned, inside = assigned_in(unread), Counter(_USED.findall(unread.text.decode()))
        names = [name for name in assigned if self.uses[name] > inside[name]]
        if not names:
            return
        asked = [
            name
            for name in _USED.findall(sentence_of(node, "", self.line))
            if name not in assigned and self._is_unset(name)
        ]
        ways = " ".join(f"--set {name}=VALUE" for name in dict.fromkeys(asked))
        self.found.choices.append(
            f"{sentence_of(node, problem, self.line)}, and {', '.join(names)} may have another value: "
            + (f"give {ways}" if ways else "compare what depends on it with the script")
        )

    def _is_unset(self, name: str) -> bool:
        value = self.scope.get(name)
        return value is None or (isinstance(value, str) and bool(holes(value)))


def sentence_of(node: Any, problem: str, first: int) -> str:
    """A note about a node of a source that begins on the line `first` of the script."""
    line = node.text.decode().strip().partition("\n")[0]
    return f"line {node.start_point[0] + first}: `{line[:80]}` {problem}"


def assigned_in(node: Any) -> list[str]:
    """Names of the variables that a part of a script sets, each once."""
    found: dict[str, None] = {}
    left = [node]
    while left:
        one = left.pop()
        left.extend(reversed(one.children))
        if one.type in ("variable_assignment", "for_statement"):
            name = one.child_by_field_name("name") or one.child_by_field_name("variable")
            found[name.text.decode().partition("[")[0]] = None
        elif one.type in ("postfix_expression", "unary_expression"):
            if any(child.type in ("++", "--") for child in one.children):
                found |= {child.text.decode(): None for child in one.children if child.is_named}
        elif one.type == "binary_expression" and _assigns(one):
            found[one.children[0].text.decode()] = None
        elif one.type == "unset_command":
            found |= {child.text.decode(): None for child in one.children if child.type == "variable_name"}
    return list(found)


def _assigns(node: Any) -> bool:
    """Return whether an operation of `(( ))` sets its left side: `=` and the like, not a comparison of `[ ]`."""
    left, sign = node.children[0], node.children[1].type
    compares = sign in ("==", "!=", "<=", ">=") or (sign == "=" and left.type != "variable_name")
    return bool(sign.endswith("=") and not compares)
