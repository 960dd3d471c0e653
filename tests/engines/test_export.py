"""Model folders: as tolerant as the loading of transformers, and whole or absent."""

import json
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.engines.export import export_weights
from hone.models.building import into_place, save_model
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from tests.kills import killed_at_each_step

BUILD = BuildConfig(hidden_size=32, layers=1, heads=2, mlp_size=48, max_positions=32)
REFUSED = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": [3, 5], "max_length": 77}


def exported(model, folder):
    export_weights(model, ((name, one.detach()) for name, one in model.named_parameters()), folder, writes=True)


@pytest.fixture
def published(tmp_path):
    """A folder with a generation config that transformers loads and refuses to save."""
    folder = tmp_path / "published"
    with without_progress_bars():
        load_language_model(ModelConfig(build=BUILD)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(REFUSED), encoding="utf-8")
    return folder


@pytest.mark.parametrize("save", [exported, save_model])
def test_a_generation_config_that_transformers_refuses_is_saved_as_it_is(save, published, tmp_path):
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(published)
        with pytest.raises(ValueError, match="temperature"):
            model.save_pretrained(tmp_path / "refused")
        save(model, tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    kept = json.loads((tmp_path / "saved" / "generation_config.json").read_text(encoding="utf-8"))
    assert {name: kept[name] for name in REFUSED if name != "do_sample"} == {
        name: value for name, value in REFUSED.items() if name != "do_sample"
    }
    assert not kept.get("do_sample")
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id == [3, 5]
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("save", [exported, save_model])
def test_generation_settings_of_config_json_move_to_the_generation_config(save, published, tmp_path):
    config = json.loads((published / "config.json").read_text(encoding="utf-8"))
    (published / "config.json").write_text(
        json.dumps({**config, "temperature": 0.7, "max_length": 20}), encoding="utf-8"
    )
    (published / "generation_config.json").unlink()
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(published)
        save(model, tmp_path / "saved")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config.temperature == 0.7
    saved = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert (saved.get("temperature"), saved.get("max_length")) == (None, None)
    kept = json.loads((tmp_path / "saved" / "generation_config.json").read_text(encoding="utf-8"))
    assert (kept["temperature"], kept["max_length"]) == (0.7, 20)


def test_a_folder_is_replaced_when_the_new_one_is_whole(tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "old").write_text("")
    written = []

    def fail():
        with into_place(folder) as partial:
            partial.mkdir()
            (partial / "half").write_text("")
            written.append(partial)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert not written[0].exists()
    assert [one.name for one in tmp_path.rglob("*")] == ["export", "old"], "nothing half is left, nothing old is lost"
    with into_place(folder) as partial:
        partial.mkdir()
        (partial / "new").write_text("")
        assert (folder / "old").exists()
    assert [one.name for one in tmp_path.rglob("*")] == ["export", "new"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    old, partial, folder = tmp_path / ".export.old", tmp_path / ".export.partial", tmp_path / "export"
    old.mkdir()
    (old / "weights").write_text("")
    partial.mkdir()
    with pytest.raises(OSError, match="full"), into_place(folder):
        raise OSError("the disk is full")
    assert [one.name for one in tmp_path.rglob("*")] == ["export", "weights"]


def test_what_a_kill_left_behind_goes_and_a_link_stays(tmp_path):
    disk, link = tmp_path / "disk", tmp_path / "export"
    disk.mkdir()
    link.symlink_to(disk)
    left = tmp_path / ".disk.partial"
    left.mkdir()
    (left / "half").write_text("")
    with into_place(link) as partial:
        assert not partial.exists()
        partial.mkdir()
    assert link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["disk", "export"]


def put(folder, text):
    with into_place(folder) as partial:
        partial.mkdir()
        for name in "ab":
            (partial / name).write_text(text)


def held(folder):
    """The text of each file; an empty dict if the folder is absent."""
    return {one.name: one.read_text() for one in folder.glob("*")}


def test_a_kill_at_any_moment_leaves_a_whole_folder_or_none_and_the_next_export_leaves_nothing_else(tmp_path):
    folder = tmp_path / "export"
    old, new = dict.fromkeys("ab", "old"), dict.fromkeys("ab", "new")

    def reset():
        put(folder, "old")

    seen = []
    for _ in killed_at_each_step(put, (folder, "new"), tmp_path, reset):
        seen.append(held(folder))
        assert seen[-1] in (old, new, {})
        put(folder, "next")
        assert held(folder) == dict.fromkeys("ab", "next")
        assert [one.name for one in tmp_path.iterdir()] == ["export"]
    assert [one for one, after in pairwise(seen) if one != after] == [old, {}]  # old, none, new
    assert seen[-1] == new


def test_a_folder_that_another_process_writes_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "export"
    with into_place(folder) as partial:
        partial.mkdir()
        (partial / "weights").write_text("")
        with pytest.raises(BlockingIOError, match="another process is writing it"), into_place(folder):
            pass
        assert (partial / "weights").exists()
    assert [one.name for one in tmp_path.rglob("*")] == ["export", "weights"]
