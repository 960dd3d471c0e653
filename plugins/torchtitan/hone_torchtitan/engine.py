"""The `torchtitan` engine: one model over data-parallel and tensor ranks, in torchtitan's modules."""

from __future__ import annotations

import hone_torchtitan.quiet_import  # noqa: F401  isort: skip

from typing import Any

import torch
from torch import Tensor

from hone.engines.base import EngineSpec
from hone.engines.engine import Engine
from hone.engines.forward import Forward, Scorer, States, scored_rows, value_output
from hone.engines.fsdp2.sharding import reshard_all
from hone.engines.fsdp2.weights import ShardedWeights
from hone.engines.layout import lay_out
from hone.engines.logprobs import Head
from hone.engines.rebuilt.reading import Reader, Region, open_model
from hone.engines.reference_head import head_of_reference
from hone.engines.unsupported import refuse, refuse_unsupported
from hone.models.attention.packed import packed
from hone.models.loading import DTYPES
from hone.models.value_head import values_of
from hone.platforms.base import compute_dtype, current_platform
from hone.types import Batch, ModelOutput, Need
from hone_torchtitan.cpu_patches import patch_for_cpu
from hone_torchtitan.families import decoder_config
from hone_torchtitan.mesh import TitanRanks, open_mesh
from hone_torchtitan.modules import Outputs
from hone_torchtitan.names import transformers_name
from hone_torchtitan.settings import TitanParallel, TitanSettings
from hone_torchtitan.sharding import allocate, shard_decoder


class TitanEngine(Engine):
    """Builds torchtitan's decoder, sharded. `model` is the transformers model without weights."""

    weights: ShardedWeights
    ranks: TitanRanks

    def __init__(self, spec: EngineSpec, device: str) -> None:
        """Raises ValueError naming a setting that this engine does not have."""
        backend = spec.engine.backend
        assert isinstance(backend, TitanSettings)
        self._parallel = backend.parallel or TitanParallel()
        _require_supported(spec)
        if device == "cpu":
            patch_for_cpu()
        super().__init__(spec, device, open_mesh(self._parallel, device))
        self._is_value_model = self.model_type == "value_model"

    # ------------------------------------------------------------------------------------------------------- building

    def _build(self) -> Forward:
        spec = self.spec
        name = spec.model.path or "the model of model.build"
        self.model, reader = open_model(spec.model, self._is_value_model)
        body: Any = self.model.body if self._is_value_model else self.model.base_model
        config = decoder_config(body, name, self.ranks, self._parallel, self._is_value_model)
        keeps_masters = self.trained or spec.follows
        with torch.device("meta"):
            decoder: Any = config.build()
        decoder.to(DTYPES[spec.model.dtype] if keeps_masters else self.compute)
        shard_decoder(decoder, self.ranks, self.compute, bool(spec.engine.activation_checkpointing) and self.trained)
        allocate(decoder, self.device)
        self._decoder = decoder
        self.weights = ShardedWeights(self._decoder, self.ranks, self.trained, rename=self._rename)
        self._read(reader)
        head = None
        if spec.reference is not None:
            whole = head_of_reference(spec.reference, self.compute_dtype, self.device, self._head_dtype)
            head = self.ranks.vocabulary.own(whole)
        self._score = Scorer(spec.temperature, spec.engine.logprob_chunk_tokens, head)
        return self._forward

    def _rename(self, name: str) -> str:
        return transformers_name(name, self._is_value_model)

    @torch.no_grad()
    def _read(self, reader: Reader) -> None:
        """Set this rank's parts to the values of a model's files."""
        for name, local, shard in self.weights.parts():
            for piece in shard.pieces():
                local[piece.at] = reader.read(Region(name, shard.shape, piece.offset, piece.shape)).to(local)

    # ------------------------------------------------------------------------------------------------------ computing

    def _forward(self, batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        layout = lay_out(batch)
        rows, where, copies = scored_rows(batch, layout, None)

        def use(hidden: Tensor, weight: Tensor) -> Outputs:
            found = self._output(States(rows, hidden[0].index_select(0, where), copies, {}), weight, batch, needs)
            return {
                "logprobs": found.logprobs,
                "entropy": found.entropy,
                "values": found.values,
                "extras": dict(found.extras),
            }

        with packed(layout.packing), self._decoder.lm_head.calling(use):
            return ModelOutput(**self._decoder(layout.token_ids[None], layout.position_ids[None]))

    def _output(self, found: States, weight: Tensor, batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        """From hidden states and this rank's rows of the head to the outputs of the micro-batch, on every rank."""
        if self._is_value_model:
            return value_output(found, values_of(weight, found.hidden), batch)
        config: Any = self.model.config
        head = Head(weight, dtype=self._head_dtype, vocabulary=self.ranks.vocabulary.vocabulary(config.vocab_size))
        return self._score(found, head, batch, needs)

    def _infer(self, batch: Batch, cut: list[list[int]], needs: frozenset[Need]) -> list[ModelOutput]:
        outputs = super()._infer(batch, cut, needs)
        reshard_all(self._decoder)
        return outputs

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Everything stays on the engine's device."""
        if device != self.device:
            raise ValueError(f"the torchtitan engine keeps its model on {self.device} and cannot move it to {device}")


def _require_supported(spec: EngineSpec) -> None:
    """Raise ValueError naming a setting that this engine does not have."""
    engine, used = spec.engine, spec.model.used
    refuse_unsupported("torchtitan", spec)
    asked = {
        f"{engine.key_of('activation_checkpointing')}=offload": engine.activation_checkpointing == "offload",
        f"{engine.key_of('activation_checkpointing')}=selective": engine.activation_checkpointing == "selective",
        used.key_of("dropout"): used.dropout != 0,
        f"{engine.key_of('compute_dtype')}=float64": compute_dtype(engine.compute_dtype, current_platform())
        == "float64",
    }
    refuse("torchtitan", asked)
