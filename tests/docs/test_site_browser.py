"""The built site in a real browser: what is copied, read, scrolled and searched there."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tracking.chromium import BROWSER, one_tab

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
BUILT = SITE / "search.html"
CHANGED = max(path.stat().st_mtime for path in [*ROOT.glob("docs/*.*"), *ROOT.glob("docs/static/*")])

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)"),
    pytest.mark.skipif(
        not BUILT.is_file() or BUILT.stat().st_mtime < CHANGED, reason="site/ is missing or old (make test-docs)"
    ),
]

LONGEST_PX = 16_000  # of a page of keys in a window of 1400 px; all keys on one page were 58,000


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Print no requests."""


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with one_tab(tmp_path_factory.mktemp("browser")) as both:
        yield both


@pytest.fixture
def show(tab, address):
    """Open a page of the site; gives what evaluates an expression in it once it has loaded."""
    page, wait = tab

    def opened(name, width=1400, dark=False, until="true"):
        wait(page.open(f"{address}/{name}", width, dark))
        wait(page.until(f"document.readyState === 'complete' && ({until})"))
        return lambda script: wait(page.run(script))

    return opened


def test_a_button_copies_the_commands_of_a_session(show, tab, address):
    page, wait = tab
    ask = show("index.html", until="document.querySelector('button.copybtn')")
    wait(page.call("Browser.grantPermissions", permissions=["clipboardReadWrite"], origin=address))
    place = ask(
        "(() => { const button = document.querySelector('button.copybtn'); button.scrollIntoView({block: 'center'});"
        " const box = button.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2] })()"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        wait(page.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1))
    wait(page.until("document.querySelector('button.copybtn.success')"))
    assert ask("navigator.clipboard.readText()").startswith("make quickstart ")
    blocks = ask("[...document.querySelectorAll('.highlight')].filter((one) => !one.querySelector('.copybtn')).length")
    assert blocks == 0


@pytest.mark.parametrize("dark", [False, True])
def test_comments_in_code_are_readable(show, dark):
    """4.5:1 is what WCAG asks of text (level AA); they had 2.6:1."""
    ask = show("configuration.html", dark=dark)
    contrasts = ask("""(() => {
      const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
      const light = (colour) => channels(colour).slice(0, 3).map((one) => one / 255)
        .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
        .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
      const ground = (one) => {
        const colour = getComputedStyle(one).backgroundColor;
        return channels(colour)[3] === 0 ? ground(one.parentElement) : colour;
      };
      return [...document.querySelectorAll(".highlight .c, .highlight .c1, .highlight .cm")].map((one) => {
        const both = [light(getComputedStyle(one).color), light(ground(one))].sort((a, b) => b - a);
        return (both[0] + 0.05) / (both[1] + 0.05);
      });
    })()""")
    assert contrasts
    assert min(contrasts) >= 4.5


def test_no_page_of_keys_is_absurdly_long(show):
    pages = sorted(SITE.glob("reference/keys-*.html"), key=lambda path: path.stat().st_size)
    ask = show("reference/keys-rl.html")
    sections = ask("[...document.querySelectorAll('article a')].filter((one) => /keys-rl-/.test(one.href)).length")
    assert sections > 10
    for path in pages[-3:]:
        ask = show(f"reference/{path.name}")
        assert ask("document.documentElement.scrollHeight") <= LONGEST_PX, path.name
    ask = show(f"reference/{pages[-1].name}", width=400)
    assert ask("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("words", ["push to hub", "gguf", "sweep", "custom reward", "learning rate"])
def test_the_search_finds_a_task_first(show, words):
    """The site's own search, as its box opens it."""
    found = show(f"search.html?q={words.replace(' ', '+')}", until="document.querySelector('#search-results li a')")
    links = found("[...document.querySelectorAll('#search-results li > a')].slice(0, 3).map((one) => one.pathname)")
    assert "/tasks.html" in links, links


def test_the_landing_page_shows_a_result_before_the_tests(show):
    ask = show("index.html")
    text = ask("document.querySelector('article').innerText")
    assert "0.97" in text
    assert "make test" not in text.partition("0.97")[0]
    assert ask("document.querySelectorAll('article h1').length") == 1
