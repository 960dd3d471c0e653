"""The contract of a training engine on one rank: its numbers are those of transformers and of `fsdp2` on the CPU.

`tests/engines/contract` runs the same models over meshes of several ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hone.data.packing import select
from hone.engines.base import BaseEngine
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.files.progress_bars import without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.platforms.base import PlatformBase, current_platform
from hone.platforms.cpu import CpuPlatform
from hone.testing.contract import Absent, Contract, require
from hone.testing.training import (
    CAP,
    LENGTHS,
    SIZES,
    TEMPERATURE,
    make_batch,
    nothing_finite,
    policy,
    save_model,
    scores,
    train,
    weights,
)
from hone.workers.train import TrainSpec

ORACLE = "fsdp2"  # what engines are compared with, on the CPU
LR = 1e-2


@dataclass(frozen=True, slots=True)
class _Place:
    """Key of an engine's class in the registry."""

    device: str
    vendor: str


class TrainingEngineContract(Contract):
    """Contract of `hone.engines.base.BaseEngine`, for a language model.

    `backend` is the engine's registered name, `settings` its own settings, `model` what differs from the sizes of the
    model that it trains. `engine` are further keys of `actor`.
    """

    backend: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, Any]] = {}
    model: ClassVar[Mapping[str, Any]] = {}
    engine: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-5  # of log-probs, losses and weights in float32
    device: ClassVar[str] = ""  # torch's name; empty: the platform's

    _folder: ClassVar[tempfile.TemporaryDirectory[str] | None] = None

    @classmethod
    def teardown_class(cls) -> None:
        folder, cls._folder = cls.__dict__.get("_folder"), None
        if folder is not None:
            folder.cleanup()

    # ------------------------------------------------------------------------------------------------------ checks

    def test_log_probs_are_those_of_transformers(self) -> None:
        """log-probs equal those of transformers on the CPU"""
        batch, found = make_batch(9), scores(self._made())
        with without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(self._path()).eval()
        gaps = []
        for i, (begin, length) in enumerate(zip(batch.cu_seqlens.tolist(), LENGTHS, strict=False)):
            ids = batch.token_ids[begin : begin + length]
            with torch.no_grad():
                logits = model(ids[None]).logits[0] / TEMPERATURE
            wanted = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            wanted = torch.nn.functional.pad(wanted, (1, 0)) * batch.loss_mask[begin : begin + length]
            gaps.append(_gap(found[f"score {i}"], wanted))
        self._within(max(gaps), "log-probs")

    def test_two_steps_are_those_of_the_oracle(self) -> None:
        """losses, gradient norms and weights of two steps equal those of fsdp2 on the CPU"""
        ours, theirs = self._made(), self._oracle()
        found, expected = torch.tensor(train(ours)), torch.tensor(train(theirs))
        self._within(_gap(found, expected), "losses and gradient norms")
        after, wanted = weights(ours), weights(theirs)
        require(after.keys() == wanted.keys(), f"other weights: {sorted(after.keys() ^ wanted.keys())[:4]}")
        gaps = {name: _gap(after[name], wanted[name]) for name in wanted}
        worst = max(gaps, key=lambda name: gaps[name])
        self._within(gaps[worst], f"weights after two steps, first {worst}")

    def test_the_update_does_not_depend_on_micro_batches(self) -> None:
        """one micro-batch and several give the same update"""
        several, one = self._made(), self._made(max_tokens_per_microbatch=sum(LENGTHS))
        for engine in (several, one):
            train(engine)
        self._same_weights(several, one)

    def test_gradients_add_up_over_calls(self) -> None:
        """a batch in two calls of `forward_backward` gives the update of one call"""
        engine, whole = self._made(), self._made()
        batch = make_batch(0)
        with engine.train_mode():
            engine.forward_backward(select(batch, [0, 1, 2]), policy)
            engine.forward_backward(select(batch, [3, 4, 5, 6]), policy)
            engine.optimizer_step()
        train(whole, [0])
        self._same_weights(engine, whole)

    def test_a_step_that_is_not_finite_is_skipped(self) -> None:
        """a gradient of NaN changes no weight, and is counted"""
        engine = self._made()
        before = _copies(engine)
        metrics = engine.train_batch(make_batch(0), nothing_finite)
        count = metrics["train/skipped_steps"].value
        require(count == 1.0, f"train/skipped_steps is {count} after one such step")
        changed = [name for name, one in weights(engine).items() if not torch.equal(one.cpu(), before[name])]
        require(not changed, f"the skipped step changed {', '.join(changed[:3])}")

    def test_every_weight_has_the_name_of_the_checkpoint(self) -> None:
        """every weight is streamed under its Hugging Face name, as it was read"""
        with without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(self._path())
        wanted, found = model.state_dict(), weights(self._made())
        require(found.keys() == wanted.keys(), f"other names: {sorted(found.keys() ^ wanted.keys())[:4]}")
        wrong = [name for name, one in wanted.items() if not torch.equal(found[name].cpu(), one)]
        require(not wrong, f"weights differ from the files: {', '.join(wrong[:3])}")

    def test_a_checkpoint_restores_every_bit(self) -> None:
        """an engine that loads a checkpoint has the weights of the first one, and takes the same next step"""
        first, second = self._made(), self._made()
        train(first)
        with tempfile.TemporaryDirectory() as folder:
            first.save_checkpoint(Path(folder))
            second.load_checkpoint(Path(folder))
        saved = _copies(first)
        wrong = [name for name, one in weights(second).items() if not torch.equal(one.cpu(), saved[name])]
        require(not wrong, f"loaded weights differ: {', '.join(wrong[:3])}")
        one, two = train(first, [5]), train(second, [5])
        require(one == two, f"loss and norm of the next step are {two} after loading, without {one}")
        self._same_weights(first, second)

    def test_an_export_loads_in_transformers(self) -> None:
        """the exported folder has the trained weights for transformers"""
        engine = self._made()
        train(engine)
        with tempfile.TemporaryDirectory() as folder:
            engine.export_hf(Path(folder))
            with without_progress_bars():
                model = AutoModelForCausalLM.from_pretrained(folder)
            found, trained = model.state_dict(), weights(engine)
            wrong = [name for name, one in trained.items() if not torch.equal(found[name], one.cpu())]
        require(not wrong, f"exported weights differ: {', '.join(wrong[:3])}")

    def test_log_probs_follow_new_weights(self) -> None:
        """after `blend`, log-probs are those of the new weights"""
        engine, other = self._made(), self._oracle()
        for one in (engine, other):
            scores(one)
            one.blend({name: weight / 2 for name, weight in weights(one).items()}, 1.0)
        self._within(max(_gap(a, b) for a, b in _pairs(scores(engine), scores(other))), "log-probs after `blend`")

    def test_a_model_that_is_never_trained_only_infers(self) -> None:
        """without optimizer steps, log-probs are the same and no weight moves"""
        engine, trained = self._made(total_steps=0), self._made()
        before = _copies(engine)
        gap = max(_gap(a, b) for a, b in _pairs(scores(engine), scores(trained)))
        self._within(gap, "log-probs of a model that is never trained")
        moved = [name for name, one in weights(engine).items() if not torch.equal(one.cpu(), before[name])]
        require(not moved, f"an inference changed {', '.join(moved[:3])}")

    def test_masters_stay_in_float32(self) -> None:
        """a step in bfloat16 moves every float32 weight, by at most a learning rate"""
        if "bfloat16" not in self._platform().dtypes:
            raise Absent("the platform does not compute in bfloat16")
        engine = self._made(compute_dtype="bfloat16")
        before = _copies(engine)
        wrong = [name for name, one in before.items() if one.dtype != torch.float32]
        require(not wrong, f"weights are not float32: {', '.join(wrong[:3])}")
        train(engine, [0])
        moves = {name: _gap(one, before[name]) for name, one in weights(engine).items()}
        still = [name for name, move in moves.items() if move == 0]
        require(not still, f"no value changed of {', '.join(still[:3])}")
        most = max(moves.values())
        require(most < 2.5 * LR, f"one step moved a weight by {most:.3g}, with a learning rate of {LR:g}")

    def test_parts_move_to_the_cpu_and_back(self) -> None:
        """offloaded and brought back, log-probs and the next step are the same"""
        engine, stays = self._made(), self._made()
        for one in (engine, stays):
            train(one, [0])
        device = self._device()
        engine.to("cpu", model=True, optimizer=True, grad=True)
        self._platform().empty_cache()
        engine.to(device, model=True, optimizer=True, grad=True)
        gap = max(_gap(a, b) for a, b in _pairs(scores(engine), scores(stays)))
        require(gap == 0, f"log-probs differ by {gap:.3g} afterwards")
        for one in (engine, stays):
            train(one, [1])
        self._same_weights(engine, stays)

    # ------------------------------------------------------------------------------------------------------- parts

    def make(self, spec: TrainSpec) -> BaseEngine:
        """Return an engine of this model and these settings, not initialised; by default the registered one."""
        platform = self._platform()
        return EngineRegistry.create(spec, _Place(self._device(), platform.vendor))

    def _platform(self) -> PlatformBase:
        return CpuPlatform() if self.device == "cpu" else current_platform()

    def _device(self) -> str:
        return self.device or current_platform().device

    @classmethod
    def _path(cls) -> Path:
        """The folder of the model, written once for each class."""
        folder = cls.__dict__.get("_folder")
        if folder is None:
            folder = cls._folder = tempfile.TemporaryDirectory(prefix="hone-contract-")
            save_model(BuildConfig(**{**SIZES, **cls.model}), Path(folder.name))
        return Path(folder.name)

    def _spec(
        self, backend: str, settings: Mapping[str, Any], total_steps: int, engine: Mapping[str, Any]
    ) -> TrainSpec:
        of_backend: Any = EngineRegistry.backends.settings(backend)
        given: dict[str, Any] = {"compute_dtype": "float32", "max_tokens_per_microbatch": CAP, **engine}
        optimizer = OptimizerConfig(lr=LR, options={"eps": 1e-4}, weight_decay=0.1)
        config = EngineConfig(optimizer=optimizer, backend=of_backend(**settings), **given)
        model = ModelConfig(path=str(self._path()))
        return TrainSpec(model, config, temperature=TEMPERATURE, total_steps=total_steps)

    def _made(self, total_steps: int = 100, **engine: Any) -> BaseEngine:
        made = self.make(self._spec(self.backend, self.settings, total_steps, {**self.engine, **engine}))
        made.initialize()
        return made

    def _oracle(self) -> BaseEngine:
        made = EngineRegistry.create(self._spec(ORACLE, {}, 100, self.engine), _Place("cpu", "generic"))
        made.initialize()
        return made

    def _within(self, gap: float, what: str) -> None:
        self.figures["error"] = max(self.figures.get("error", 0.0), float(f"{gap:.2g}"))
        require(gap <= self.tolerance, f"{what}: the largest difference is {gap:.3g}, allowed are {self.tolerance:g}")

    def _same_weights(self, one: BaseEngine, other: BaseEngine) -> None:
        gaps = {name: _gap(a, b) for (name, a), b in zip(weights(one).items(), weights(other).values(), strict=True)}
        worst = max(gaps, key=lambda name: gaps[name])
        self._within(gaps[worst], f"weights of the two updates, first {worst}")


def _copies(engine: BaseEngine) -> dict[str, Tensor]:
    return {name: one.detach().cpu().clone() for name, one in weights(engine).items()}


def _pairs(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(one[name], other[name]) for name in other]


def _gap(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where one of them is not finite or has another shape."""
    if found.shape != expected.shape:
        return float("inf")
    gap = float((found.detach().cpu().double() - expected.detach().cpu().double()).abs().max())
    return gap if gap == gap else float("inf")


__all__ = ["TrainingEngineContract"]
