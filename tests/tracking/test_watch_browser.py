"""`hone watch` as people use it: the command, its address, and the page in a real browser while a run goes on."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tracking.chromium import BROWSER, chromium
from tests.tracking.test_watch import line, member, rollout

pytestmark = pytest.mark.browser
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")
WAIT_S = 60


@contextmanager
def watching(*folders):
    """Run `hone watch` on these folders; gives the address that it prints."""
    command = [sys.executable, "-m", "hone", "watch", *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            assert lines[1].startswith("http://127.0.0.1:"), lines
            yield lines[1].strip()
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=WAIT_S)


def step(number):
    return line({"step": number, "reward/mean": number / 10, "perf/step_s": 2.0, "perf/generate_s": 1.0})


def finding(number, title):
    """A mark on the chart of the reward, in the words of a rule."""
    words = {
        "title": title,
        "weight": "hurts",
        "seen": "it <b>fell</b>",
        "meaning": "hacking",
        "tries": ["read", "ask"],
    }
    return line({"step": number, "metrics": ["reward/mean"], **words})


@pytest.fixture
def runs(tmp_path):
    """A run in progress and one that has finished."""
    for name, rate in (("slow", 0.001), ("fast", 0.002)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_bytes(b"".join(map(step, range(1, 6))))
        (folder / "config.yaml").write_text(f"kind: rl\nactor:\n  optimizer:\n    lr: {rate}\n")
        (folder / "rollouts.jsonl.gz").write_bytes(
            b"".join(member(*(rollout(i, sample=j, reward=j / 2) for j in range(3))) for i in range(1, 6))
        )
        (folder / "run.json").write_text(json.dumps({"total_steps": 5 if name == "fast" else 9}))
    (tmp_path / "runs" / "slow" / "findings.jsonl").write_bytes(finding(3, "rewards at odds"))
    return tmp_path / "runs"


def test_the_address_is_the_key(runs):
    with watching(runs / "slow") as address:
        assert b"<title>slow \xc2\xb7 hone</title>" in urllib.request.urlopen(address, timeout=WAIT_S).read()
        base, token = address.rstrip("/").rsplit("/s/")
        for wrong in (f"{base}/", f"{base}/s/{token[:-1]}/", f"{base}/rollouts?run=0"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(wrong, timeout=WAIT_S)
        for wrong, status in (("run?run=7", 404), ("curves?section=a&run=0&points=99999", 422)):
            with pytest.raises(urllib.error.HTTPError, match=str(status)):
                urllib.request.urlopen(address + wrong, timeout=WAIT_S)


@needs_browser
def test_a_page_grows_with_its_runs(runs, tmp_path):
    asyncio.run(follow(runs, tmp_path))


async def follow(runs, tmp_path):
    pictures = os.environ.get("HONE_TEST_PICTURES")
    with watching(runs) as address:
        async with chromium(tmp_path / "browser") as page:
            await page.open(address)
            await page.until("document.body.dataset.ready === 'yes' && Number(document.body.dataset.points) >= 20")
            await page.run("window.before = 'the same page'")
            assert await page.run("document.querySelectorAll('.runs tbody tr').length") >= 2
            # the runs by name, and the only setting in which they differ
            await page.until("document.getElementById('differing').textContent.includes('1 key')")
            cells = (
                "[...document.querySelectorAll('#differing th, #differing td')].map((one) => one.textContent).sort()"
            )
            assert await page.run(cells) == sorted(["key", "slow", "fast", "actor.optimizer.lr", "0.001", "0.002"])
            await page.run("page.choose(page.runs.find((run) => run.name === 'slow'))")
            await page.until("document.body.dataset.rows === '15'")
            tile = "document.querySelector('#part-tiles .value').textContent"
            await page.until(f"{tile} === '5'")

            # what a rule found: a mark with its sentence, where it began, and a list
            await page.until("document.querySelectorAll('.finding').length === 1")
            await page.run("document.querySelector('.finding').dispatchEvent(new PointerEvent('pointerenter'))")
            shown = await page.run("document.getElementById('tip').innerText")
            assert shown.split("\n")[0] == "slow, step 3: rewards at odds"
            assert "it <b>fell</b>" in shown
            await page.until("document.querySelector('#part-findings li')?.innerText.includes('Try read; ask.')")

            # the run takes a step: its curve, tiles and rollouts follow, and the other run is left alone
            with (runs / "slow" / "rollouts.jsonl.gz").open("ab") as file:
                file.write(member(*(rollout(6, sample=j, response="a needle") for j in range(3))))
            with (runs / "slow" / "metrics.jsonl").open("ab") as file:
                file.write(step(6))
            with (runs / "slow" / "findings.jsonl").open("ab") as file:
                file.write(finding(6, "entropy collapse"))
            await page.until(f"{tile} === '6' && document.body.dataset.rows === '18'")
            last = "page.runs.map((run) => [run.name, run.series['reward/mean'].values.at(-1)]).sort()"
            await page.until(f"JSON.stringify({last}) === JSON.stringify([['fast', 0.5], ['slow', 0.6]])")
            assert await page.run("window.before") == "the same page"
            await page.until("document.querySelectorAll('.finding').length === 2")
            assert await page.run("document.querySelector('tr.group').innerText.includes('3 answers')")

            # search in all steps, side by side, and a link to one rollout
            await page.run(
                "{const box = document.querySelector('input[type=search]'); box.value = 'NEEDLE';"
                "box.dispatchEvent(new Event('input'))}"
            )
            await page.until("document.body.dataset.rows === '3'")
            await page.until("document.querySelectorAll('.siblings button').length === 4")
            read = await page.run("document.querySelector('.detail').innerText")
            assert "right printed\n<i>compared</i>" in read
            assert "advantage −1.00" in read or "advantage −1" in read
            assert "advantage" in await page.run("document.querySelector('.rollouts thead').innerText")
            await page.run("document.querySelector('.beside-button').click()")
            assert await page.run("document.querySelectorAll('.answer').length") == 3
            link = await page.run("document.querySelector('.detail h3 a').href")
            assert link.startswith(f"{address}#rollout=15&run=slow")
            if pictures:
                await page.picture(Path(pictures) / "watch-1400.png")

            # on a phone and on a screen, in the light and in the dark, at that link
            for width, dark in ((1400, True), (400, False), (400, True)):
                await page.open("about:blank")
                await page.open(link, width=width, dark=dark)
                await page.until("document.querySelector('.detail h3')?.textContent.includes('step 6')")
                assert await page.run("document.documentElement.scrollWidth") <= width
                assert await page.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
                lost = "document.body.dataset.faults + document.getElementById('lost').textContent"
                assert await page.run(lost) == "0"
            if pictures:
                await page.picture(Path(pictures) / "watch-400.png")
    # without the page there is no server any more
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=WAIT_S)
