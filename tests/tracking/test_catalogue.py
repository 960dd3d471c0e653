"""The catalogue describes every metric that the code records, with its reducer, and nothing else."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from hone.tracking.catalogue import METRICS, describe_metric
from hone.types import Metric, Reducer

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = "reward|rollout|train|critic|process_reward|correction|weights|schedule|perf|eval"
READERS = ("hone/tracking/", "hone/planner/", "hone/cli/", "hone/trainers/policy/health.py")
WRITERS = ("hone/tracking/metrics.py", "hone/tracking/hub.py")  # in the folders of READERS


def _text(node: ast.AST) -> str | None:
    """A string of the source; a `*` for each value in an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@cache
def _trees() -> dict[str, ast.Module]:
    files = sorted(path for path in (ROOT / "hone").rglob("*.py") if "testing" not in path.parts)  # suites invent names
    files += sorted((ROOT / "plugins").glob("*/hone_*/**/*.py"))
    paths = {path.relative_to(ROOT).as_posix(): path for path in files}
    recording = [name for name in paths if not name.startswith(READERS) or name in WRITERS]
    return {name: ast.parse(paths[name].read_text(encoding="utf-8")) for name in recording}


def _named_in_code() -> dict[str, str]:
    """Metric names, or patterns of them, in the strings of the package -> where."""
    found = {}
    for name, tree in _trees().items():
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = _text(node) if id(node) not in parts else None
            if text is not None and re.fullmatch(rf"({NAMESPACES})/[\w@*/]*\w[\w@*/]*", text):
                found[text] = f"{name}:{node.lineno}"
    return found


def _recorded() -> Iterator[tuple[str, str, str]]:
    """(name, reducer, place) of every `"name": Metric.reducer(...)` and `metrics["name"] = Metric.reducer(...)`."""
    for place, tree in _trees().items():
        for node in ast.walk(tree):
            pairs = []
            if isinstance(node, ast.Dict):
                pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                pairs = [(node.targets[0].slice, node.value)]
            for key, value in pairs:
                if isinstance(value, ast.Call) and (made := re.fullmatch(r"Metric\.(\w+)", ast.unparse(value.func))):
                    yield _text(key) or "", made[1], f"{place}:{node.lineno}"


def as_actor(name: str) -> str:
    """What a role with an optimizer of its own is called in the code: `train/lr` for `critic/lr`."""
    return re.sub(r"^(perf/)?(critic|process_reward)/", r"\1train/", name)


def test_names_are_unique_and_found():
    assert len({one.name for one in METRICS}) == len(METRICS)
    assert [one.name for one in METRICS if describe_metric(one.name) is not one] == []
    assert describe_metric("rollout/tools/search/calls").name == "rollout/tools/<tool>/calls"
    assert describe_metric("eval/gsm8k/exact_match/maj@16").name == "eval/<set>/<component>/maj@<n>"
    assert describe_metric("eval/code/tests/late").name == "eval/<set>/<component>/<part>"
    assert describe_metric("reward/mean").own is False
    assert describe_metric("reward/style").own is True
    assert describe_metric("nothing/like/this") is None


def test_every_name_in_the_code_has_an_entry():
    named = _named_in_code()
    assert len(named) > 100
    known = [name for one in METRICS for name in {one.name, as_actor(one.name)}]
    wrong = {
        name: place
        for name, place in named.items()
        if not any(fnmatchcase(entry, name) if "*" in name else entry == name for entry in known)
    }
    assert wrong == {}


def test_every_entry_is_recorded_somewhere():
    named = list(_named_in_code())
    stale = []
    for one in METRICS:
        names = [one.name, as_actor(one.name)]
        exact = [pattern for pattern in named if pattern.count("*") == 0 and pattern in names]
        patterns = [pattern for pattern in named if "*" in pattern and pattern not in ("rollout/*", "reward/*")]
        wide = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
        if not exact and not wide and not one.own and not one.name.startswith("eval/"):  # composed of parts
            stale.append(one.name)
    assert stale == []


def test_reducers_are_the_code_s():
    checked, wrong = 0, []
    for name, reducer, place in _recorded():
        entry = describe_metric(name)
        if entry is not None and not entry.own:
            checked += 1
            wrong += [f"{place}: {name}: {reducer}"] if entry.reducer != Reducer(reducer) else []
    assert wrong == []
    assert checked > 60


@pytest.mark.parametrize("reducer", Reducer)
def test_reducers_are_constructors_of_metric(reducer):
    assert getattr(Metric, reducer)(2.0).reducer is reducer
