"""Python objects in the settings of a run: functions, data sets, models and rows, as text that a run file may have.

A function becomes `file.py:name`; everything else is saved in the run's folder, under a name made of its content.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hone.composition import ConfigError

SAVERS = ("save_to_disk", "save_pretrained")  # methods of data sets, and of models and tokenizers
FOLDER_KEYS = ("path", "tokenizer")  # of run files: those that name a folder themselves
ROWS = ("data.train", "data.mix.*", "evaluation.sets.*", "warm_start.data.train", "warm_start.data.mix.*")


def plain(value: Any, folder: str, key: str = "") -> Any:
    """Plain data: a function is replaced by its reference, other objects by a path in the run's `folder`.

    `key` is the dotted key of the value. Where it is a section (`data.train`, `model`), the path is its `path`. Raises
    ConfigError for what other processes could not use.
    """
    if isinstance(value, Mapping) and not hasattr(value, SAVERS[0]):
        named = {name: _by_name(inner) if name == "components" else inner for name, inner in value.items()}
        return {name: plain(inner, folder, f"{key}.{name}".removeprefix(".")) for name, inner in named.items()}
    if isinstance(value, list | tuple) and not _stands_for_rows(key):
        return [plain(inner, folder, f"{key}[{number}]") for number, inner in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if _is_definition(value):
        return reference_to(value, _stored(value.__qualname__, folder), key)
    if (save := _saver(value, key)) is not None:
        name = type(value).__name__
        saved = _saved(save, name, _stored(name, folder))
        if key.rpartition(".")[2] in FOLDER_KEYS:
            return saved
        return {"path": saved, "source": None} if _stands_for_rows(key) else {"path": saved}
    return reference_to(value, Path(folder), key) if callable(value) else value


def _is_definition(value: Any) -> bool:
    return inspect.isfunction(value) or inspect.isclass(value)


def _stored(name: str, folder: str) -> Path:
    if not folder:
        raise ConfigError(f"run.dir is required, because {name} is stored there")
    return Path(folder)


def _stands_for_rows(key: str) -> bool:
    """Return whether a list under this key is a data set: no run file has a list there."""
    section = key.removesuffix(".path")
    return section in ROWS or (section.count(".") > 0 and f"{section.rpartition('.')[0]}.*" in ROWS)


def _saver(value: Any, key: str) -> Callable[[Path], Path] | None:
    """The function that saves an object in a new folder, and returns the path for the run file; None: it is none.

    Raises ConfigError for a dictionary of splits.
    """
    if isinstance(value, Mapping):
        splits = ", ".join(map(str, value))
        first = next(iter(value), "train")
        raise ConfigError(f"{key} is a {type(value).__name__} of {splits}; give one split, such as dataset[{first!r}]")
    if isinstance(value, list | tuple):
        return lambda folder: _rows_in_file(value, folder, key)
    if hasattr(value, "to_parquet") and not hasattr(value, SAVERS[0]):
        return lambda folder: _frame_in_file(value, folder, key)
    saves = next((name for name in SAVERS if hasattr(value, name)), None)
    return None if saves is None else lambda folder: _in_folder(getattr(value, saves), folder)


def _in_folder(save: Callable[[str], Any], folder: Path) -> Path:
    save(str(folder))
    return folder


def _rows_in_file(rows: Sequence[Any], folder: Path, key: str) -> Path:
    """Rows as JSON Lines."""
    folder.mkdir(parents=True)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{key} row {number} should be a dict of columns, found {row!r:.60}")
            try:
                file.write(json.dumps(dict(row)) + "\n")
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{key} row {number} cannot be written as JSON: {error}") from error
    return folder / "rows.jsonl"


def _frame_in_file(frame: Any, folder: Path, key: str) -> Path:
    """A data frame of pandas as Parquet."""
    folder.mkdir(parents=True)
    try:
        frame.to_parquet(folder / "rows.parquet", index=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} cannot be written as Parquet: {error}") from error
    return folder / "rows.parquet"


def _by_name(components: Any) -> Any:
    """Rewards as components: a function in a mapping, and functions or names in a list, or one function alone."""
    if _is_definition(components):
        components = [components]
    if isinstance(components, Mapping):
        return {name: {"reward": one} if callable(one) else one for name, one in components.items()}
    if not isinstance(components, list | tuple):
        return components
    named = {one if isinstance(one, str) else _title(one): {"reward": one} for one in components}
    if len(named) < len(components):
        raise ConfigError("reward.components: two rewards of the list have the same name; give a mapping instead")
    return named


def _title(reward: Any) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))


def _saved(save: Callable[[Path], Path], name: str, folder: Path) -> str:
    """The path that `save` returns, in a folder that is named by its content: another content is another folder."""
    partial = folder / "objects" / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
    path = save(partial)
    digest = hashlib.sha256()
    for file in sorted(file for file in partial.rglob("*") if file.is_file()):
        digest.update(file.relative_to(partial).as_posix().encode() + file.read_bytes())
    target = partial.with_name(f"{name}-{digest.hexdigest()[:12]}")
    if target.is_dir():
        shutil.rmtree(partial)
    else:
        partial.rename(target)
    return str(target / path.relative_to(partial))


def reference_to(function: Any, folder: Path, key: str = "reward") -> str:
    """`file.py:name` of a function, for the other processes that import it.

    A function of a script or a notebook is stored in a file of its own in `folder`, because importing a script would
    run it again: from a script with all imports and definitions around it, from a notebook alone. `key` names it in
    errors. Raises ConfigError for what is no function of a file or cell.
    """
    if not _is_definition(function):
        raise ConfigError(
            f"{key} is a {type(function).__name__} object, which other processes cannot import; define a function that "
            "calls it at the top level of a file or cell, and give the function"
        )
    name = function.__qualname__
    if "<" in name or "." in name:
        raise ConfigError(f"{name} cannot be found by other processes: define it at the top level of a file or cell")
    file = inspect.getsourcefile(function)
    if file is not None and os.path.isfile(file) and function.__module__ != "__main__":
        return f"{os.path.abspath(file)}:{name}"
    text = Path(file).read_text(encoding="utf-8") if file is not None and os.path.isfile(file) else ""
    source = _definitions(text, name) if text else inspect.getsource(function)
    target = folder / "functions" / f"{name}.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{source}\n", encoding="utf-8")
    return f"{target}:{name}"


def _definitions(script: str, function: str) -> str:
    """The imports, functions, classes and constants of a script, without what it does.

    Raises ConfigError if the function, or what it calls, reads a name that only the whole script gives a value.
    """
    tree = ast.parse(script)
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    changed = {name for node in tree.body for name in _changed(node)}
    kept = [node for node in tree.body if isinstance(node, kinds) or _is_constant(node, changed) or _imports(node)]
    given = {name for node in kept if not isinstance(node, kinds) for name in _assigned(node)}
    rest = [node for node in tree.body if node not in kept]
    left = {name: node for node in rest for name in (*_changed(node), *_assigned(node)) if name not in given}
    named = {node.name: node for node in kept if isinstance(node, kinds[2:])}
    reached, waiting = set(), [function]
    while waiting:
        reached.add(found := waiting.pop())
        inside = list(ast.walk(named[found]))
        read = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        own = {one.arg for one in inside if isinstance(one, ast.arg)} | set(_assigned(named[found]))
        for name in sorted((read - own) & left.keys()):
            raise ConfigError(
                f"{found} reads {name}, which the script computes in line {left[name].lineno}; other processes import "
                f"{found} without running the script: move {name} into {found}, or both into a file of their own"
            )
        waiting += sorted((read & named.keys()) - reached)
    tree.body = kept
    return ast.unparse(tree)


def _imports(node: ast.stmt) -> bool:
    """Return whether a statement chooses between imports and does no more: `if TYPE_CHECKING`, `try: import x`."""
    inner = [one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node]
    imports = all(isinstance(one, ast.Import | ast.ImportFrom | ast.Pass) or _is_constant(one, set()) for one in inner)
    return isinstance(node, ast.If | ast.Try) and imports


def _assigned(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a value, also inside of a tuple, a loop or a branch."""
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))


def _targets(node: ast.stmt) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Constant(None))]


def _changed(node: ast.stmt) -> Iterator[str]:
    """The names whose value a statement changes: `settings["run"] = ...`, `count += 1`."""
    for target in _targets(node):
        inner: Any = target
        while isinstance(inner, ast.Subscript | ast.Attribute):
            inner = inner.value
        if isinstance(inner, ast.Name) and (inner is not target or isinstance(node, ast.AugAssign)):
            yield inner.id


def _is_constant(node: ast.stmt, changed: Set[str]) -> bool:
    """A plain value under a name, which the script does not change afterwards: without the change it would be wrong."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    names = [one.id for one in _targets(node) if isinstance(one, ast.Name)]
    if not names or changed & set(names):
        return False
    return _is_plain(node.value)


PURE = frozenset({"re.compile", "set", "frozenset", "tuple", "list", "dict", "Path", "pathlib.Path"})


def _is_plain(value: ast.expr) -> bool:
    """Return whether to evaluate an expression costs and does nothing: literals, and calls of `PURE` with them."""
    if isinstance(value, ast.Call):
        arguments = [*value.args, *(one.value for one in value.keywords)]
        return ast.unparse(value.func) in PURE and all(map(_is_plain, arguments))
    if isinstance(value, ast.BinOp):
        return _is_plain(value.left) and _is_plain(value.right)
    try:
        ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value).startswith("re.") and isinstance(value, ast.Attribute)  # flags: re.DOTALL
    return True
