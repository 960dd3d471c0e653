"""Reward functions: their signature, how they are loaded, and which return values are valid.

    fn(response, ground_truth, row, **options) -> float | {"reward": float, "<sub-component>": float, ...}

`response` is the decoded text of the trajectory; `ground_truth` and `row` come from its prompt. `hone.rewards.binding`
says which other parameters are understood, such as `role`, the role that the policy played. The function may be
`async`. Any return value but a finite number (or a dict of them with the key "reward") is a failed reward, never a 0. A
class is constructed once in each process, with the options as keyword arguments, and its objects are called as
`(response, ground_truth, row)`.

A function with a parameter `responses` scores the whole group, all answers to one prompt, in one call:

    fn(responses, ground_truth, row, **options) -> list of such values, one for each answer, in their order

With `roles` it also gets the role of each answer.

The worker processes import this file, so it imports neither torch, transformers nor pydantic, directly or indirectly.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import traceback
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.registry import resolve
from hone.rewards import REWARDS
from hone.rewards.binding import Binding, CannotBind, Case, bind

Value = float | Mapping[str, float]
RewardFn = Callable[..., Value | Awaitable[Value]]

VALUE = "reward"  # key of the component's own value in a returned dict
THEIRS = "score"  # the same in verl\'s functions
LONGEST_ERROR = 2000  # characters of an error text that are kept


class BadReward(ValueError):
    """A reward function cannot be loaded, or does not accept its options."""


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A component that is ready to be called: a function and its options."""

    name: str
    function: RewardFn
    options: Mapping[str, Any]
    concurrent: bool  # a coroutine function: several calls may wait at once
    binding: Binding

    def call(self, case: Case) -> Any:
        """Score one answer, or with a `whole_group` binding all answers to a prompt."""
        return self.binding.call(self.function, case, self.options)


def load_reward(name: str, reference: str, options: Mapping[str, Any]) -> LoadedReward:
    """Import a reward function and check that it accepts `options`.

    Raises BadReward with the component, the reference and the reason.
    """
    try:
        function = _find(reference)
    except Exception as error:  # importing foreign code may raise anything
        raise BadReward(f"reward component {name!r}: {reference!r} cannot be loaded: {describe(error)}") from error
    if not callable(function):
        raise BadReward(f"reward component {name!r}: {reference!r} is a {type(function).__name__}, not a function")
    hints = _hints(function)
    for key, value in options.items():
        _check_option(name, key, value, hints.get(key))
    if inspect.isclass(function):
        function, options = _constructed(name, function, options), {}
    try:
        binding = bind(function, options)
    except CannotBind as error:
        raise BadReward(f"reward component {name!r}: {error}") from error
    concurrent = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return LoadedReward(name, function, dict(options), concurrent, binding)


def _find(reference: str) -> Any:
    return resolve(reference) if ":" in reference else REWARDS.get(reference)


def _constructed(name: str, cls: Any, options: Mapping[str, Any]) -> Any:
    """An object of a reward class; what its constructor raises is an error at start-up."""
    try:
        made = cls(**options)
    except Exception as error:  # foreign code may raise anything
        accepted = ", ".join(inspect.signature(cls).parameters)
        raise BadReward(
            f"reward component {name!r}: {cls.__name__} cannot be constructed: {error} (it accepts the options: "
            f"{accepted or 'none'})"
        ) from error
    if not callable(made):
        raise BadReward(f"reward component {name!r}: the class {cls.__name__} has no method __call__")
    return made


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}  # without annotations that can be evaluated, there is no early check


def _check_option(name: str, key: str, value: Any, hint: Any) -> None:
    """Check an option against its annotation (literals and plain types), so that it fails at start-up."""
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
    """Convert a function's return value to (value, sub-components).

    Raises TypeError or ValueError if it is not a finite number, or a dict of them with the key "reward". A dict with
    the key "score", as verl's functions return, may also hold texts, lists and None, which are dropped.

    >>> judge(True), judge({"reward": 0.5, "format": 1}), judge({"score": 1, "acc": True, "pred": "34"})
    ((1.0, {}), (0.5, {'format': 1.0}), (1.0, {'acc': 1.0}))
    """
    if not isinstance(returned, Mapping):
        return _number(returned, "the reward"), {}
    key = VALUE if VALUE in returned else THEIRS
    if key not in returned:
        raise TypeError(
            f"the reward returned a dict without the key {VALUE!r} (it has: {', '.join(map(str, returned))})"
        )
    parts = {}
    for name, value in returned.items():
        try:
            parts[str(name)] = _number(value, f"the reward's {name!r}")
        except TypeError:
            if key == VALUE or name == key:
                raise
    return parts.pop(key), parts


def judge_group(returned: Any, answers: int) -> list[tuple[float, dict[str, float]] | Exception]:
    """Convert what a function of a whole group returned to one result for each answer, or why it has none.

    An exception in the list is the reason why this answer has none.
    Raises TypeError or ValueError if it is not a list of as many values as there are answers.

    >>> judge_group([1, {"reward": 0.5}], 2)
    [(1.0, {}), (0.5, {})]
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(
            f"the reward of a group is {returned!r:.80} ({type(returned).__name__}); expected a list of {answers} "
            f"values"
        )
    if len(values) != answers:
        raise ValueError(f"the reward of a group returned {len(values)} values for {answers} answers")
    return [_judged(value) for value in values]


def _judged(value: Any) -> tuple[float, dict[str, float]] | Exception:
    if isinstance(value, Exception):
        return value
    try:
        return judge(value)
    except (TypeError, ValueError) as error:
        return error


def _number(value: Any, what: str) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a numpy or torch scalar
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} is {value!r:.80} ({type(value).__name__}); expected a number")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {float(value)}; expected a finite number")
    return float(value)


def describe(error: BaseException) -> str:
    """An exception on one line: type, message, and the line of code that raised it."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  an exception whose own text fails is still to be named
        message = "(its message cannot be shown)"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return f"{type(error).__name__}: {message[:LONGEST_ERROR]}{where}"
