"""The `automodel` engine: `fsdp2` with NeMo Automodel's parallelisation, and its own models if they are asked for."""

from __future__ import annotations

from transformers import PreTrainedModel

from hone.engines.base import EngineSpec
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.fsdp2.mesh import Mesh
from hone.engines.unsupported import refuse_expert_ranks, refuse_unproven_layers, refuse_unsupported
from hone.models.loading import DTYPES, ClassOf
from hone_automodel.models import model_class
from hone_automodel.settings import AutomodelSettings
from hone_automodel.sharding import AutomodelSharder

NO_EXPERT_RANKS = (
    "Automodel divides the experts of its own model classes only, and these can be built on a GPU only, so hone cannot "
    "compare them with fsdp2 on a CPU"
)


class AutomodelEngine(Fsdp2Engine):
    """Shards a model as Automodel does; everything else is as in `fsdp2`."""

    def __init__(self, spec: EngineSpec, device: str) -> None:
        """Raises ValueError naming a setting that this engine does not have."""
        backend = spec.engine.backend
        assert isinstance(backend, AutomodelSettings)
        refuse_unsupported("automodel", spec)
        refuse_expert_ranks(backend.parallel, NO_EXPERT_RANKS)
        refuse_unproven_layers("automodel", spec.model)
        self._settings = backend
        super().__init__(spec, device)

    @property
    def _class_of(self) -> ClassOf | None:
        if self._settings.models == "transformers":
            return None

        def choose(kind: str) -> type[PreTrainedModel]:
            return model_class(kind, self.model_type == "value_model", self._settings.key_of("models"))

        return choose

    def _sharder(self, mesh: Mesh) -> AutomodelSharder:
        return AutomodelSharder(mesh, self._parallel, DTYPES[self.spec.model.dtype], self.compute)
