"""A check at start-up that no token of a packed row depends on what it must not see: other sequences, later tokens.

    config --fewer layers, narrower--> small model in float32, random weights --packed row--> hidden states
    derivative of hidden states by embeddings: exactly zero where nothing may be seen, not zero where something must be

A derivative compares structure, not size: a leak that rounding would hide is a number that is not zero. Values are
compared too, with each sequence alone, because a choice (of experts, of keys) has no derivative. The row is long enough
for windows, convolutions and chunks of 64 tokens. The small model has every kind of layer of the model, and its layers
with a state are changed as the model's are (`hone.models.attention.stateful`). If their kernels take the bounds of
packed sequences, a row without shared prefixes shows first whether they honour them.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hone.models.attention.adapting import adapt
from hone.models.attention.indexed import indexers
from hone.models.attention.packed import PACKED, Packing, packed
from hone.models.attention.stateful import are_separate, separate_sequences, state_layers, takes_bounds, use_bounds
from hone.models.dropout import set_dropout
from hone.models.errors import ModelError
from hone.models.rotary import fix_rotary, longest_position, rotary_context

_LONGEST = 72  # tokens of a sequence
_SHORT = 16  # a longer window or chunk is cut to this
_NARROW = 128  # a wider model is narrowed to about this
_VOCABULARY = 512
_MOST = 2**28  # parameters of the small model
_ROUNDING = 1e-3  # of a token's hidden state: chunks and experts are summed in another order
_WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width", "mamba_d_ssm"),
    *("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("intermediate_size_mlp", "mlp_hidden_size", "moe_latent_size", "expert_ffn_hidden_size"),
)
_HEADS = (
    *("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "num_kv_heads"),
    *("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "n_groups", "mamba_n_groups", "mamba_ngroups"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_LENGTHS = (
    *("sliding_window", "sliding_window_size", "chunk_size", "mamba_chunk_size", "block_size"),
    *("attention_chunk_size", "floor_scale", "index_topk"),
)
# What this process has checked, and if kernels honour bounds: evaluation engines share their policy's config.
_proven: dict[tuple[Any, ...], bool] = {}
LOG = logging.getLogger("hone")


def refuse_for_states(body: Any, name: str, asked: Mapping[str, bool]) -> None:
    """Raise ModelError naming the first key that is set, if layers of the model carry a state.

    `asked`: keys with which these layers are not proven to compute the same, and if set.
    """
    layers = state_layers(body) if any(asked.values()) else {}
    for key in (key for key, is_asked in asked.items() if layers and is_asked):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers.values()}))
        raise ModelError(f"{key}: {name} has layers that carry a state ({kinds}), which do not support it; remove it")


def check_isolation(body: Any, name: str, training: bool) -> None:
    """Raise ModelError if tokens of a packed row see each other where they must not; `training`: in training mode too.

    `body` is the model without its head; its weights are not used. Noise of its own config is turned off.
    """
    text = getattr(body, "language_model", body)  # of a model with images, sound or several parts
    device = next(text.parameters()).device
    bounded = are_separate(text) and takes_bounds(text)
    key = (_class_of(text), text.config.to_json_string(), str(device), are_separate(text), bounded, training)
    if key not in _proven:
        small = _small_copy(text, name).to(device)
        set_dropout(small, 0.0)
        if are_separate(text):
            separate_sequences(small)
        row = _Row.of(longest_position(small.config, rotary_context(small)) or _LONGEST, device)
        bounded = bounded and _honours_bounds(small, row, name, training)
        use_bounds(small, bounded)
        _Trial(small, row, name).compare(training)
        _proven[key] = bounded
    use_bounds(text, _proven[key])


def _honours_bounds(small: PreTrainedModel, row: _Row, name: str, training: bool) -> bool:
    """Return whether kernels that take the bounds of packed sequences keep them apart; else say that they do not."""
    use_bounds(small, True)
    try:
        _Trial(small, replace(row, parents=(None,) * len(row.lengths)), name).compare(training)
    except ModelError:
        kinds = sorted({type(layer).__name__ for layer in state_layers(small).values()})
        LOG.warning(
            "%s: the kernels of layers that carry a state (%s) do not keep the sequences of a row apart by its bounds "
            "(seq_idx, cu_seqlens), so these layers get padded batches of sequences",
            name,
            ", ".join(kinds),
        )
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Row:
    """A packed row: sequences alone, and two with a prefix in common."""

    lengths: tuple[int, ...]  # of each segment
    parents: tuple[int | None, ...]
    device: torch.device

    @classmethod
    def of(cls, longest: int, device: torch.device) -> _Row:
        longest = min(longest, _LONGEST)
        prefix = max(longest * 2 // 5, 1)
        own = max(longest - prefix, 1)
        lengths = (min(5, longest), prefix, min(3, own), own, max(longest - 5, 1), min(2, longest))
        return cls(lengths, (None, None, 1, 1, None, None), device)

    @property
    def packing(self) -> Packing:
        ends = [sum(self.lengths[:count]) for count in range(len(self.lengths) + 1)]
        return Packing.of(torch.tensor(ends), self.parents, self.device)

    @property
    def segments(self) -> list[Tensor]:
        """Tokens of each segment."""
        return list(torch.arange(sum(self.lengths), device=self.device).split(list(self.lengths)))

    @property
    def sequences(self) -> list[Tensor]:
        """Tokens of each sequence, its prefix included."""
        parts = self.segments
        pairs = zip(parts, self.parents, strict=True)
        return [part if parent is None else torch.cat([parts[parent], part]) for part, parent in pairs]

    @property
    def positions(self) -> Tensor:
        found = torch.zeros(sum(self.lengths), dtype=torch.int64, device=self.device)
        for sequence in self.sequences:
            found[sequence] = torch.arange(len(sequence), device=self.device)
        return found


class _Trial:
    """The small model on the row."""

    def __init__(self, model: PreTrainedModel, row: _Row, name: str) -> None:
        self._model, self._row, self._name = model, row, name
        generator = torch.Generator().manual_seed(1)
        count = sum(row.lengths)
        self._tokens = torch.randint(3, model.config.vocab_size, (count,), generator=generator).to(row.device)
        self._embedded: Tensor | None = None
        model.get_input_embeddings().register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self._embedded = output.detach().requires_grad_(torch.is_grad_enabled())
        return self._embedded.clone()  # some models scale it in place

    def _states(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Hidden states [T, H] of the row's `tokens`."""
        positions = self._row.positions[tokens]
        try:
            with packed(packing):
                output = self._model(
                    input_ids=self._tokens[tokens][None], position_ids=positions[None], use_cache=False
                )
        except (NotImplementedError, TypeError) as error:
            raise ModelError(f"{self._name} cannot be trained on packed sequences: {error}") from error
        states: Tensor = output.last_hidden_state[0]
        return states

    @cached_property
    def _everything(self) -> Tensor:
        return torch.arange(sum(self._row.lengths), device=self._row.device)

    def compare(self, training: bool) -> None:
        """Compare values and structure; `training`: structure in training mode too."""
        self._model.eval()
        self.compare_values()
        for train in (False, True) if training else (False,):
            self._model.train(train)
            self.compare_structure()

    @torch.no_grad()
    def compare_values(self) -> None:
        """Compare each sequence of the row with itself alone."""
        row = self._states(self._everything, self._row.packing)
        for sequence in self._row.sequences:
            whole = Packing.of(torch.tensor([0, len(sequence)]), device=self._row.device)
            alone = self._states(sequence, whole)
            gap, scale = (row[sequence] - alone).norm(dim=-1), alone.norm(dim=-1)
            worst = int((gap / scale.clamp(min=1e-30)).argmax())
            if not bool(gap[worst] <= _ROUNDING * scale[worst]):
                raise self._error(
                    f"the hidden state of token {worst} of a sequence changes by {float(gap[worst]):.3g} (of "
                    f"{float(scale[worst]):.3g}) where other sequences are in the row"
                )

    def compare_structure(self) -> None:
        """Take derivatives of some tokens by all embeddings of the row, and compare what is zero."""
        with torch.enable_grad():
            states = self._states(self._everything, self._row.packing)
        generator = torch.Generator().manual_seed(2)
        self._directions = torch.randn(states.shape, generator=generator).to(states)
        sequences = self._row.sequences
        for bit in range((len(sequences) - 1).bit_length()):  # any two sequences differ in a bit of their numbers
            for value in (0, 1):
                chosen = [tokens for number, tokens in enumerate(sequences) if number >> bit & 1 == value]
                self._require_zero(states, torch.cat(chosen), "another sequence")
        self._require_zero(states, torch.cat([tokens[: -(-len(tokens) // 2)] for tokens in sequences]), "a later token")
        if not indexers(self._model):  # they may choose other keys than the one before
            self._require_mixing(states)

    def _require_zero(self, states: Tensor, seen: Tensor, unseen: str) -> None:
        """Raise ModelError if the states of the tokens `seen` depend on tokens that are not among them."""
        found = self._derivative(states, seen).index_fill(0, seen, 0.0)
        worst = float(found.max())
        if worst != 0:
            mode = ", in training" if self._model.training else ""
            raise self._error(
                f"a token's hidden state depends on {unseen} (its derivative is {worst:.3g} in float32{mode}, and has "
                "to be 0)"
            )

    def _require_mixing(self, states: Tensor) -> None:
        """Raise ModelError if a token does not see the one before it, which in a sequence may be its prefix's last."""
        segments = self._row.segments
        pairs = [(part[-2:-1], part[-1:]) for part in segments if len(part) > 1]
        pairs += [
            (segments[parent][-1:], part[:1])
            for part, parent in zip(segments, self._row.parents, strict=True)
            if parent is not None
        ]
        before, after = (torch.cat(tokens) for tokens in zip(*pairs, strict=True))
        if not bool((self._derivative(states, after)[before] > 0).all()):
            raise self._error("a token's hidden state does not depend on the token before it")

    def _derivative(self, states: Tensor, rows: Tensor) -> Tensor:
        """Largest entry of the derivative of some tokens' states, each in a direction, by each embedding: [T]."""
        assert self._embedded is not None
        value = (states[rows] * self._directions[rows]).sum()
        (found,) = torch.autograd.grad(value, self._embedded, retain_graph=True)
        return found[0].abs().amax(-1).nan_to_num(math.inf)

    def _error(self, found: str) -> ModelError:
        kinds = sorted({type(layer).__name__ for layer in state_layers(self._model).values()})
        with_state = f" (layers with a state: {', '.join(kinds)})" if kinds else ""
        return ModelError(
            f"{self._name} cannot be trained on packed sequences: {found}; are there recurrent layers that hone does "
            f"not know{with_state}?"
        )


# ------------------------------------------------------------------------------------------------- the small model


def _class_of(model: nn.Module) -> Any:
    """The class of a model from before it was sharded."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def _small_copy(text: Any, name: str) -> PreTrainedModel:
    """A model in float32 with random weights and every kind of layer of `text`.

    Raises ModelError if none can be built.
    """
    cls, kinds = _class_of(text), _kinds(text)
    reason = f"its layers alone have more than {_MOST} parameters"
    for config in _configs(text):
        try:
            with torch.device("meta"):
                empty = cls._from_config(config, attn_implementation=PACKED)
            if sum(weight.numel() for weight in empty.parameters()) > _MOST or not kinds <= _kinds(empty):
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                small: PreTrainedModel = cls._from_config(config, dtype=torch.float32, attn_implementation=PACKED)
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        adapt(small)
        fix_rotary(small, rotary_context(text), name)
        _scatter(small)
        small.eval()
        return small
    raise ModelError(f"{name} cannot be checked on packed sequences: no small model of its kind can be built: {reason}")


def _configs(text: Any) -> Iterator[Any]:
    """Smaller configs, the smallest first, and last the model's own."""
    layers, count = _needed_layers(text)
    divisors = _divisors(text.config)
    for divisor, cut in (*((one, cut) for cut in (True, False) for one in divisors), (1, True)):
        config = copy.deepcopy(text.config)
        _shorten(config)
        if cut and layers < count:
            _cut_layers(config, layers, count)
        _narrow(config, divisor)
        yield config
    yield copy.deepcopy(text.config)


def _kinds(model: nn.Module) -> set[str]:
    """Names of the classes of modules that the model's own file defines."""
    home = _class_of(model).__module__
    classes = {_class_of(module) for module in model.modules()}
    return {cls.__name__ for cls in classes if cls.__module__ == home}


def _needed_layers(text: Any) -> tuple[int, int]:
    """Number of the first layers that have every kind of layer, and of all layers."""
    count = getattr(text.config, "num_hidden_layers", None)
    if count is None:
        raise ModelError(f"{_class_of(text).__name__} is made of several models: its config has no num_hidden_layers")
    lists = [one for one in text.modules() if isinstance(one, nn.ModuleList) and len(one) == count]
    if not lists:
        return count, count
    named = getattr(text.config, "layer_types", None) or [None] * count
    shared = count - (getattr(text.config, "num_kv_shared_layers", None) or 0)  # the first that reads others' keys
    kinds = [
        (kind, number >= shared, frozenset(_class_of(module).__name__ for module in layer.modules()))
        for number, (kind, layer) in enumerate(zip(named, lists[0], strict=False))
    ]
    return max(kinds.index(kind) for kind in set(kinds)) + 1, count


def _cut_layers(config: Any, layers: int, count: int) -> None:
    """Keep the first layers of a config, in its lists of layers too."""
    for field, value in list(vars(config).items()):
        if isinstance(value, (list, tuple, str)) and len(value) == count:
            setattr(config, field, value[:layers])
        elif isinstance(value, (list, tuple)) and field.endswith(("_ids", "_idxs", "_idx", "_indices", "_layers")):
            setattr(config, field, type(value)(one for one in value if one < layers))
    config.num_hidden_layers = layers
    if shared := getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = max(layers - (count - shared), 0)


def _shorten(config: Any) -> None:
    """Windows and chunks shorter than the row, and a small vocabulary."""
    for field in _LENGTHS:
        if isinstance(length := getattr(config, field, None), int) and length > _SHORT:
            setattr(config, field, _SHORT)
    if isinstance(size := getattr(config, "vocab_size_per_layer_input", None), int):
        config.vocab_size_per_layer_input = min(size, _VOCABULARY)
    if config.vocab_size > _VOCABULARY:
        config.vocab_size = _VOCABULARY
        for number, field in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
            if getattr(config, field, None) is not None:
                setattr(config, field, number)


def _divisors(config: Any) -> list[int]:
    """Numbers that the width and the heads of a model may be divided by: the largest, and the largest power of two."""
    common = math.gcd(config.hidden_size, getattr(config, "num_attention_heads", None) or 0)
    fitting = [one for one in range(1, common + 1) if common % one == 0 and config.hidden_size >= one * _NARROW] or [1]
    return list(dict.fromkeys([fitting[-1], max(one for one in fitting if one & (one - 1) == 0)]))


def _narrow(config: Any, divisor: int) -> None:
    """Divide the sizes of matrices and the numbers of heads; sizes of heads stay."""
    for field in _WIDTHS + _HEADS:
        found = getattr(config, field, None)
        if isinstance(found, (list, tuple)):  # of each layer
            setattr(config, field, type(found)(max(one // divisor, 1) for one in found))
        elif isinstance(found, int) and found > 1:
            setattr(config, field, max(found // divisor, 1))


def _scatter(model: nn.Module) -> None:
    """Move every weight off its initial value: a matrix of zeros would hide what it is given."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            inputs = weight.shape[-1] if weight.dim() > 1 else 100
            weight.add_(torch.randn(weight.shape, generator=generator) / math.sqrt(inputs))
