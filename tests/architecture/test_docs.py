"""Docs: a page for every package, every registered name and command explained, links that lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

import hone
from hone.cli.listing import REGISTRIES, registered
from hone.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
PAGES = {  # package -> its page, where that does not bear its name
    "migration": "migrate",
    "trainers": "training",
    "testing": "extend",
    "service": "serve",
}


def _pages() -> list[Path]:
    folders = [ROOT / "recipes", ROOT / "benchmarks", DOCS / "decisions"]
    found = [*DOCS.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    found += ROOT.glob("plugins/*/*.md")
    return [*found, *(ROOT / name for name in ROOT_PAGES if (ROOT / name).is_file())]


def _docs_text() -> str:
    """The pages that people wrote; docs/reference/ is generated."""
    return "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("name", ROOT_PAGES)
def test_the_project_has_its_front_pages(name):
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("name", sorted(p.parent.name for p in (ROOT / "hone").glob("*/__init__.py")))
def test_every_package_has_a_page(name):
    assert (DOCS / f"{name}.md").is_file() or (DOCS / f"{PAGES.get(name, name)}.md").is_file()


def test_a_folder_says_what_is_in_it(products):
    """The docstring of a folder's `__init__` names each of its files and folders; a file of `cli` is a command."""
    unnamed = []
    for module in products:
        folder = ROOT / module.path.parent
        if module.path.name != "__init__.py" or folder.name == "cli":
            continue
        inside = {path.stem for path in folder.glob("*.py")}
        inside |= {path.parent.name for path in folder.glob("*/__init__.py")}
        named = set(re.findall(r"`(\w+)(?:/|\.py)?`", ast.get_docstring(module.tree) or ""))
        unnamed += [f"{module.name}.{name}" for name in sorted(inside - named - {"__init__", "__main__"})]
    assert unnamed == []


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_registered_name_is_explained(kind):
    text = _docs_text()
    names = [entry.name.split()[0] for entry in registered(kind)]  # an engine's first word is its backend
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{re.escape(name)}\b[^`\n]*`", text)] == []


def test_every_command_is_explained():
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`hone {name}" not in text] == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    wrong = []
    for page in _pages():
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            aim = (page.parent / name).resolve() if name else page
            if not aim.exists() or (anchor and aim.suffix == ".md" and anchor not in _anchors(aim)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert wrong == []


def test_files_named_in_the_docs_exist():
    """`hone/x/y.py`, `plugins/...`, `tests/...` in backticks are files of this project."""
    named = [
        (page, name)
        for page in _pages()
        if page.name != "CHANGELOG.md"
        for name in re.findall(
            r"`((?:hone|plugins|recipes|tests|docs|benchmarks)/[\w./-]+)`", page.read_text(encoding="utf-8")
        )
    ]
    assert [f"{page.relative_to(ROOT)}: {name}" for page, name in named if not (ROOT / name).exists()] == []


def test_no_text_installs_the_other_package_of_this_name():
    """`hone` on PyPI is another program, and this one is not there: extras come from a clone or a wheel."""
    texts = [*_pages(), *(ROOT / "hone").rglob("*.py"), ROOT / "Makefile", *(ROOT / "deploy").rglob("*")]
    wrong = [
        f"{path.relative_to(ROOT)}: {found}"
        for path in texts
        if path.is_file() and path.name != "CHANGELOG.md"
        for found in re.findall(
            r"pip install[^`\n]*?['\" ]hone(?:-rl)?(?:\[[^`\n]*|(?=[ `'\"\n]))", path.read_text("utf-8")
        )
    ]
    assert wrong == []


def test_the_citation_is_of_this_version():
    found = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert found is not None
    assert found[1] == hone.__version__


DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
PARTS = ["Context", "Decision", "What was measured", "What would reverse it"]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem[:4])
def test_a_decision_says_why_and_what_would_reverse_it(page):
    """Ten to forty lines: what is shorter says nothing, and what is longer holds more than one decision."""
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == PARTS
    assert all(part.strip() for part in re.split(r"^## .+$", text, flags=re.M)[1:])
    assert 10 <= len(text.splitlines()) <= 40


def test_decisions_are_numbered_and_in_the_index():
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    index = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8")
    listed = {name: title for title, name in re.findall(r"^- \[(.+)\]\((.+)\)$", index, re.M)}
    titles = {page.name: page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for page in DECISIONS}
    assert listed == titles


@pytest.mark.parametrize(("name", "most"), [("ARCHITECTURE.md", 12 << 10), ("CHANGELOG.md", 12 << 10)])
def test_a_front_page_stays_short_enough_to_be_read(name, most):
    assert (ROOT / name).stat().st_size <= most
