"""What hone asks of the Python of a server before it starts one there."""

import sys
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.rollout.interpreter import check_packages


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
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    for path, why in ((broken, "exit status 3"), (tmp_path / "nothing", "No such file")):
        with pytest.raises(ConfigError, match=rf"rollout\.python: {path} does not run \(.*{why}.*\); make one so"):
            check_packages(path, "vllm", "make one so")
