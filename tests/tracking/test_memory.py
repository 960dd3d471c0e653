"""The tracker of peak memory, on a CPU: what counts as held."""

import json
import mmap

from hone.config import Choice
from hone.tracking.base import RunInfo
from hone.tracking.trackers.memory import MEMORY_FILE, MemoryTracker

MIB = 2**20


def peaks(folder):
    return json.loads((folder / MEMORY_FILE).read_text())["phases"]


def test_pages_of_a_file_count_also_when_they_were_written(tmp_path):
    """Weights are read from a file, and then training writes them. A phase after the last step counts, too."""
    file, size = tmp_path / "weights", 96 * MIB
    with file.open("wb") as empty:
        empty.truncate(size)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as weights:
        for page in range(0, size, mmap.PAGESIZE):
            weights[page]
        tracker = MemoryTracker(Choice(name="memory"), RunInfo(tmp_path))
        tracker.phase("read")
        for page in range(0, size, mmap.PAGESIZE):
            tracker.phase("write") if page == size // 2 else None
            weights[page] = 1
        tracker.log(1, {})
        tracker.phase("written")
        tracker.phase("")
        tracker.close()
    found = peaks(tmp_path)
    assert found["written"] > found["read"] - size / 4
