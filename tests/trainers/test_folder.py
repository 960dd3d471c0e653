"""One writer per run folder, and one run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hone.config import Config, ConfigError, setting
from hone.trainers.run.folder import claim, set_aside, write_config
from tests.kills import killed_at_each_step


class Model(Config):
    path: str = setting("a", "weights")


class Settings(Config):
    model: Model = setting(meaning="model", factory=Model)
    steps: int = setting(3, "steps")
    lr: float | None = setting(None, "learning rate")


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from hone.config import ConfigError; from hone.trainers.run.folder import claim\n"
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


def test_every_configuration_is_kept_and_changes_are_shown(tmp_path):
    assert write_config(tmp_path, Settings()) == []
    assert (tmp_path / "config.yaml").read_text() == "model:\n  path: a\nsteps: 3\nlr: null\n"
    assert write_config(tmp_path, Settings(steps=5)) == ["steps: 3 -> 5"]
    assert write_config(tmp_path, Settings(steps=5)) == []
    assert write_config(tmp_path, Settings(steps=7)) == ["steps: 5 -> 7"]
    kept = {path.name: yaml.safe_load(path.read_text())["steps"] for path in tmp_path.glob("config*.yaml")}
    assert kept == {"config-0001.yaml": 3, "config-0002.yaml": 5, "config.yaml": 7}


def test_a_kill_while_settings_are_written_leaves_the_settings_of_a_run(tmp_path):
    """A folder without config.yaml would pass for an empty one, and take a run of another model."""

    def steps():
        return {one.name: yaml.safe_load(one.read_text())["steps"] for one in tmp_path.glob("*.yaml")}

    def reset():
        for one in tmp_path.glob("*"):
            one.unlink()
        write_config(tmp_path, Settings())

    seen = []
    for _ in killed_at_each_step(write_config, (tmp_path, Settings(steps=5)), tmp_path, reset):
        seen.append(steps())
        write_config(tmp_path, Settings(steps=5))
        assert steps()["config.yaml"] == 5
        assert not list(tmp_path.glob("*.partial"))
    assert seen[0] == {"config.yaml": 3}
    assert seen[-2:] == [{"config.yaml": 3, "config-0001.yaml": 3}, {"config.yaml": 5, "config-0001.yaml": 3}]
    assert all("config.yaml" in one for one in seen)


def test_another_model_is_another_run(tmp_path):
    write_config(tmp_path, Settings())
    with pytest.raises(ConfigError, match=r"holds another run \(model.path: 'a' -> 'b'\); give another run.dir"):
        write_config(tmp_path, Settings(model=Model(path="b")))
    assert "path: a" in (tmp_path / "config.yaml").read_text()


class Run(Config):
    dir: str = setting("runs/a", "folder")


class Whole(Settings):
    run: Run = setting(meaning="run", factory=Run)
    reward: str = setting("", "file.py:function")


def test_another_spelling_of_a_path_is_the_same_path(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "r.py").write_text("")
    (tmp_path / "link").symlink_to("m")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"outcome": "finished", "total_steps": 3}))
    write_config(folder, Whole(model=Model(path="m"), run=Run(dir="run"), reward="r.py:score"))
    for path in ("./m", "m/", str(tmp_path / "m"), "link"):
        config = Whole(model=Model(path=path), run=Run(dir=f"./{folder.name}"), reward=f"{tmp_path}/r.py:score")
        assert write_config(folder, config, steps=3) == [], path
    with pytest.raises(ConfigError, match=r"finished with other settings \(reward: "):
        write_config(folder, Whole(model=Model(path="m"), run=Run(dir="run"), reward="r.py:other"), steps=3)


def test_a_relative_path_and_the_same_place_from_another_working_folder_are_one_model(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for place in (project, elsewhere):
        (place / "models" / "a").mkdir(parents=True)
    run = project / "runs" / "x"
    run.mkdir(parents=True)
    monkeypatch.chdir(project)
    write_config(Path("runs/x"), Whole(model=Model(path="models/a"), run=Run(dir="runs/x")))
    monkeypatch.chdir(elsewhere)
    absolute = Whole(model=Model(path=f"{project}/models/a"), run=Run(dir=str(run)))
    with pytest.raises(ConfigError, match=r"holds another run \(model.path: 'models/a' -> "):
        write_config(run, Whole(model=Model(path=f"{elsewhere}/models/a"), run=Run(dir=str(run))))
    assert write_config(run, absolute) == []
    assert write_config(run, absolute) == []


@pytest.mark.parametrize("text", ["x" * 5000, "a\0b", "~nobody-at-all/x"], ids=["long", "null", "home"])
def test_text_that_can_be_no_path_is_compared_as_text(tmp_path, text):
    write_config(tmp_path, Whole(reward="before"))
    assert len(write_config(tmp_path, Whole(reward=text))) == 1
    assert write_config(tmp_path, Whole(reward=text)) == []


def test_a_model_that_has_moved_with_its_run_is_the_same_model(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for name in ("runs", "m", "other"):
        (old / name).mkdir(parents=True)
    write_config(old / "runs", Whole(model=Model(path=str(old / "m")), run=Run(dir=str(old / "runs"))))
    old.rename(new)
    moved = Run(dir=str(new / "runs"))
    with pytest.raises(ConfigError, match="holds another run"):
        write_config(new / "runs", Whole(model=Model(path=str(new / "other")), run=moved))
    assert write_config(new / "runs", Whole(model=Model(path=str(new / "m")), run=moved)) == []


@pytest.mark.parametrize("outcome", ["finished", "interrupted", "failed: OSError: disk", None])
def test_a_finished_run_is_not_run_again_with_other_settings(tmp_path, outcome):
    write_config(tmp_path, Settings(lr=0.1))
    (tmp_path / "run.json").write_text(json.dumps({"outcome": outcome, "total_steps": 3}))
    assert write_config(tmp_path, Settings(lr=0.1), steps=3) == []  # again as it was
    if outcome == "finished":
        with pytest.raises(ConfigError, match=r"is finished with other settings \(lr: 0.1 -> 0.2\); give"):
            write_config(tmp_path, Settings(lr=0.2), steps=3)
        assert "lr: 0.1" in (tmp_path / "config.yaml").read_text()
    else:
        assert write_config(tmp_path, Settings(lr=0.2), steps=3) == ["lr: 0.1 -> 0.2"]
    assert write_config(tmp_path, Settings(lr=0.3, steps=4), steps=4)  # more steps: it goes on


def test_a_run_is_set_aside_under_a_free_name(tmp_path):
    folder = tmp_path / "run"
    assert set_aside(folder) is None
    for number in (1, 2):
        folder.mkdir()
        write_config(folder, Settings(steps=number))
        assert set_aside(folder) == tmp_path / f"run-{number}"
    assert not folder.exists()
    assert "steps: 1" in (tmp_path / "run-1" / "config.yaml").read_text()
