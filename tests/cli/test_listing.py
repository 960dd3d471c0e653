"""`hone list`: every registry, by kind, without importing what it names."""

import importlib
import pkgutil

import pytest

import hone
from hone.cli.listing import REGISTRIES, problems, registered
from hone.cli.main import main
from hone.registry import Registry


def test_every_registry_of_the_package_is_in_the_table():
    """A `Registry` that a package creates but the table lacks would be missing from `list` and `doctor`."""
    created = {}
    for module in pkgutil.iter_modules(hone.__path__, "hone."):
        front = vars(importlib.import_module(module.name)) if module.ispkg else {}
        created |= {f"{module.name}:{name}": value for name, value in front.items() if isinstance(value, Registry)}
    listed = {id(value._base) for value in created.values()}  # with the registry that it is the base of
    assert {name for name, value in created.items() if id(value) not in listed} <= set(REGISTRIES.values())


@pytest.mark.parametrize("kind", REGISTRIES)
def test_names_are_listed_with_where_they_are(kind, capsys):
    entries = list(registered(kind))
    assert entries
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == kind
    assert [line.split() for line in lines[1:]] == [[*entry.name.split(), entry.where] for entry in entries]


def test_all_kinds_without_an_argument(capsys):
    assert main(["list"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert headings == list(REGISTRIES)


@pytest.mark.parametrize("kind", [kind for kind in REGISTRIES if kind not in ("presets", "platforms")])
def test_problems_are_reported_per_name(kind):
    assert set(problems(kind)) == {entry.name for entry in registered(kind)}


def test_metrics_are_listed_with_their_meaning(capsys):
    assert main(["list", "metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (found,) = [line for line in lines if line.startswith("rollout/replicas_serving ")]
    assert found.split(maxsplit=1)[1] == "replicas that take requests, or are receiving weights (min, replicas)"
