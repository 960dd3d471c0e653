"""What hone asks of the Python of a server before it starts one there."""

import sys
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.rollout.servers.engine import check_packages


def bare(tmp_path):
    """A Python that has its standard library, and nothing that was installed."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return path


def test_a_python_without_the_engine_or_what_hone_needs_there_is_named(tmp_path):
    check_packages(Path(sys.executable), "hone", "make one")
    python = bare(tmp_path)
    with pytest.raises(ConfigError, match=rf"rollout\.python: {python} has no sglang; make one so"):
        check_packages(python, "sglang", "make one so")
    with pytest.raises(ConfigError, match=rf"{python} has no torch numpy pyzmq xxhash: {python} -m pip install torch"):
        check_packages(python, "json", "make one so")


def test_what_is_no_python_is_named(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho dear me >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"{broken} is no Python that runs: it ended with 3 .*'dear me'; make one"):
        check_packages(broken, "vllm", "make one so")
    nothing = tmp_path / "nothing"
    with pytest.raises(ConfigError, match=rf"{nothing} does not run \(.*No such file.*\); make one so"):
        check_packages(nothing, "vllm", "make one so")


def test_neither_what_a_python_says_first_nor_folders_of_the_trainers_are_taken_for_packages(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    talking = tmp_path / "talking"
    talking.write_text(f'#!/bin/sh\necho Loading a module\nexec {sys.executable} "$@"\n')
    talking.chmod(0o755)
    check_packages(talking, "hone", "make one")
    for engine in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=f"has no {engine}; make one"):
            check_packages(talking, engine, "make one")
