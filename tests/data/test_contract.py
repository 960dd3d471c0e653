"""Every source of rows, by the contract."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from hone.config import build
from hone.data.settings import DatasetConfig
from hone.data.sources.base import open_rows
from hone.testing import SourceContract

ROWS = [{"prompt": f"What is {n} + {n}?", "ground_truth": 2 * n, "extra": {"n": [n, n]}} for n in range(25)]


def rows_from_function(seed, size):
    return [{"prompt": f"{seed}/{n}"} for n in range(size)]


class OfSettings(SourceContract):
    settings = {}  # noqa: RUF012

    def make(self):
        return open_rows(build(DatasetConfig, self.settings, "run.yaml"))


class TestPython(OfSettings):
    settings = {"source": {"name": "python", "function": f"{__file__}:rows_from_function", "size": 7}}  # noqa: RUF012


class TestShapes(OfSettings):
    settings = {"source": {"name": "shapes", "size": 9}}  # noqa: RUF012


class TestReasoningGym(OfSettings):
    settings = {"source": {"name": "reasoning_gym", "task": "spell_backward", "size": 9}}  # noqa: RUF012

    def make(self):
        pytest.importorskip("reasoning_gym", reason="comes with hone-rl[tasks]")
        return super().make()


class OfFile(OfSettings):
    @pytest.fixture(autouse=True)
    def _written(self, tmp_path):
        self.settings = {"path": str(tmp_path / f"*.{self.suffix}")}
        for number in range(2):
            self.write(tmp_path / f"{number}.{self.suffix}", ROWS[number * 13 : number * 13 + 13])


class TestJsonl(OfFile):
    suffix = "jsonl"

    def write(self, path, rows):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


class TestParquet(OfFile):
    suffix = "parquet"

    def write(self, path, rows):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
