"""Settings: documented, defined once, few on the common path; every shipped run file parses."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from hone.cli.recipe import load_recipe
from hone.config import Choice, Config, build, dump, walk
from hone.trainers.policy.settings import PolicyRunConfig

ROOT = Path(__file__).resolve().parents[2]
COMMON_PATH_KEYS = 150

BASES: set[str] = set()  # files under recipes/ that other files name in `defaults` and that are no runs by themselves
SERVICES = {"recipes/serve/tiny.yaml"}  # `hone serve` reads them, and tests/deploy

RECIPES = [p for p in sorted((ROOT / "recipes").rglob("*.yaml")) if str(p.relative_to(ROOT)) not in BASES | SERVICES]

SECOND_DEFAULTS: dict[str, str] = {}  # "function: parameter" -> why it has a default of its own beside the setting's
OFF = (0, 1)  # a pure function may leave a term or a factor out unless it is told


def _settings_classes(products) -> Iterator[type[Config]]:
    for module in products:
        if module.name.endswith("settings"):
            loaded = importlib.import_module(module.name)
            for _, cls in inspect.getmembers(loaded, inspect.isclass):
                if issubclass(cls, Config) and cls.__module__ == module.name:
                    yield cls


def test_every_setting_says_what_it_means(products):
    silent = [
        f"{cls.__module__}.{cls.__qualname__}.{name}"
        for cls in _settings_classes(products)
        for name, info in cls.model_fields.items()
        if not info.description and name != "name"
    ]
    assert silent == []


def test_every_section_says_what_it_is(products):
    assert [
        cls.__qualname__ for cls in _settings_classes(products) if not cls.__doc__ or cls.__doc__ == Config.__doc__
    ] == []


def test_settings_stand_in_settings_files(products):
    wrong = []
    for module in products:
        for node in module.nodes():
            bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
            if bases & {"Config", "Choice"} and not module.name.endswith("settings") and module.part != "config":
                wrong.append(f"{module.path}: {ast.unparse(node).splitlines()[0]}")
    assert wrong == []


def test_a_default_is_written_once(products):
    """A parameter named as a setting of its own package takes its value from there, not from a second default."""
    keys: dict[str, set[str]] = {}
    for cls in _settings_classes(products):
        keys.setdefault(cls.__module__.split(".")[1], set()).update(cls.model_fields)
    wrong = []
    for function in (f for m in products if not m.name.endswith("settings") for f in m.functions):
        arguments = function.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        given = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
        given += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
        for argument, default in given:
            own = argument.arg in keys.get(function.name.split(".")[1].partition(":")[0], set())
            number = isinstance(default, ast.Constant) and type(default.value) in (int, float)
            if (
                own
                and number
                and default.value not in OFF
                and f"{function.name}: {argument.arg}" not in SECOND_DEFAULTS
            ):
                wrong.append(f"{function.name}: {argument.arg} = {ast.unparse(default)}")
    assert wrong == []


def test_no_setting_is_read_with_a_fallback(products):
    """`getattr(config, "key", 3)` would be a second default, and hide a key that does not exist."""
    wrong = []
    for module in products:
        for node in module.nodes():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 3:
                of = ast.unparse(node.args[0]).rpartition(".")[2]
                number = isinstance(node.args[2], ast.Constant) and type(node.args[2].value) in (int, float, str)
                if of in ("config", "settings", "_config", "_settings") and number:
                    wrong.append(f"{module.path}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


# ------------------------------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_every_recipe_parses_and_survives_a_round_trip(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = load_recipe(recipe)
    (tmp_path / "config.yaml").write_text(dump(loaded.config))
    assert load_recipe(tmp_path / "config.yaml").config == loaded.config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_every_recipe_is_described(recipe):
    overview = ROOT / "recipes" / "README.md"
    name = str(recipe.relative_to(ROOT / "recipes"))
    assert (recipe.parent / "README.md").is_file() or (overview.is_file() and name in overview.read_text())


def test_base_files_exist_and_are_used():
    named = {
        str((path.parent / line.partition(":")[2].strip()).resolve().relative_to(ROOT))
        for path in RECIPES
        for line in path.read_text().splitlines()
        if line.startswith("defaults:")
    }
    assert all((ROOT / name).is_file() for name in named)
    assert named >= BASES


def test_the_common_path_has_few_keys():
    """One data set, one reward, one evaluation set, no optional section: what somebody reads who starts."""
    data = {
        "run": {"dir": "runs/x", "steps": 1},
        "model": {"path": "m"},
        "data": {"train": {"path": "x.jsonl"}},
        "reward": {"components": {"r": {"reward": "exact_match"}}},
        "update": {"prompts_per_step": 1},
        "evaluation": {"sets": {"test": {"path": "y.jsonl"}}},
    }
    keys = [key for key, _ in walk(build(PolicyRunConfig, data, "the common path"))]
    assert len(keys) <= COMMON_PATH_KEYS


def test_choices_bear_the_name_they_are_registered_under(products):
    """`name` of a settings class is its default: the name by which a run file finds it."""
    from hone.algorithms import ADVANTAGES, POLICY_LOSSES
    from hone.tracking import TRACKERS

    for registry in (ADVANTAGES, POLICY_LOSSES, TRACKERS):
        for name in registry:
            cls = registry.settings(name)
            if cls is not None:
                assert issubclass(cls, Choice)
                assert cls.model_fields["name"].default == name
