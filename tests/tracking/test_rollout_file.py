"""rollouts.jsonl.gz: members that any gzip reads, torn and damaged files, and the limit."""

import gzip
import json
import random
import subprocess

import pytest

from hone.config import Choice
from hone.planner.lengths import recorded_lengths
from hone.tracking.base import RunInfo, TrackingError
from hone.tracking.settings import JsonlSettings
from hone.tracking.trackers.jsonl import ROLLOUTS_FILE, JsonlTracker, RolloutFile, rollout_lines


def write(folder, *steps, resumed_from=None):
    tracker = JsonlTracker(Choice(name="jsonl"), RunInfo(folder, resumed_from=resumed_from))
    for step in steps:
        for name in (None, "held_out"):
            lines = [{"step": step, "set": name, "response": "1 3 " * 50, "response_length": step} for _ in range(2)]
            tracker.rollouts(step, lines)
    tracker.close()
    return folder / ROLLOUTS_FILE


def steps_of(path):
    return [json.loads(line)["step"] for line in rollout_lines(path)]


def test_the_file_is_one_that_gzip_reads_and_smaller(tmp_path):
    path = write(tmp_path, 1, 2)
    unpacked = subprocess.run(["gzip", "-dc", str(path)], capture_output=True, check=True).stdout
    assert [json.loads(line)["step"] for line in unpacked.splitlines()] == [1] * 4 + [2] * 4
    assert gzip.decompress(path.read_bytes()) == unpacked == b"".join(rollout_lines(path))
    assert path.stat().st_size < len(unpacked) / 2
    assert path.read_bytes()[4:8] == bytes(4), "no time, so two equal runs have equal files"
    plain = tmp_path / "rollouts.jsonl"
    plain.write_bytes(unpacked)
    assert list(rollout_lines(plain)) == list(rollout_lines(path)), "unpacked by hand, it is read too"
    assert recorded_lengths(path) == recorded_lengths(plain) == [1, 1, 2, 2]


def test_a_file_cut_anywhere_is_read_to_its_last_whole_line_and_continued(tmp_path):
    whole = write(tmp_path / "whole", 1, 2, 3).read_bytes()
    lines = list(rollout_lines(tmp_path / "whole" / ROLLOUTS_FILE))
    cut = tmp_path / "cut" / ROLLOUTS_FILE
    cut.parent.mkdir()
    found = []
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        read = list(rollout_lines(cut))
        assert read == lines[: len(read)]
        found.append(len(read))
    assert found == sorted(found)
    assert {0, 2, 4, 6, 8, 10} <= set(found), "a member is complete before the next one begins"
    for size in range(whole.rindex(b"\x1f\x8b", 0, len(whole) // 2) + 1, len(whole), 7):
        cut.write_bytes(whole[:size])
        write(cut.parent, 2, 3, resumed_from=1)
        assert cut.read_bytes() == whole


@pytest.mark.parametrize("resumed_from", [0, 1, 2, 3])
def test_a_continued_run_writes_the_file_of_an_uninterrupted_one(tmp_path, resumed_from):
    write(tmp_path / "whole", 1, 2, 3)
    path = write(tmp_path / "one", 1, 2, 3)
    write(tmp_path / "one", *range(resumed_from + 1, 4), resumed_from=resumed_from)
    assert path.read_bytes() == (tmp_path / "whole" / ROLLOUTS_FILE).read_bytes()


def test_damage_is_named_with_its_place(tmp_path):
    path = write(tmp_path, 1, 2)
    content = bytearray(path.read_bytes())
    second = content.index(b"\x1f\x8b", 2)
    content[second + 15 : second + 40] = bytes(25)
    path.write_bytes(content)
    with pytest.raises(TrackingError, match=rf"rollouts\.jsonl\.gz is damaged after byte {second} .*: move it away"):
        list(rollout_lines(path))
    with pytest.raises(TrackingError, match="is damaged after byte"):
        write(tmp_path, 3, resumed_from=2)
    path.write_bytes(gzip.compress(b'{"step": 1}\n{"step": 2}\n'))
    with pytest.raises(TrackingError, match="has steps 1 to 2 in one gzip member, which hone does not write"):
        write(tmp_path, 2, resumed_from=1)
    path.write_bytes(gzip.compress(b"[1]\n"))
    with pytest.raises(TrackingError, match=r"should begin with a step, found b'\[1\]"):
        write(tmp_path, 2, resumed_from=1)


def test_at_the_limit_the_file_keeps_what_it_has_and_a_resumed_run_leaves_out_the_same(tmp_path):
    """400 KiB that cannot be compressed: two fit into 1 MiB, then only a small one."""
    noise = random.Random(0)
    large = [json.dumps({"step": step, "x": noise.randbytes(400 * 1024).hex()}).encode() + b"\n" for step in range(5)]
    written = {1: large[1], 2: large[2], 3: large[3], 4: b'{"step": 4}\n', 5: b""}

    def run(folder, steps, resumed_from=None):
        file = RolloutFile(folder, resumed_from, max_mib=1)
        said = {step: file.write(written[step]) for step in steps}
        file.close()
        return said

    said = run(tmp_path / "whole", range(1, 6))
    assert [bool(said[step]) for step in range(1, 6)] == [False, False, True, False, False]
    assert said[3] == f"{tmp_path / 'whole' / ROLLOUTS_FILE} has reached its limit, rollouts_max_mib = 1"
    path = tmp_path / "whole" / ROLLOUTS_FILE
    assert steps_of(path) == [1, 2, 4]
    assert path.stat().st_size <= 2**20
    for last in range(1, 5):
        folder = tmp_path / str(last)
        run(folder, range(1, last + 1))
        assert run(folder, range(2, 6), resumed_from=1) == {
            step: said[step].replace("whole", str(last)) for step in range(2, 6)
        }
        assert (folder / ROLLOUTS_FILE).read_bytes() == path.read_bytes()


def test_the_limit_is_a_setting_of_the_tracker(tmp_path):
    tracker = JsonlTracker(JsonlSettings(rollouts_max_mib=1), RunInfo(tmp_path))
    tracker.rollouts(1, [{"step": 1, "x": random.Random(0).randbytes(2**20).hex()}])
    assert tracker.left_out
    tracker.rollouts(2, [{"step": 2}])
    assert not tracker.left_out
    tracker.close()
    assert steps_of(tmp_path / ROLLOUTS_FILE) == [2]
