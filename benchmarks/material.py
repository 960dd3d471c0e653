"""Makes what both sides are measured on: model folders in the Hugging Face format, prompts and samples.

    python benchmarks/material.py FOLDER [--pretrained]

The two models that it builds have 10 M parameters and random weights, and decide by themselves how long their answers
are: the logit of the end-of-sequence token is all but constant, so an answer goes on with the same probability after
every token. In `model-uniform` that token never comes and every answer fills its limit; in `model-ragged` it comes once
in `MEAN_RAGGED` tokens, which makes lengths geometric. Both sides run unchanged, without flags, patches or
forced lengths.

`--pretrained` adds the model and the prompts of recipes/smollm2, which are fetched once (93 MB).

How: one dimension of the residual stream is written by the embedding only, with the same value for every token, so
that the last norm hands the output head a constant; the (tied) embedding of the end-of-sequence token weighs just it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import runpy
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hone.models.files.gguf import converted, copy_model
from hone.models.files.packaged import fetched

VOCABULARY = 2048
PAD, EOS = 0, 1
PROMPT_TOKENS = 32
MEAN_RAGGED = 64
CONSTANT = 0.5  # the value of the reserved dimension in every token's embedding
NEVER = 1e-12  # probability of the end-of-sequence token where answers are to fill their limit
SAMPLES = 64
PRETRAINED = "smollm2-135m-instruct"
TASK = Path(__file__).resolve().parents[1] / "recipes" / "smollm2" / "task.py"
SHORTEST, LONGEST = 16, 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: `w2` ... `w2047`, after the padding and the end-of-sequence token."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_model(stop_probability: float) -> Qwen3ForCausalLM:
    """A random Qwen3 that ends an answer after any token with `stop_probability`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.norm.weight[0] = 0.1  # small, so that bfloat16 has digits left for the other words' logits
        embedding[:, 0] = CONSTANT
        embedding[EOS] = 0.0
        embedding[EOS, 0] = _eos_weight(model, stop_probability)
    return model


def _eos_weight(model: Qwen3ForCausalLM, stop_probability: float) -> float:
    """Return the weight of the constant in the end-of-sequence row that gives the wanted mean probability."""
    words = torch.randint(2, VOCABULARY, (16, PROMPT_TOKENS + 64), generator=torch.Generator().manual_seed(1))
    hidden = model.model(words).last_hidden_state[:, PROMPT_TOKENS:].flatten(0, 1)
    logits = hidden @ model.model.embed_tokens.weight.T
    logits[:, EOS] = float("-inf")
    others = logits.logsumexp(-1)
    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = torch.sigmoid(hidden[:, 0] * middle - others).mean()
        low, high = (middle, high) if mean < stop_probability else (low, middle)
    return (low + high) / 2


def words_of(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(2, VOCABULARY)}" for _ in range(count))


def sample_lengths(rng: random.Random) -> list[int]:
    """Lengths in tokens, end-of-sequence token included: evenly spread, in random order, both limits included."""
    lengths = [SHORTEST + round(i * (LONGEST - SHORTEST) / (SAMPLES - 1)) for i in range(SAMPLES)]
    rng.shuffle(lengths)
    return lengths


def write_data(folder: Path) -> None:
    rng = random.Random(0)
    prompts = [{"prompt": words_of(rng, PROMPT_TOKENS)} for _ in range(1024)]
    samples = []
    for length in sample_lengths(rng):
        prompt_tokens = min(8, length // 2)
        answer = words_of(rng, length - prompt_tokens - 1)
        samples.append({"prompt": words_of(rng, prompt_tokens), "completion": " " + answer})
    for name, rows in (("prompts", prompts), ("samples", samples)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_all(folder: Path) -> None:
    """Everything into `folder`, which may exist."""
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    for name, stop_probability in (("uniform", NEVER), ("ragged", 1 / MEAN_RAGGED)):
        target = folder / f"model-{name}"
        model = build_model(stop_probability)
        model.save_pretrained(target)
        build_tokenizer().save_pretrained(target)
        size = sum(p.numel() for p in model.parameters())
        print(f"{target}: {size / 1e6:.2f} M parameters, stops with probability {_measured(model):.3g} per token")


def write_pretrained(folder: Path) -> None:
    """The pretrained model and its prompts into `folder`, which exists."""
    target = folder / "model-pretrained"
    shutil.rmtree(target, ignore_errors=True)
    copy_model(converted(fetched(PRETRAINED, "--pretrained"), "--pretrained"), target)
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in runpy.run_path(str(TASK))["rows"](1, 1024)]
    text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (folder / "prompts-pretrained.jsonl").write_text(text, encoding="utf-8")


def _measured(model: Qwen3ForCausalLM) -> float:
    words = torch.randint(2, VOCABULARY, (16, 96), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        probability = model(words).logits[:, PROMPT_TOKENS:].softmax(-1)[..., EOS]
    spread = float(probability.std() / probability.mean())
    if not math.isfinite(spread) or spread > 0.25:
        raise AssertionError(f"the stop probability varies by {spread:.2f} of its mean: lengths would not be geometric")
    return float(probability.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pretrained", action="store_true")
    given = parser.parse_args()
    write_all(given.folder)
    if given.pretrained:
        write_pretrained(given.folder)
