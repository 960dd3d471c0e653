"""Every code block of the pages: Python runs and prints what the page says, commands parse, settings load.

A block that this cannot run has an HTML comment before it, with the reason or the test that runs it. YAML is loaded on
top of a recipe: the one that `<!-- run file: PATH -->` names, or the quickstart's.
"""

import ast
import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hone.cli.recipe import load_run
from hone.composition import Layer, from_yaml, read_layers
from tests.docs.blocks import PAGES, ROOT, Block, read_blocks
from tests.docs.commands import HONE, RECIPES, check_hone

BLOCKS = {page: read_blocks(page) for page in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]
LANGUAGES = {"": "text or commands", "bash": "", "python": "", "yaml": "", "json": "", "toml": "", "{toctree}": ""}


def run_here(block: Block) -> bool:
    return block.language == "python" and block.mark not in ("not run", "run by")


def imports(block: Block) -> str:
    """The imports of a block that is not run: they run."""
    tree = compile(block.text, block.place, "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the Python blocks of each page printed: one process for all, in a folder that has the recipes."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    asked = [[page, [block.text for block in blocks if run_here(block)]] for page, blocks in BLOCKS.items()]
    for page, texts in asked:
        texts += [imports(block) for block in BLOCKS[page] if block.language == "python" and block.mark == "not run"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_blocks"],
        input=json.dumps([one for one in asked if one[1]]), cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {found["page"]: found for found in map(json.loads, done.stdout.splitlines())}


def same(printed: str, shown: str) -> bool:
    """Whether the words are the same; numbers up to the last shown digit, since machines differ; digests alike."""
    number = re.compile(r"(?<![\w.])-?\d+\.\d+(?![\w.])")
    found, said = ([float(x) for x in number.findall(text)] for text in (printed, shown))
    texts = [re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", number.sub("#", text)) for text in (printed, shown)]
    return texts[0] == texts[1] and found == pytest.approx(said, rel=1e-3, abs=2e-3)


@pytest.mark.parametrize("page", [page for page in PAGES if any(one.language == "python" for one in BLOCKS[page])])
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page, ran):
    if page not in ran:
        assert not any(map(run_here, BLOCKS[page]))  # other tests run its blocks
        return
    assert ran[page]["error"] == ""
    printed = iter(ran[page]["printed"])
    outputs = {block.place: next(printed) for block in BLOCKS[page] if run_here(block)}
    for block, following in zip(BLOCKS[page], BLOCKS[page][1:], strict=False):
        if block.place in outputs and following.before.strip().endswith("prints"):
            assert same(outputs[block.place], following.text), outputs[block.place]


def test_outputs_are_compared_by_number_and_by_word():
    assert same("loss 4.7281 of 3\n", "loss 4.728 of 3\n")
    assert not same("loss 4.74 of 3\n", "loss 4.728 of 3\n")
    assert not same("loss 4.728 of 4\n", "loss 4.728 of 3\n")
    assert not same("loss", "lost")


@pytest.mark.parametrize("block", [block for block in ALL if block.mark], ids=lambda block: block.place)
def test_a_block_that_is_not_run_here_says_why(block, capsys):
    if block.mark == "run by":
        test = (ROOT / block.reason).read_text(encoding="utf-8")
        assert Path(block.page).name in test
    if block.mark == "not run":
        with capsys.disabled():
            print(f"\n{block.place} is not run: {block.reason} ", end="")
        assert len(block.reason.split()) > 2
    if block.mark == "run file":
        assert block.language == "yaml"


def test_every_block_has_a_language_that_is_checked():
    assert [block.place for block in ALL if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", [block for block in ALL if block.language in ("json", "toml")], ids=lambda b: b.place)
def test_data_parses(block):
    if block.language == "toml":
        assert tomllib.loads(block.text)
    else:
        assert [json.loads(line) for line in block.text.splitlines()]


YAML = [block for block in ALL if block.language == "yaml" and block.mark not in ("not run", "run by")]


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.place)
def test_settings_on_a_page_load_on_top_of_a_recipe(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = block.reason if block.mark == "run file" else RECIPES["train"]
    load_run([*read_layers(Path(recipe)), Layer(block.place, from_yaml(block.text))], block.place)


def _targets(makefile):
    """The commands of a Makefile; in `.PHONY`, `$(ENGINES:%=test-%)` stands for one command of each engine."""
    names = {name: re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE)[1].split() for name in ("ENGINES", "LIGHT")}
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    names["APART"] = sorted(plugins - {"sglang", *names["LIGHT"]})
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1]
    listed = re.compile(r"\$\((ENGINES|LIGHT|APART):%=(.*?)%\)")
    return listed.sub(lambda found: " ".join(found[2] + one for one in names[found[1]]), phony).split()


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if any(one.commands for one in blocks)])
def test_the_commands_of_a_page_parse_and_their_settings_load(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    targets = _targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    for block in BLOCKS[page]:
        for line in block.commands if block.mark not in ("not run", "run by") else []:
            if found := HONE.match(line):
                check_hone(line[found.end() :], block)
            elif line.startswith("make "):
                assert line.split()[1] in targets, line
            else:  # test_other_programs.py parses it; the files that it names are there
                named = re.findall(r"(?<![\w/=-])((?:benchmarks|deploy|requirements|recipes)/[\w./-]+)", line)
                assert [name for name in named if not (ROOT / name).exists()] == [], line


@pytest.mark.slow
def test_the_environment_of_envs_md_trains(tmp_path):
    """The page's Python as a file next to the command, which is run as it stands."""
    (source,) = [block.text for block in BLOCKS["docs/envs.md"] if block.text.rstrip().endswith("SecondTry)")]
    ((command,),) = [block.commands for block in BLOCKS["docs/envs.md"] if "second_try" in "".join(block.commands)]
    (tmp_path / "second_try.py").write_text(source, encoding="utf-8")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    variables, _, arguments = command.partition(" hone ")
    module = variables.partition("HONE_USE_EXTERNAL_MODULES=")[2]
    smaller = ["update.prompts_per_step=8", "evaluation.every_steps=0"]
    done = subprocess.run(
        [sys.executable, "-m", "hone", *shlex.split(arguments), *smaller],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": f".:{ROOT}", "HONE_USE_EXTERNAL_MODULES": module, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with gzip.open(tmp_path / "runs" / "second_try" / "rollouts.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    added = {row["rollout_logprobs"].count(None) for row in rows}  # <user> f <assistant>, and an end token if cut off
    assert added <= {0, 3, 4}
    assert 3 in added
