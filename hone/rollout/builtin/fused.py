"""The Llama, Mistral, Qwen2 and Qwen3 decoder written out: fewer, larger operations than a module tree makes.

    x --norm--> one matmul: q|k|v --(q and k normed)--> RoPE once over q|k --> cache, attention --> x + o
      --norm--> one matmul: gate|up --> silu(gate) * up --> x + down          (per layer; then norm and head)

The named weights (`q_proj`, `k_proj`, ... as in a Hugging Face state dict) are views into the fused storage, so weight
sync writes directly into it, and its checksum covers the weights in use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hone.models.attention.packed import Scoring, attend
from hone.models.rotary import fix_rotary
from hone.models.routing import Routers
from hone.rollout.builtin.cache import CacheShape, KVCache, PackedPrompts, Step
from hone.rollout.builtin.scoring import Following, following_logprobs

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]


def unfit_for_fusing(config: PreTrainedConfig, longest: int) -> str:
    """Return why this path cannot run a model exactly; empty if it can. `longest`: the longest sequence in tokens."""
    if config.model_type not in _FAMILY:
        return f"architecture {config.model_type!r} is not one of {', '.join(_FAMILY)}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}, not 'silu'"
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if window is not None and sliding and window < longest:
        return f"its sliding window of {window} tokens is shorter than the longest sequence of {longest}"
    return ""


@dataclass(slots=True)
class _Layer:
    """The fused weights of one layer."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 kv_heads) * head_size, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_size]
    k_norm: Tensor | None
    o: Tensor  # [hidden, heads * head_size]
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [2 mlp_size, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, mlp_size]
    down_bias: Tensor | None


class _Storage:
    """Allocator of fused tensors, which records the name of each part."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = shapes
        self._placement: dict[str, Any] = {"dtype": dtype, "device": device}
        self.named: dict[str, Tensor] = {}

    def take(self, *names: str) -> Tensor | None:
        """Allocate one tensor for the named ones, stacked along the first dimension; None if they do not exist."""
        if names[0] not in self._shapes:
            return None
        shapes = [self._shapes[name] for name in names]
        whole = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], **self._placement)
        for name, part in zip(names, whole.split([shape[0] for shape in shapes]), strict=True):
            self.named[name] = part
        return whole

    def need(self, *names: str) -> Tensor:
        whole = self.take(*names)
        assert whole is not None, names
        return whole


class FusedDecoder:
    """`Decoder` for the Llama family; `unfit_for_fusing` rejects models that it cannot run."""

    routers: Routers | None = None

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager")
        shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._scoring = Scoring(scale=self._head_size**-0.5)
        shape = CacheShape(config.num_hidden_layers, self._kv_heads, self._head_size, self._head_size)
        self.cache_shapes: tuple[CacheShape, ...] = (shape,)
        self._rotary = type(skeleton.model.rotary_emb)(config=config).to(device)
        fix_rotary(self._rotary, getattr(config, "run_context", None), config.model_type)
        self.rope = torch.zeros(2, 0, self._head_size, dtype=dtype, device=device)
        self._take_storage(_Storage(shapes, dtype, device), config)
        if unknown := shapes.keys() - self._named.keys():
            raise ValueError(f"execution 'fused' has no place for {sorted(unknown)[:4]}; use execution 'generic'")

    def _take_storage(self, storage: _Storage, config: PreTrainedConfig) -> None:
        self._embedding = storage.need("model.embed_tokens.weight")
        self._layers = [_layer(storage, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self._norm = storage.need("model.norm.weight")
        if config.tie_word_embeddings:
            self._head = storage.named["lm_head.weight"] = self._embedding
        else:
            self._head = storage.need("lm_head.weight")
        self._named = storage.named

    def weights(self) -> Mapping[str, Tensor]:
        return self._named

    def prefill(self, prompts: PackedPrompts, cache: KVCache) -> None:
        tokens = prompts.rows.shape[0]
        at = cache.addresses(prompts.rows, prompts.positions[:tokens])

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
            cache.write(layer, at, k[:tokens], v[:tokens])
            if layer == len(self._layers) - 1:
                return None  # decode steps compute the logits
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return cache.attend_prompts(layer, q, k, v, prompts, self._scoring)[0].transpose(0, 1).flatten(1)

        self._forward(prompts.token_ids, self._rope_at(prompts.positions, prompts.longest), attention)

    def decode(self, step: Step, cache: KVCache) -> Tensor:
        n = step.rows
        padding = step.token_ids.shape[0] - n
        at = cache.addresses(torch.arange(n, device=step.positions.device), step.positions[:n])

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, at, k[:n], v[:n])
            out = cache.attend(layer, q[:n], step, self._scoring)
            return F.pad(out, (0, 0, 0, padding)) if padding else out

        hidden = self._forward(step.token_ids, self._rope_at(step.positions, step.columns), attention)
        logits = F.linear(self._normed(hidden, self._norm), self._head)[:n]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def score(self, prompts: PackedPrompts, temperature: float, top_k: int = 0) -> Following:
        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return attend(q, k, v, prompts.packing, self._scoring)[0].transpose(0, 1).flatten(1)

        rope = self._rope_at(prompts.positions, prompts.longest)
        hidden = self._normed(self._forward(prompts.token_ids, rope, attention), self._norm)
        return following_logprobs(prompts, hidden, lambda rows: F.linear(rows, self._head), temperature, top_k)

    def _forward(self, token_ids: Tensor, rope: Tensor, attention: _Attention) -> Tensor:
        """Compute [T] tokens -> [T, hidden] before the last norm; stop early if `attention` returns None."""
        x = F.embedding(token_ids, self._embedding)
        cos, sin = rope
        split = (self._heads, self._kv_heads, self._kv_heads)
        for number, layer in enumerate(self._layers):
            qkv = F.linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.unflatten(1, (-1, self._head_size))
            qk = self._rotated(self._qk_normed(qkv[:, : split[0] + split[1]], layer), cos, sin)
            q, k = qk.split(split[:2], 1)
            mixed = attention(number, q, k, qkv[:, split[0] + split[1] :])
            if mixed is None:
                return x
            x = _add_linear(x, mixed, layer.o, layer.o_bias)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, 1)
            x = _add_linear(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return x

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _qk_normed(self, qk: Tensor, layer: _Layer) -> Tensor:
        if layer.q_norm is None or layer.k_norm is None:
            return qk
        normed = F.rms_norm(qk, (self._head_size,), None, self._eps)
        normed[:, : self._heads] *= layer.q_norm
        normed[:, self._heads :] *= layer.k_norm
        return normed

    def _rotated(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply RoPE; `sin` contains the sign of rotate_half."""
        half = self._head_size // 2
        swapped = torch.cat((qk[..., half:], qk[..., :half]), -1)
        return torch.addcmul(qk * cos, swapped, sin)

    def _rope_at(self, positions: Tensor, reach: int) -> Tensor:
        """Return cos and sin [2, T, 1, head_size] of positions below `reach`, from a table that grows when needed."""
        if reach > self.rope.shape[1]:
            ids = torch.arange(max(reach, 2 * self.rope.shape[1], 512), device=positions.device)[None]
            cos, sin = self._rotary(self.rope, ids)
            sin = sin.clone()
            sin[..., : self._head_size // 2].neg_()
            self.rope = torch.cat([cos, sin])
        return self.rope[:, positions, None]


def _layer(storage: _Storage, prefix: str) -> _Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = [f"{attention}{part}_proj." for part in "qkv"]
    gate_up = [f"{mlp}{part}_proj." for part in ("gate", "up")]
    return _Layer(
        input_norm=storage.need(f"{prefix}input_layernorm.weight"),
        qkv=storage.need(*(f"{name}weight" for name in qkv)),
        qkv_bias=storage.take(*(f"{name}bias" for name in qkv)),
        q_norm=storage.take(f"{attention}q_norm.weight"),
        k_norm=storage.take(f"{attention}k_norm.weight"),
        o=storage.need(f"{attention}o_proj.weight"),
        o_bias=storage.take(f"{attention}o_proj.bias"),
        mlp_norm=storage.need(f"{prefix}post_attention_layernorm.weight"),
        gate_up=storage.need(*(f"{name}weight" for name in gate_up)),
        gate_up_bias=storage.take(*(f"{name}bias" for name in gate_up)),
        down=storage.need(f"{mlp}down_proj.weight"),
        down_bias=storage.take(f"{mlp}down_proj.bias"),
    )


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        residual = residual + bias
    return torch.addmm(residual, x, weight.t())


__all__ = ["FusedDecoder", "unfit_for_fusing"]
