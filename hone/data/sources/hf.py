"""The Hugging Face `datasets` library as a source: folders, single files, saved data sets, and names on the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.data.settings import HfSettings, RowsConfig
from hone.data.sources.base import FILES_OF_DATASETS, DataError, ListRows

TEXTS = ("prompt", "completion", "chosen", "rejected")  # columns that are text, also where CSV has "2" or "None"
_CSV = {"keep_default_na": False, "na_values": [""]}  # pandas would take an answer "None" for a missing value
BAR_BYTES = 64 << 20  # of a file, which take about a second
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")  # files that `save_to_disk` writes


def open_hf(config: RowsConfig) -> ListRows:
    """Open one split of a Hugging Face data set, memory-mapped. Never runs code that comes with a data set."""
    settings = config.source if config.source is not None else HfSettings()
    assert isinstance(settings, HfSettings)
    if not config.path:
        raise DataError("source hf needs path: a folder, or a name on the hub such as openai/gsm8k")
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"path={config.path} needs the package datasets, which cannot be imported: {error}") from error
    names: Mapping[str, str] = getattr(config, "columns", {})
    try:
        return ListRows(
            _load(datasets, config.path, settings, names), f"{config.path} [{settings.split}]", fills_gaps=True
        )
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"datasets cannot load {config.path} (split {settings.split}): {reason}") from error


def _load(datasets: Any, path: str, settings: HfSettings, names: Mapping[str, str]) -> Any:
    """The rows; `names`: what the data set calls hone's columns."""
    folder = Path(path)
    if any((folder / name).is_file() for name in SAVED):
        loaded = datasets.load_from_disk(path)
        if not isinstance(loaded, dict):
            return loaded
        if settings.split not in loaded:
            raise ValueError(f"no split {settings.split!r} (there is: {', '.join(loaded)})")
        return loaded[settings.split]
    if folder.is_file():
        if folder.suffix not in FILES_OF_DATASETS:
            raise ValueError(f"a file should end in {' or '.join(FILES_OF_DATASETS)}")
        name, options = FILES_OF_DATASETS[folder.suffix]
        if name == "csv":
            options = {**options, **_CSV, "converters": dict.fromkeys((names.get(one, one) for one in TEXTS), str)}
        with _bar_of_large_files(datasets, folder):
            return datasets.load_dataset(name, data_files=str(folder.resolve()), split=settings.split, **options)
    if folder.is_dir():
        path = str(folder.resolve())  # `json` or `csv` alone would be the library's own loader of such files
    return datasets.load_dataset(path, settings.subset, split=settings.split, revision=settings.revision)


@contextmanager
def _bar_of_large_files(datasets: Any, file: Path) -> Iterator[None]:
    """Turn the library's progress bar off for a file that is read in a moment."""
    turned_off = file.stat().st_size < BAR_BYTES and datasets.is_progress_bar_enabled()
    if turned_off:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if turned_off:
            datasets.enable_progress_bars()
