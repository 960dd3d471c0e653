"""The pages for users say what exists: the keys and metrics in their text. tests/docs runs their code blocks."""

import re
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.cli.recipe import KINDS
from hone.config import key_paths
from hone.tracking.catalogue import describe_metric

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{name}.md" for name in ("first_run", "faq", "debugging", "reference", "cli"))]
NAMESPACES = ("reward", "rollout", "train", "critic", "correction", "weights", "schedule", "perf", "eval")


def _is_known(name: str) -> bool:
    """Whether a word in backticks, if it looks like a key or a metric, is one."""
    if re.fullmatch(rf"({'|'.join(NAMESPACES)})/[\w/@]+", name):
        return describe_metric(name) is not None
    key = name.partition("=")[0]
    if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) or key.partition(".")[0] not in KEYS_OF_TOP:
        return True
    return key in KEYS or any(key.startswith(f"{free}.") for free in ("rollout.engine", "reward.components"))


KEYS = {key for kind in KINDS.values() for key in key_paths(kind.load())}
KEYS_OF_TOP = {key for key in KEYS if "." not in key}


@pytest.mark.parametrize("page", [page for page in PAGES if "cli" not in page])
def test_keys_and_metrics_in_the_text_exist(page):
    words = re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S))
    theirs = {"data.max_response_length", "algorithm.kl_ctrl.kl_coef", "actor.kl_loss_coef", "rollout.name"}  # verl's
    files = {"run.json", "run.dir"}
    assert [word for word in words if word not in theirs | files and not _is_known(word)] == []
    assert len(words) > 5


def test_the_answer_to_another_framework_s_name_is_the_faq_s(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"\$ hone (config .*)\n(error: .*)\(the top level has", text)
    assert main(shown[0].split()) == 2
    assert capsys.readouterr().err.startswith(shown[1])
