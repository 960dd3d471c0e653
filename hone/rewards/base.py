"""What a reward function is, how one is loaded, and what counts as a value.

    fn(response, ground_truth, row, **options) -> float | {"reward": float, "<sub-component>": float, ...}

`response` is the decoded text of the trajectory, `ground_truth` and `row` are those of its prompt. The function may be
`async`. Anything but a finite number (or a dict of them with the key "reward") is a failure of the reward, never a 0.

This file is imported by the worker processes: it and what it imports stay free of torch, transformers and pydantic.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import traceback
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hone.registry import load_plugins, resolve
from hone.rewards import REWARDS

Value = float | Mapping[str, float]
RewardFn = Callable[..., Value | Awaitable[Value]]

VALUE = "reward"  # the key of a returned dict that holds the component's own value
LONGEST_ERROR = 2000  # characters of an error text that are kept


class BadReward(ValueError):
    """A reward function that cannot be loaded, or that does not take the options it was given."""


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A component ready to be called: its function bound to its options."""

    name: str
    function: RewardFn
    options: Mapping[str, Any]
    concurrent: bool  # a coroutine function: many of its calls may wait at once

    def call(self, response: str, ground_truth: Any, row: Mapping[str, Any]) -> Any:
        return self.function(response, ground_truth, row, **self.options)


def load_reward(name: str, reference: str, options: Mapping[str, Any]) -> LoadedReward:
    """Import a reward function and check that it takes `options`.

    Raises BadReward with one sentence that names the component, the reference and the reason.
    """
    try:
        function = _find(reference)
    except Exception as error:  # importing foreign code may raise anything
        raise BadReward(f"reward component {name!r}: {reference!r} cannot be loaded: {describe(error)}") from error
    if not callable(function):
        raise BadReward(f"reward component {name!r}: {reference!r} is a {type(function).__name__}, not a function")
    _check_options(name, function, options)
    concurrent = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return LoadedReward(name, function, dict(options), concurrent)


def _find(reference: str) -> Any:
    if ":" in reference:
        return resolve(reference)
    if reference not in REWARDS:
        load_plugins()
    return REWARDS.get(reference)


def _check_options(name: str, function: Any, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # built in C, without a signature: the first call will tell
    try:
        signature.bind("", None, {}, **options)
    except TypeError as error:
        taken = ", ".join(list(signature.parameters)[3:]) or "none"
        raise BadReward(
            f"reward component {name!r}: the function is called as (response, ground_truth, row, **options), "
            f"options {dict(options)}, and this does not fit: {error} (its options: {taken})"
        ) from error
    hints = _hints(function)
    for key, value in options.items():
        _check_option(name, key, value, hints.get(key))


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}  # annotations that cannot be evaluated only cost the early check


def _check_option(name: str, key: str, value: Any, hint: Any) -> None:
    """A wrong option fails at start-up, not on every call: literals and plain types are checked."""
    where = f"reward component {name!r}: option {key}"
    if typing.get_origin(hint) is typing.Literal:
        known = typing.get_args(hint)
        if value not in known:
            near = difflib.get_close_matches(str(value), [str(k) for k in known], n=1, cutoff=0.5)
            also = f"; did you mean {near[0]!r}?" if near else ""
            raise BadReward(f"{where} should be one of {', '.join(map(repr, known))}, found {value!r}{also}")
    elif hint in (bool, int, float, str):
        accepted = (int, float) if hint is float else hint
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            raise BadReward(f"{where} should be a {hint.__name__}, found {value!r}")


def judge(returned: Any) -> tuple[float, dict[str, float]]:
    """What a function returned, as (value, sub-components).

    Raises TypeError or ValueError if it is not a finite number or a dict of them that has the key "reward".

    >>> judge(True), judge({"reward": 0.5, "format": 1})
    ((1.0, {}), (0.5, {'format': 1.0}))
    """
    if not isinstance(returned, Mapping):
        return _number(returned, "the reward"), {}
    if VALUE not in returned:
        raise TypeError(
            f"the reward returned a dict without the key {VALUE!r} (it has: {', '.join(map(str, returned))})"
        )
    parts = {str(key): _number(value, f"the reward's {key!r}") for key, value in returned.items()}
    return parts.pop(VALUE), parts


def _number(value: Any, what: str) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} is {value!r:.80} ({type(value).__name__}); expected a number")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {float(value)}; expected a finite number")
    return float(value)


def describe(error: BaseException) -> str:
    """An exception as one line: type, message, and the line of code that raised it."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  an exception whose own text fails is still to be named
        message = "(its message cannot be shown)"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return f"{type(error).__name__}: {message[:LONGEST_ERROR]}{where}"
