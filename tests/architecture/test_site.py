"""The site: every page is in the menu, and links between pages lead to their place on it."""

import json
import re
from pathlib import Path

from docs.project_pages import menu, notebook_page, project_pages, relink, themed

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_menu_once():
    text = menu((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    trees = text.partition("```{toctree}")[2].splitlines()
    pages = [path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index"]
    assert [page for page in [*pages, *project_pages()] if trees.count(page) != 1] == []


def test_a_notebook_is_a_page_with_its_code():
    said, ran = {"cell_type": "markdown", "source": ["# a\n", "b"]}, {"cell_type": "code", "source": ["1 + 1"]}
    assert notebook_page(json.dumps({"cells": [said, ran]})) == "# a\nb\n\n```python\n1 + 1\n```\n"
    assert relink("index", "[a](../recipes/notebook.ipynb)") == "[a](project/recipes-notebook.md)"


def test_links_lead_to_the_place_of_a_page_on_the_site():
    text = "[a](../README.md#set-up) [b](../recipes/gsm8k/README.md) [c](data.md) `[d](../README.md)` [e](https://x.y)"
    assert relink("faq", text) == (
        "[a](project/readme.md#set-up) [b](project/recipes-gsm8k-readme.md) [c](data.md) `[d](../README.md)` "
        "[e](https://x.y)"
    )
    assert relink("project/readme", "[a](docs/data.md) [b](recipes/README.md)") == (
        "[a](../data.md) [b](recipes-readme.md)"
    )
    assert relink("project/recipes-presets-readme", "![c](curves.svg) [d](../../docs/faq.md)") == (
        "![c](../../recipes/presets/curves.svg) [d](../faq.md)"
    )
    assert relink("reference/keys-rl", "[a](../configuration.md)") == "[a](../configuration.md)"


def test_a_picture_follows_the_theme_of_the_site():
    for page, name, folder in (("README.md", "project/readme", "docs/"), ("docs/index.md", "index", "")):
        text = (ROOT / page).read_text(encoding="utf-8")
        (light, dark) = (f"{folder}static/step-{theme}.svg" for theme in ("light", "dark"))
        assert f'srcset="{dark}"' in text
        assert f'src="{light}"' in text
        shown = re.findall(r'<img class="(.+?)" src="(.+?)"', themed(name, text))
        place = "../_static" if "/" in name else "_static"
        assert shown == [("only-light", f"{place}/step-light.svg"), ("only-dark", f"{place}/step-dark.svg")]
        assert "<picture>" not in themed(name, text)


def test_the_light_and_the_dark_picture_differ_only_in_colours():
    texts = [(ROOT / f"docs/static/step-{theme}.svg").read_text(encoding="utf-8") for theme in ("light", "dark")]
    assert texts[0] != texts[1]
    assert len({re.sub("#[0-9a-f]{6}", "", text) for text in texts}) == 1
