"""Additions of the site to docs/: the README, recipes and other pages from outside, working links, the menu."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FOLDER = "project"
NAMED = ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "SECURITY")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)
PICTURE = re.compile(r"<picture>\s*<source [^>]*srcset=\"(.+?)\">\s*<img src=\"(.+?)\" alt=\"(.+?)\">\s*</picture>")
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def project_pages() -> dict[str, Path]:
    """Document name on the site -> the file, relative to the project."""
    files = [Path(f"{name}.md") for name in NAMED]
    files += [path.relative_to(ROOT) for path in sorted((ROOT / "recipes").rglob("README.md"))]
    files += [path.relative_to(ROOT) for path in sorted((ROOT / "recipes").glob("*.ipynb"))]
    return {f"{FOLDER}/{'-'.join(path.with_suffix('').parts).lower()}": path for path in files}


def write_pages() -> None:
    """Copy the pages into docs/project/, which git ignores. Sphinx reads only files below docs/."""
    (DOCS / FOLDER).mkdir(exist_ok=True)
    for old in (DOCS / FOLDER).glob("*.md"):
        old.unlink()
    for name, path in project_pages().items():
        text = (ROOT / path).read_text(encoding="utf-8")
        (DOCS / f"{name}.md").write_text(notebook_page(text) if path.suffix == ".ipynb" else text, encoding="utf-8")


def notebook_page(text: str) -> str:
    """A notebook as a page: its code is shown, not run."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells) + "\n"


def relink(name: str, text: str) -> str:
    """The text of a document, whose links to other pages lead to their place on the site."""
    origins = project_pages()
    places = {path: f"{name}.md" for name, path in origins.items()}
    origin = origins.get(name, Path("docs") / f"{name}.md")

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        aim = Path(os.path.normpath(origin.parent / target))
        if aim in places:
            place = places[aim]
        elif aim.parts[0] == "docs":
            place = str(aim.relative_to("docs"))
        elif name in origins:  # an image, or a file that is not on the site
            place = f"../{aim}"
        else:
            return match[0]
        return f"]({os.path.relpath(place, Path(name).parent)}{anchor})"

    parts = CODE.split(text)
    return "".join(part if number % 2 else LINK.sub(moved, part) for number, part in enumerate(parts))


def themed(name: str, text: str) -> str:
    """The text of a document, whose `<picture>`s follow the theme that the reader chose on the site.

    In the files, the picture follows the system's setting, or the theme on GitHub; Furo has a switch of its own.
    """
    static = os.path.relpath("_static", Path(name).parent)

    def both(match: re.Match[str]) -> str:
        dark, light, alt = match.groups()
        return "\n".join(
            f'<img class="{kind}" src="{static}/{Path(source).name}" alt="{alt}">'
            for kind, source in (("only-light", light), ("only-dark", dark))
        )

    return PICTURE.sub(both, text)


def menu(index: str) -> str:
    """The index with a menu: its tables as toctrees, and the pages from outside docs/."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", index, re.M | re.S)
    listed: dict[str, str] = {}  # page -> the first section that names it
    for title, body in sections:
        for page in re.findall(r"\]\(((?:[a-z_]+/)?[a-z_]+)\.md\)", body):
            listed.setdefault(page, title)
    trees = [(title, [page for page, found in listed.items() if found == title]) for title, _ in sections]
    trees.append(("Project", list(project_pages())))
    menus = [
        "\n".join(["```{toctree}", f":caption: {title}", ":hidden:", ":maxdepth: 1", "", *names, "```"])
        for title, names in trees
    ]
    return "\n\n".join([index, *menus])


def numbered(index: str) -> str:
    """The index of a folder, with its numbered pages in the menu."""
    return "\n".join([index, "```{toctree}", ":hidden:", ":glob:", "", "[0-9]*", "```"])
