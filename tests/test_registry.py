"""Registries: lazy, exact about what is missing and why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hone.registry import CannotLoad, Entry, Registry, UnknownName, reason, resolve, unknown


def colours() -> Registry:
    return Registry(
        "colour",
        {
            "red": "colorsys:rgb_to_hsv",
            "blue": Entry("colorsys:hsv_to_rgb", "string:Template"),
            "gone": "no_such_module:x",
            "empty": "colorsys:no_such_attribute",
            "needy": Entry("colorsys:rgb_to_hls", requires=("json", "no_such_package")),
        },
    )


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def test_a_name_gives_the_object_and_its_settings():
    import colorsys
    import string

    registry = colours()
    assert registry.get("red") is colorsys.rgb_to_hsv
    assert registry.settings("red") is None
    assert registry.settings("blue") is string.Template


def test_names_are_sorted_and_membership_imports_nothing():
    assert list(colours()) == ["blue", "empty", "gone", "needy", "red"]
    assert "gone" in colours()
    assert "green" not in colours()


def test_an_unknown_name_lists_what_exists_nearest_first():
    for ask in (colours().get, colours().settings, colours().target):
        with pytest.raises(UnknownName) as caught:
            ask("rde")
        assert str(caught.value) == (
            "unknown colour 'rde'; did you mean 'red'? (there is: blue, empty, gone, needy, red)"
        )
    with pytest.raises(UnknownName, match="'envs'; did you mean 'environments'"):  # and not engines, which is nearer
        Registry("kind", {"engines": "", "environments": ""}).get("envs")
    with pytest.raises(UnknownName, match=r"unknown thing 'x' \(there is: nothing\)"):
        Registry("thing").get("x")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gone", "colour 'gone' (no_such_module:x) cannot be loaded: No module named 'no_such_module'"),
        ("empty", "colour 'empty' (colorsys:no_such_attribute) cannot be loaded: unknown name in colorsys"),
        ("needy", "colour 'needy' needs no_such_package, which is not installed: pip install no-such-package"),
    ],
)
def test_what_cannot_be_loaded_says_why(name, expected):
    with pytest.raises(CannotLoad) as caught:
        colours().get(name)
    assert str(caught.value).startswith(expected)


def test_whatever_a_module_raises_on_import_is_its_reason(tmp_path, monkeypatch):
    (tmp_path / "half_broken.py").write_text("raise RuntimeError('operator nms\\n does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("part", {"it": "half_broken:x"})
    with pytest.raises(CannotLoad, match=r"cannot be loaded: RuntimeError: operator nms does not exist$") as caught:
        registry.get("it")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_probe_reports_every_entry():
    probed = colours().probe()
    assert (probed["red"], probed["blue"]) == ("", "")
    assert "no_such_module" in probed["gone"]
    assert "no_such_package" in probed["needy"]


def test_an_entry_may_be_the_object_itself():
    registry = Registry("thing")
    registry.register("dict", dict, settings=str)
    assert registry.get("dict") is dict
    assert registry.settings("dict") is str
    assert registry.target("dict") == "builtins:dict"
    assert colours().target("blue") == "colorsys:hsv_to_rgb"


def test_a_name_is_registered_once():
    registry = colours()
    with pytest.raises(ValueError, match="colour 'red' is already registered as 'colorsys:rgb_to_hsv'"):
        registry.register("red", "x:y")


def test_unknown_without_a_near_name():
    assert unknown("reward", "zzzz", ["b", "a"]) == "unknown reward 'zzzz' (there is: a, b)"


def test_reason_names_the_class_unless_the_text_says_enough():
    assert reason(ValueError("a\nb")) == "ValueError: a b"
    assert reason(KeyError()) == "KeyError: no message"
    assert reason(ImportError("No module named 'x'")) == "No module named 'x'"


def test_resolve_follows_dots():
    assert resolve("os:path.join") is os.path.join


@pytest.mark.parametrize("reference", ["colorsys", "colorsys:", ":x", ""])
def test_malformed_references(reference):
    with pytest.raises(ValueError, match=r"should be 'package\.module:name' or 'path/to/file\.py:name'"):
        resolve(reference)


def test_a_misspelt_attribute_gets_the_nearest():
    with pytest.raises(AttributeError, match=r"unknown name in colorsys 'rgb_to_hvs'; did you mean 'rgb_to_hsv'\?"):
        resolve("colorsys:rgb_to_hvs")


def test_a_file_is_loaded_once_and_by_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Thing: pass")
    monkeypatch.chdir(tmp_path)
    assert resolve("mine.py:Thing") is resolve(f"{tmp_path}/mine.py:Thing")


def test_a_file_that_fails_is_not_remembered_as_loaded(tmp_path):
    path = tmp_path / "fragile.py"
    path.write_text("x = 1 / 0")
    with pytest.raises(ZeroDivisionError):
        resolve(f"{path}:x")
    path.write_text("x = 4")
    assert resolve(f"{path}:x") == 4


def test_a_file_imports_its_neighbours_and_no_namesake_of_them(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "neighbour_of_task.py").write_text(f"NAME = {name!r}")
        (tmp_path / name / "task.py").write_text("from neighbour_of_task import NAME")
    found = [resolve(f"{tmp_path}/{name}/task.py:NAME") for name in ("one", "two")]
    assert found == ["one", "two"]
    assert not [path for path in sys.path if str(tmp_path) in path]


def test_a_missing_file_says_where_it_was_sought(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportError, match=r"no file gone\.py \(current folder: .*"):
        resolve("gone.py:x")


def test_a_module_that_lies_in_the_current_folder_gets_a_hint(tmp_path):
    (tmp_path / "my_reward.py").write_text("def fn(): pass")
    code = "import sys; sys.path.remove(''); from hone.registry import resolve\n"
    done = run(code + "try: resolve('my_reward:fn')\nexcept ImportError as e: print(e)", tmp_path, PYTHONPATH="")
    assert done.stdout.strip() == (
        "no module 'my_reward' is installed; to use the file in the current folder, write my_reward.py:attribute"
    )


def test_a_file_keeps_its_module_name_in_every_process(tmp_path):
    (tmp_path / "mine.py").write_text("class Thing: pass")
    code = "from hone.registry import resolve; print(resolve('mine.py:Thing').__module__)"
    names = {run(code, tmp_path, PYTHONHASHSEED=str(seed)).stdout for seed in (1, 2)}
    assert len(names) == 1


def test_the_names_of_a_base_belong_to_a_registry_too():
    base = Registry("colour", {"red": "colorsys:rgb_to_hsv"})
    both = Registry("colour", {"grey": "colorsys:rgb_to_yiq"}, base=base)
    base.register("blue", dict)
    assert list(both) == ["blue", "grey", "red"]
    assert (both.get("blue"), both.target("red"), "grey" in base) == (dict, "colorsys:rgb_to_hsv", False)
    assert both.probe() == {"blue": "", "grey": "", "red": ""}
    with pytest.raises(ValueError, match="'red' is already registered as 'colorsys:rgb_to_hsv'"):
        both.register("red", dict)
    with pytest.raises(UnknownName, match="grey"):
        both.get("gray")
