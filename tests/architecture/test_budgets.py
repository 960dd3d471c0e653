"""How large things may be. An exception stands here by name, with its reason."""

import ast
import statistics
from collections import Counter

FILE_LINES, FILE_LINES_P90 = 600, 400
FUNCTION_LINES, FUNCTION_LINES_P90 = 100, 45
CLASS_LINES, PUBLIC_METHODS = 250, 20
FILES_IN_A_FOLDER = 16
SERVICE_LINES = 3_500
NESTING = 4
PARAMETERS = 7

LONG_FILES: dict[str, str] = {}
LONG_CLASSES: dict[str, str] = {}
FULL_FOLDERS: dict[str, str] = {
    "hone/cli": "one file for each command",
}
LONG_FUNCTIONS: dict[str, str] = {}
DEEP_FUNCTIONS: dict[str, str] = {}
WIDE_FUNCTIONS: dict[str, str] = {}

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def _p90(numbers: list[int]) -> float:
    return statistics.quantiles(numbers, n=10)[-1]


def test_files_are_short(products):
    lines = {str(module.path): module.text.count("\n") for module in products}
    assert {path: n for path, n in lines.items() if n > FILE_LINES and path not in LONG_FILES} == {}
    assert _p90([n for n in lines.values() if n > 0]) <= FILE_LINES_P90


def test_the_service_stays_one_room(products):
    """`hone/service` is the protocol: what computes is below it, in `hone/workers/tenants` and `hone/schedule`."""
    assert sum(module.text.count("\n") for module in products if "hone/service/" in str(module.path)) <= SERVICE_LINES


def _classes(products) -> dict[str, tuple[int, int]]:
    """Lines and public methods of each class; a property's setter is the property."""
    sizes = {}
    for module in products:
        for node in module.nodes():
            if isinstance(node, ast.ClassDef):
                methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
                public = sum(not name.startswith("_") for name in methods)
                sizes[f"{module.name}:{node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1, public
    return sizes


def _too_long(size: tuple[int, int]) -> bool:
    return size[0] > CLASS_LINES or size[1] > PUBLIC_METHODS


def test_classes_are_short(products):
    long = {name: size for name, size in _classes(products).items() if _too_long(size) and name not in LONG_CLASSES}
    assert long == {}, "lines and public methods of each"


def _folders(products) -> Counter[str]:
    return Counter(module.path.parent.as_posix() for module in products if module.path.name != "__init__.py")


def test_folders_hold_few_files(products):
    full = {path: n for path, n in _folders(products).items() if n > FILES_IN_A_FOLDER and path not in FULL_FOLDERS}
    assert full == {}


def test_functions_are_short(products):
    lines = {function.name: function.lines for module in products for function in module.functions}
    assert {name: n for name, n in lines.items() if n > FUNCTION_LINES and name not in LONG_FUNCTIONS} == {}
    assert _p90(list(lines.values())) <= FUNCTION_LINES_P90


def _depth(body: list[ast.stmt]) -> int:
    """Levels of blocks in a body; an `elif` is on its `if`'s level; functions within count for themselves."""
    deepest = 0
    for node in body:
        if not isinstance(node, BLOCKS):
            continue
        if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            deepest = max(deepest, 1 + _depth(node.body), _depth(node.orelse))
            continue
        inner = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        inner += [handler.body for handler in getattr(node, "handlers", [])]
        inner += [case.body for case in getattr(node, "cases", [])]
        deepest = max(deepest, 1 + max(_depth(part) for part in inner if part is not None))
    return deepest


def test_functions_are_flat(products):
    deep = {f.name: _depth(f.node.body) for module in products for f in module.functions}
    assert {name: n for name, n in deep.items() if n > NESTING and name not in DEEP_FUNCTIONS} == {}


def _arguments(function) -> list[ast.arg]:
    """What a caller gives: without `self` and `cls`."""
    arguments = function.node.args
    named = [*arguments.posonlyargs, *arguments.args]
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.node.decorator_list)
    return [*(named[1:] if function.is_method and not static else named), *arguments.kwonlyargs]


def test_functions_take_few_parameters(products):
    wide = {f.name: len(_arguments(f)) for module in products for f in module.functions}
    assert {name: n for name, n in wide.items() if n > PARAMETERS and name not in WIDE_FUNCTIONS} == {}


def test_all_arguments_and_results_are_typed(products):
    bare = []
    for function in (f for module in products for f in module.functions):
        spread = [a for a in (function.node.args.vararg, function.node.args.kwarg) if a is not None]
        untyped = [argument.arg for argument in [*_arguments(function), *spread] if argument.annotation is None]
        if untyped or function.node.returns is None:
            bare.append(f"{function.name}: {', '.join(untyped) or 'its result'} has no type")
    assert bare == []


def test_exceptions_are_still_needed(products):
    functions = {function.name: function for module in products for function in module.functions}
    lines = {str(module.path): module.text.count("\n") for module in products}
    assert [path for path in LONG_FILES if lines.get(path, 0) <= FILE_LINES] == []
    classes, folders = _classes(products), _folders(products)
    assert [n for n in LONG_CLASSES if n not in classes or not _too_long(classes[n])] == []
    assert [path for path in FULL_FOLDERS if folders[path] <= FILES_IN_A_FOLDER] == []
    assert [n for n in LONG_FUNCTIONS if n not in functions or functions[n].lines <= FUNCTION_LINES] == []
    assert [n for n in DEEP_FUNCTIONS if n not in functions or _depth(functions[n].node.body) <= NESTING] == []
    assert [n for n in WIDE_FUNCTIONS if n not in functions or len(_arguments(functions[n])) <= PARAMETERS] == []
