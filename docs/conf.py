"""Configuration of the site that `make docs` builds from these pages and from docs/write_reference.py."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.llms import write_llms
from docs.project_pages import menu, numbered, relink, themed, write_pages

project = "hone"
extensions = ["myst_parser", "sphinx_copybutton"]
html_theme = "furo"  # light and dark, and readable on a phone
html_title = "hone"
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["hone.css"]
pygments_style = "a11y-high-contrast-light"  # comments with a contrast of 7:1, in both
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True  # of a session only the commands
copybutton_remove_prompts = True
myst_heading_anchors = 3
# Links to files that are no pages, such as run files, lead nowhere on the site; tests/architecture/test_docs.py checks
# that the files exist.
suppress_warnings = ["myst.xref_missing"]


def setup(app: Any) -> None:
    """Put the pages from outside docs/ on the site."""
    write_pages()
    app.connect("source-read", _place)
    app.connect("build-finished", lambda app, error: None if error else write_llms(Path(app.outdir)))


def _place(app: Any, name: str, source: list[str]) -> None:
    text = themed(name, relink(name, source[0]))
    source[0] = {"index": menu, "decisions/index": numbered}.get(name, str)(text)
