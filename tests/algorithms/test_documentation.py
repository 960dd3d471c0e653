"""docs/algorithms.md names every registered part, and its examples run and print what it says."""

import contextlib
import io
import re
from pathlib import Path

from hone import algorithms
from hone.algorithms.presets import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_every_name_is_on_the_page():
    names = set(PRESETS).union(*(getattr(algorithms, registry) for registry in algorithms.__all__))
    assert not [name for name in sorted(names) if f"`{name}`" not in PAGE]


def test_the_examples_run():
    example, plugin = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    (expected,) = re.findall(r"prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert printed.getvalue() == expected
    # in a registry of its own, so that the other tests do not see the plug-in
    exec(
        plugin.replace("POLICY_LOSSES.register", "Registry('policy loss').register"), {"Registry": algorithms.Registry}
    )
