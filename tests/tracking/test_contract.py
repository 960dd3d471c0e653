"""The trackers that keep no state outside of a run's folder, by the contract; the others: `test_trackers.py`."""

import pytest

from hone.config import Choice
from hone.testing import TrackerContract
from hone.tracking import TRACKERS
from hone.tracking.settings import PrometheusSettings, TensorBoardSettings, TraceSettings
from hone.tracking.trackers.jsonl import read_metrics


class TestJsonl(TrackerContract):
    def make(self, run):
        return TRACKERS.get("jsonl")(Choice(name="jsonl"), run)

    def read(self, folder):
        return [(int(line.pop("step")), line) for line in read_metrics(folder)]


class TestConsole(TrackerContract):
    def make(self, run):
        return TRACKERS.get("console")(Choice(name="console"), run)


class TestTrace(TrackerContract):
    def make(self, run):
        return TRACKERS.get("trace")(TraceSettings(), run)


class TestPrometheus(TrackerContract):
    def make(self, run):
        pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
        return TRACKERS.get("prometheus")(PrometheusSettings(port=0), run)


class TestTensorBoard(TrackerContract):
    def make(self, run):
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        return TRACKERS.get("tensorboard")(TensorBoardSettings(), run)

    def read(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
        events.Reload()
        names = events.Tags()["scalars"]
        return [(event.step, {name: event.value}) for name in names for event in events.Scalars(name)]
