"""The cheap columns of the table in docs/families.md, run again; and the page has what was kept."""

import pytest

from tests.families import checks
from tests.families.families import FAMILIES, save
from tests.families.table import BEGIN, CHEAP, COLUMNS, END, PAGE, applies, read, run_cell, table

QUICK = {
    "Qwen3-MoE": CHEAP,
    "DeepSeek-V3.2": ("builtin_bf16",),  # its indexer chooses other keys where trainer and rollout round differently
    "Kimi-Linear": ("builtin_bf16",),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(name, column, marks=[pytest.mark.ci] if column in QUICK.get(name, ()) else [])
        for name in FAMILIES
        for column in CHEAP
    ],
)
def test_a_cell_is_as_the_page_says(name, column):
    assert run_cell(FAMILIES[name], column) == read()[name][column]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Nemotron-H", marks=pytest.mark.ci),
        *("Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next", "Kimi-Linear", "LFM2", "Granite 4", "Falcon-H1", "Jamba"),
        "OLMo-Hybrid",
    ],
)
def test_an_adapter_learns_beside_layers_with_a_state_in_4_bits(name, tmp_path):
    checks.qlora(save(FAMILIES[name], tmp_path / "model"))


def test_the_page_has_the_table_of_the_kept_cells():
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == table(read())


def test_every_cell_was_run():
    """But those of vLLM, which has an environment of its own: the page says where it was not."""
    cells = read()
    missing = [
        (name, column)
        for name, family in FAMILIES.items()
        for column in COLUMNS
        if applies(family, column) and not column.startswith("vllm") and column not in cells.get(name, {})
    ]
    assert missing == []
