"""Every causal model type of transformers is accepted or refused, by `hone doctor --model` and by a run alike."""

import pytest

from tests.families import every
from tests.families.table import EVERY, PAGE
from tests.families.types import TYPES

REFUSED = (
    "bart",
    "blt",
    "deepseek_v4",
    "doge",
    "emu3",
    "falcon",
    "gemma3n",
    "gemma4_assistant",
    "mllama",
    "musicgen",
    "rwkv",
)
ACCEPTED = ("afmoe", "deepseek_v32", "diffllama", "gemma4_text", "llama4_text")
ROUNDED = ("granitemoeshared", "minimax", "phimoe")


def test_every_type_was_tried_and_doctor_and_run_agree():
    """The results of `python -m tests.families.table --all`."""
    rows = every.read()
    assert sorted(rows) == TYPES
    assert {kind: cells for kind, cells in rows.items() if cells[every.DOCTOR] != cells[every.RUN]} == {}
    assert {kind for kind, cells in rows.items() if cells[every.RUN].startswith(("error", "not tried"))} == set()


def test_the_page_has_the_table_of_the_kept_rows():
    page = PAGE.read_text(encoding="utf-8")
    begin, end = EVERY
    assert page.partition(begin)[2].partition(end)[0].strip() == every.page(every.read())


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_is_what_doctor_says(kind):
    """Encoders, several models in one, own attention, a missing package, a state that transformers does not cache."""
    cells = every.row(kind)
    assert cells[every.RUN] == cells[every.DOCTOR] != ""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ACCEPTED)
def test_packed_rows_and_rollouts_of_special_layers_are_exact(kind):
    """Values that are viewed; an indexer; two attentions in a layer; two shapes of layers that share keys; chunks."""
    cells = every.row(kind, ("packed", "builtin"))
    assert cells == {every.DOCTOR: "", every.RUN: "", "packed": "yes", "builtin": "yes"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ROUNDED)
def test_packed_rows_in_bfloat16_round_as_each_sequence_alone(kind):
    """Experts that rounding moves, decays in float32, experts that are drawn in training."""
    assert every.row(kind, ("bfloat16",)) == {every.DOCTOR: "", every.RUN: "", "bfloat16": "yes"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2"])
def test_a_single_token_s_step_size_is_limited_as_in_a_sequence(kind):
    assert every.row(kind, ("builtin",)) == {every.DOCTOR: "", every.RUN: "", "builtin": "yes"}


def test_an_adapter_leaves_out_a_tower_with_layers_of_the_same_names():
    """Gemma 4's tower wraps each linear layer in a class of its own that has the layer's name."""
    assert every.row("gemma4", ("lora",)) == {every.DOCTOR: "", every.RUN: "", "lora": "yes"}
