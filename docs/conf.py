"""How `make docs` turns these pages, and those that docs/write_reference.py writes, into a site."""

project = "hone"
extensions = ["myst_parser"]
html_theme = "furo"  # light and dark, and readable on a phone
html_title = "hone"
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
myst_heading_anchors = 3
# Links to files beside docs/ lead nowhere within the site; tests/architecture/test_docs.py follows those.
suppress_warnings = ["myst.xref_missing"]
