"""The report in a real browser: its script runs without a fault and draws what the run has."""

import gzip
import json
import math
import re

import pytest

from hone.tracking.report.build import build_report
from hone.tracking.report.charts import NAMESPACES
from tests.tracking.chromium import BROWSER, one_tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)"),
]

EVIL = "</script><script>document.title = 'evil'</script><b>not bold</b>"


FAILED = {"status": "reward_failed", "error": "no answer within 5 s", "reward": None, "logprob_gap": None}


def rollout(step):
    return {
        "step": step, "prompt_id": f"sort/{step}", "status": "ok", "stop_reason": "stop", "error": "",
        "components": {"exact_match": 1.0}, "question": f"Sort {step}", "response": f"answer {step} {EVIL}",
        "prompt": f"<|im_start|>system\nYou sort.<|im_end|>\n<|im_start|>user\nSort {step}<|im_end|>\n",
        "ground_truth": [1, 2], "response_length": 3, "turns": 1, "weight_versions": [[step - 1, 2], [step, 1]],
        "tokens": [f"answer {step}", " observed", f" {EVIL}", "\n"], "logprob_gap": [1e-5, None, "NaN", -3e-5],
        "rollout_logprobs": [-0.5, None, "-Infinity", -3.0],
    }  # fmt: skip


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with one_tab(tmp_path_factory.mktemp("browser")) as both:
        yield both


@pytest.fixture
def show(tab):
    """Open the report of a run folder; gives what evaluates an expression in it."""
    page, wait = tab

    def opened(folder, width=1400):
        wait(page.open(build_report(folder).as_uri(), width))
        wait(page.until("document.body.dataset.ready === 'yes'"))
        return lambda script: wait(page.run(script))

    return opened


def until(tab, condition):
    page, wait = tab
    wait(page.until(condition))


FAULTS = "[document.body.dataset.faults, document.getElementById('faults').textContent].join('')"


@pytest.fixture
def run(tmp_path):
    """A run of 60 steps with everything that can be odd in it."""
    folder = tmp_path / "run"
    folder.mkdir()
    steps = []
    for step in range(61):
        one = {"step": step}
        if step % 20 == 0:
            one |= {"eval/test/exact_match": step / 100, "eval/hard/exact_match": 0.0, "eval/hard/truncated": 0.0}
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
        if one["sample"] == 1:
            one |= {"response": " ", "tokens": []}
        one["reward"] = one.get("reward", one["sample"] / 2)
        if one["set"]:
            one |= {"prompt_id": "held out/1", "sample": 0}
    (folder / "rollouts.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(one) + "\n" for one in rollouts).encode())
    )
    (folder / "config.yaml").write_text(
        "run:\n  seed: 3\nactor:\n  optimizer: {lr: 0.0002}\ndata:\n  train: {path: rows.jsonl}\n"
    )
    (folder / "run.json").write_text(json.dumps({"hardware": "2 cores, 6 GiB", "commit": "", "total_steps": 60}))
    finding = {"title": "odd", "weight": "hurts", "seen": "a", "meaning": "b", "tries": [], "metrics": ["train/kl"]}
    (folder / "findings.jsonl").write_text(json.dumps({"step": 9, **finding}) + "\n")
    return folder


def test_the_page_draws_every_point_and_row_without_a_fault(run, show):
    ask = show(run)
    assert ask(FAULTS) == "0"
    # 2 evaluations x 4 + the truncated share x 4 + 6 metrics x 60 + the phases' 2 bands, what they leave, the step and
    # the driver, x 60
    assert int(ask("document.body.dataset.points")) == 8 + 4 + 6 * 60 + 5 * 60
    assert int(ask("document.body.dataset.rows")) == 180
    count = "document.querySelectorAll('{}').length".format
    assert ask(count(".chart.wide")) == 1
    assert ask(count("path.odd")) == 2
    assert ask(count(".rollouts tr")) == 1 + 5 + 8  # the head, five prompts, and the answers to them
    assert ask(count("tr.group")) == 5
    assert ask("document.title") == "run · hone"
    assert ask("document.body.innerText.includes('<b>not bold</b>')") is True
    ask("document.querySelector('.rollouts tbody tr:not(.group)').click()")
    assert ask(count(".token.observed")) > 0


def test_filters_sorting_hovering_and_themes_work(run, show):
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
      const heads = () => [...document.querySelectorAll(".rollouts th")];
      const column = (title) => heads().find((th) => th.textContent.startsWith(title));
      const first = (n) => document.querySelector(`.rollouts tbody tr td:nth-child(${n})`).textContent;
      column("reward").click(); found.best = first(3);
      column("reward").click(); found.worst = first(3);
      column("step").click(); column("step").click(); found.earliest = first(1);
      document.querySelector(".reader > .panel").dispatchEvent(new KeyboardEvent("keydown", { key: "j" }));
      found.second = [...document.querySelectorAll(".rollouts tbody tr")].findIndex((tr) => tr.className === "chosen");
      document.querySelectorAll(".rollouts tbody tr")[2].click();
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
        resolve(found);
      });
    """
    ask = show(run)
    found = ask(f"new Promise((resolve) => {{ {script} }})")
    assert ask(FAULTS) == "0"
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


def test_the_table_shows_what_the_user_asked_and_that_an_answer_is_empty(run, show):
    ask = show(run)
    assert ask("document.querySelector('tr.group .asked').textContent") == "Sort 60"
    ask("[...document.querySelectorAll('button')].find((one) => one.textContent === 'by prompt').click()")
    texts = "[...document.querySelectorAll('.rollouts td.text')].map((one) => one.textContent)"
    answers = ask(texts)
    assert set(answers[::2]) == {f"Sort {step}" for step in range(54, 61)}
    assert "(empty)" in answers[1::2]
    ask("[...document.querySelectorAll('.rollouts tbody tr')].find((one) => one.innerText.includes('(empty)')).click()")
    assert ask("document.querySelector('.detail .text-box:not(.short)').innerText") == "(empty)"


def test_the_facts_name_hardware_commit_learning_rate_and_data(run, show):
    ask = show(run)
    pairs = ask("[...document.querySelectorAll('dt')].map((one) => [one.textContent, one.nextSibling.textContent])")
    facts = dict(pairs)
    wanted = {"Hardware": "2 cores, 6 GiB", "Learning rate": "0.0002", "Data": "rows.jsonl", "Seed": "3"}
    assert facts == {**facts, **wanted, "Commit": "none: the run was launched outside of git"}


def test_every_term_is_explained_under_the_pointer(run, show, tab):
    """Facts, tiles, marks, legends, charts and heads of tables: a title that says more than the term."""
    ask = show(run)
    open_all(ask, tab)
    terms = "dt, th, .badge, .legend > span, .chart h3, .detail h4, .components, .tile .what, .tool, .modes button"
    silent = f"""[...document.querySelectorAll("{terms}")].filter((one) => {{
      const title = one.closest("[title]")?.title.trim() ?? "";
      return !title || title === one.textContent.trim();
    }}).map((one) => one.outerHTML)"""
    assert ask(silent) == []
    kinds = [kind.strip() for kind in terms.split(",")]
    assert ask(f"{json.dumps(kinds)}.filter((kind) => !document.querySelector(kind))") == []
    about = ask("document.querySelector('.finding').getAttribute('aria-label')")
    assert about == "step 9: odd: a"
    ask("document.querySelector('.finding').dispatchEvent(new PointerEvent('pointerenter'))")
    assert ask("document.getElementById('tip').innerText").startswith("step 9: odd")


def test_an_axis_shows_no_sign_that_no_value_has(run, show, tab):
    """A curve that is 0 throughout has the mark 0 alone, and no axis goes below 0 or above it for looks."""
    ask = show(run)
    open_all(ask, tab)
    charts = ask("""page.charts.filter((one) => !one.stack).map((one) => ({
      title: one.spec.title, marks: one.marks.map(([value]) => value),
      values: one.series.flatMap((curve) => curve.values).filter(Number.isFinite),
    }))""")
    flat = {one["title"]: one["marks"] for one in charts if len(set(one["values"])) == 1}
    assert flat["truncated"] == [0]
    assert flat["Learning rate"] == [1e-5]
    for one in charts:
        low, high = min(one["values"]), max(one["values"])
        assert low < 0 or min(one["marks"]) >= 0, one
        assert high > 0 or max(one["marks"]) <= 0, one


def open_all(ask, tab):
    """Open every section of charts, and wait until they are drawn."""
    ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    until(tab, "page.charts.every((one) => one.width)")


@pytest.mark.parametrize("width", [1400, 1010, 400])
def test_nothing_is_cut(width, run, show, tab, tmp_path):
    """With a long name and every section: at 1400 px the menu was cut, and now it is one line."""
    folder = run.rename(tmp_path / "a-name-of-a-run-that-is-as-long-as-names-are")
    names = [f"{namespace}/x" for namespace in NAMESPACES] + ["other", "reward/" + "a_long_name_of_a_part" * 3]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, **dict.fromkeys(names, 123456.789)}) + "\n")
    ask = show(folder, width)
    open_all(ask, tab)
    found = ask("""(() => {
      const boxes = (within, kind) => [...within.querySelectorAll(kind)].map((one) => one.getBoundingClientRect());
      const links = boxes(document, "nav a").filter((one) => one.width);
      const [header] = boxes(document, "header");
      const inside = (one) => one.left >= 0 && one.right <= header.right && one.bottom <= header.bottom;
      const cut = (one) => one.scrollWidth > one.clientWidth + 1;
      const cards = ["html", "nav", ".tile", ".tile div", ".chart", ".chart div", ".facts dl", ".facts dd"];
      const apart = (one) => {
        const [frame] = boxes(one.host, "svg"), texts = boxes(one.svg, "text");
        const across = (text) => text.left >= frame.left - 0.5 && text.right <= frame.right + 0.5;
        const within = (text) => across(text) && text.top >= frame.top && text.bottom <= frame.bottom;
        const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2;
        return texts.every((a, i) => within(a) && !texts.some((b, j) => i < j && meet(a, b)));
      };
      return {
        links: links.length, lines: new Set(links.map((one) => one.top)).size, inside: links.every(inside),
        cut: cards.filter((kind) => [...document.querySelectorAll(kind)].some(cut)),
        labels: page.charts.filter((one) => !apart(one)).map((one) => one.spec.title),
      };
    })()""")
    # headlines, before and after, rollouts, one for each namespace, other, the run; a phone has no room for a menu
    links = 4 + len(NAMESPACES) + 1 if width > 1000 else 0
    lines = {1400: 1, 1010: 2, 400: 0}[width]
    assert found == {"links": links, "lines": lines, "inside": True, "cut": [], "labels": []}


def test_a_fault_of_the_page_is_seen(run, show, tab):
    """The check above can fail: a script that breaks is recorded in the page."""
    ask = show(run)
    ask("{ setTimeout(() => undefinedFunction()); }")
    until(tab, "document.body.dataset.faults === '1'")
    assert "This page has an error: Uncaught ReferenceError: undefinedFunction is not defined" in ask(FAULTS)


def test_a_run_without_any_step_has_a_page_that_works(show, tmp_path):
    (tmp_path / "config.yaml").write_text("run:\n  seed: 3\n")
    ask = show(tmp_path)
    assert ask(FAULTS + " + document.body.dataset.charts") == "00"


def test_a_run_of_one_step_has_a_page_that_works(show, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.0, "train/kl": "NaN", "perf/step_s": 1.0}\n')
    assert show(tmp_path)(FAULTS) == "0"
