"""Configuration of the site that `make docs` builds from these pages and from docs/write_reference.py."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from project_pages import menu, numbered, relink, themed, write_pages

project = "hone"
extensions = ["myst_parser"]
html_theme = "furo"  # light and dark, and readable on a phone
html_title = "hone"
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["hone.css"]
pygments_style = "friendly"
pygments_dark_style = "github-dark"
myst_heading_anchors = 3
# Links to files that are no pages, such as run files, lead nowhere on the site; tests/architecture/test_docs.py checks
# that the files exist.
suppress_warnings = ["myst.xref_missing"]


def setup(app: Any) -> None:
    """Put the pages from outside docs/ on the site."""
    write_pages()
    app.connect("source-read", _place)


def _place(app: Any, name: str, source: list[str]) -> None:
    text = themed(name, relink(name, source[0]))
    source[0] = {"index": menu, "decisions/index": numbered}.get(name, str)(text)
