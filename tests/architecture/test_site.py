"""The site: every page is in the menu, links lead to their place on it, and `make docs` checks what it built."""

import json
import re
from pathlib import Path

from docs.check_site import problems
from docs.llms import overview, title_of, write_llms
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


def test_a_built_site_is_checked(tmp_path):
    """As `make docs` does: for phones, for the dark, and every link to a file or a place on a page."""
    (tmp_path / "_static" / "styles").mkdir(parents=True)
    (tmp_path / "_static" / "pygments.css").write_text("@media (prefers-color-scheme: dark) { pre { color: #fff } }")
    (tmp_path / "_static" / "hone.css").write_text("pre { white-space: pre-wrap }")
    (tmp_path / "_static" / "a.svg").write_text("<svg/>")
    head = (
        '<meta name="viewport" content="width=device-width"/><link rel="stylesheet" href="_static/hone.css?v=1"/>'
        '<link rel="stylesheet" href="_static/pygments.css"/>'
    )
    pictures = "".join(f'<img class="only-{kind}" src="_static/a.svg">' for kind in ("light", "dark"))
    links = '<a href="b.html#there">b</a> <a href="https://x.y/none">x</a> <a href="#top">up</a>'
    good = f'{head}<h1 id="top">a</h1>{links}{pictures}'
    (tmp_path / "a.html").write_text(good)
    (tmp_path / "b.html").write_text(f'{head}<h1 id="there">b</h1>')
    assert list(problems(tmp_path)) == []
    for old, new, said in [
        ("b.html#there", "b.html#gone", "the link b.html#gone leads to no place on its page"),
        ("b.html#there", "project/readme.html", "the link project/readme.html leads to no file"),
        ('src="_static/a.svg"', 'src="a.svg"', "the link a.svg leads to no file"),
        ("#top", "#bottom", "the link #bottom leads to no place on its page"),
        ("viewport", "author", "no viewport for phones"),
        ("hone.css", "a.svg", "without hone.css, which wraps code"),
        ("only-dark", "", "1 pictures for the light, 0 for the dark"),
    ]:
        (tmp_path / "a.html").write_text(good.replace(old, new))
        assert f"a.html: {said}" in list(problems(tmp_path))
    (tmp_path / "a.html").write_text(good)
    (tmp_path / "_static" / "pygments.css").write_text("pre { color: #000 }")
    assert list(problems(tmp_path)) == [f"{name}.html: no colours of code for the dark" for name in ("a", "b")]


def test_no_code_is_cut_at_the_right():
    """Neither on a phone nor on a wide screen: what does not fit wraps."""
    css = (ROOT / "docs" / "static" / "hone.css").read_text(encoding="utf-8")
    always = re.sub(r"@media[^{]*\{.*?\n\}", "", css, flags=re.S)
    (rule,) = re.findall(r"\.highlight pre \{(.*?)\}", always, re.S)
    assert {"white-space: pre-wrap;", "overflow-wrap: anywhere;"} <= {line.strip() for line in rule.splitlines()}


def test_language_models_get_a_list_of_the_pages_and_their_text(tmp_path):
    """Each page of the index with its task, the others by title; and the text of all, with links to the site."""
    write_llms(tmp_path)
    short, whole = ((tmp_path / name).read_text(encoding="utf-8") for name in ("llms.txt", "llms-full.txt"))
    assert short.startswith("# hone\n\n> hone trains language models with reinforcement learning after pre-training.\n")
    assert "- [watch runs](watch.html): watch runs in a live page, compare them, read their rollouts" in short
    named = set(re.findall(r"\]\(([\w/-]+)\.html\)", short))
    pages = {path.stem for path in (ROOT / "docs").glob("*.md") if path.stem not in ("index", "tasks")}
    assert pages <= named
    assert all(f"<!-- {name}.html -->" in whole for name in pages)
    assert "hone watch runs/mine" in whole
    assert overview("# x\n\nOne thing. Two.\n", {"a": "# The `A` page\n"}).endswith(
        "## Optional\n\n- [The A page](a.html)\n"
    )
    assert title_of("no heading") == "a page"


def test_the_search_finds_tasks_by_their_usual_names():
    """Titles count most in the search of the site."""
    titles = re.findall(r"^## (.+)$", (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8"), re.M)
    text = " ".join(titles).lower()
    assert [
        words for words in ("push to hub", "gguf", "sweep", "custom reward", "learning rate") if words not in text
    ] == []
