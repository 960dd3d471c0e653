"""`llms.txt` and `llms-full.txt` of the site: a list of its pages for language models, and all of them as one text.

The format of `llms.txt` is the one of https://llmstxt.org: a title, a summary, and sections of links.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.project_pages import DOCS, project_pages, relink

_LINK = re.compile(r"\]\(((?:[a-z_]+/)?[a-z_0-9]+)\.md(#[^)]*)?\)")


def write_llms(site: Path) -> None:
    """Write both files into the built site."""
    index = relink("index", (DOCS / "index.md").read_text(encoding="utf-8"))
    names = list(dict.fromkeys(match[1] for match in _LINK.finditer(index)))
    names += [name for name in project_pages() if name not in names]
    names += sorted(f"reference/{path.stem}" for path in (DOCS / "reference").glob("*.md"))
    files = {name: DOCS / f"{name}.md" for name in names}
    pages = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    site.joinpath("llms.txt").write_text(overview(index, pages), encoding="utf-8")
    whole = (f"<!-- {name}.html -->\n\n{relink(name, text).strip()}\n" for name, text in pages.items())
    site.joinpath("llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")


def overview(index: str, pages: dict[str, str]) -> str:
    """`llms.txt`: first sentence of the index, its tables as lists of links, and the other pages by their titles."""
    summary = index.partition("\n\n")[2].partition(". ")[0]
    parts = [f"# hone\n\n> {summary}.\n"]
    listed: set[str] = set()
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", index, re.M | re.S):
        lines = []
        for task, cell in re.findall(r"^\| (.+?) \| (.+?) \|$", body, re.M):
            for label, name in re.findall(r"\[([^\]]+)\]\(((?:[a-z_]+/)?[a-z_0-9]+)\.md", cell):
                lines.append(f"- [{label}]({name}.html): {task}")
                listed.add(name)
        parts += [f"## {title}\n\n" + "\n".join(lines) + "\n"] if lines else []
    rest = [f"- [{title_of(text)}]({name}.html)" for name, text in pages.items() if name not in listed]
    return "\n".join([*parts, "## Optional\n", *rest, ""])


def title_of(text: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.M)
    return found[1].replace("`", "") if found else "a page"
