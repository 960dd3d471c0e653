"""The local runtime: one rank per role, in this process."""

from __future__ import annotations

from typing import Any

from hone.runtime.base import PhaseFn

PHASES = {"infer_batch": "forward", "train_batch": "backward"}
"""What a verb is called in the timings; any other verb goes by its own name."""


class LocalWorkerGroup:
    """Calls its one worker directly: nothing is split, nothing is copied.

    With one rank the worker's own exception is the clearest error there is, so it is passed on as it is.
    """

    def __init__(self, role: str, worker: Any, phase: PhaseFn) -> None:
        self.role = role
        self._worker = worker
        self._phase = phase

    def call(self, method: str, *arguments: Any) -> Any:
        with self._phase(PHASES.get(method, method)):
            return getattr(self._worker, method)(*arguments)

    def close(self) -> None:
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()
