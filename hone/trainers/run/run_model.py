"""The model that a run trains, where every part of the run finds the same one.

model.build           made once, written to <run.dir>/model
model.path, quantised dequantised once, written to <run.dir>/model
model.path, GGUF      converted once (`hone.models.files.gguf`), written to <run.dir>/model
model.path, on a hub  its commit is written to <run.dir>/model_source.json, and every later start is from that commit
model.path, a folder  as it is
"""

from __future__ import annotations

import json
from pathlib import Path

from hone.config import count_as_read
from hone.models.building import into_place, save_model
from hone.models.errors import ModelError
from hone.models.files.gguf import copy_model
from hone.models.files.progress_bars import without_progress_bars
from hone.models.loading import check_model_source, folder_of, load_language_model
from hone.models.quantised import method_of
from hone.models.settings import ModelConfig
from hone.models.source import is_converted, locate
from hone.models.vision.image_processor import save_language

SOURCE_FILE = "model_source.json"
FOLDER = "model"


def local_model(model: ModelConfig, folder: Path) -> ModelConfig:
    """The model that the parts of a run load; a model that must be written first is written to `folder`.

    Raises ModelError for a model that cannot be used.
    """
    converted = model.path is not None and is_converted(model.path)
    if model.build is None and not converted:
        model = pinned(model, folder.parent)
        if not method_of(check_model_source(model)):
            return model
    if not (folder / "config.json").is_file():
        with without_progress_bars(), into_place(folder) as partial:
            if converted:
                copy_model(folder_of(model), partial)
            else:
                save_model(load_language_model(model), partial)
            save_language(model, partial)
    elif model.build is not None:
        count_as_read(model.build)
    return model.at(folder)


def recorded_model(model: ModelConfig, run: Path) -> ModelConfig:
    """The model that the run in folder `run` began from, as `local_model` gave it then."""
    if (run / FOLDER / "config.json").is_file():
        return model.at(run / FOLDER)
    return pinned(model, run)


def pinned(model: ModelConfig, run: Path) -> ModelConfig:
    """A model of a hub at one commit: the run folder `run` records the commit when the run begins."""
    assert model.path is not None
    if Path(model.path).expanduser().is_dir():
        return model
    record, asked = run / SOURCE_FILE, {"path": model.path, "revision": model.revision}
    if record.is_file():
        found = json.loads(record.read_text(encoding="utf-8"))
        if {key: found.get(key) for key in asked} != asked:
            raise ModelError(f"{record} is of another model than model.path {model.path!r}; choose another run.dir")
    else:
        commit = locate(model.path, "model.path", model.revision, weights=False).commit
        found = {**asked, "commit": commit}
        run.mkdir(parents=True, exist_ok=True)
        partial = record.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1), encoding="utf-8")
        partial.replace(record)
    return model.model_copy(update={"revision": found["commit"]})
