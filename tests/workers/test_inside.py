"""What hone does inside other engines' processes, as far as it needs none of them."""

import torch
from transformers import LlamaConfig, Qwen3Config

from hone.workers.inside import tied_names, watched

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_what_a_loader_does_nothing_with_is_left():
    given = {name: torch.arange(6.0).view(2, 3) for name in ("copied", "part", "joined", "read", "asked", "dropped")}
    left = set()
    found = dict(watched(given.items(), left))
    assert left == set(given)
    target = torch.nn.Parameter(torch.zeros(2, 3))
    target.data.copy_(found["copied"])
    assert torch.equal(target.data, given["copied"])
    part = found["part"].narrow(0, 1, 1)
    assert type(part) is torch.Tensor, "what is made of it is plain"
    assert torch.equal(part, given["part"][1:])
    torch.cat([torch.zeros(1, 3), found["joined"]])
    assert found["read"].sum().item() == 15
    asked = found["asked"]
    assert (asked.shape, asked.dtype, asked.numel(), asked.dim(), len(asked)) == ((2, 3), torch.float32, 6, 2, 2)
    assert not asked.is_cuda
    assert left == {"asked", "dropped"}


def test_second_names_of_tied_tensors_are_known():
    assert tied_names(Qwen3Config(**SIZES, tie_word_embeddings=True)) == {"lm_head.weight"}
    assert tied_names(LlamaConfig(**SIZES, tie_word_embeddings=False)) == set()
