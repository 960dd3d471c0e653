"""`report.html`: one file that shows what a run did. It needs no network, server or other file.

    run.json, config.yaml, metrics.jsonl,     --rundata--> RunData --charts--> which charts
    findings.jsonl, rollouts.jsonl.gz                         |
                     page/ (HTML, CSS, JavaScript) + data as JSON --> report.html

Text from models and data sets is embedded as JSON and shown as plain text, and a content security policy in the page
stops it from loading anything. The live page of `hone watch` is the same page, which asks its server for the data.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from hone import __version__
from hone.tracking.base import TrackingError
from hone.tracking.report.answers import ON_PAGE, beside_section, read_beside
from hone.tracking.report.charts import charts
from hone.tracking.report.head import page_parts
from hone.tracking.report.rundata import RunData, curves, read_run, time_by_phase

REPORT_FILE = "report.html"

_SCRIPTS = ("charts.js", "sources.js", "rollout.js", "rollouts.js", "runs.js", "live.js", "main.js")
_MARK = re.compile(r"@@([A-Z]+)@@")


def build_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run folder from the files that it has, and return its path.

    Works during a run. Raises ConfigError if the folder is not a run folder, TrackingError if the page cannot be
    written.
    """
    folder = Path(run_dir)
    page = render(read_run(folder), folder.resolve().name, beside_section(read_beside(folder, ON_PAGE)))
    path = folder / REPORT_FILE
    temporary = folder / f"{REPORT_FILE}.tmp"
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        raise TrackingError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def render(data: RunData, name: str, beside: str = "") -> str:
    """The page of a report as HTML; `beside`: its section of answers before and after."""
    axes, series = curves(data)
    run = {"name": name, "axes": axes, "series": series, "phases": time_by_phase(data), "marks": data.marks}
    embedded = {"runs": [run], "charts": [chart.plain() for chart in charts(data.names)], "rollouts": data.rollouts}
    return page_of(name, embedded, {**page_parts(data), "BESIDE": beside})


def page_of(name: str, embedded: Mapping[str, Any], parts: Mapping[str, str], live: bool = False) -> str:
    """The page as HTML: `embedded` is the data that its scripts read, `parts` the HTML of its placeholders.

    `live`: the page may ask the server that it comes from.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    made = f"Live from the run folder by hone {__version__}." if live else f"Written by hone {__version__} on {now}."
    values = {
        "TITLE": escape(f"{name} · hone"),
        "CONNECT": " connect-src 'self';" if live else "",
        "STYLE": _asset("page.css"),
        "NAME": escape(name),
        "FOOTER": escape(f"{made} The horizontal axis of every chart is the step."),
        "DATA": json_in_page(embedded),
        "SCRIPT": "\n".join(_asset(script) for script in _SCRIPTS),
        **parts,
    }
    return _MARK.sub(lambda match: values[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("hone.tracking.report").joinpath("page", name).read_text(encoding="utf-8")


def json_in_page(value: Any) -> str:
    """JSON that is safe inside a script element, whatever text it contains."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
