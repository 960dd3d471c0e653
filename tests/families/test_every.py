"""Every causal model type of transformers is accepted or refused, by `hone doctor --model` and by a run alike."""

import pytest

from tests.families import every

REFUSED = ("doge", "falcon", "gemma4_assistant", "minimax_m3_vl_text", "mpt", "musicgen")
ACCEPTED = ("afmoe", "deepseek_v32", "diffllama", "gemma4_text", "llama4_text")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_is_what_doctor_says(kind):
    cells = every.row(kind)
    assert cells[every.RUN] == cells[every.DOCTOR] != ""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ACCEPTED)
def test_packed_rows_and_rollouts_of_special_layers_are_exact(kind):
    """Values that are viewed; an indexer; two attentions in a layer; two shapes of layers that share keys; chunks."""
    cells = every.row(kind, ("packed", "builtin"))
    assert cells == {every.DOCTOR: "", every.RUN: "", "packed": "yes", "builtin": "yes"}
