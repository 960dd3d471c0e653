"""Plug-ins: one folder for each foreign project, which hone neither imports nor names outside of one table."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import hone
from hone.cli.listing import REGISTRIES
from hone.engines.registry import ANY, EngineRegistry
from hone.plugins import GROUP, OURS
from hone.registry import Registry, resolve

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(
    path for path in (ROOT / "plugins").iterdir() if path.is_dir() and not path.name.startswith((".", "_"))
)
TABLE = "hone/plugins.py"


def _package(folder):
    return f"hone_{folder.name.replace('-', '_')}"


def test_the_table_has_every_plug_in():
    assert sorted(OURS) == [folder.name for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plug_in_is_a_distribution_with_a_page_a_lock_file_and_tests(folder):
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = _package(folder)
    assert project["name"] == f"hone-{folder.name}"
    assert "hone-rl" in project["dependencies"]
    assert project["entry-points"][GROUP] == {folder.name: f"{package}:register"}
    page = (folder / project["readme"]).read_text(encoding="utf-8")
    for part in (f"# hone-{folder.name}", f"pip install ./plugins/{folder.name}", "**Was run**", "**Never ran**"):
        assert part in page, f"{folder.name}/README.md lacks {part!r}"
    assert (folder / "requirements.lock").is_file()
    assert list((folder / "tests").glob("test_*.py"))
    front = ast.parse((folder / package / "__init__.py").read_text(encoding="utf-8"))
    declared = {ast.unparse(node) for node in front.body if isinstance(node, ast.Assign)}
    assert f"PLUGIN_API = {hone.PLUGIN_API}" in declared, "as a number: a copy of hone's would fit every version"


def test_hone_imports_no_plug_in(package):
    packages = {_package(folder) for folder in FOLDERS}
    wrong = [
        f"{module.path}:{found.line}" for module in package for found in module.imports if found.package in packages
    ]
    assert wrong == []


PROTOCOL = "tinker"  # a plug-in's runtime, and the protocol that `hone serve` speaks: these files have to name it
SPEAKS_IT = ("hone/service/", "hone/cli/serve.py")


def test_hone_names_plug_ins_in_the_table_only(package):
    """Also in comments and messages: hone's parts have to make sense without them."""
    names = {name for kinds in OURS.values() for names in kinds.values() for name in names}
    names |= {part for folder in FOLDERS for part in (f"hone-{folder.name}", _package(folder))}
    named = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b", re.I)
    wrong = [
        f"{module.path}:{number}: {found[0]}"
        for module in package
        if str(module.path) != TABLE and module.part != "migration"  # values of other frameworks' options
        for number, line in enumerate(module.text.splitlines(), 1)
        if (found := named.search(line)) and found[0] != "AutoModel"  # transformers' class
        if not (found[0].lower() == PROTOCOL and str(module.path).startswith(SPEAKS_IT))
    ]
    assert wrong == []


def test_the_table_says_what_plug_ins_register():
    registered: dict[str, dict[str, set[str]]] = {folder.name: {} for folder in FOLDERS}
    homes = {_package(folder): folder.name for folder in FOLDERS}
    for place in REGISTRIES.values():
        registry = resolve(place)
        if registry is EngineRegistry:  # a class for one kind of device adds no name
            kind = registry.backends.kind
            targets = {key[1]: registry.target(key) for key in registry if key[2] == ANY}
        elif isinstance(registry, Registry):
            kind, targets = registry.kind, {name: registry.target(name) for name in registry}
        else:
            continue
        for name, target in targets.items():
            if home := homes.get(target.partition(".")[0]):
                registered[home].setdefault(kind, set()).add(name)
    assert {name: {kind: set(parts) for kind, parts in kinds.items()} for name, kinds in OURS.items()} == registered
