"""Commands that a bash script would start, with their arguments. Nothing is run.

    text --> tree-sitter's syntax tree --> statements in order: assignments, if, case, for, functions --> commands

Understood: arrays, defaults, `case`, `if`, `while` and `&&` over variables, arithmetic, quotes, functions and their
local variables, subshells, loops over constants, and the text of `bash -c` and `eval`.
What depends on running something (a command's output, a file that exists, an unset variable) becomes a hole with the
script's own text, or a note. A part that is not read and sets a variable of the rest of the script is a choice too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from hone.migration.shell.flow import MAX_STATEMENTS, Flow, Jump
from hone.migration.shell.found import Commands, sentence_of
from hone.migration.shell.holes import hole, shown
from hone.migration.shell.words import Scope, TooLong, Value
from hone.registry import CannotLoad

MAX_DEPTH = 120
"""Functions within functions, and blocks within blocks."""


def read_script(text: str, variables: Mapping[str, str], arguments: Sequence[str]) -> Commands:
    """Return the commands of a script that is started with these variables and arguments.

    Raises:
        CannotLoad: the parser is not installed.
    """
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise CannotLoad("shell scripts are read with tree-sitter: pip install tree-sitter tree-sitter-bash") from error
    source = shown(text).encode()  # a script that holds the marks of holes loses them
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    script = _Script(Scope(dict(variables), list(arguments), variables), source, parser.parse)
    try:
        script.block(parser.parse(source).root_node.children)
    except Jump:
        pass
    except (TooLong, RecursionError) as error:
        script.found.notes.append(f"reading ended early: {error}")
        script.found.choices.append(script.found.notes[-1])
    return script.found


class _Script(Flow):
    def __init__(self, scope: Scope, source: bytes, parse: Callable[[bytes], Any]) -> None:
        super().__init__(scope, source, parse)
        self.functions: dict[str, tuple[_Script, Any]] = {}
        self.locals: list[dict[str, Value | None]] = []
        """Local variables of each function that is being called, with the values that they have outside."""
        self.statements = 0
        self.depth = 0

    def block(self, nodes: Sequence[Any]) -> bool | None:
        """Read statements in order; returns whether the last one succeeded, or None if that cannot be told."""
        result: bool | None = True
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLong(f"blocks are nested more than {MAX_DEPTH} deep")
        try:
            for node in nodes:
                if node.is_named:
                    result = self.statement(node)
        finally:
            self.depth -= 1
        return result

    def statement(self, node: Any) -> bool | None:
        """Read one statement; returns whether it succeeds, or None if that cannot be told."""
        self.statements += 1
        if self.statements > MAX_STATEMENTS:
            raise TooLong(f"more than {MAX_STATEMENTS:,} statements")
        reader = getattr(self, f"_{node.type}", None) if node.type in _READ else None
        if reader is not None:
            result: bool | None = reader(node)
            return result
        if node.type == "unset_command":
            for name in (child for child in node.children if child.type == "variable_name"):
                self.scope.variables.pop(name.text.decode(), None)
        elif node.type not in ("comment", "heredoc_body"):
            self._leave_out(node, "is not read")
        return None

    # ---------------------------------------------------------------------------------------- names and commands

    def _variable_assignment(self, node: Any) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        new: Value = ""
        if value is not None and value.type == "array":
            new = [word for child in value.children if child.is_named for word in self.words.fields(child)]
            if any(child.text.startswith(b"[") and b"]=" in child.text for child in value.children):
                new = hole(f"${{{name.text.decode()}[@]}}")  # names its places
        elif value is not None:
            new = self.words.text(value)
        key = name.text.decode()
        if name.type == "subscript":
            self._note(node, "sets an element of an array, which is not read")
            array = name.child_by_field_name("name").text.decode()
            self.scope.put(array, hole(f"${{{array}[@]}}"))
            return True
        if any(child.type == "+=" for child in node.children):
            new = _appended(self.scope.get(key), new)
        self.scope.put(key, new)
        return True

    def _declaration_command(self, node: Any) -> bool:
        kind = node.children[0].type
        flags = "".join(child.text.decode() for child in node.children if child.text.startswith(b"-"))
        names = [
            (child.child_by_field_name("name") or child).text.decode()
            for child in node.children
            if child.type in ("variable_assignment", "variable_name")
        ]
        if self.locals and kind in ("local", "declare", "typeset") and "g" not in flags:
            for name in names:
                self.locals[-1].setdefault(name, self.scope.variables.get(name))
                self.scope.variables.pop(name, None)
        self._only(node, "variable_assignment")
        if "i" in flags or "n" in flags:  # a value that is computed, or another variable's
            self._forget(names)
        return True

    def _variable_assignments(self, node: Any) -> bool:
        return bool(self._only(node, "variable_assignment"))

    def _only(self, node: Any, kind: str) -> bool | None:
        return self.block([child for child in node.children if child.type == kind])

    def _command(self, node: Any) -> bool | None:
        words = []
        if _assigns_before(node):
            self._only(node, "variable_assignment")
        for child in node.children:
            if child.type == "command_name":
                words += self.words.fields(child.children[0])
            elif child.is_named and child.type not in ("variable_assignment", "file_redirect", "herestring_redirect"):
                words += self.words.fields(child)
        if words and words[0] in self.functions:
            return self._called(words)
        if not words or words[0] in (":", "set", "echo", "true", "printf", "cd", "mkdir"):
            if words[:2] == ["set", "--"]:
                self.scope.arguments[:] = words[2:]
            if words[:2] == ["printf", "-v"]:
                self._forget(words[2:3])
            return True
        if words[0] == "exit" and words[1:] and words[1].isdigit() and int(words[1]):  # such as the end of a usage text
            self._note(node, "ends the script with an error; it is read as if it went on")
            return None
        if words[0] in _JUMPS:
            raise Jump(words[0], *words[1:2])
        if words[0] in _BUILTINS:
            return self._builtin(words, node)
        inside = _text_of_shell(words)
        if inside:
            _read_inside(self, inside, node)
        else:
            self.found.commands.append(words)
        return None

    def _builtin(self, words: Sequence[str], node: Any) -> bool | None:
        """Read a command of bash that changes variables or arguments."""
        if words[0] == "false":
            return False
        if words[0] == "shift":
            count = words[1] if words[1:] else "1"
            if not count.isdigit():
                self._note(node, "shifts the arguments by a number that only running tells")
            elif int(count) <= len(self.scope.arguments):
                del self.scope.arguments[: int(count)]
            return True
        if words[0] == "eval":
            return _read_evaluated(self, " ".join(words[1:]), node)
        if words[0] in ("source", "."):
            self.found.notes.append(sentence_of(node, "is another script, which is not read", self.line))
            return None
        self._forget([word.partition("=")[0].rstrip("+-*/") for word in words[1:] if _NAME.match(word)])
        return None

    def _called(self, words: Sequence[str]) -> bool | None:
        own = list(self.scope.arguments)
        self.scope.arguments[:] = words[1:]
        where, body = self.functions[words[0]]
        where.statements, where.depth = self.statements, self.depth
        where.locals.append({})
        try:
            nodes = [body] if body.type == "subshell" else body.children
            result: bool | None = where.block(nodes)
            return result
        except Jump as jump:
            if jump.name != "return":
                raise
            return jump.succeeds
        finally:
            self.statements = where.statements
            self.scope.arguments[:] = own
            for name, value in where.locals.pop().items():
                if value is None:
                    self.scope.variables.pop(name, None)
                else:
                    self.scope.put(name, value)

    def _function_definition(self, node: Any) -> bool:
        self.functions[node.child_by_field_name("name").text.decode()] = (self, node.child_by_field_name("body"))
        return True

    def _apart(self, nodes: Sequence[Any]) -> bool | None:
        """Read statements of a subshell. Variables that it sets stay in it, and its `exit` ends only it."""
        variables, arguments = dict(self.scope.variables), list(self.scope.arguments)
        functions = dict(self.functions)
        try:
            return self.block(nodes)
        except Jump as jump:
            return jump.succeeds
        finally:
            self.scope.variables.clear()
            self.scope.variables.update(variables)
            self.scope.arguments[:] = arguments
            self.functions.clear()
            self.functions.update(functions)

    def _redirected_statement(self, node: Any) -> bool | None:
        body = node.child_by_field_name("body")
        here = next((child for child in node.children if child.type == "heredoc_redirect"), None)
        if body is not None and here is not None and body.type == "command" and body.text.split()[:1] == [b"read"]:
            text = next((child for child in here.children if child.type == "heredoc_body"), None)
            name = body.text.split()[-1].decode()
            if text is not None and any(child.type == "<<-" for child in here.children) and b"$" in text.text:
                self._forget([name])
            elif text is not None:  # `read -r -d '' NAME <<EOF` gives the text to a variable
                self.scope.put(name, self.words.text(text).strip(" \t\n"))
            return True
        return None if body is None else self.statement(body)

    def _pipeline(self, node: Any) -> bool | None:
        for child in node.children:
            if child.is_named:
                self._apart([child])
        return None

    def _compound_statement(self, node: Any) -> bool | None:
        if node.children and node.children[0].type == "((":
            return self._test_command(node)
        return self.block(node.children)

    def _subshell(self, node: Any) -> bool | None:
        return self._apart(node.children)

    def _negated_command(self, node: Any) -> bool | None:
        result = self.block(node.children)
        return None if result is None else not result


def _assigns_before(node: Any) -> bool:
    """Return whether a command's assignments are a line of their own, which the parser takes for its beginning."""
    set_ = [child for child in node.children if child.type == "variable_assignment"]
    name = node.child_by_field_name("name")
    if not set_ or name is None or name.start_point[0] == set_[-1].end_point[0]:
        return False
    between = node.text[set_[-1].end_byte - node.start_byte : name.start_byte - node.start_byte]
    return b"\n" in between.replace(b"\\\n", b"")


def _read_inside(script: _Script, words: Sequence[str], node: Any) -> None:
    """Read what `bash -c TEXT NAME ARGUMENTS` runs at a node of a script, with its variables."""
    source = shown(words[0]).encode()  # what only running tells is a hole in there again
    scope = Scope(
        script.scope.variables | {"0": words[1] if words[1:] else "bash"}, list(words[2:]), script.scope.given
    )
    inner = _Script(scope, source, script.words.parse)
    inner.found, inner.statements, inner.depth = script.found, script.statements, script.depth
    inner.line = int(node.start_point[0]) + script.line
    inner._apart(script.words.parse(source).root_node.children)
    script.statements = inner.statements


def _read_evaluated(script: _Script, text: str, node: Any) -> bool | None:
    """Read what `eval` runs at a node of a script, as a part of it."""
    source = shown(text).encode()
    inner = _Script(script.scope, source, script.words.parse)
    inner.found, inner.statements, inner.depth = script.found, script.statements, script.depth
    inner.functions, inner.locals, inner.uses = script.functions, script.locals, script.uses
    inner.line = int(node.start_point[0]) + script.line
    try:
        result: bool | None = inner.block(script.words.parse(source).root_node.children)
        return result
    finally:
        script.statements = inner.statements


def _text_of_shell(words: Sequence[str]) -> Sequence[str]:
    """Text, name and arguments that a command gives to `bash -c`, also behind a launcher; empty if it does not."""
    for at, word in enumerate(words):
        if PurePath(word).name in ("bash", "sh"):
            flags = list(takewhile(lambda one: one.startswith("-"), words[at + 1 :]))
            if any("c" in one and not one.startswith("--") for one in flags):
                return words[at + 1 + len(flags) :]
    return []


def _appended(old: Value | None, new: Value) -> Value:
    if isinstance(old, list) or isinstance(new, list):
        first = old if isinstance(old, list) else [old] if old else []
        return [*first, *([new] if isinstance(new, str) else new)]
    return (old or "") + new


_JUMPS = ("exit", "return", "break", "continue")
_BUILTINS = ("false", "shift", "eval", "source", ".", "let", "read", "mapfile", "readarray", "getopts")
_NAME = re.compile(r"[A-Za-z_]\w*")

_READ = frozenset(name.removeprefix("_") for name in dir(_Script) if name.startswith("_") and name[1] != "_")
"""Kinds of nodes that a method reads."""
