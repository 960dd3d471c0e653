"""Tools that are Python functions: methods of a class, or functions with `@tool`.

    class Calculator:                                        @tool
        def add(self, a: float, b: float) -> float:          def add(a: float, b: float) -> float:
            \"""Add two numbers.\"""                             \"""Add two numbers.\"""
            return a + b                                         return a + b

The annotations and the docstring become the JSON schema that the model reads. A class is constructed for each episode,
so it may keep state.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from hone.config import ConfigError
from hone.envs.base import BadArguments, ToolLost, ToolResult
from hone.registry import reason, resolve
from hone.types import Prompt

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__hone_tool__"
MOST_HANGING = 512  # calls that still run after their deadlines; containers often allow a few thousand threads


def tool(function: F) -> F:
    """Mark a function as a tool."""
    setattr(function, _MARK, True)
    return function


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a function: its schema for the model, and the check of a call's arguments."""

    spec: Mapping[str, Any]
    arguments: type[BaseModel]

    @property
    def name(self) -> str:
        return str(self.spec["function"]["name"])

    @classmethod
    def of(cls, function: Callable[..., Any], where: str) -> Signature:
        """Read a function. Raises ConfigError for a parameter without annotation, or one that no schema can say."""
        name = function.__name__
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ConfigError(f"{where}: tool {name}: an annotation cannot be read: {error}") from error
        text, notes = _docstring(function)
        fields: dict[str, Any] = {}
        for one in inspect.signature(function).parameters.values():
            if one.name == "self":
                continue
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
                raise ConfigError(f"{where}: tool {name}: parameter {one} has no name in a call; name each parameter")
            if one.name not in hints:
                raise ConfigError(
                    f"{where}: tool {name}: parameter {one.name} has no annotation, so the model cannot know what to "
                    f"give; write for example {one.name}: str"
                )
            default = ... if one.default is one.empty else one.default
            fields[one.name] = (hints[one.name], Field(default, description=notes.get(one.name)))
        try:
            return cls.of_parameters(name, text, fields)
        except (PydanticSchemaGenerationError, TypeError, NameError) as error:
            raise ConfigError(f"{where}: tool {name}: no schema for its parameters: {reason(error)}") from error

    @classmethod
    def of_parameters(cls, name: str, text: str, parameters: Mapping[str, Any]) -> Signature:
        """Describe a tool by its parameters: name -> (type, pydantic `Field`)."""
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **parameters)
        schema = _plain(model.model_json_schema())
        described = {"name": name, "description": text, "parameters": {"properties": {}, **schema}}
        return cls({"type": "function", "function": described}, model)


class FunctionTool:
    """One function as a tool (`hone.envs.base.Tool`)."""

    def __init__(self, signature: Signature, function: Callable[..., Any], timeout_s: float) -> None:
        self.spec = signature.spec
        self.timeout_s = timeout_s
        self._arguments = signature.arguments
        self._function = function

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the function. Raises BadArguments for arguments that do not fit, and what the function raises."""
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise BadArguments(_wrong(error)) from error
        given = {name: getattr(checked, name) for name in self._arguments.model_fields}
        if not inspect.iscoroutinefunction(self._function):
            return as_result(await in_thread(lambda: self._function(**given)))
        try:
            return as_result(await self._function(**given))
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error}") from error

    async def check(self) -> None:
        """A function has no infrastructure that could be gone."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A class with its tools, or a function, whose owner is None."""

    signatures: tuple[Signature, ...]
    owner: type[Any] | None = None
    function: Callable[..., Any] | None = None

    def bound(self, prompt: Prompt, options: Mapping[str, Any], timeout_s: float) -> Iterator[FunctionTool]:
        """The tools for one episode."""
        if self.owner is None:
            assert self.function is not None
            yield FunctionTool(self.signatures[0], self.function, timeout_s)
            return
        wants = inspect.signature(self.owner).parameters
        instance = self.owner(**options, **({"prompt": prompt} if "prompt" in wants else {}))
        for one in self.signatures:
            yield FunctionTool(one, getattr(instance, one.name), timeout_s)


class Toolbox:
    """The tools that a run file names; `bound` gives the tools of one episode."""

    def __init__(self, references: Sequence[str], options: Mapping[str, Any]) -> None:
        """`references`: "file.py:Class", "file.py:function", or "file.py" for its functions with `@tool`.

        `options` are keyword arguments of the classes. Raises ConfigError for what cannot be loaded or has no schema,
        and for two tools of one name.
        """
        self._options = dict(options)
        self._groups = [group for reference in references for group in _load(reference, self._options)]
        seen: set[str] = set()
        for signature in (one for group in self._groups for one in group.signatures):
            if signature.name in seen:
                raise ConfigError(
                    f"episode.env.tools: two tools are called {signature.name}; a call could mean either: rename one"
                )
            seen.add(signature.name)

    @property
    def specs(self) -> list[Mapping[str, Any]]:
        """The tools' schemas, as chat templates take them."""
        return [one.spec for group in self._groups for one in group.signatures]

    def bound(self, prompt: Prompt, timeout_s: float) -> list[FunctionTool]:
        """The tools of one episode; classes are constructed."""
        return [one for group in self._groups for one in group.bound(prompt, self._options, timeout_s)]


def as_result(value: Any) -> ToolResult:
    """Return a function's value as a result: text as it is, other values as JSON."""
    if isinstance(value, ToolResult):
        return value
    return ToolResult(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _load(reference: str, options: Mapping[str, Any]) -> Iterator[_Group]:
    try:
        found: Any = _whole_file(reference) if ":" not in reference else resolve(reference)
    except Exception as error:  # importing runs foreign code, which may raise anything
        raise ConfigError(f"episode.env.tools: {reference} cannot be loaded: {reason(error)}") from error
    where = f"episode.env.tools: {reference}"
    if isinstance(found, dict):
        marked = [one for one in found.values() if getattr(one, _MARK, False)]
        if not marked:
            raise ConfigError(f"{where} has no function with @tool (from hone.envs.functions import tool)")
        yield from (_Group((Signature.of(one, where),), function=one) for one in marked)
    elif inspect.isclass(found):
        methods = [one for name, one in inspect.getmembers(found, inspect.isfunction) if not name.startswith("_")]
        if not methods:
            raise ConfigError(f"{where} has no public method; each public method is a tool")
        try:
            inspect.signature(found).bind_partial(**options)
        except TypeError as error:
            raise ConfigError(f"episode.env.options do not fit {reference}: {error}") from error
        try:
            yield _Group(tuple(Signature.of(one, where) for one in methods), found)
        except ConfigError as error:
            if hasattr(found, "reset") and hasattr(found, "step"):
                hint = f"a class with the reset and step of gym is an environment: episode.env={reference}"
                raise ConfigError(f"{error}; {hint}") from error
            raise
    elif inspect.isroutine(found):
        yield _Group((Signature.of(found, where),), function=found)
    else:
        raise ConfigError(f"{where} should be a class or a function, found {type(found).__name__}")


def _whole_file(reference: str) -> dict[str, Any]:
    if not Path(reference).is_file():
        raise ImportError(f"no file {reference}; tools are named as file.py:Class, file.py:function or file.py")
    return dict(resolve(f"{reference}:__dict__"))


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """A docstring's text before its `Args:`, and the notes of its parameters."""
    text = inspect.getdoc(function) or ""
    before, _, after = text.partition("\nArgs:\n")
    notes = dict(re.findall(r"^ {2,8}(\w+)(?: \([^)\n]*\))?: (.+)$", after, re.MULTILINE))
    return before.strip(), notes


def _plain(schema: Any) -> Any:
    """A schema without pydantic's titles."""
    if isinstance(schema, dict):
        return {k: _plain(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
    return [_plain(one) for one in schema] if isinstance(schema, list) else schema


def _wrong(error: ValidationError) -> str:
    """Return the fault of the arguments, for the model to read."""
    found = [
        f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors(include_url=False)
    ]
    return "; ".join(found[:4])


_HANGING: set[threading.Thread] = set()
"""The threads of calls that nobody waits for any more."""


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run a function that blocks in a thread of its own, which does not keep the process alive when it hangs.

    Raises ToolLost if `MOST_HANGING` calls still run after their deadlines, or if the machine starts no more threads:
    the policy is not to blame for that.
    """
    if len(_HANGING) >= MOST_HANGING:
        _HANGING.difference_update([thread for thread in _HANGING if not thread.is_alive()])
        if len(_HANGING) >= MOST_HANGING:
            raise ToolLost(f"{len(_HANGING)} calls of tools still run after their deadlines: some tool hangs")
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():  # the episode has given up
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def run() -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = call()
        except Exception as error:  # noqa: BLE001  the tool's own; the caller raises it
            failure = error
        except BaseException as error:  # noqa: BLE001  sys.exit(), or a panic of another language: nobody else sees it
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        if isinstance(failure, StopIteration):  # a future cannot hold it
            failure = RuntimeError(f"StopIteration: {failure}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    thread = threading.Thread(target=run, name="tool", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ToolLost(f"no thread for a tool: {error}") from error
    try:
        return await done
    except asyncio.CancelledError:
        _HANGING.add(thread)
        raise


__all__ = ["FunctionTool", "Signature", "Toolbox", "as_result", "in_thread", "tool"]
