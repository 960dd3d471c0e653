"""The metrics of a run as a table."""

import math

import pytest

from hone.tracking.table import MetricsTable

STEPS = [{"step": 0.0, "eval/test/loss": 2.5}, {"step": 1.0, "train/loss": 2.0}, {"step": 2.0, "train/loss": 1.5}]


def test_a_column_has_a_value_for_each_step():
    table = MetricsTable(STEPS)
    assert table.column("step") == [0.0, 1.0, 2.0]
    assert math.isnan(table.column("train/loss")[0])
    assert table.column("train/loss")[1:] == [2.0, 1.5]
    assert table.names == ["step", "eval/test/loss", "train/loss"]
    assert table[-1] == STEPS[2]
    assert table == STEPS


def test_an_unknown_metric_names_the_nearest():
    with pytest.raises(KeyError, match="no metric 'train/los'; did you mean 'train/loss'"):
        MetricsTable(STEPS).column("train/los")
    with pytest.raises(KeyError, match="`names` lists"):
        MetricsTable(STEPS).column("zzz")


def test_it_is_shown_in_a_line():
    assert repr(MetricsTable(STEPS)) == "<metrics of 3 steps, 0 to 2: 3 names, such as 'train/loss'>"
    assert repr(MetricsTable()) == "<metrics of no steps>"


def test_the_frame_has_a_row_for_each_step():
    pytest.importorskip("pandas")
    frame = MetricsTable(STEPS).to_pandas()
    assert frame["train/loss"].tolist()[1:] == [2.0, 1.5]
    assert frame.index.tolist() == [0.0, 1.0, 2.0]
    assert MetricsTable().to_pandas().empty
