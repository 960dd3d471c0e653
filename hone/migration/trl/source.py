"""Options of a Python script that trains with TRL, read from its syntax tree. Nothing is run.

trainer call, its config, PEFT's config, load_dataset --> options under the names of TRL's command line
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.composition import ConfigError
from hone.migration.shell.holes import hole, holes

KINDS: Mapping[str, str] = {
    "GRPO": "grpo",
    "AsyncGRPO": "async_grpo",
    "RLOO": "rloo",
    "SFT": "sft",
    "DPO": "dpo",
    "Reward": "reward",
    "KTO": "kto",
    "ORPO": "orpo",
}
"""Beginning of the names of TRL's trainers and configs -> kind of training."""

PEFT: Mapping[str, str] = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
    "bias": "lora_bias",
}
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
}
MAX_TEXT = 100_000
"""Longest text that an expression of a script may make."""


@dataclass(slots=True)
class Record:
    """A call whose arguments matter: a config, a trainer, a data set."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Script:
    """Kind of training of a script, its options, and notes about what was not read."""

    kind: str
    options: Mapping[str, Any]
    notes: list[str]


class Unknown(Exception):
    """An expression that only running the script tells."""


def options_of_script(text: str, variables: Mapping[str, str]) -> Script:
    """Return the options of the one TRL trainer of a script; `variables` are its environment.

    Raises:
        ConfigError: the text is no Python, or has no trainer.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"this is no Python: {error}") from error
    reader = _Reader(variables)
    reader.body(tree.body)
    for function in _functions_that_train(tree):
        for argument in ast.walk(function.args):
            if isinstance(argument, ast.arg):
                reader.names.pop(argument.arg, None)
        reader.body(function.body)
    if reader.trainer is None:
        raise ConfigError(f"the script calls no trainer of TRL ({', '.join(f'{name}Trainer' for name in KINDS)})")
    if "TrlParser" in text or "HfArgumentParser" in text:
        reader.notes.append(
            "the script takes options from its command line; they are in the shell script that starts it, which "
            "hone migrate trl reads too"
        )
    return Script(reader.kind, reader.options(), reader.notes)


def _functions_that_train(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions that call a trainer of TRL; no other function is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
            isinstance(one, ast.Call) and ast.unparse(one.func).rpartition(".")[2].removesuffix("Trainer") in KINDS
            for one in ast.walk(node)
        ):
            yield node


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.names: dict[str, Any] = {}
        self.trainer: Record | None = None
        self.kind = ""
        self.notes: list[str] = []

    def body(self, statements: Sequence[ast.stmt]) -> None:
        """Read statements in their order. What only some branches of a condition set becomes a hole."""
        for node in statements:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
                self.statement(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif isinstance(node, ast.With | ast.AsyncWith):
                self.body(node.body)
            elif isinstance(node, ast.Try):
                self.body(node.body)
                self._branches([[], *(handler.body for handler in node.handlers)])
                self.body([*node.orelse, *node.finalbody])
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                self._branches([[], node.body])
            elif isinstance(node, ast.Match):
                self._branches([[], *(case.body for case in node.cases)])
            elif isinstance(node, ast.If):
                known = self._decided(node.test)
                if known is None:
                    self._branches([node.body, node.orelse])
                else:
                    self.body(node.body if known else node.orelse)

    def _decided(self, test: ast.expr) -> bool | None:
        """Result of a condition; None: it is known only when the script runs."""
        if ast.unparse(test).replace('"', "'") == "__name__ == '__main__'":
            return True
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decided(test.operand)
            return None if inner is None else not inner
        found = self.value(test)
        return None if isinstance(found, Record | list | dict) or holes(str(found)) else bool(found)

    def _branches(self, bodies: Sequence[Sequence[ast.stmt]]) -> None:
        """Read branches of which one runs."""
        before, ends = (self.names, self.trainer), []
        for statements in bodies:
            self.names, self.trainer = copy.deepcopy(before)
            self.body(statements)
            ends.append((self.names, self.trainer))
        names = dict.fromkeys(name for found, _ in ends for name in found)
        self.names = {name: self._joined(name, [found.get(name) for found, _ in ends]) for name in names}
        trainers = [trainer for _, trainer in ends if trainer is not None]
        self.trainer = self._joined("trainer", trainers) if trainers else None
        if self.trainer is not None and not isinstance(self.trainer, Record):
            self.trainer = trainers[-1]
            self.notes.append("the script chooses one of several trainers when it runs; the last one was read")

    def _joined(self, name: str, values: Sequence[Any]) -> Any:
        """The value that all branches agree on; of calls, argument by argument."""
        first = values[0]
        if all(type(one) is type(first) and one == first for one in values):
            return first
        if all(isinstance(one, Record) and one.name == first.name for one in values):
            options = dict.fromkeys(option for one in values for option in one.options)
            joined = {option: self._joined(option, [one.options.get(option) for one in values]) for option in options}
            return Record(first.name, joined)
        return self.environment.get(name, hole(name))

    def statement(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) -> None:
        """Read an assignment or a call."""
        if node.value is None:
            return
        if isinstance(node, ast.AugAssign):
            read = self.value(ast.BinOp(_read(node.target), node.op, node.value))
        else:
            read = self.value(node.value)
        targets = node.targets if isinstance(node, ast.Assign) else [] if isinstance(node, ast.Expr) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = read
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                owner = self.names.get(target.value.id)
                if isinstance(owner, Record):
                    owner.options[target.attr] = read

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Give names from `trl.rewards` their full name as text, which a command's `--reward_funcs` has, too."""
        start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for one in node.names:
            name = f"{start}{one.name}"
            if f"{name}.".startswith("trl.rewards.") and (start or one.asname):
                self.names[one.asname or one.name] = name

    def value(self, node: ast.expr) -> Any:
        """Value of an expression; what only running tells is a hole with its text."""
        try:
            return self._evaluated(node)
        except (Unknown, TypeError, ValueError, ZeroDivisionError, OverflowError):
            return hole(ast.unparse(node)[:200])

    def _evaluated(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names[node.id] if node.id in self.names else self.environment.get(node.id, hole(node.id))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(one) for one in node.elts]
        if isinstance(node, ast.Dict):
            found: dict[str, Any] = {}
            for key, one in zip(node.keys, node.values, strict=True):
                found |= _merged(one, self.value(one)) if key is None else {str(self.value(key)): self.value(one)}
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._evaluated(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return self._computed(node)
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            return "".join(str(self.value(part)) for part in parts)[:MAX_TEXT]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            return self._part(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise Unknown

    def _computed(self, node: ast.BinOp) -> Any:
        left, right = self._evaluated(node.left), self._evaluated(node.right)
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list)]
        if not all(isinstance(side, int | float | str | list) for side in (left, right)):
            raise Unknown
        if isinstance(node.op, ast.Mult) and sizes:
            raise Unknown  # a repeated text: none of the options has one
        result = OPERATORS[type(node.op)](left, right)
        if isinstance(result, str | list) and len(result) > MAX_TEXT:
            raise Unknown
        return result

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = self.names.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(owner, Record) and node.attr in owner.options:
            return owner.options[node.attr]
        of_trl = isinstance(owner, str) and f"{owner}.".startswith("trl.rewards.")
        text = f"{owner}.{node.attr}" if of_trl else ast.unparse(node)
        return text if text.startswith(("torch.", "trl.rewards.")) else hole(text)

    def _part(self, node: ast.Subscript) -> Any:
        """A split of a data set."""
        owner, split = self.value(node.value), self.value(node.slice)
        if isinstance(owner, Record) and owner.name == "load_dataset" and isinstance(split, str):
            return Record(owner.name, {**owner.options, "split": split})
        raise Unknown

    def _arguments(self, node: ast.Call) -> dict[str, Any]:
        """Arguments with names. Those of a `**` that only running tells are one hole under its text."""
        found: dict[str, Any] = {}
        for one in node.keywords:
            value = self.value(one.value)
            found |= _merged(one.value, value) if one.arg is None else {one.arg: value}
        return found

    def _call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func).rpartition(".")[2]
        whole = ast.unparse(node.func)
        if whole in ("os.environ.get", "os.getenv") and node.args:
            key = self._evaluated(node.args[0])
            return self.environment.get(str(key), self.value(node.args[1]) if len(node.args) > 1 else hole(f"${key}"))
        if name in ("int", "float", "str", "bool") and len(node.args) == 1:
            return {"int": int, "float": float, "str": str, "bool": bool}[name](self._evaluated(node.args[0]))
        record = Record(name, self._arguments(node))
        if whole == "dict" and not node.args:
            return record.options
        if name == "load_dataset":
            names = ("path", "name")
            record.options.update(zip(names, (self.value(one) for one in node.args), strict=False))
            return record
        if isinstance(node.func, ast.Attribute) and isinstance(owner := self.value(node.func.value), Record):
            return self._of_data(node, owner, name)
        for start, kind in KINDS.items():
            if name == f"{start}Trainer":
                record.options.update(zip(("model",), (self.value(one) for one in node.args), strict=False))
                self.trainer, self.kind = record, kind
                return record
        if name.endswith(("Config", "Arguments")) or name == "TrainingArguments":
            return record
        if name == "from_pretrained" and node.args:
            return self.value(node.args[0])
        raise Unknown

    def _of_data(self, node: ast.Call, owner: Record, name: str) -> Any:
        """Result of a method of a data set: the data set, with a note about what its rows went through."""
        if owner.name == "load_dataset" and name in (
            "map",
            "filter",
            "select",
            "shuffle",
            "rename_column",
            "remove_columns",
        ):
            changed = Record(owner.name, dict(owner.options))
            if name != "shuffle":
                changed.options["changed"] = f"{owner.options.get('changed', '')} {ast.unparse(node)[-120:]}".strip()
            return changed
        raise Unknown

    def options(self) -> dict[str, Any]:
        """The options of the trainer, its config, its adapter and its data, under the names of TRL's command line."""
        assert self.trainer is not None
        given = dict(self.trainer.options)
        options: dict[str, Any] = {}
        config = given.pop("args", None)
        if isinstance(config, Record):
            options |= config.options
        elif config is not None:
            options["args"] = config
        adapter = given.pop("peft_config", None)
        if adapter is not None and not isinstance(adapter, Record):
            options["peft_config"] = adapter
        if isinstance(adapter, Record):
            options |= {"use_peft": True, "peft_config": adapter.name}
            options |= {PEFT.get(name, f"peft.{name}"): value for name, value in adapter.options.items()}
        if "model" in given:
            model = given.pop("model")
            options["model_name_or_path"] = model
        for argument, prefix in (("train_dataset", "dataset"), ("eval_dataset", "eval_dataset")):
            if argument in given:
                options |= _data(given.pop(argument), prefix)
        return options | given


def _data(value: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(value, Record):
        return {f"{prefix}_name": value}
    names = {"path": "name", "name": "config", "split": "split", "data_files": "files", "changed": "changed"}
    return {f"{prefix}_{names.get(name, name)}": one for name, one in value.options.items()}


def _merged(node: ast.expr, value: Any) -> dict[str, Any]:
    """Entries of a `**`; if only running tells them, one hole under its text."""
    text = ast.unparse(node)[:200]
    return value if isinstance(value, dict) else {f"**{text}": hole(text)}


def _read(target: ast.expr) -> ast.expr:
    """The same place, as an expression."""
    return ast.parse(ast.unparse(target), mode="eval").body
