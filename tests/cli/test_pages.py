"""The pages for users say what exists: their commands parse, their settings load, and the keys in the text are keys."""

import re
from pathlib import Path

import pytest
import typer

from hone.cli.keys import keys_of
from hone.cli.main import COMMANDS, TAKES_KEYS, main
from hone.cli.recipe import KINDS, load_recipe
from hone.config import key_paths
from hone.registry import resolve
from hone.tracking.catalogue import describe_metric

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{name}.md" for name in ("first_run", "faq", "debugging", "reference", "cli"))]
NAMESPACES = ("reward", "rollout", "train", "critic", "correction", "weights", "schedule", "perf", "eval")


def _commands(page: str) -> list[str]:
    """The lines of code blocks that call hone, joined where they are continued."""
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    blocks = [block for language, block in fenced if language in ("", "bash")]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    starts = re.compile(r"^(?:\$ )?(?:\S+ --\S+ \d+ -m )?hone (?=[a-z])")
    return [starts.sub("", line).partition(" | ")[0].partition(" #")[0] for line in lines if starts.match(line)]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_parse_and_their_settings_load(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in _commands(page):
        name, *arguments = line.split()
        assert name in COMMANDS, line
        app = typer.Typer(add_completion=False)
        app.command(name)(resolve(COMMANDS[name].target))
        arguments = keys_of(arguments) if name in TAKES_KEYS else arguments
        context = typer.main.get_command(app).make_context(name, arguments)  # raises for an unknown option
        given = context.params.get("overrides") or []
        recipe = Path(str(context.params.get("recipe") or ""))
        wrong_on_purpose = "num_generations=8" in given
        if recipe.is_file() and not wrong_on_purpose:
            load_recipe(recipe, given)


def _is_known(name: str) -> bool:
    """Whether a word in backticks, if it looks like a key or a metric, is one."""
    if re.fullmatch(rf"({'|'.join(NAMESPACES)})/[\w/@]+", name):
        return describe_metric(name) is not None
    key = name.partition("=")[0]
    if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) or key.partition(".")[0] not in KEYS_OF_TOP:
        return True
    return key in KEYS or any(key.startswith(f"{free}.") for free in ("rollout.engine", "reward.components"))


KEYS = {key for kind in KINDS.values() for key in key_paths(kind.load())}
KEYS_OF_TOP = {key for key in KEYS if "." not in key}


@pytest.mark.parametrize("page", [page for page in PAGES if "cli" not in page])
def test_keys_and_metrics_in_the_text_exist(page):
    words = re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S))
    theirs = {"data.max_response_length", "algorithm.kl_ctrl.kl_coef", "actor.kl_loss_coef", "rollout.name"}  # verl's
    files = {"run.json", "run.dir"}
    assert [word for word in words if word not in theirs | files and not _is_known(word)] == []
    assert len(words) > 5


def test_the_answer_to_another_framework_s_name_is_the_faq_s(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"\$ hone (config .*)\n(error: .*)\(the top level has", text)
    assert main(shown[0].split()) == 2
    assert capsys.readouterr().err.startswith(shown[1])
