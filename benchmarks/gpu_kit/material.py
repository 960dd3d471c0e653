"""Model folders of real Qwen3 shapes with random weights, and data for them: `python material.py SHAPE FOLDER`.

The shapes that begin with `hybrid` are Qwen3.5's: three layers of gated DeltaNet to one of attention.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WORDS = 2048  # tokens that the tokenizer can write; the embedding has the model's real size
SHAPES = {  # hidden size, layers, heads, KV heads, head size, MLP size, vocabulary
    "tiny": (64, 2, 4, 2, 16, 192, 4096),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151_936),
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151_936),
    "4b": (2560, 36, 32, 8, 128, 9728, 151_936),
}
HYBRIDS = {  # hidden size, layers, heads, KV heads, head size, MLP size, vocabulary
    "hybrid-tiny": (64, 4, 4, 2, 16, 192, 4096),
    "hybrid": (1024, 12, 8, 2, 256, 3584, 151_936),
}
SAMPLES, SAMPLE_TOKENS = 64, 2048
LONG_SAMPLES, LONG_TOKENS = 8, 16_000  # of long.jsonl
PROMPTS, PROMPT_TOKENS = 1024, 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word `w2`, `w3` ..., after padding and end of sequence."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_model(shape: str) -> PreTrainedModel:
    hidden, layers, heads, kv_heads, head, mlp, vocabulary = (SHAPES | HYBRIDS)[shape]
    torch.manual_seed(0)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": mlp,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        if shape in HYBRIDS:
            states = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
            widths = {"linear_key_head_dim": min(head, 128), "linear_value_head_dim": min(head, 128)}
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **states, **widths)).to(torch.bfloat16)
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).to(torch.bfloat16)


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(2, WORDS)}" for _ in range(count))


def write(shape: str, folder: Path) -> int:
    """Write `model/`, `samples.jsonl`, `long.jsonl` and `prompts.jsonl`; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(shape)
    model.cpu().save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rng = random.Random(0)
    rows, long = (
        [{"prompt": words(rng, 8), "completion": " " + words(rng, tokens - 9)} for _ in range(count)]
        for count, tokens in (
            (SAMPLES, SAMPLE_TOKENS),
            (LONG_SAMPLES, SAMPLE_TOKENS if "tiny" in shape else LONG_TOKENS),
        )
    )
    prompts = [{"prompt": words(rng, PROMPT_TOKENS)} for _ in range(PROMPTS)]
    for name, lines in (("samples", rows), ("long", long), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return model.num_parameters()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES | HYBRIDS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    print(f"{given.shape}: {write(given.shape, given.folder):,} parameters in {given.folder}")
