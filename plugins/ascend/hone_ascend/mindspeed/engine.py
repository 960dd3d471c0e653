"""The `megatron` engine for NPUs. Never run."""

from __future__ import annotations

from hone.engines.base import EngineSpec
from hone_ascend.mindspeed.adaptor import patch_megatron, repatch

patch_megatron()  # before the first import of megatron-core

from hone_megatron.engine import MegatronEngine  # noqa: E402
from hone_megatron.settings import MegatronParallel, MegatronSettings  # noqa: E402


class MindSpeedEngine(MegatronEngine):
    """Megatron-Core under MindSpeed's patches, which take the place of those for CPUs."""

    def __init__(self, spec: EngineSpec, device: str) -> None:
        backend = spec.engine.backend
        assert isinstance(backend, MegatronSettings)
        repatch(sizes_of(backend.parallel or MegatronParallel()))
        super().__init__(spec, device)


def sizes_of(parallel: MegatronParallel) -> dict[str, int | bool]:
    """The mesh under Megatron's names.

    Without the context size: hone's attention shares heads between these ranks itself, and MindSpeed would use its
    ring attention instead, and open process groups for it.
    """
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "use_distributed_optimizer": True,
    }
