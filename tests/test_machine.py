"""What a process may use: the affinity, the quota of cgroups of both versions, and their memory."""

import os

import pytest

from hone import machine


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Writes the files that the kernel shows in a container."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")

    return write


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "800000 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "9000000 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_cores_are_no_more_than_the_quota_of_time(container, files, cores):
    container(files)
    assert machine.cores() == cores


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({"memory.max": "max", "memory.current": "5"}, None, None),
        ({"memory.max": 1 << 20, "memory.current": 1 << 18}, 1 << 20, 3 << 18),
        ({"memory/memory.limit_in_bytes": 1 << 20, "memory/memory.usage_in_bytes": 7}, 1 << 20, (1 << 20) - 7),
        ({"memory.max": 1 << 20, "memory.current": 1 << 21}, 1 << 20, 0),
        ({"memory/memory.limit_in_bytes": 1 << 62, "memory/memory.usage_in_bytes": 7}, None, None),  # no limit
    ],
)
def test_memory_is_that_of_the_machine_or_of_the_container(container, tmp_path, monkeypatch, files, total, free):
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  4096 kB\n")
    container(files)
    assert machine.memory() == (total or whole, 4 << 20 if free is None else free)
