"""Options of 64 scripts of verl have a key here, need none, or are named; each run file loads."""

import shlex
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")

from hone.cli.recipe import load_recipe
from hone.migration.page import run_file
from hone.migration.verl.command import launch_of_script
from hone.migration.verl.reader import migrate_verl

LAUNCHES = Path(__file__).with_name("verl_launches.txt")


def commands():
    """The command of each launch, as a script has it."""
    for block in LAUNCHES.read_text(encoding="utf-8").split("\n\n")[1:]:
        module, *sections = block.strip().splitlines()
        options = []
        for section in sections:
            name, *pairs = shlex.split(section)
            for pair in pairs:
                mark = pair[: len(pair) - len(pair.lstrip("+~"))]
                options.append(mark + ("" if name == "." else f"{name}.") + pair[len(mark) :])
        yield f"python3 -m {module} {shlex.join(options)}"


def test_at_least_95_percent_of_the_options_of_64_scripts_are_understood_and_every_result_loads(tmp_path):
    became: Counter[str] = Counter()
    for number, command in enumerate(commands()):
        migration = migrate_verl(launch_of_script(command, {}, []))
        became["here"] += len(migration.mapped)
        became["dropped"] += len(migration.dropped)
        became["decided"] += len(migration.decided_by_hand)
        became["unknown"] += len(migration.unknown)
        became["launches"] += 1
        file = tmp_path / f"{number}.yaml"
        file.write_text(run_file(migration, "x"), encoding="utf-8")
        load_recipe(file, [])
    options = sum(became.values()) - became["launches"]
    assert became["launches"] == 64
    assert options > 3800
    assert (became["here"] + became["dropped"]) / options >= 0.95
