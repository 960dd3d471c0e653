"""Sections `device`, `weight sync`, `engines`, `rollouts`: the suites of `hone.testing`, on this process's device."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from hone.cli.conformance.record import Recorder
from hone.platforms.base import current_platform
from hone.rollout.base import RolloutEngine
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.testing.contract import Contract
from hone.testing.engine import TrainingEngineContract
from hone.testing.platform import PlatformContract
from hone.testing.rollout import RolloutEngineContract
from hone.testing.transport import FILE_DTYPES, TransportContract
from hone.weights import TRANSPORTS
from hone.weights.base import CheckpointEngine

TOLERANCE = 1e-3  # in float32; kernels add in other orders


class _Transport(TransportContract):
    name: ClassVar[str]

    def make(self, bucket_bytes: int, timeout_s: float, token: str) -> CheckpointEngine:
        engine: CheckpointEngine = TRANSPORTS.get(self.name)(bucket_bytes, timeout_s, token, **self.options())
        return engine

    def options(self) -> Mapping[str, Any]:
        return {}


class _Ipc(_Transport):
    name = "ipc"

    def setup_method(self) -> None:
        super().setup_method()
        why = current_platform().why_no_ipc()
        self.uses = f"shared host memory ({why})" if why else "device memory"

    def test_large_tensors_arrive_and_are_timed(self) -> None:
        """Tensors larger than a bucket arrive twice with the digest of the sender; the second sync is timed."""
        self.figures["uses"] = self.uses
        super().test_large_tensors_arrive_and_are_timed()


class _Collective(_Transport):
    name = "collective"


class _Disk(_Transport):
    name = "disk"
    dtypes = FILE_DTYPES

    def setup_method(self) -> None:
        super().setup_method()
        self._folder = tempfile.TemporaryDirectory()

    def teardown_method(self) -> None:
        super().teardown_method()
        self._folder.cleanup()

    def options(self) -> Mapping[str, Any]:
        return {"folder": Path(self._folder.name)}


class _Fsdp2(TrainingEngineContract):
    """The only engine that needs neither a launcher nor a further package."""

    backend = "fsdp2"
    tolerance = TOLERANCE


class _Builtin(RolloutEngineContract):
    """Engines with a Python environment of their own are not started here (docs/rollout.md)."""

    tolerance = TOLERANCE
    long_tokens = 30

    def make(self, model: Any, tokenizer: Any) -> RolloutEngine:
        return BuiltinEngine(BuiltinSettings(), model, tokenizer, device=current_platform().torch_device(0))


_ARRIVE = ("test_every_kind_of_tensor_arrives_bit_for_bit", "test_large_tensors_arrive_and_are_timed")


def device(record: Recorder) -> None:
    """The functions of the platform itself."""
    _perform(record, PlatformContract)


def sharing(record: Recorder) -> None:
    """Weights of the device in another process, over each transport: what depends on the device."""
    for suite in (_Ipc, _Collective, _Disk):
        _perform(record, suite, f"{suite.name}: ", _ARRIVE)


def engines(record: Recorder) -> None:
    """The training engine on the device against transformers and the same engine on the CPU."""
    _use_one_thread()
    _perform(record, _Fsdp2, f"{_Fsdp2.backend}: ")


def rollouts(record: Recorder) -> None:
    """The built-in rollout engine on the device against transformers on the CPU."""
    _use_one_thread()
    _perform(record, _Builtin, "builtin: ")


def _use_one_thread() -> None:
    """Compute on the CPU in one thread: with more, each operation on a tiny model waits while others use a core."""
    torch.set_num_threads(1)


def _perform(record: Recorder, suite: type[Contract], prefix: str = "", only: Sequence[str] = ()) -> None:
    """Record every check of a suite, or only some."""
    try:
        for method, title in suite.checks():
            if not only or method in only:
                with record.check(prefix + title) as figures:
                    suite.perform(method, figures)
    finally:
        suite.teardown_class()
