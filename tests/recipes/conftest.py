"""A tiny Qwen3 as somebody would find it on a disk: Hugging Face folder, BPE tokenizer, Qwen3's kind of template."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

# As Qwen3's: turns between <|im_start|> and <|im_end|>, and an empty thought where thinking is switched off.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def train_tokenizer(texts):
    """A byte-level BPE tokenizer of 400 tokens, trained on the spot."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL[:3]), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(list(SPECIAL[3:]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_qwen3(folder, texts):
    """A random Qwen3 of 30 k parameters with its tokenizer, in the Hugging Face format."""
    tokenizer = train_tokenizer(texts)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


QUESTIONS = [
    ("Mia has {a} red apples and buys {b} more. How many apples does she have?", "{a}+{b}=<<{a}+{b}={c}>>{c} apples."),
    ("A box holds {a} pens, another {b}. How many pens are in both boxes?", "Both hold {a}+{b}=<<{a}+{b}={c}>>{c}."),
]


def gsm8k_rows(count):
    """Rows of the data set's shape: a question, and a solution that ends with '#### number'."""
    rows = []
    for number in range(count):
        a, b = 700 + 13 * number, 400 + 7 * number
        question, solution = QUESTIONS[number % 2]
        values = {"a": a, "b": b, "c": a + b}
        rows.append({"question": question.format(**values), "answer": f"{solution.format(**values)}\n#### {a + b:,}"})
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def gsm8k(tmp_path):
    """A folder with train.jsonl, test.jsonl and a model."""
    rows = gsm8k_rows(24)
    write_rows(tmp_path / "train.jsonl", rows[:16])
    write_rows(tmp_path / "test.jsonl", rows[16:])
    save_tiny_qwen3(tmp_path / "model", [text for row in rows for text in row.values()])
    return tmp_path
