"""Options of a command in a dataclass: typer sees one option for each field, the command gets the object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command whose type is a dataclass by options for the fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters = []
    for one in inspect.signature(command).parameters.values():
        if one.name not in groups:
            parameters.append(one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name]))
            continue
        inner = get_type_hints(groups[one.name], include_extras=True)
        parameters += [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field), annotation=inner[field.name])
            for field in fields(groups[one.name])
        ]

    @wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    del called.__wrapped__
    return called


def _default(field: Field[Any]) -> Any:
    return Parameter.empty if field.default is MISSING else field.default
