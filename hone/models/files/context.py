"""The context of a model whose files are on this machine: nothing is fetched, converted or loaded."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from hone.models.errors import ModelError
from hone.models.files.packaged import here

CONFIG = "config.json"


def known_context(model: str) -> int:
    """The context in tokens of a folder, GGUF file, or model that was fetched before; 0: not known here.

    Raises ModelError for a file that is not GGUF.
    """
    path = here(model) or Path(model).expanduser()
    if path.is_file():
        return _of_gguf(path)
    config: object = path / CONFIG
    if not path.is_dir():
        try:
            config = try_to_load_from_cache(model, CONFIG)
        except HFValidationError:  # not a name of a hub either, which the run says
            return 0
    if not isinstance(config, str | Path) or not Path(config).is_file():
        return 0
    read = json.loads(Path(config).read_text(encoding="utf-8"))
    text = read.get("text_config") or read
    return int(text.get("max_position_embeddings") or text.get("n_positions") or 0)


def _of_gguf(file: Path) -> int:
    if find_spec("gguf") is None:  # training says so
        return 0
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
    except ValueError as error:
        raise ModelError(f"{file} is not a GGUF file: {error}") from error
    family = fields["general.architecture"].contents()
    found = fields.get(f"{family}.context_length")
    return int(found.contents()) if found is not None else 0
