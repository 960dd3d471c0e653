"""recipes/notebook.ipynb, executed in a kernel of its own as Jupyter does."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hone.tracking.notebook import LiveChart, svg_of

NOTEBOOK = Path(__file__).resolve().parents[2] / "recipes" / "notebook.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The code cells, with the outputs of this run, by their first line."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=170, kernel_name="python3").execute(
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython")),
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell):
    return "".join(one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in cell.outputs)


def cell_with(cells, source):
    (found,) = [cell for cell in cells if source in cell.source]
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the packages that talk to the kernel
def test_the_notebook_learns_shows_its_charts_and_continues_after_the_stop(cells):
    stopped, ended = cell_with(cells, "except hone.Interrupted"), cell_with(cells, "continued at step")
    at = int(re.search(r"stopped after step (\d+), which is saved", text_of(stopped)).group(1))
    assert 40 <= at < 100
    assert f"continued at step {at + 1}, ended at step 100" in text_of(ended)
    for cell, last in ((stopped, at), (ended, 100)):
        (chart,) = [one.data["text/html"] for one in cell.outputs if "text/html" in one.get("data", {})]
        assert f"(step {last})" in chart  # redrawn after the last step
        assert chart.count("<polyline") == 2
    assert float(text_of(cell_with(cells, "hone.evaluate"))) >= 0.9
    assert text_of(cell_with(cells, "hone.generate")) == "[('cba', 1.0), ('acd', 1.0)]"


def test_the_notebook_is_stored_without_outputs():
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    assert [cell.outputs for cell in stored.cells if cell.cell_type == "code" and cell.outputs] == []


def test_a_chart_draws_each_new_step_once_and_drops_what_a_run_repeats(tmp_path):
    shown, passed = [], []
    chart = LiveChart(tmp_path, shown.append)
    chart.draw()
    assert shown == []
    follow = chart.following(lambda step, metrics: passed.append((step, metrics)))
    for step, value in ((0, 0.0), (1, 1.0), (2, 0.25), (1, 0.5)):
        follow(step, {"reward/mean": value})
    chart.draw()
    chart.draw()
    assert shown == [svg_of([{"step": 0, "reward/mean": 0.0}, {"step": 1, "reward/mean": 0.5}])]
    assert [step for step, _ in passed] == [0, 1, 2, 1]
    (line,) = re.findall(r'<polyline points="([^"]+)"', shown[0])
    assert line == "44.0,136.0 436.0,44.0"
    follow(2, {"reward/mean": float("nan"), "train/policy_loss": float("inf")})
    chart.draw()
    assert re.findall(r'<polyline points="([^"]+)"', shown[1]) == [line], "only finite figures are drawn"
