"""TensorBoard event files, written with the `tensorboard` package, without importing torch or TensorFlow."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence

from hone.tracking.base import FINISHED, RolloutRecord, RunInfo, Tracker
from hone.tracking.settings import TensorBoardSettings
from hone.tracking.trackers.completions import table_of

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DataType
    from tensorboard.summary.writer.record_writer import RecordWriter
except ImportError as error:
    raise ImportError(
        f"tracker tensorboard needs the package tensorboard: pip install 'tensorboard>=2.18' ({error})"
    ) from error


class TensorBoardTracker(Tracker):
    """Writes scalars, and completions as text, to `<run folder>/tensorboard`, one event file per launch.

    A resumed run begins with a START record; TensorBoard then drops the steps that are written again.
    """

    def __init__(self, settings: TensorBoardSettings, run: RunInfo) -> None:
        self._settings = settings
        folder = run.run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self.where = str(folder)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if run.resumed_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=run.resumed_from + 1, session_log=start))
        self._file.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._file.flush()

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        table = table_of(self._settings, step, records)
        if table is None:
            return
        text = TensorProto(dtype=DataType.DT_STRING, string_val=[table.markdown().encode("utf-8", "backslashreplace")])
        shape = text.tensor_shape.dim.add()
        shape.size = 1
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=f"completions/{table.name}", metadata=kind, tensor=text)
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

    def close(self, outcome: str = FINISHED) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
