"""The generated reference has every key, metric, command, registered name and public function."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest

import hone
from docs.write_reference import pages, sections
from hone.cli.listing import REGISTRIES, registered
from hone.cli.main import COMMANDS
from hone.cli.recipe import KINDS
from hone.config import Config, FromRegistry
from hone.registry import CannotLoad
from hone.tracking.catalogue import METRICS


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages()


def _parts(annotation: Any, marks: list[Any]) -> Iterator[tuple[type[Config], list[Any]]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation, marks
    for inner in get_args(annotation):
        yield from _parts(inner, [*marks, *getattr(annotation, "__metadata__", ())])


def _reachable(cls: type[Config], found: set[type[Config]]) -> None:
    """Every settings class that a run file may contain, with those of registered names."""
    if cls in found:
        return
    found.add(cls)
    for info in cls.model_fields.values():
        for inner, marks in _parts(info.annotation, list(info.metadata)):
            registries = [mark.registry for mark in marks if isinstance(mark, FromRegistry)]
            if not registries:
                _reachable(inner, found)
            for registry in registries:
                for name in registry:
                    try:
                        settings = registry.settings(name)
                    except CannotLoad:
                        continue
                    if settings is not None:
                        _reachable(settings, found)


def page_of(kind: str, path: str) -> str:
    """The page of a section: one for each section of a run file, one for the keys that are in none."""
    top = path.partition(".")[0]
    return f"keys-{kind.replace('_', '-')}{f'-{top}' if top else ''}.md"


def test_every_key_has_a_row(written):
    seen: dict[type[Config], str] = {}
    listed = {
        name: [one for one in sections(name, kind.load(), seen) if not one.same_as] for name, kind in KINDS.items()
    }
    reachable: set[type[Config]] = set()
    for kind in KINDS.values():
        _reachable(kind.load(), reachable)
    nameless = {cls for cls in reachable if set(cls.model_fields) <= {"name"}}  # entries without settings
    assert reachable - nameless - {one.cls for found in listed.values() for one in found} == set()
    missing = [
        one.key(name)
        for kind, found in listed.items()
        for one in found
        for name in one.cls.model_fields
        if not (name == "name" and one.chosen) and f"\n| `{one.key(name)}` |" not in written[page_of(kind, one.path)]
    ]
    assert missing == []


def test_a_row_has_type_default_and_meaning(written):
    meaning = "training steps of the whole run, resumed parts included"
    assert f"| `run.steps` | int >= 1 or null, in steps | `null` | {meaning} |" in written["keys-rl-run.md"]
    assert "| `update.prompts_per_step` | int >= 1, in prompts | required |" in written["keys-rl-update.md"]
    empty = [row for text in written.values() for row in re.findall(r"^\| `[a-z_.<>]+` \| .* \|  \|$", text, re.M)]
    assert [row for row in empty if not row.startswith("| `--")] == []


def test_a_row_is_one_line_with_a_cell_for_each_column(written):
    assert "| `\\n` | process reward model: the text between two steps |" in "".join(written.values())
    for name, text in written.items():
        for table in re.findall(r"^\| .*\n\| ---.*\n(?:.+\n)*", text, re.M):
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(cells) == 1, (name, table)


def test_no_page_of_keys_is_longer_than_a_reader_scrolls(written):
    """All keys of a kind on one page were 58,000 pixels; a row takes about 40."""
    rows = {name: text.count("\n| `") for name, text in written.items() if name.startswith("keys-")}
    assert {name: count for name, count in rows.items() if count > 160} == {}


def test_labels_are_unique_and_links_lead_to_them(written):
    text = "\n".join(written.values())
    labels = re.findall(r"^\((key-[^)]+)\)=$", text, re.M)
    assert len(labels) == len(set(labels))
    assert set(re.findall(r"\(#(key-[^)]+)\)", text)) <= set(labels)


def test_every_metric_command_name_and_function_has_an_entry(written):
    assert [one.name for one in METRICS if f"| `{one.name}` |" not in written["metrics.md"]] == []
    assert [name for name in COMMANDS if f"## `hone {name}`" not in written["commands.md"]] == []
    assert [name for name in hone.__all__ if f"## `hone.{name}`" not in written["api.md"]] == []
    names = {one.name for kind in REGISTRIES for one in registered(kind)}
    assert [name for name in sorted(names) if f"| `{name}` |" not in written["registries.md"]] == []


def test_registered_parts_say_what_they_are(written):
    """The first line of the docstring; presets are data."""
    rows = re.findall(r"^\| `(.+?)` \| (.*?) \|", written["registries.md"], re.M)
    assert [name for name, meaning in rows if not meaning] == []
