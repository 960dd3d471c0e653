"""`hone doctor --model`: what is said of real folders, to people and to programs; one sentence for what is none."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, RecurrentGemmaConfig

from hone.cli.main import main
from tests.families.families import FAMILIES, save


def said(folder, capsys, *arguments):
    assert main(["doctor", "--model", str(folder), *arguments]) == 0
    return capsys.readouterr().out


def test_to_programs(tmp_path, capsys):
    save(FAMILIES["DeepSeek-V3"], tmp_path)
    found = json.loads(said(tmp_path, capsys, "--json", "--devices", "4", "--lora-rank", "8"))
    assert found["model"]["family"] == "deepseek_v3"
    assert (found["model"]["experts"], found["model"]["experts_per_token"]) == (8, 4)
    assert found["degrees"] == {"tensor": [2], "sequence": [2], "expert": [2, 4, 8]}
    rows = [(row["devices"], row["lora_rank"], row["four_bit"]) for row in found["memory"]]
    assert rows == [(4, 0, False), (4, 8, False), (4, 8, True)]
    whole, adapter, narrow = found["memory"]
    assert narrow["optimizer"] == adapter["optimizer"] < whole["optimizer"]
    assert whole["total"] == sum(whole[part] for part in ("weights", "gathered", "gradients", "optimizer"))
    assert found["kv_bytes_per_token"] == 2 * 2 * (80 + 16) * 2  # layers, heads, key and value, bytes


def test_to_people(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    save(FAMILIES["gpt-oss"], tmp_path)
    lines = [" ".join(line.split()) for line in said(tmp_path, capsys).splitlines()]
    assert "family gpt_oss (GptOssForCausalLM), language model" in lines
    assert "parallel.tensor no transformers has no tensor-parallel plan" in lines
    assert "parallel.expert yes 2, 4" in lines
    assert any(line.startswith("LoRA targets yes k_proj, o_proj, q_proj, v_proj; if named: experts.") for line in lines)
    assert any(line.startswith("all weights, 8 devices ") for line in lines)
    assert any(line.startswith("QLoRA, rank 16, 1 device ") for line in lines)


def test_layers_that_carry_a_state_train_and_have_no_ranks_for_heads(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, architectures=["MambaForCausalLM"])
    config.save_pretrained(tmp_path)
    lines = [" ".join(line.split()) for line in said(tmp_path, capsys).splitlines()]
    assert "attention none" in lines
    assert "layers with a state yes MambaMixer: they see one sequence of a packed row at a time" in lines
    assert "parallel.sequence no layers that carry a state do not support it" in lines
    assert any(line.startswith("rollout builtin yes uses the same attention as training, and keeps") for line in lines)


def test_parts_that_are_not_read_are_named(tmp_path, capsys, monkeypatch):
    """A head for several tokens, and nothing of what the model computes itself."""
    monkeypatch.setenv("COLUMNS", "200")
    file = save(FAMILIES["Qwen3-Next"], tmp_path) / "model.safetensors"
    others = {name: torch.ones(2) for name in ("mtp.fc.weight", "mtp.norm.weight", "model.rotary_emb.inv_freq")}
    save_file(load_file(file) | others, file, {"format": "pt"})
    lines = [" ".join(line.split()) for line in said(tmp_path, capsys).splitlines()]
    assert "not read mtp (2 weights): not trained, not served, and not in an export" in lines
    assert "parallel.tensor yes 2" in lines
    assert "parallel.sequence no layers that carry a state do not support it" in lines


def test_states_that_hone_cannot_separate_are_no_good(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    RecurrentGemmaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16
    ).save_pretrained(tmp_path)
    lines = [" ".join(line.split()) for line in said(tmp_path, capsys).splitlines()]
    assert any(line.startswith("packed attention no its layers carry a state") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/folder"], "error: model.path: no folder no/such/folder"),
        (["--devices", "4"], "error: --devices is for a model: give --model too"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, message, capsys):
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_quantised_model_that_cannot_be_trained_is_refused(tmp_path, capsys):
    save(FAMILIES["Qwen3"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "is quantised (gptq), and such weights cannot be trained" in capsys.readouterr().err
