"""How `make docs` turns these pages into a site (Sphinx reads this file)."""

project = "hone"
extensions = ["myst_parser"]
html_theme = "alabaster"
html_theme_options = {"description": "Reinforcement learning of language models", "page_width": "70em"}
html_show_copyright = False
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3
# Links to files beside docs/ lead nowhere within the site; tests/architecture/test_docs.py follows those.
suppress_warnings = ["myst.xref_missing"]
