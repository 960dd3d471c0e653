"""Sources: the same rows whatever holds them, and one clear sentence for what cannot be read."""

import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hone.config import ConfigError
from hone.data import SOURCES
from hone.data.sources.base import DataError, check_path, open_rows
from hone.data.sources.files import GROUPS_IN_MEMORY, JsonlRows, ParquetRows

ROWS = [{"prompt": f"What is {n} + {n}?", "ground_truth": 2 * n, "extra": {"n": [n, n]}} for n in range(25)]
FORKS = """
import json, sys
from multiprocessing import get_context
from hone.config import build
from hone.data.settings import DatasetConfig
from hone.data.sources.base import open_rows

rows = open_rows(build(DatasetConfig, {"path": sys.argv[1]}, "run.yaml"))
with get_context("fork").Pool(2) as pool:
    print(json.dumps(pool.map(rows.__getitem__, list(range(25)) * 8)))
"""


def list_of(config):
    rows = open_rows(config)
    return [rows[i] for i in range(len(rows))]


def rows_from_function(seed, size, start=0):
    for n in range(start, start + size + 5):
        yield {"prompt": f"{seed}/{n}"}


def test_jsonl_and_parquet_give_the_same_rows_in_any_order(tmp_path, dataset, write_jsonl, write_parquet):
    for path in (write_jsonl(tmp_path / "rows.jsonl", ROWS), write_parquet(tmp_path / "rows.parquet", ROWS)):
        rows = open_rows(dataset(path=path))
        assert len(rows) == 25
        assert [rows[i] for i in (24, 0, 7, 13, 7, 1)] == [ROWS[i] for i in (24, 0, 7, 13, 7, 1)]
        with pytest.raises(IndexError):
            rows[25]


def test_several_files_are_one_set_in_the_order_of_their_names(tmp_path, dataset, write_jsonl, write_parquet):
    for write, suffix in ((write_jsonl, "jsonl"), (write_parquet, "parquet")):
        for name, part in (("c", ROWS[13:]), ("a", ROWS[:9]), ("d", []), ("b", ROWS[9:13])):
            write(tmp_path / f"{name}.{suffix}", part)
        rows = open_rows(dataset(path=tmp_path / f"*.{suffix}"))
        assert [rows[i] for i in range(len(rows))] == ROWS
        assert rows.where(11).endswith({"jsonl": "b.jsonl line 3", "parquet": "b.parquet row 2"}[suffix])


def test_compressed_jsonl_gives_the_same_rows_in_any_order_and_in_forked_processes(tmp_path, dataset, write_jsonl):
    text = write_jsonl(tmp_path / "rows.jsonl", ROWS).read_bytes()
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(text[:100]) + gzip.compress(text[100:]))  # members, as in a run's rollouts
    rows = open_rows(dataset(path=path))
    assert [rows[i] for i in (24, 0, 7)] == [ROWS[i] for i in (24, 0, 7)]
    assert rows.where(24) == f"{path} line 25"
    assert rows.folder(3) == tmp_path
    # In a process of its own: this one may have threads (Ray's), which a fork does not survive.
    done = subprocess.run([sys.executable, "-c", FORKS, path], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == ROWS * 8, done.stderr
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz is not a whole gzip file: Compressed file ended before"):
        open_rows(dataset(path=path))


@pytest.mark.parametrize("size", [5_000, 100_000])  # written when the file is closed, and before
def test_a_gzip_file_for_which_the_disk_has_no_room_is_named(tmp_path, size):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "' + b"x" * size + b'"}\n'))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(DataError, match=r"rows\.jsonl\.gz cannot be unpacked into /.*: File too large; .*TMPDIR"):
            JsonlRows([path])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_row_group_of_parquet_may_have_more_than_2_gib_of_images(tmp_path):
    image = pyarrow.array([b"\0" * (1 << 25)])
    pictures = pyarrow.ListArray.from_arrays([0, 1], pyarrow.StructArray.from_arrays([image], ["bytes"]))
    table = pyarrow.table({"images": pyarrow.chunked_array([pictures] * 70)})
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(
        table, path, row_group_size=70, compression="zstd", use_dictionary=False, write_statistics=False
    )
    rows = ParquetRows([path])
    assert rows.blocks == [70]
    assert len(rows[69]["images"][0]["bytes"]) == 1 << 25
    del rows
    pyarrow.default_memory_pool().release_unused()  # 3 GB, for the tests beside this one


def test_parquet_keeps_few_row_groups_in_memory(tmp_path, dataset, write_parquet):
    rows = open_rows(dataset(path=write_parquet(tmp_path / "rows.parquet", ROWS)))
    assert rows.blocks == [3] * 8 + [1]
    for index in range(25):
        rows[index]
    assert len(rows._cache) == GROUPS_IN_MEMORY


def test_jsonl_skips_empty_lines_and_counts_lines_as_an_editor_does(tmp_path, dataset):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n   \n{"prompt": "b\xc3\xa9"}')
    rows = open_rows(dataset(path=path))
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["a", "bé"]
    assert rows.where(1) == f"{path} line 4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": 2', "line 2 should be one JSON object, found '{\"a\": 2'"),
        ('{"a": 1}\n[1, 2]\n', r"line 2 should be one JSON object, found '\[1, 2\]'"),
        ("prompt,answer\n", "line 1 should be one JSON object"),
        ('{"a": 1}\n\n{"a": }\n', "line 3 is not valid JSON: Expecting value"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "line 1 is nested too deeply to be read"),
        ("", "has no rows"),
        ("\n \n", "has no rows"),
    ],
)
def test_a_malformed_jsonl_file_names_the_line(tmp_path, text, said, dataset):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"bad\.jsonl {said}"):
        list_of(dataset(path=path))


@pytest.mark.parametrize(
    "row", ['{"prompt": "a", "prompt": "b"}', '{"prompt": [{"role": "user", "n": [{"n": 1, "n": 1}]}]}']
)
def test_a_key_that_a_row_has_twice_is_a_clear_error(tmp_path, row, dataset):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{row}\n', encoding="utf-8")
    rows = open_rows(dataset(path=path))
    with pytest.raises(DataError, match=r"rows.jsonl line 2 is not valid JSON: the key '(prompt|n)' is there twice"):
        rows[1]


def test_a_column_that_parquet_has_twice_is_a_clear_error(tmp_path, dataset):
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(twice, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet has the column 'prompt' twice"):
        open_rows(dataset(path=tmp_path / "rows.parquet"))


def test_a_row_of_parquet_that_python_cannot_hold_is_named(tmp_path, dataset):
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"good", b"\xff"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), tmp_path / "rows.parquet")
    rows = open_rows(dataset(path=tmp_path / "rows.parquet"))
    assert rows[0] == {"prompt": "good"}
    with pytest.raises(DataError, match=r"rows.parquet row 1 cannot be read: 'utf-8' codec"):
        rows[1]


def test_rows_that_change_after_they_were_opened_are_an_error_and_new_ones_are_not(tmp_path, dataset, write_jsonl):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    rows = open_rows(dataset(path=path))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("7 + 7", "9 + 9") + json.dumps(ROWS[0]) + "\n", encoding="utf-8")
    assert [rows[i] for i in (6, 8, 24)] == [ROWS[i] for i in (6, 8, 24)]
    with pytest.raises(DataError, match=r"rows.jsonl line 8 has changed since it was opened"):
        rows[7]
    path.unlink()
    with pytest.raises(DataError, match=r"row 6 of .*rows.jsonl cannot be read any more: No such file"):
        rows[6]


def test_a_parquet_file_that_changes_after_it_was_opened_is_an_error(tmp_path, dataset, write_parquet):
    path = write_parquet(tmp_path / "rows.parquet", ROWS)
    rows = open_rows(dataset(path=path))
    write_parquet(path, ROWS[::-1])
    with pytest.raises(DataError, match=r"rows.parquet has changed since it was opened"):
        rows[0]


def test_a_pipe_is_no_file_of_rows_and_brackets_in_a_name_are_no_pattern(tmp_path, dataset, write_jsonl):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe.jsonl should be a file, but is a pipe or a device"):
        open_rows(dataset(path=tmp_path / "pipe.jsonl"))
    check_path(dataset(path=write_jsonl(tmp_path / "rows[1].jsonl", ROWS)), "data.train")


def test_what_is_not_there_is_a_clear_error(tmp_path, dataset, write_jsonl):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "table.xlsx").write_text("a,b\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "folder.jsonl").mkdir()
    cases = [
        ({"path": tmp_path / "trian.jsonl"}, r"no file .*trian\.jsonl; did you mean .*train\.jsonl\?"),
        ({"path": tmp_path / "*.parquet5", "source": "parquet"}, r"no file .*\*\.parquet5"),
        ({"path": "openai/gsm8k"}, r"data\.train\.path: no file or folder openai/gsm8k .*; .*source=hf"),
        ({"path": "one/rows.jsonl"}, rf"no file one/rows\.jsonl \(current folder: {Path.cwd()}\)$"),
        ({"path": "one/rows.csv"}, rf"no file or folder one/rows\.csv \(current folder: {Path.cwd()}\)$"),
        ({"path": tmp_path / "table.xlsx"}, r"table\.xlsx should end in \.jsonl or \.ndjson or \.parquet"),
        ({"path": tmp_path / "broken.parquet"}, r"broken\.parquet is not a readable Parquet file"),
        ({"path": tmp_path / "folder.jsonl", "source": "jsonl"}, "should be a file, but is a folder"),
        ({}, "data.train: set path to a file, or source to one of hf, jsonl, parquet, python, reasoning_gym"),
        ({"source": "jsonl"}, "needs a path"),
    ]
    for settings, said in cases:
        with pytest.raises(DataError, match=said):
            open_rows(dataset(**settings))
    with pytest.raises(ConfigError, match="unknown data source 'josnl'; did you mean 'jsonl'"):
        dataset(source="josnl")


def test_a_python_function_gives_rows(tmp_path, dataset):
    file = tmp_path / "rows.py"
    file.write_text("def make(seed, size):\n    return [{'prompt': str(seed + n)} for n in range(size)]\nnumber = 3\n")
    rows = open_rows(dataset(source={"name": "python", "function": f"{file}:make", "size": 4, "seed": 10}))
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["10", "11", "12", "13"]
    settings = {"name": "python", "function": f"{__file__}:rows_from_function", "size": 3, "options": {"start": 7}}
    rows = open_rows(dataset(source=settings))
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["0/7", "0/8", "0/9"]
    for function, said in (
        (f"{file}:maek", "did you mean 'make'"),
        (f"{file}:number", "is not a function but a int"),
        ("no_such_module_at_all:make", "No module named"),
    ):
        with pytest.raises(DataError, match=said):
            open_rows(dataset(source={"name": "python", "function": function}))


def test_a_row_that_is_not_a_mapping_is_a_clear_error(tmp_path, dataset):
    file = tmp_path / "wrong.py"
    file.write_text("def make(seed, size):\n    return ['text'] * size\ndef one(seed, size):\n    return 7\n")
    rows = open_rows(dataset(source={"name": "python", "function": f"{file}:make", "size": 4}))
    with pytest.raises(DataError, match=r"wrong\.py:make row 2 should be a mapping of columns, found str"):
        rows[2]
    with pytest.raises(DataError, match="should give rows, but gave a int"):
        open_rows(dataset(source={"name": "python", "function": f"{file}:one"}))
    with pytest.raises(DataError, match=r"source\.options: .*:one cannot be called with sise, seed, size: got an unex"):
        open_rows(dataset(source={"name": "python", "function": f"{file}:one", "options": {"sise": 4}}))


def test_reasoning_gym_rows_can_be_scored_by_its_own_verifier(dataset):
    factory = pytest.importorskip("reasoning_gym").factory
    settings = {"name": "reasoning_gym", "task": "number_sorting", "size": 50, "seed": 3}
    rows = open_rows(dataset(source={**settings, "options": {"min_numbers": 3, "max_numbers": 3}}))
    row = rows[7]
    assert len(rows) == 50
    assert len(row["metadata"]["original_numbers"]) == 3
    assert row == rows[7]
    assert factory.get_score_answer_fn(row["task"])(answer=row["answer"], entry=row["entry"]) == 1.0
    other = open_rows(dataset(source={**settings, "seed": 4}))
    assert other[7]["question"] != row["question"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "number_sortin"}, "unknown reasoning_gym task 'number_sortin'; did you mean 'number_sorting'"),
        ({"task": "number_sorting", "options": {"max_number": 3}}, "unknown option .* did you mean 'max_numbers'"),
        ({"task": "number_sorting", "options": {"min_numbers": 9, "max_numbers": 3}}, "max_numbers must be >= min_num"),
    ],
)
def test_a_wrong_task_or_option_is_a_clear_error(settings, said, dataset):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=said):
        open_rows(dataset(source={"name": "reasoning_gym", **settings}))


def test_a_small_file_is_read_without_the_bar_of_the_library(tmp_path, dataset, monkeypatch, capfd):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.enable_progress_bars()
    (tmp_path / "one.csv").write_text("a,b\nx,y\n")
    assert list_of(dataset(path=tmp_path / "one.csv")) == [{"a": "x", "b": "y"}]
    assert datasets.is_progress_bar_enabled()
    assert capfd.readouterr().err == ""


def test_answers_in_csv_are_text_whatever_they_look_like(tmp_path, dataset, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums.csv").write_text("prompt,said,level,ground_truth\n1+1,007,3,None\n2+2,4.50,,4\n3+3,None,5,\n")
    found = list_of(dataset(path=tmp_path / "sums.csv", columns={"completion": "said"}))
    assert [(row["prompt"], row["said"]) for row in found] == [("1+1", "007"), ("2+2", "4.50"), ("3+3", "None")]
    assert [row["level"] for row in found] == [3, None, 5]
    assert [row["ground_truth"] for row in found] == ["None", "4", None]


def test_hugging_face_folders(tmp_path, dataset, write_jsonl, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": whole}).save_to_disk(tmp_path / "dict")
    rows = open_rows(dataset(path=tmp_path / "saved"))  # a folder needs no source
    assert rows[24] == ROWS[24]
    rows = open_rows(dataset(path=tmp_path / "dict", source={"name": "hf", "split": "test"}))
    assert len(rows) == 25
    assert rows[3] == ROWS[3]
    with pytest.raises(DataError, match=r"no split 'train' \(there is: test\)"):
        open_rows(dataset(path=tmp_path / "dict"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"datasets cannot load .*empty"):
        open_rows(dataset(path=tmp_path / "empty"))
    for name, text in (("one.csv", "a,b\nx,y\n"), ("one.tsv", "a\tb\nx\ty\n"), ("one.json", '[{"a": "x", "b": "y"}]')):
        (tmp_path / name).write_text(text)
        (row,) = list_of(dataset(path=tmp_path / name))  # nor does a single file
        assert row == {"a": "x", "b": "y"}
    (tmp_path / "one.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=r"one\.bin .*: a file should end in \.csv"):
        open_rows(dataset(path=tmp_path / "one.bin", source="hf"))
    with pytest.raises(DataError, match="source hf needs path"):
        open_rows(dataset(source="hf"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json").mkdir()  # also a name of the library's own
    write_jsonl(tmp_path / "json" / "rows.jsonl", ROWS)
    assert open_rows(dataset(path="json"))[24] == ROWS[24]


def test_a_missing_library_is_a_clear_error():
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from hone.config import build\nfrom hone.data.settings import DatasetConfig\n"
        "from hone.data.sources.base import open_rows\nfrom hone.registry import CannotLoad\n"
        "config = build(DatasetConfig, {'source': {'name': 'reasoning_gym', 'task': 'countdown'}}, 'x')\n"
        "try:\n    open_rows(config)\nexcept CannotLoad as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (
        done.stdout
        == "data source 'reasoning_gym' needs reasoning_gym, which is not installed: pip install reasoning-gym\n"
    )


def test_settings_import_nothing_heavy():
    code = (
        "import sys\nimport hone.data, hone.data.settings\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'datasets', 'jinja2', 'reasoning_gym'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_source_can_be_imported_here():
    assert set(SOURCES.probe().values()) == {""}
