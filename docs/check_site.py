"""Check a built site: links lead to what there is, and each page is readable on a phone and in the dark.

python -m docs.check_site site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

OURS = "hone.css"  # the style sheet that wraps code


class Page(HTMLParser):
    """References of one page: its links, pictures and style sheets, and the ids that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.pictures: list[set[str]] = []  # the classes of each
        self.styles: list[str] = []
        self.fits_a_phone = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "meta" and given.get("name") == "viewport":
            self.fits_a_phone = "width=device-width" in given.get("content", "")
        if tag == "img":
            self.pictures.append(set(given.get("class", "").split()))
        if tag == "link" and given.get("rel") == "stylesheet":
            self.styles.append(given["href"].partition("?")[0])
        named = given.get("src" if tag == "img" else "href", "")
        if tag in ("a", "img", "link") and named:
            self.links.append(named)


def problems(site: Path) -> Iterator[str]:
    """One sentence for each problem."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.resolve().rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        yield from (f"{name}: {one}" for one in _readable(path, page))
        for link in page.links:
            aim, place = urldefrag(link)
            if "://" in aim or aim.startswith("mailto:"):
                continue
            target = (path.parent / unquote(aim.partition("?")[0])).resolve() if aim else path
            if not target.is_file():
                yield f"{name}: the link {link} leads to no file"
            elif place and target in pages and unquote(place) not in pages[target].ids:
                yield f"{name}: the link {link} leads to no place on its page"


def _readable(path: Path, page: Page) -> Iterator[str]:
    if not page.fits_a_phone:
        yield "no viewport for phones"
    if not any(Path(one).name == OURS for one in page.styles):
        yield f"without {OURS}, which wraps code"
    code = [path.parent / one for one in page.styles if Path(one).name == "pygments.css"]
    if not any("prefers-color-scheme: dark" in one.read_text(encoding="utf-8") for one in code if one.is_file()):
        yield "no colours of code for the dark"
    light, dark = (sum(kind in one for one in page.pictures) for kind in ("only-light", "only-dark"))
    if light != dark:
        yield f"{light} pictures for the light, {dark} for the dark"


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]))) or 0)
