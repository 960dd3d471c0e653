"""The loop that every trainer shares: resume, step, evaluate, write down, save; and end well however it ends.

    resume --> [ step --> evaluate? --> log --> publish? --> save? ]* --> finish       (files are written meanwhile)
                 |                                             ^
                 `-- an error or a second Ctrl-C: the state after the last whole step is saved first, if it is intact

A full disk is waited for, and ends the run if that lasts.
A first Ctrl-C (or SIGTERM) lets the current step end, saves, and leaves with `Interrupted`, or after the last step
finishes the run; a second one leaves at once. The loop waits for nothing by itself: deadlines belong to the parts it
calls.
"""

from __future__ import annotations

import gc
import math
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hone.diagnosis.live import LiveRules
from hone.models.building import into_place
from hone.platforms.host_memory import StepMemory
from hone.runtime import ranks
from hone.runtime.base import WorkerFailed
from hone.tracking.base import Interrupted, TrackingError
from hone.trainers.run.checkpoints import Checkpoint, CheckpointStore, DiskFull, PartWriter
from hone.trainers.run.context import RunContext
from hone.trainers.run.randomness import load_random_state, save_random_state
from hone.trainers.run.settings import CheckpointConfig

STOPPING = "stopping"  # key of a checkpoint's state

Values = Mapping[str, float]


class Changing(Protocol):
    """A model whose weights change; `TrainHandle` satisfies this."""

    updates: int  # how often they were changed


class Trainer(ABC):
    """Runs steps 1 to `steps` over parts that it was given; subclasses say what a step is."""

    def __init__(self, steps: int, checkpoint: CheckpointConfig, context: RunContext, evaluates: bool) -> None:
        """`evaluates`: whether there are held-out sets; without them no checkpoint is the best."""
        self.steps = steps
        self.folder = context.folder
        self.tracking = context.tracking
        self.recorder = context.recorder
        rules = [LiveRules(context.folder, context.tracking.message).look] if ranks.is_first() else []
        self.watchers: list[Callable[[Values], None]] = [*rules]  # see `step` and its metrics; may end the run
        self.complete_export: Callable[[Path], None] = lambda folder: None  # adds what is not of the model
        self._profiler = context.profiler
        self._control = context.control
        self._stopping = context.stopping
        self._save_every = checkpoint.every_steps
        self._keep_best = evaluates and checkpoint.keep_best
        self.store = CheckpointStore(context.folder / "checkpoints", checkpoint.keep, self._keep_best)
        self._interrupts = 0
        self._settled: dict[str, Any] = {}
        self._updates: list[int] = []  # of each model, when its weights belonged to the step of `_settled`
        self._saved_step = -1
        self._written_step = -1
        self._scores: dict[int, float] = {}  # of the last step, if it was evaluated
        self._best_score: float | None = None  # of all evaluated steps

    @abstractmethod
    def step(self, step: int) -> None:
        """One training step."""

    @abstractmethod
    def evaluate(self, step: int) -> Mapping[str, float]:
        """Held-out figures after `step` (0: before training); empty when none is due."""

    @abstractmethod
    def changing_roles(self) -> Sequence[Changing]:
        """All models whose weights change, and so belong into a checkpoint."""

    @abstractmethod
    def parts(self) -> Mapping[str, PartWriter]:
        """Return the writer of each folder of a checkpoint."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The trainer's own JSON-compatible state: positions, counts, controllers."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore what `parts` and `state` wrote."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the trained model into the new folder `folder`, on every rank."""

    def score_of(self, figures: Mapping[str, float]) -> float | None:
        """The evaluation figure that the best checkpoint is chosen by; None if there is none."""
        return None

    def run(self) -> None:
        """Train to the last step. Raises Interrupted after a signal, and any error after saving the last whole step."""
        with self._signals(), _frozen_garbage():
            step, memory = self.resume(), StepMemory()
            try:
                if step == 0:
                    self._settle(0)
                    self._write(0, self.evaluate(0))
                    self._best_score = self._scores.get(0)
                    self._keep(0)
                self._stop_early(step)
                while step < self.steps:
                    with self._profiler.step(step + 1), self.recorder.timer.step():
                        self.step(step + 1)
                        memory.step_ended()
                    step += 1
                    self._settle(step)
                    self._write(step, self.evaluate(step))
                    self._stop_early(step)
                    self._keep(step)
                    if step < self.steps and ranks.agree(self._interrupts or int(self._control.stop.is_set())):
                        raise Interrupted(step)
                self.save(step)
                self._publish(wait=True)
                self._finish(step)
            except (TrackingError, DiskFull):  # a checkpoint ahead of the record would leave a gap in it
                raise
            except BaseException as error:
                # a save is a meeting of all ranks: where one fails alone, the others do not come
                alone = ranks.ranks() == 1 and not isinstance(error, WorkerFailed)
                if alone or isinstance(error, Interrupted):
                    self._save_what_is_whole(step)
                raise

    def resume(self) -> int:
        """Continue from the newest checkpoint; returns the step it was taken after, 0 for a fresh run."""
        self.store.prepare()
        checkpoint = self.store.latest()
        if checkpoint is None:
            self.tracking.begin(0)
            return 0
        self.restore(checkpoint)
        load_random_state(checkpoint.part("random"))
        self._best_score = self.store.best_score
        self._saved_step = self._written_step = checkpoint.step
        if STOPPING in checkpoint.state:
            self._stopping.restore(checkpoint.state[STOPPING])
        self._settle(checkpoint.step)
        self.tracking.begin(checkpoint.step)
        self.tracking.message(f"continuing from {checkpoint.folder}")
        return checkpoint.step

    def written(self, wait: bool) -> bool:
        """Return whether the parts of a checkpoint that are written while training goes on are on the disk."""
        return True

    def save(self, step: int) -> None:
        """Begin the checkpoint of `step`, the step that has just ended; it is published when all of it is written."""
        if step == self._saved_step:
            return
        self.tracking.flush()  # the record must reach at least as far as the checkpoint
        with self.recorder.phase("save_checkpoint"):
            parts = {**self.parts(), "random": _by_the_first(save_random_state)}
            self.store.begin(step, parts, self._settled, self._scores.get(step), self.written)
        self._saved_step = step

    def _finish(self, step: int) -> None:
        """Export the model of the last step: the folder is whole, or as it was before."""
        target, writes = self.folder / "export", ranks.is_first()
        try:
            with into_place(target, writes) as partial:
                self.export(partial)
                if writes:
                    self.complete_export(partial)
        except BaseException:
            is_run = (self.folder / "config.yaml").is_file()  # a warm start has none
            elsewhere = f", or write it elsewhere with hone export {self.folder} FOLDER" if is_run else ""
            self.tracking.message(
                f"{target} was not written. The model is in the checkpoint of step {step}: run the same command again "
                f"to export it{elsewhere}"
            )
            raise

    def _keep(self, step: int) -> None:
        """Publish what has been written, and save `step` if that is due."""
        self._publish(wait=False)
        if self._save_is_due(step):
            self.save(step)

    def _save_is_due(self, step: int) -> bool:
        """Every so many steps, after the last one, and where an evaluation is the best so far."""
        score, best = self._scores.get(step), self._best_score
        improved = score is not None and (best is None or score > best)
        if improved:
            self._best_score = score
        return step % self._save_every == 0 or step == self.steps or (improved and self._keep_best)

    def _publish(self, wait: bool) -> None:
        if self.store.has_pending:
            with self.recorder.phase("save_checkpoint"):
                self.store.publish(wait)

    def _stop_early(self, step: int) -> None:
        """Make `step` the last one, if the score says so."""
        if self._stopping.reason and step < self.steps:
            self.tracking.message(f"the run ends after step {step} of {self.steps}: {self._stopping.reason}")
            self.steps = step

    def _settle(self, step: int) -> None:
        self._settled = {**self.state(), STOPPING: self._stopping.state}
        self._updates = [role.updates for role in self.changing_roles()]

    @property
    def _intact(self) -> bool:
        """Return whether no weight has changed since the last whole step: only whole steps are saved."""
        return self._updates == [role.updates for role in self.changing_roles()]

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        score = self.score_of(figures)
        self._scores = {step: score} if score is not None and math.isfinite(score) else {}
        values = {**self.recorder.drain(), **figures}
        self.tracking.log(step, values)
        for found in self._scores.values():
            self._stopping.see(found)
        self._settled |= {STOPPING: self._stopping.state}
        self._written_step = step
        for watch in self.watchers:
            watch({"step": step, **values})
        if self._control.on_step is not None:
            self._control.on_step(step, values)

    def _save_what_is_whole(self, step: int) -> None:
        self._publish(wait=True)
        if not self._intact or not self._settled or step == self._saved_step:
            return
        if self._written_step != step:  # stopped during its evaluation: the step's other figures are kept
            self._write(step, {})
        self.save(step)
        self._publish(wait=True)
        self.tracking.message(f"saved the state after step {step}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM into a request, the second into an exception."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            last = self._saved_step == self.steps
            first = "the model is exported" if last else "the current step ends and is saved"
            self.tracking.message(f"stopping: {first} first; again to stop at once")

        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Keep the garbage collector from looking through everything that exists when training begins.

    With torch and transformers imported, a full collection takes a fifth of a second, and requests cause many.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _by_the_first(write: PartWriter) -> PartWriter:
    """A part that is the same on every rank, written once."""
    return lambda folder: write(folder) if ranks.is_first() else None
