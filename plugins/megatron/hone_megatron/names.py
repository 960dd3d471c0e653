"""Table of the box of a Hugging Face weight that each Megatron parameter is; everything else follows from it.

    Megatron's parameter on a tensor rank         boxes of Hugging Face weights, as row ranges of that parameter
    linear_qkv  [q q k v | q q k v | ...]         q_proj, k_proj, v_proj: one box each for every key-value head
    linear_fc1  [gate; up]                        gate_proj, up_proj
    linear_proj, linear_fc2                       o_proj, down_proj: all rows, this rank's columns
    experts.gate_up_proj [gate; up; gate; up ..]  gate_up_proj, which holds all experts: two boxes for each expert here
    other weights of experts                      one box for each expert here
    q_b_proj, kv_b_proj (latent attention)        this rank's rows; q_a_proj, kv_a_proj_with_mqa: all of them

Loading, exports, weight sync and checkpoints use this table. Names are the keys of the transformers model's state dict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hone.engines.rebuilt.configs import head_size
from hone.engines.rebuilt.reading import Region
from hone.models.routing import expert_count
from hone_megatron.mesh import MegatronRanks

LATENT_WHOLE = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")  # on every tensor rank
LATENT_SPLIT = ("q_proj", "q_b_proj", "kv_b_proj")  # by heads
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Box(Region):
    """A region of a whole weight, and which rows of a local parameter hold it, with all their columns."""

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
            **{f"self_attention.{one}": f"self_attn.{one}" for one in LATENT_WHOLE},
        }
        if module in same:
            return self._same(f"{layer}{same[module]}.{kind}", parameter)
        if module == "mlp.router":
            router = "router" if self.config.model_type == "gpt_oss" else "gate"
            return self._same(f"{layer}mlp.{router}.{kind}", parameter)
        if module == "mlp.experts":
            return self._experts(f"{layer}{name}", kind, parameter)
        if name == "self_attention.core_attention.sinks":
            return self._rows(f"{layer}self_attn.sinks", parameter)
        if name == "self_attention.linear_proj.bias":
            return self._same(f"{layer}self_attn.o_proj.bias", parameter)
        if module.startswith("mlp.shared_experts"):
            return self._shared(f"{layer}mlp.shared_expert", name, parameter)
        if module == "self_attention.linear_qkv":
            return self._heads(f"{layer}self_attn.", kind, parameter)
        if module == "self_attention.linear_proj":
            return self._columns(f"{layer}self_attn.o_proj.{kind}", parameter)
        if module.removeprefix("self_attention.") in LATENT_SPLIT:
            return self._rows(f"{layer}self_attn.{name.removeprefix('self_attention.')}", parameter)
        if module == "mlp.linear_fc1":
            return self._pair(f"{layer}mlp.", kind, parameter)
        if module == "mlp.linear_fc2":
            return self._columns(f"{layer}mlp.down_proj.{kind}", parameter)
        raise KeyError(f"{name} has no Hugging Face name")

    def _vocabulary(self, name: str, is_owner: bool = True) -> list[Box]:
        tokens, width = self.config.vocab_size, self.config.hidden_size
        mine = self.ranks.vocabulary.rows(tokens)
        count = mine.stop - mine.start
        return [Box(name, (tokens, width), (mine.start, 0), (count, width), (0, count), is_owner)]

    def _same(self, name: str, parameter: Tensor) -> list[Box]:
        """A weight that every tensor rank holds whole."""
        shape = tuple(parameter.shape)
        return [Box(name, shape, (0,) * len(shape), shape, (0, shape[0]), self.ranks.tensor_rank == 0)]

    def _rows(self, name: str, parameter: Tensor) -> list[Box]:
        """A weight whose rows the tensor ranks share out in their order."""
        rows, *rest = parameter.shape
        whole, first = (rows * self.ranks.sizes.tensor, *rest), rows * self.ranks.tensor_rank
        return [Box(name, whole, (first, *(0,) * len(rest)), (rows, *rest), (0, rows), True)]

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

    def _experts(self, name: str, kind: str, parameter: Tensor) -> list[Box]:
        """The matrices, or biases, of this rank's experts; transformers has all experts in one tensor.

        Ranks that share experts cut gate and up by rows, down by columns; of gpt-oss, which has them transposed, gate
        and up by columns, down by rows. Each of them holds the whole bias of the results.
        """
        sizes, experts, transposed = self.ranks.sizes, expert_count(self.config), self.config.model_type == "gpt_oss"
        here, columns = experts // sizes.expert, parameter.shape[1]
        rows = parameter.shape[0] // here
        blocks = 2 if kind == "gate_up_proj" and not transposed else 1  # gate, and up under it
        by_rows = blocks == 2 or (kind == "down_proj" and transposed)
        is_whole = kind == "down_proj_bias"
        part, parts = (0, 1) if is_whole else (self.ranks.expert_tensor_rank, sizes.expert_tensor)
        height = rows // blocks
        whole = (rows * parts, columns) if by_rows else (rows, columns * parts)
        is_owner = not is_whole or self.ranks.expert_tensor_rank == 0
        skipped = 1 if kind.endswith("bias") else 0  # a bias is a matrix of one row here, and a vector there
        boxes = []
        for number in range(here):
            for block in range(blocks):
                first = number * rows + block * height
                offset = ((block * parts + part) * height, 0) if by_rows else (0, part * columns)
                boxes.append(
                    Box(
                        name,
                        (experts, *whole[skipped:]),
                        (number + self.ranks.expert_rank * here, *offset[skipped:]),
                        (1, *(height, columns)[skipped:]),
                        (first, first + height),
                        is_owner,
                    )
                )
        return boxes

    def _shared(self, path: str, name: str, parameter: Tensor) -> list[Box]:
        """The experts that every token goes to, as one MLP; Qwen2-MoE has one, behind a gate."""
        if name.endswith("gate_weight"):
            return self._same(f"{path}_gate.weight", parameter)
        path = path if self.config.model_type == "qwen2_moe" else f"{path}s"
        if name.endswith("linear_fc1.weight"):
            return self._pair(f"{path}.", "weight", parameter)
        return self._columns(f"{path}.down_proj.weight", parameter)

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
