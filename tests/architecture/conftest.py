"""The package as data: every module parsed once, with its imports, for the tests of this folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One imported module: `target` is the longest name that the statement gives (`hone.data.packing`)."""

    target: str
    line: int
    in_function: bool
    typing_only: bool  # under `if TYPE_CHECKING`

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


@dataclass(frozen=True)
class Function:
    """A function or method, with the names that lead to it."""

    name: str  # module:Class.method
    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_method: bool

    @property
    def lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path  # relative to the project
    name: str  # dotted; a package's `__init__` has the package's own name

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @property
    def part(self) -> str:
        """The sub-package, or the name of a top-level module: the unit of the import table."""
        return self.name.split(".")[1] if "." in self.name else ""

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree.body, in_function=False, typing_only=False))

    @cached_property
    def functions(self) -> list[Function]:
        return list(_functions(self.tree, self.name + ":", in_class=False))

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)


def _imports(body: list[ast.AST] | list[ast.stmt], in_function: bool, typing_only: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, in_function, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, in_function, typing_only)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imports(node.body, in_function, True)
            yield from _imports(node.orelse, in_function, typing_only)
        else:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(list(ast.iter_child_nodes(node)), inside, typing_only)


def _functions(tree: ast.AST, prefix: str, in_class: bool) -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(f"{prefix}{node.name}", node, in_class)
            yield from _functions(node, f"{prefix}{node.name}.", in_class=False)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.", in_class=True)
        else:
            yield from _functions(node, prefix, in_class)


def _module(path: Path) -> Module:
    parts = path.with_suffix("").parts
    if parts[0] == "plugins" and parts[2:] and parts[2].startswith("hone_"):
        parts = parts[2:]  # its package is installed from this folder
    return Module(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def package() -> list[Module]:
    """Every module of `hone`."""
    return [_module(path.relative_to(ROOT)) for path in sorted((ROOT / "hone").rglob("*.py"))]


@pytest.fixture(scope="session")
def plugins() -> list[Module]:
    """Every module of the packages in plugins/."""
    return [_module(path.relative_to(ROOT)) for path in sorted(ROOT.glob("plugins/*/hone_*/**/*.py"))]


@pytest.fixture(scope="session")
def products(package, plugins) -> list[Module]:
    """Every module that a user installs: of `hone`, and of the packages in plugins/."""
    return [*package, *plugins]


@pytest.fixture(scope="session")
def python_files() -> list[Module]:
    """Every Python file of the project: the package, plug-ins, tests, recipes, benchmarks."""
    folders = ("hone", "plugins", "tests", "recipes", "benchmarks")
    return [_module(p.relative_to(ROOT)) for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
