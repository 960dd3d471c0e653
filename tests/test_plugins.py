"""Plug-ins: from entry points and the environment, with the version of their API, and where to find those of hone."""

import json
import os
import subprocess
import sys

import pytest

import hone
from hone import plugins
from hone.registry import Registry, UnknownName, unknown

REPORT = """
import json
from hone.plugins import load_plugins
print(json.dumps(load_plugins()))
assert load_plugins() is load_plugins()
"""
API = f"PLUGIN_API = {hone.PLUGIN_API}\n"


def run(code, folder, modules=""):
    """Output of a program that finds the modules of `folder`, which the environment variable names as plug-ins."""
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "HONE_USE_EXTERNAL_MODULES": modules}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def reported(lines, names):
    """Of the plug-ins of a test, name -> problem: others may be installed beside it."""
    found = json.loads(lines[-1])
    return {name: found[name] for name in names}


def write_package(folder, name, points, **modules):
    """A distribution as pip leaves it on the path: metadata beside modules."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[hone.plugins]\n{points}")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


def test_modules_named_in_the_environment_are_imported_once(tmp_path):
    (tmp_path / "first_plugin.py").write_text("print('first is imported')\ndef add():\n    print('called')\n")
    (tmp_path / "second_plugin.py").write_text("raise RuntimeError('no\\ndevice')")
    lines = run(REPORT, tmp_path, "first_plugin, second_plugin ,,absent_plugin, first_plugin:add, first_plugin")
    assert lines[:-1] == ["first is imported", "called"]
    wanted = {
        "first_plugin": "",
        "second_plugin": "RuntimeError: no device",
        "absent_plugin": "ModuleNotFoundError: No module named 'absent_plugin'",
        "first_plugin:add": "",
    }
    assert reported(lines, wanted) == wanted


def test_entry_points_are_loaded_and_called(tmp_path):
    points = "good = their_package:register\nplain = their_package\nbad = their_package:absent\n"
    code = f"{API}def register():\n    print('called')\n"
    write_package(tmp_path, "their_package", points, their_package=code)
    lines = run(REPORT, tmp_path)
    assert lines[:-1] == ["called"]
    found = reported(lines, ("good", "plain", "bad"))
    assert (found["good"], found["plain"]) == ("", "")
    assert found["bad"].startswith("AttributeError: ")


def test_a_plug_in_for_another_version_is_refused_before_it_adds_anything(tmp_path):
    code = "def register():\n    print('called')\n"
    old, silent = f"PLUGIN_API = {hone.PLUGIN_API + 1}\n{code}", code
    points = "old = old_package:register\nsilent = silent_package:register\n"
    write_package(tmp_path, "theirs", points, old_package=old, silent_package=silent)
    (tmp_path / "beside.py").write_text(silent)
    lines = run(REPORT, tmp_path, "beside:register")
    assert lines[:-1] == ["called"], "of the module beside the run, which need not name a version"
    loads = f"and hone {hone.__version__} loads plug-ins with PLUGIN_API = {hone.PLUGIN_API}"
    advice = "install versions of hone-rl and theirs that fit each other"
    assert reported(lines, ("old", "silent", "beside:register")) == {
        "old": f"old_package has PLUGIN_API = {hone.PLUGIN_API + 1}, {loads}; {advice}",
        "silent": f"silent_package does not say PLUGIN_API, {loads}; {advice}",
        "beside:register": "",
    }


def test_registries_load_plug_ins_before_they_list_names_or_call_one_unknown(tmp_path):
    (tmp_path / "adds.py").write_text(
        "from hone.rewards import REWARDS\nREWARDS.register('theirs', 'adds:judge')\ndef judge(): return 1.0\n"
    )
    asks = ("REWARDS.get('theirs')()", "'theirs' in REWARDS", "'theirs' in list(REWARDS)", "REWARDS.target('theirs')")
    answers = [run(f"from hone.rewards import REWARDS\nprint({ask})", tmp_path, "adds")[0] for ask in asks]
    assert answers == ["1.0", "True", "True", "adds:judge"]


def test_a_plug_in_whose_parts_are_imported_first_is_loaded_whole(tmp_path):
    """Python then imports hone's registries from the plug-in's front, which has no function to call so far."""
    front = f"from hone.engines.registry import EngineRegistry\n{API}"
    front += "def register():\n    EngineRegistry.register(model_type='language_model', backend='mine', target='x:y')\n"
    write_package(tmp_path, "theirs", "mine = mine_package:register\n", mine_package=front)
    assert run(f"import mine_package\n{REPORT}", tmp_path)[-1].count('"mine": ""') == 1


def test_importing_registries_loads_no_plug_in(tmp_path):
    code = "from hone.cli.listing import REGISTRIES, resolve\n"
    code += "for place in REGISTRIES.values():\n    resolve(place)\nfrom hone import plugins\nprint(plugins._loaded)"
    assert run(code, tmp_path) == ["None"]


@pytest.fixture
def foreign(monkeypatch):
    """A plug-in of hone's repository, `forge`, that is not installed; and `torn`, which is, and does not load."""
    ours = {"forge": {"colour": ("copper", "brass")}, "torn": {"colour": ("grey",)}}
    monkeypatch.setattr(plugins, "OURS", ours)
    monkeypatch.setattr(plugins, "_loaded", {"torn": "RuntimeError: torn off"})


def test_an_unknown_name_of_a_plug_in_says_what_installs_it(foreign):
    registry = Registry("colour", {"red": "colorsys:rgb_to_hsv"})
    with pytest.raises(UnknownName) as caught:
        registry.get("brass")
    assert str(caught.value) == ("unknown colour 'brass': it is in the plug-in hone-forge: pip install ./plugins/forge")
    assert unknown("colour", "cooper", ["red"]) == (
        "unknown colour 'cooper'; did you mean 'copper', in the plug-in hone-forge: pip install ./plugins/forge "
        "(there is: red)"
    )
    assert unknown("sound", "brass", ["red"]) == "unknown sound 'brass' (there is: red)"


def test_an_unknown_name_of_a_plug_in_that_failed_says_why(foreign):
    assert unknown("colour", "grey", ["red"]) == (
        "unknown colour 'grey': it is in the plug-in hone-torn, which failed to load: RuntimeError: torn off"
    )


def test_the_packages_of_loaded_plug_ins_are_known_and_those_of_broken_ones_are_not(tmp_path):
    (tmp_path / "one_file.py").write_text("")
    (tmp_path / "broken_file.py").write_text("raise RuntimeError")
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    (tmp_path / "a_package" / "inner.py").write_text("def register(): ...")
    code = "from hone.plugins import packages\nfor name, path in packages().items():\n    print(name, path)"
    lines = run(code, tmp_path, "one_file, broken_file, a_package.inner:register")
    found = {line.partition(" ")[0]: line.partition(" ")[2] for line in lines}
    assert found["one_file"] == str(tmp_path / "one_file.py")
    assert found["a_package"] == str(tmp_path / "a_package")
    assert "broken_file" not in found
