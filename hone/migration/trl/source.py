"""Options of a Python script that trains with TRL, read from its syntax tree. Nothing is run.

trainer call, its config, PEFT's config, load_dataset --> options under the names of TRL's command line
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.composition import ConfigError
from hone.migration.shell.holes import hole

KINDS: Mapping[str, str] = {
    "GRPO": "grpo",
    "AsyncGRPO": "grpo",
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
    for statement in _statements(tree):
        reader.statement(statement)
    if reader.trainer is None:
        raise ConfigError(f"the script calls no trainer of TRL ({', '.join(f'{name}Trainer' for name in KINDS)})")
    if "TrlParser" in text or "HfArgumentParser" in text:
        reader.notes.append(
            "the script takes options from its command line; they are in the shell script that starts it, which "
            "hone migrate trl reads too"
        )
    return Script(reader.kind, reader.options(), reader.notes)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Assignments and expressions of a script in the order of its lines, also inside functions and blocks."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr)]
    yield from sorted(found, key=lambda node: node.lineno)


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.names: dict[str, Any] = {}
        self.trainer: Record | None = None
        self.kind = ""
        self.notes: list[str] = []

    def statement(self, node: ast.stmt) -> None:
        """Read an assignment or a call."""
        value = node.value  # type: ignore[attr-defined]
        if value is None:
            return
        read = self.value(value)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = read
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                owner = self.names.get(target.value.id)
                if isinstance(owner, Record):
                    owner.options[target.attr] = read

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
            return self.names[node.id] if node.id in self.names else _reference(node)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(one) for one in node.elts]
        if isinstance(node, ast.Dict):
            return {
                str(self.value(key)): self.value(one) for key, one in zip(node.keys, node.values, strict=True) if key
            }
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._evaluated(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return self._computed(node)
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            return "".join(str(self.value(part)) for part in parts)[:MAX_TEXT]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
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
        text = ast.unparse(node)
        return text if text.startswith("torch.") else hole(text)

    def _call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func).rpartition(".")[2]
        whole = ast.unparse(node.func)
        if whole in ("os.environ.get", "os.getenv") and node.args:
            key = self._evaluated(node.args[0])
            return self.environment.get(str(key), self.value(node.args[1]) if len(node.args) > 1 else hole(f"${key}"))
        if name in ("int", "float", "str", "bool") and len(node.args) == 1:
            return {"int": int, "float": float, "str": str, "bool": bool}[name](self._evaluated(node.args[0]))
        record = Record(name, {one.arg: self.value(one.value) for one in node.keywords if one.arg})
        if any(one.arg is None for one in node.keywords):
            self.notes.append(f"line {node.lineno}: arguments given to {name} with ** are not read")
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
        adapter = given.pop("peft_config", None)
        if isinstance(adapter, Record):
            options["use_peft"] = True
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


def _reference(node: ast.Name) -> Any:
    """A name that the script defines by `def`, `class` or an import: it is kept as a name."""
    return hole(node.id)
