"""Arguments of a reward function: hone's own signature, verl's, or a part of them, by parameter names.

    def reward(response, ground_truth, row, **options)                              hone; other names go by position
    def reward(response)                    def reward(ground_truth, response)      by name, in any order
    def compute_score(data_source, solution_str, ground_truth, extra_info=None)     verl, by name
    def reward(responses, ground_truth, row)            the whole group: all answers to one prompt, by name
    def reward(response, ground_truth, row, role)       also the role that the policy played; a group: `roles`
    def reward(completions, prompts, answer, **columns) TRL, by name: a group, and every argument is a list

The worker processes import this file, so it imports neither torch, transformers nor pydantic, directly or indirectly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HONE = ("response", "ground_truth", "row")
GROUP = "responses"
"""The parameter that makes a function score whole groups: it gets the list of all answers to a prompt."""
TRL = "completions"
"""The parameter of TRL's functions: the list of all answers. Their other arguments are columns, as lists of as many."""
_ONE = ("response", "solution_str", "role")
_ALL = (GROUP, "roles")


@dataclass(frozen=True, slots=True)
class Case:
    """Input of a function. For a whole group, `response` and `role` have one entry for each answer."""

    response: str | Sequence[str]
    role: str | Sequence[str]  # that the policy played; "" where it plays one only
    ground_truth: Any
    row: Mapping[str, Any]


_MEANINGS: Mapping[str, Callable[[Case], Any]] = {
    "response": lambda case: case.response,
    GROUP: lambda case: case.response,
    "solution_str": lambda case: case.response,
    "ground_truth": lambda case: case.ground_truth,
    "row": lambda case: case.row,
    "extra_info": lambda case: case.row.get("extra_info", case.row),
    "data_source": lambda case: case.row.get("data_source", ""),
    "role": lambda case: case.role,
    "roles": lambda case: case.role,
}
_LISTS = ("completion_ids", "prompts", "samples", "solution_strs", "reward_inputs")
_SHOWN = "def reward(response, ground_truth, row, **options)"
_SHOWN_GROUP = "def reward(responses, ground_truth, row, **options)"


class CannotBind(ValueError):
    """A function does not have the parameters of a reward."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Calling convention of a function: `names` are its parameters that hone fills by name."""

    names: tuple[str, ...]
    by_position: bool = False  # before these, the answer, the ground truth and the row go by position
    needs_ground_truth: bool = False  # it names `ground_truth`, without a default
    whole_group: bool = False  # it names `responses`: one call scores all answers to a prompt
    in_lists: bool = False  # it is TRL's: a whole group, and every argument is a list with one entry for each answer
    every_column: bool = False  # ... and it takes all columns

    def call(self, function: Callable[..., Any], case: Case, options: Mapping[str, Any]) -> Any:
        """Call it with what it takes of `case`. Raises CannotBind for a column that the row does not have."""
        if self.in_lists:
            return function(**_in_lists(case, self.names, self.every_column, options), **options)
        first = (case.response, case.ground_truth, case.row) if self.by_position else ()
        return function(*first, **{name: _MEANINGS[name](case) for name in self.names}, **options)


def bind(function: Callable[..., Any], options: Mapping[str, Any]) -> Binding:
    """Choose how to call a reward function with these options. Raises CannotBind."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Binding((), by_position=True)  # a C function without a signature; the first call checks it
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    required = [one.name for one in named if one.default is one.empty and one.name not in options]
    if TRL in required and GROUP not in required:
        return _bind_lists(function, named, options, any(one.kind is one.VAR_KEYWORD for one in parameters))
    lists = [name for name in required if name in _LISTS]
    if lists:
        raise CannotBind(
            f"its parameter {lists[0]!r} is a list of answers, as TRL's reward functions take for several prompts; "
            f"hone calls a reward for one answer: {_SHOWN}, or for all answers to one prompt: {_SHOWN_GROUP}"
        )
    group = GROUP in required
    if group and (both := [name for name in _ONE if name in required]):
        instead = "name 'roles', the list of all" if both[0] == "role" else "remove one of them"
        raise CannotBind(f"it names {GROUP!r}, all answers to a prompt, and {both[0]!r}, which is of one; {instead}")
    needs = "ground_truth" in required
    if tuple(required[:3]) == HONE or not (group or _is_by_name(required)):
        named_roles = [one.name for one in named[3:] if one.name == "role" and "role" not in options]
        _check_positions(function, named_roles, options)
        return Binding(tuple(named_roles), True, needs)
    known = [name for name in _MEANINGS if name not in (_ONE if group else _ALL)]
    unknown = [name for name in required if name not in known]
    if unknown:
        raise CannotBind(
            f"hone cannot fill its parameter {unknown[0]!r} (it can: {', '.join(known)}); give it a default, or "
            f"set it in the component's options"
        )
    filled = [one.name for one in named if one.name in known and one.name not in options]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        filled += [name for name in HONE[1:] if name not in filled]
    _check_options(function, filled, options)
    return Binding(tuple(filled), needs_ground_truth=needs, whole_group=group)


def _bind_lists(
    function: Callable[..., Any], named: list[inspect.Parameter], options: Mapping[str, Any], takes_all: bool
) -> Binding:
    """Binding of a function of TRL. Raises CannotBind for what only TRL's trainer has."""
    required = [one.name for one in named if one.default is one.empty and one.name not in options]
    missing = [name for name in required if name in ("completion_ids", "trainer_state", "log_extra", "log_metric")]
    if missing:
        raise CannotBind(f"its parameter {missing[0]!r} comes from TRL's trainer; give it a default, or remove it")
    if any(one.kind is one.POSITIONAL_ONLY for one in named):
        raise CannotBind(f"its parameters go by name, as TRL gives them: {TRL}, prompts, and columns of the data")
    return Binding(
        tuple(required),
        needs_ground_truth="ground_truth" in required,
        whole_group=True,
        in_lists=True,
        every_column=takes_all,
    )


def _in_lists(case: Case, names: Sequence[str], every_column: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a function of TRL: texts, or messages if the prompt is messages, as in its own data formats."""
    count = len(case.response)
    prompt = case.row.get("prompt", case.row.get("messages", ""))
    texts = isinstance(prompt, str)
    answers = [text if texts else [{"role": "assistant", "content": text}] for text in case.response]
    columns = {**case.row, "ground_truth": case.ground_truth}
    others = [name for name in columns if every_column and name not in options]
    wanted = dict.fromkeys([*names, *others])
    values: dict[str, Any] = {TRL: answers, "prompts": [prompt] * count}
    for name in wanted:
        if name not in values and name not in columns:
            raise CannotBind(f"hone cannot fill its parameter {name!r}: the row has the columns {', '.join(columns)}")
    return {name: values[name] if name in values else [columns[name]] * count for name in wanted}


def _is_by_name(required: list[str]) -> bool:
    """Return whether the names say what the parameters are: verl's names, or fewer than three of which one is known."""
    foreign = set(_MEANINGS) - set(HONE) - {"role"}
    return bool(foreign & set(required)) or (bool(required) and set(required) <= set(_MEANINGS))


def _check_positions(function: Callable[..., Any], filled: list[str], options: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind("", None, {}, **dict.fromkeys(filled), **options)
    except TypeError as error:
        names = [name for name in signature.parameters if name not in options]
        if len(names) < len(HONE):
            raise CannotBind(
                f"the function cannot be called as ({', '.join(HONE)}): it takes ({', '.join(names)}), and hone knows "
                f"fewer than three parameters by these names: {', '.join(_MEANINGS)}; write for example "
                f"({', '.join(HONE[: len(names)])})"
            ) from error
        raise _not_called(error, options, list(signature.parameters)[3:]) from error


def _check_options(function: Callable[..., Any], filled: list[str], options: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(filled), **options)
    except TypeError as error:
        raise _not_called(error, options, [name for name in signature.parameters if name not in filled]) from error


def _not_called(error: TypeError, options: Mapping[str, Any], accepted: list[str]) -> CannotBind:
    return CannotBind(
        f"the function cannot be called as (response, ground_truth, row, **options) with options {dict(options)}: "
        f"{error} (it accepts the options: {', '.join(accepted) or 'none'})"
    )
