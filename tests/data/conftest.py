"""Small tokenizers and data files made on the spot."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hone.config import build
from hone.data.settings import DataConfig, DatasetConfig

SPECIAL = [
    "<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip
TEXT = [
    "What is 2 + 2?\n\nIt is 4.\n#### 4",
    "\n\nuser\nassistant\nmodel\nsystem\ntool\n",
    "<think>\nlet me think\n</think>\n\nThe answer is 7.\n",
    "You are a helpful assistant. Natalia sold clips to 48 of her friends in April.",
]


@pytest.fixture(scope="session")
def make_tokenizer():
    """A byte-level BPE whose merges cross line breaks and spaces, as real ones do."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT * 3,
        trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )

    def make(chat_template=None, eos="<eos>", bos="<bos>"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=eos, bos_token=bos, pad_token="<pad>", extra_special_tokens=SPECIAL[3:]
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def write_jsonl():
    def write(path, rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def write_parquet():
    def write(path, rows, row_group_size=3):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
        return path

    return write


@pytest.fixture
def gsm8k(tmp_path, write_jsonl):
    """A file of the shape of GSM8K, with the settings that read it."""
    rows = [
        {"question": f"What is {n} + {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"}
        for n in range(10)
    ]
    return {
        "path": write_jsonl(tmp_path / "gsm8k.jsonl", rows),
        "prompt_template": "{{ question }}",
        "ground_truth_template": "{{ answer.split('####')[-1].strip() }}",
    }


def _plain(settings):
    return {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}


@pytest.fixture
def dataset():
    """Settings of one data set, built as from a run file."""
    return lambda **settings: build(DatasetConfig, _plain(settings), "run.yaml")


@pytest.fixture
def data():
    """Settings of the training data, built as from a run file."""
    return lambda train, **more: build(DataConfig, {"train": _plain(train), **more}, "run.yaml")
