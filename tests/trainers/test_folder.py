"""One writer per run folder, and one run."""

import subprocess
import sys

import pytest

from hone.config import Config, ConfigError, setting
from hone.trainers.folder import claim, write_config


class Model(Config):
    path: str = setting("a", "weights")


class Settings(Config):
    model: Model = setting(meaning="model", factory=Model)
    steps: int = setting(3, "steps")


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from hone.config import ConfigError; from hone.trainers.folder import claim\n"
        "try:\n    with claim(Path(sys.argv[1])): print('claimed')\n"
        "except ConfigError as error: print(error)"
    )

    def other():
        return subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
        )

    import os

    with claim(tmp_path):
        assert f"run.dir: process {os.getpid()} is writing the run in {tmp_path}" in other().stdout
    assert other().stdout == "claimed\n"


def test_settings_are_written_and_changes_are_named(tmp_path):
    assert write_config(tmp_path, Settings()) == []
    assert (tmp_path / "config.yaml").read_text() == "model:\n  path: a\nsteps: 3\n"
    assert write_config(tmp_path, Settings(steps=5)) == ["steps"]


def test_another_model_is_another_run(tmp_path):
    write_config(tmp_path, Settings())
    with pytest.raises(ConfigError, match=r"holds another run \(model.path 'a' -> 'b'\); choose another folder"):
        write_config(tmp_path, Settings(model=Model(path="b")))
    assert "path: a" in (tmp_path / "config.yaml").read_text()
