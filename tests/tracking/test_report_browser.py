"""The report in a real browser: its script runs without a fault and draws what the run has."""

import gzip
import json
import math
import re
import shutil
import subprocess

import pytest

from hone.tracking.report.build import build_report
from hone.tracking.report.charts import NAMESPACES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)"),
]

EVIL = "</script><script>document.title = 'evil'</script><b>not bold</b>"


FAILED = {"status": "reward_failed", "error": "no answer within 5 s", "reward": None, "logprob_gap": None}


def rollout(step):
    return {
        "step": step, "prompt_id": f"sort/{step}", "status": "ok", "stop_reason": "stop", "error": "",
        "components": {"exact_match": 1.0}, "prompt": f"Sort {step}", "response": f"answer {step} {EVIL}",
        "ground_truth": [1, 2], "response_length": 3, "turns": 1, "weight_versions": [[step - 1, 2], [step, 1]],
        "tokens": [f"answer {step}", " observed", f" {EVIL}", "\n"], "logprob_gap": [1e-5, None, "NaN", -3e-5],
        "rollout_logprobs": [-0.5, None, "-Infinity", -3.0],
    }  # fmt: skip


def rendered(page, tmp_path, script="", width=1400):
    """The page's DOM after its scripts, and `script` behind them, have run."""
    if script:
        # The browser's virtual clock waits for timers, not for frames: it may end before a busy machine draws one.
        script = f"window.requestAnimationFrame = (paint) => setTimeout(paint);{script}"
        text = page.read_text(encoding="utf-8")
        page = page.with_name("scripted.html")
        page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
        f"--disable-sync --no-first-run --disable-dev-shm-usage --window-size={width},1200 --virtual-time-budget=2000"
    )
    done = subprocess.run(
        [BROWSER, *flags.split(), f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def body_facts(dom):
    (tag,) = re.findall(r"<body[^>]*>", dom)
    return dict(re.findall(r'data-([a-z]+)="([^"]*)"', tag))


@pytest.fixture
def run(tmp_path):
    """A run of 60 steps with everything that can be odd in it."""
    folder = tmp_path / "run"
    folder.mkdir()
    steps = []
    for step in range(61):
        one = {"step": step}
        if step % 20 == 0:
            one |= {"eval/test/exact_match": step / 100, "eval/hard/exact_match": 0.0}
        if step:
            one |= {"reward/mean": math.tanh(step / 30), "reward/max": 1.0, "train/kl": 1e-4 * step, "train/lr": 1e-5}
            one |= {"perf/step_s": 2.0, "perf/generate_s": 1.25, "perf/backward_s": 0.5, "perf/driver_s": 0.25}
            one |= {"train/grad_norm": 10.0 ** (step % 7), f"reward/{EVIL}": 0.5}
        steps.append(one)
    steps[7]["train/kl"] = "NaN"
    steps[8]["train/kl"] = "Infinity"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rollouts = [
        {**rollout(step), "sample": sample, "set": "test" if sample == 2 else None, **(FAILED if sample == 0 else {})}
        for step in range(1, 61)
        for sample in range(3)
    ]
    for one in rollouts:
        one["reward"] = one.get("reward", one["sample"] / 2)
    (folder / "rollouts.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(one) + "\n" for one in rollouts).encode())
    )
    (folder / "config.yaml").write_text("run:\n  seed: 3\n")
    return folder


def test_the_page_draws_every_point_and_row_without_a_fault(run, tmp_path):
    dom = rendered(build_report(run), tmp_path)
    facts = body_facts(dom)
    assert facts["faults"] == "0", re.findall(r'id="faults"[^>]*>([^<]*)', dom)
    assert facts["ready"] == "yes"
    # 2 evaluations x 4 + 6 metrics x 60 + the phases' 2 bands, what they leave, the step and the driver, x 60
    assert int(facts["points"]) == 8 + 6 * 60 + 5 * 60
    assert int(facts["rows"]) == 180
    assert dom.count('class="chart wide"') == 1
    assert dom.count('class="odd"') == 2
    assert dom.count("<tr") == 1 + 5 + 8  # the head, five prompts, and the answers to them
    assert dom.count('<tr class="group">') == 5
    assert 'class="token observed"' in dom
    assert "<title>run · hone</title>" in dom
    assert "<b>not bold</b>" not in dom


def test_filters_sorting_hovering_and_themes_work(run, tmp_path):
    script = """
      const pick = (label, value) => {
        const box = document.querySelector(`select[aria-label="${label}"]`);
        box.value = value;
        box.dispatchEvent(new Event("change"));
      };
      const found = {};
      pick("step", "12");
      found.step = document.body.dataset.rows;
      pick("set", "test");
      found.set = document.body.dataset.rows;
      pick("set", ""); pick("step", "");
      pick("status", "reward_failed");
      found.status = document.body.dataset.rows;
      found.error = document.querySelector(".detail .faults").textContent;
      pick("status", "");
      const search = document.querySelector("input[type=search]");
      search.value = "SORT 33";
      search.dispatchEvent(new Event("input"));
      found.search = document.body.dataset.rows;
      search.value = "";
      search.dispatchEvent(new Event("input"));
      found.grouped = document.querySelector("tr.group").innerText;
      [...document.querySelectorAll("button")].find((one) => one.textContent === "by prompt").click();
      const column = (title) => [...document.querySelectorAll("th")].find((th) => th.textContent.startsWith(title));
      const first = (n) => document.querySelector(`tbody tr td:nth-child(${n})`).textContent;
      column("reward").click(); found.best = first(3);
      column("reward").click(); found.worst = first(3);
      column("step").click(); column("step").click(); found.earliest = first(1);
      document.querySelector(".reader > .panel").dispatchEvent(new KeyboardEvent("keydown", { key: "j" }));
      found.second = [...document.querySelectorAll("tbody tr")].findIndex((tr) => tr.className === "chosen");
      document.querySelectorAll("tbody tr")[1].click();
      const token = document.querySelector(".token");
      token.dispatchEvent(new PointerEvent("pointerenter"));
      found.tip = document.getElementById("tip").innerText.split(/\\s+/).join(" ");
      found.colour = token.style.background !== "";
      [...document.querySelectorAll(".modes button")].find((one) => one.textContent === "weights").click();
      const tokens = [...document.querySelectorAll(".token")];
      found.versions = tokens.map((one) => one.style.background.replace(/.*(--c\\d).*/, "$1"));
      const svg = document.querySelector(".chart svg"), box = svg.getBoundingClientRect();
      document.getElementById("theme").click();
      found.theme = document.documentElement.dataset.theme;
      document.querySelector("button.log").click();
      const middle = { clientX: box.left + box.width / 2, clientY: box.top + 20 };
      svg.dispatchEvent(new PointerEvent("pointermove", middle));
      requestAnimationFrame(() => {
        found.reads = [...document.querySelectorAll("#first .read")].map((one) => one.textContent.trim());
        const out = document.createElement("pre");
        out.id = "found";
        out.textContent = JSON.stringify(found);
        document.body.append(out);
      });
    """
    dom = rendered(build_report(run), tmp_path, script)
    assert body_facts(dom)["faults"] == "0", re.findall(r'id="faults"[^>]*>([^<]*)', dom)
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', dom, flags=re.S)[1].replace("&amp;", "&"))
    assert (found["step"], found["set"], found["status"], found["search"]) == ("3", "1", "60", "3")
    assert found["error"] == "no answer within 5 s"
    assert found["grouped"].split() == ["Sort", "60", "2", "answers", "·", "mean", "reward", "0.500"]
    assert (found["best"], found["worst"], found["earliest"], found["second"]) == ("1", "0.500", "1", 1)
    assert "rollout log-prob -0.500 probability 60.7 % trainer − rollout 1.00e-5 weight version 0" in found["tip"]
    assert found["colour"]
    assert found["versions"] == ["--c0", "", "--c0", "--c1"], "the second token is the environment's"
    assert found["theme"] in ("dark", "light")
    steps = {re.match(r"step (\d+)", read)[1] for read in found["reads"] if read}
    assert len(steps) == 1  # one cursor for all charts
    assert 25 <= int(steps.pop()) <= 35


@pytest.mark.parametrize("width", [1400, 1010, 500])
def test_nothing_is_cut_at_the_right(width, run, tmp_path):
    """With a long name and every section: at 1400 px the menu was cut."""
    folder = run.rename(tmp_path / "a-name-of-a-run-that-is-as-long-as-names-are")
    names = [f"{namespace}/x" for namespace in NAMESPACES] + ["other"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, **dict.fromkeys(names, 0.5)}) + "\n")
    script = """
      const links = [...document.querySelectorAll("nav a")].map((one) => one.getBoundingClientRect());
      const header = document.querySelector("header").getBoundingClientRect();
      const inside = (one) => one.left >= 0 && one.right <= header.right && one.bottom <= header.bottom;
      const cut = (one) => one.scrollWidth > one.clientWidth + 1;
      document.body.dataset.found = JSON.stringify({
        links: links.filter((one) => one.width > 0).length, inside: links.every(inside),
        cut: [document.documentElement, document.querySelector("nav")].map(cut),
      }).replaceAll('"', "'");
    """
    found = json.loads(body_facts(rendered(build_report(folder), tmp_path, script, width))["found"].replace("'", '"'))
    # headlines, rollouts, one for each namespace, other, the run; a phone has no room for a menu, and scrolls
    links = 3 + len(NAMESPACES) + 1 if width > 1000 else 0
    assert found == {"links": links, "inside": True, "cut": [False, False]}


def test_a_fault_of_the_page_is_seen(run, tmp_path):
    """The check above can fail: a script that breaks is recorded in the page."""
    dom = rendered(build_report(run), tmp_path, "undefinedFunction();")
    assert body_facts(dom)["faults"] == "1"
    assert "This page has an error: Uncaught ReferenceError: undefinedFunction is not defined" in dom


def test_a_run_without_any_step_has_a_page_that_works(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("run:\n  seed: 3\n")
    facts = body_facts(rendered(build_report(folder), tmp_path))
    assert (facts["faults"], facts["ready"], facts["charts"]) == ("0", "yes", "0")


def test_a_run_of_one_step_has_a_page_that_works(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.0, "train/kl": "NaN", "perf/step_s": 1.0}\n')
    facts = body_facts(rendered(build_report(folder), tmp_path))
    assert (facts["faults"], facts["ready"]) == ("0", "yes")
