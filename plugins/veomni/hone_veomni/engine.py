"""The `veomni` engine: `fsdp2` with VeOmni's model classes, operators and sharding."""

from __future__ import annotations

import hone_veomni.quiet_import  # noqa: F401  isort: skip

from transformers import PreTrainedModel

from hone.engines.base import EngineSpec
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.fsdp2.mesh import Mesh
from hone.engines.unsupported import refuse_expert_ranks, refuse_unsupported
from hone.models.loading import DTYPES, ClassOf
from hone_veomni.models import choose_operators, model_class
from hone_veomni.settings import OperatorsConfig, VeomniSettings
from hone_veomni.sharding import VeomniSharder

NO_EXPERT_RANKS = (
    "VeOmni sends tokens to the experts of other ranks in its fused kernels alone (operators.moe), which need triton "
    "and a GPU or NPU, so hone cannot compare them with fsdp2 on a CPU"
)
SHARDED_PRECISIONS = (("float32", "float32"), ("float32", "bfloat16"), ("float64", "float64"))  # stored, computed


class VeomniEngine(Fsdp2Engine):
    """Loads VeOmni's class of a model and shards it as VeOmni does; everything else is as in `fsdp2`."""

    def __init__(self, spec: EngineSpec, device: str) -> None:
        """Raises ValueError naming a setting that this engine does not have."""
        backend = spec.engine.backend
        assert isinstance(backend, VeomniSettings)
        refuse_unsupported("veomni", spec)
        refuse_expert_ranks(backend.parallel, NO_EXPERT_RANKS)
        super().__init__(spec, device)
        stored = (spec.model.dtype, self.compute_dtype)
        if self.mesh is not None and self.trained and stored not in SHARDED_PRECISIONS:
            raise ValueError(
                f"backend veomni on {self.mesh.world} ranks: compute_dtype={self.compute_dtype} needs "
                f"model.dtype=float32, found {spec.model.dtype}: VeOmni would sum gradients in another precision"
            )
        self._operators = backend.operators or OperatorsConfig()

    @property
    def _class_of(self) -> ClassOf:
        def choose(kind: str) -> type[PreTrainedModel]:
            name = self.spec.model.path or "the model of model.build"
            cls = model_class(kind, "Model" if self.model_type == "value_model" else "ForCausalLM", name)
            choose_operators(cls, self._operators)
            return cls

        return choose

    def _sharder(self, mesh: Mesh) -> VeomniSharder:
        return VeomniSharder(mesh, self._parallel, DTYPES[self.spec.model.dtype], self.compute)
