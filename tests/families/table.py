"""Runs the columns of the table of families, keeps what came out, and writes the table into docs/families.md.

    python -m tests.families.table                                  every column of every family; about half an hour
    python -m tests.families.table --columns packed,lora            these columns
    python -m tests.families.table --families "Qwen3,GLM-4"         these families
    python -m tests.families.table --show                           run nothing: the table of what is known
    python -m tests.families.table --all                            the other table: every causal model type, about ten
                                                                    minutes; goes on where it was stopped
    python -m tests.families.table --all --families "dbrx,doge"     these types again, or of them these `--columns`

A cell is "yes", or what was said when it failed. Cells are kept in tests/families/results.json; the table is made from
them alone. The column vllm needs .venv-vllm (make test-vllm).
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch

from tests.families import checks, every
from tests.families.families import FAMILIES, Family, save
from tests.families.types import TYPES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- table of families: begin -->", "<!-- table of families: end -->"
EVERY = "<!-- table of all types: begin -->", "<!-- table of all types: end -->"
COLUMNS: dict[str, tuple[str, Callable[[Path], None] | None]] = {  # None: run for all families together, on two ranks
    "packed": ("packed", checks.packed),
    "path": ("SFT, GRPO, export", checks.whole_path),
    "builtin": ("built-in rollout", checks.built_in_rollout),
    "builtin_bf16": ("built-in in bfloat16", checks.built_in_bfloat16),
    "value": ("value head", checks.value_head),
    "lora": ("LoRA", checks.lora),
    "shard": ("2 shards", None),
    "tensor": ("tp2", None),
    "sequence": ("sp2", None),
    "expert": ("ep2", None),
    "vllm": ("vLLM rollout", checks.vllm_rollout),
    "vllm_bf16": ("vLLM in bfloat16", checks.vllm_bfloat16),
}
CHEAP = ("packed", "path", "builtin", "builtin_bf16", "value")  # which the tests run
NONE = "–"

Cells = dict[str, dict[str, str]]


def run_cell(family: Family, column: str) -> str:
    """One cell: "yes", or the first sentence of what was wrong."""
    run = COLUMNS[column][1]
    assert run is not None
    with tempfile.TemporaryDirectory() as path:
        try:
            run(save(family, Path(path) / "model", served=column.startswith("vllm")))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the cell
            return _sentence(str(error) or type(error).__name__, path)
    return checks.YES


def run_ranks(names: Iterable[str], column: str) -> dict[str, str]:
    """The cells of a column on two ranks. An error that is no refusal ends the run."""
    with tempfile.TemporaryDirectory() as path:
        folders = {name: save(FAMILIES[name], Path(path) / str(number) / "model") for number, name in enumerate(names)}
        cells = checks.on_ranks(folders, **{column: 2})
        return {name: _sentence(cell, str(folders[name].parent)) for name, cell in cells.items()}


def _sentence(text: str, folder: str) -> str:
    said = text.replace(f"model.path '{folder}/model' cannot be loaded: ", "").replace(f"{folder}/model", "the model")
    said = re.sub(r"/tmp/\S+", "the model", " ".join(said.splitlines()[-1:] or [said]))
    said = re.sub(r".* after (\w+: .*) \(its log: .*", r"vLLM's \1", said)  # the last words of a server
    return said.replace("|", "/")[:300]


def applies(family: Family, column: str) -> bool:
    return family.experts or column != "expert"


def table(cells: Mapping[str, Mapping[str, str]]) -> str:
    """The table in Markdown; cells that failed are numbered, and what was wrong stands below."""
    columns = [*COLUMNS]
    headings = [heading for heading, _ in COLUMNS.values()]
    lines = ["| family | `model_type` | " + " | ".join(headings) + " |", "|---" * (len(columns) + 2) + "|"]
    notes: list[str] = []
    for name, family in FAMILIES.items():
        row = []
        for column in columns:
            cell = cells.get(name, {}).get(column, "not run") if applies(family, column) else NONE
            if cell not in (checks.YES, NONE, "not run"):
                if cell not in notes:
                    notes.append(cell)
                cell = f"no ({notes.index(cell) + 1})"
            row.append(cell)
        lines.append(f"| {name} | `{family.architecture}` | " + " | ".join(row) + " |")
    said = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    traits = [f"- {name}: {family.traits}" for name, family in FAMILIES.items()]
    return "\n".join(
        [*lines, "", *said, *([""] if said else []), "What each tiny model has of its family:", "", *traits]
    )


def read() -> Cells:
    cells: Cells = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return cells


def keep(cells: Cells) -> None:
    """Write the cells, and the table into the page."""
    RESULTS.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    _put(table(cells), BEGIN, END)


def _put(text: str, begin: str, end: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def run_all(kinds: Iterable[str], columns: Collection[str]) -> None:
    """Run these model types, and write each row when it is known."""
    torch.set_num_threads(1)  # such small models wait for each other's threads
    for kind in kinds:
        try:
            row = every.row(kind, columns)
        except Exception as error:  # noqa: BLE001  (the sweep goes on; the row says what has to be mended)
            text = f"error: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            row = {every.DOCTOR: text, every.RUN: text}
        print(f"{kind:24} {row[every.RUN] or ', '.join(f'{name}: {cell}' for name, cell in row.items())}", flush=True)
        rows = every.read()
        rows[kind] = row if row[every.RUN] else rows.get(kind, {}) | row
        every.RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n", encoding="utf-8")
        _put(every.page(rows), *EVERY)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the columns of docs/families.md.")
    parser.add_argument("--columns", default="", help="by default all")
    parser.add_argument("--families", default="")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--all", action="store_true", help="every causal model type; by default those without a row")
    asked = parser.parse_args()
    if asked.all:
        known = every.read()
        kinds = asked.families.split(",") if asked.families else [kind for kind in TYPES if kind not in known]
        run_all(kinds, asked.columns.split(",") if asked.columns else every.COLUMNS)
        return
    cells = read()
    names = [name.strip() for name in (asked.families or ",".join(FAMILIES)).split(",")]
    for column in [] if asked.show else (asked.columns or ",".join(COLUMNS)).split(","):
        chosen = [name for name in names if applies(FAMILIES[name], column)]
        together = run_ranks(chosen, column) if COLUMNS[column][1] is None else {}
        for name in chosen:
            cell = together.get(name) or run_cell(FAMILIES[name], column)
            print(f"{name:12} {column:9} {cell}", flush=True)
            cells = read()
            cells.setdefault(name, {})[column] = cell
            keep(cells)
    if asked.show:
        print(table(cells))


if __name__ == "__main__":
    main()
