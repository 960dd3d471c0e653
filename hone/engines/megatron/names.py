"""Which box of which Hugging Face weight each Megatron parameter is: the one table that everything else follows.

    Megatron's parameter on a tensor rank         boxes of Hugging Face weights, as row ranges of that parameter
    linear_qkv  [q q k v | q q k v | ...]         q_proj, k_proj, v_proj: one box each for every key-value head
    linear_fc1  [gate; up]                        gate_proj, up_proj
    linear_proj, linear_fc2                       o_proj, down_proj: all rows, this rank's columns
    local_experts.N.linear_fc1, linear_fc2        one expert of gate_up_proj and down_proj, which hold all experts

Loading, exports, weight sync and checkpoints use this table. Names are the keys of the transformers model's state dict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hone.engines.megatron.families import head_size
from hone.engines.megatron.mesh import MegatronRanks

EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole weight, and which rows of a local parameter hold it, with all their columns."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rows: tuple[int, int]
    is_owner: bool  # whether this tensor rank is the first of those that hold it


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one part of the model on one rank."""

    config: Any  # of transformers
    ranks: MegatronRanks
    prefix: str  # of the body's weights: "model." or "body."
    first_layer: int  # number of the part's layer 0 in the whole model
    copies_embedding: bool  # whether the head is this stage's copy of the first stage's embedding

    def boxes(self, name: str, parameter: Tensor) -> list[Box]:
        """The boxes of a parameter; padding of the vocabulary belongs to none."""
        if name == "embedding.word_embeddings.weight":
            return self._vocabulary(f"{self.prefix}embed_tokens.weight")
        if name == "output_layer.weight" and self.copies_embedding:
            return self._vocabulary(f"{self.prefix}embed_tokens.weight", is_owner=False)
        if name == "output_layer.weight":
            return self._vocabulary("lm_head.weight")
        if name == "decoder.final_layernorm.weight":
            return self._same(f"{self.prefix}norm.weight", parameter)
        if name == "score.weight":
            return self._same(name, parameter)
        found = LAYER.fullmatch(name)
        if found is None:
            raise KeyError(f"{name} has no Hugging Face name")
        return self._in_layer(f"{self.prefix}layers.{int(found[1]) + self.first_layer}.", found[2], parameter)

    def _in_layer(self, layer: str, name: str, parameter: Tensor) -> list[Box]:
        module, _, kind = name.rpartition(".")
        same = {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
        }
        if module in same:
            return self._same(f"{layer}{same[module]}.{kind}", parameter)
        if module == "mlp.router":
            return self._same(f"{layer}mlp.gate.{kind}", parameter)
        if found := EXPERT.fullmatch(module):
            return self._expert(f"{layer}mlp.experts.", int(found[1]), found[2], parameter)
        if module == "self_attention.linear_qkv":
            return self._heads(f"{layer}self_attn.", kind, parameter)
        if module == "self_attention.linear_proj":
            return self._columns(f"{layer}self_attn.o_proj.{kind}", parameter)
        if module == "mlp.linear_fc1":
            return self._pair(f"{layer}mlp.", kind, parameter)
        if module == "mlp.linear_fc2":
            return self._columns(f"{layer}mlp.down_proj.{kind}", parameter)
        raise KeyError(f"{name} has no Hugging Face name")

    def _vocabulary(self, name: str, is_owner: bool = True) -> list[Box]:
        tokens, width = self.config.vocab_size, self.config.hidden_size
        mine = self.ranks.rows_of_vocabulary(tokens)
        count = mine.stop - mine.start
        return [Box(name, (tokens, width), (mine.start, 0), (count, width), (0, count), is_owner)]

    def _same(self, name: str, parameter: Tensor) -> list[Box]:
        """A weight that every tensor rank holds whole."""
        shape = tuple(parameter.shape)
        return [Box(name, shape, (0,) * len(shape), shape, (0, shape[0]), self.ranks.tensor_rank == 0)]

    def _columns(self, name: str, parameter: Tensor) -> list[Box]:
        rows, columns = parameter.shape
        whole = (rows, columns * self.ranks.sizes.tensor)
        return [Box(name, whole, (0, columns * self.ranks.tensor_rank), (rows, columns), (0, rows), True)]

    def _pair(self, path: str, kind: str, parameter: Tensor) -> list[Box]:
        half, *rest = parameter.shape[0] // 2, *parameter.shape[1:]
        whole, first = (half * self.ranks.sizes.tensor, *rest), half * self.ranks.tensor_rank
        zeros = (0,) * len(rest)
        return [
            Box(f"{path}{one}_proj.{kind}", whole, (first, *zeros), (half, *rest), (i * half, (i + 1) * half), True)
            for i, one in enumerate(("gate", "up"))
        ]

    def _expert(self, path: str, number: int, matrix: str, parameter: Tensor) -> list[Box]:
        """One of this rank's experts; transformers fuses all experts of a layer into one tensor."""
        experts = self.config.num_experts
        index = number + self.ranks.expert_rank * (experts // self.ranks.sizes.expert)
        rows, columns = parameter.shape
        count = 2 if matrix == "linear_fc1" else 1  # gate and up, or down
        name = f"{path}{'gate_up_proj' if count == 2 else 'down_proj'}"
        whole, half = (experts, rows, columns), rows // count
        starts = range(0, rows, half)
        return [Box(name, whole, (index, at, 0), (1, half, columns), (at, at + half), True) for at in starts]

    def _heads(self, path: str, kind: str, parameter: Tensor) -> list[Box]:
        config, size = self.config, head_size(self.config)
        rest, groups = tuple(parameter.shape[1:]), config.num_key_value_heads
        queries = config.num_attention_heads // groups
        mine = groups // self.ranks.sizes.tensor
        boxes, at = [], 0
        for group in range(mine * self.ranks.tensor_rank, mine * (self.ranks.tensor_rank + 1)):
            for letter, count in (("q", queries), ("k", 1), ("v", 1)):
                whole = (groups * count * size, *rest)
                offset = (group * count * size, *(0,) * len(rest))
                rows = (at, at + count * size)
                boxes.append(Box(f"{path}{letter}_proj.{kind}", whole, offset, (count * size, *rest), rows, True))
                at += count * size
        return boxes
