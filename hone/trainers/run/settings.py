"""The sections of a run file that every kind of run has."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from hone.config import Config, build, plain, setting
from hone.data.settings import DatasetConfig
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.runtime.settings import ServiceRuntime


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


class StopWhenConfig(Config):
    """End of a run before its last step.

    The score is the figure of held-out sets that also chooses the best checkpoint.
    """

    score_reaches: float | None = setting(None, "end when the score is at least this")
    no_better_for: int | None = setting(None, "end after so many evaluations in a row without a better score", ge=1)
    skipped_steps: int = setting(
        10, "the run fails after this many optimizer steps in a row whose gradient was not finite", unit="steps", ge=1
    )

    @property
    def by_score(self) -> bool:
        """Return whether the score may end the run."""
        return self.score_reaches is not None or self.no_better_for is not None


class RunSettings(Config):
    """Base of the settings of all kinds of run. If `runtime.backend` is a service, engine and rollout follow it."""

    @model_validator(mode="after")
    def _policy_is_where_the_runtime_says(self) -> RunSettings:
        run: Any = self
        backend = run.runtime.backend
        if not isinstance(backend, ServiceRuntime):
            if not run.actor.backend.computes_here:
                raise ValueError(
                    f"actor.backend = {run.actor.backend.name}: a service would hold the policy; remove actor.backend "
                    f"and set runtime.backend={run.actor.backend.name}, with the same keys, or set actor.backend=fsdp2"
                )
            return self
        for name in ("actor", "rollout"):
            section = self.__dict__.get(name)
            if section is None:  # supervised runs have no rollout
                continue
            found = getattr(section.backend, "name", section.backend)
            if "backend" in section.model_fields_set and found != backend.name:
                raise ValueError(
                    f"{name}.backend = {found}, but the service of runtime.backend={backend.name} holds the policy; "
                    f"remove {name}.backend, or set it to {backend.name}"
                )
            value = (
                build(EngineConfig, {"backend": plain(backend)}, "runtime").backend if name == "actor" else backend.name
            )
            self.__dict__[name] = section.model_copy(update={"backend": value})
        return self


class RunConfig(Config):
    """Identity and length of a run. The same folder continues the same run."""

    dir: str = setting(meaning="the run folder: everything a run writes is in it; an existing run in it is continued")
    steps: int | None = setting(None, "training steps of the whole run, resumed parts included", unit="steps", ge=1)
    epochs: float | None = setting(None, "passes over the training data, instead of steps", gt=0)
    stop_when: StopWhenConfig | None = setting(None, "what ends the run before its last step")
    seed: int = setting(0, "seed of data order, sampling and new weights; the same seed gives the same run", ge=0)

    @model_validator(mode="after")
    def _has_one_length(self) -> RunConfig:
        if (self.steps is None) == (self.epochs is None):
            found = "neither is set" if self.steps is None else f"found steps {self.steps} and epochs {self.epochs:g}"
            raise ValueError(f"set steps or epochs: {found}")
        return self

    @property
    def stops(self) -> StopWhenConfig:
        """The section `stop_when`; without it, its defaults."""
        return self.stop_when or StopWhenConfig()

    @property
    def total_steps(self) -> int:
        """The steps of the run, where `epochs` were counted before."""
        assert self.steps is not None
        return self.steps

    def counted(self, rows: int, per_step: int) -> RunConfig:
        """A copy with `steps` computed from `epochs`, for `rows` rows of which a step uses `per_step`."""
        assert self.epochs is not None
        exact = round(self.epochs * rows / per_step, 9)  # 1.1 * 100 / 10 is more than 11 in binary
        return self.model_copy(update={"steps": max(math.ceil(exact), 1)})


class CheckpointConfig(Config):
    """When the run's state is saved, and how much of the past is kept."""

    every_steps: int = setting(50, "steps between checkpoints; the last step always has one", unit="steps", ge=1)
    keep: int = setting(2, "newest checkpoints that are kept", unit="checkpoints", ge=1)
    keep_best: bool = setting(True, "also keep the checkpoint with the best evaluation score")


class ProfileConfig(Config):
    """Traces of single steps by torch.profiler, written to the run folder.

    `profile/step-N.json` is the driver's, or the only process's; a rank writes `profile/step-N-rank-R.json`.
    """

    steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_listed)] = setting(
        meaning="the steps to trace: one number, or a list", unit="steps", min_length=1
    )
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_listed)] = setting(
        None, "the ranks to trace, of each pool: one number, or a list; default: all", min_length=1
    )

    def of(self, steps: int | None) -> frozenset[int]:
        """The steps to trace. Raises ValueError for one that a run of `steps` steps does not have."""
        for step in self.steps:
            if steps is not None and step > steps:
                raise ValueError(
                    f"{self.key_of('steps')}: the run has no step {step}; choose from 1 to {steps} (run.steps)"
                )
        return frozenset(self.steps)

    def ranks_of(self, count: int) -> frozenset[int]:
        """The ranks to trace. Raises ValueError for one that no pool of the run has: the largest has `count` ranks."""
        for rank in self.ranks or ():
            if rank >= count:
                choice = f"from 0 to {count - 1}" if count > 1 else "0"
                raise ValueError(f"{self.key_of('ranks')}: the run has no rank {rank}; choose {choice}")
        return frozenset(range(count) if self.ranks is None else self.ranks)


class EvaluationConfig(Config):
    """Held-out sets that are measured before training, every so many steps, and after it."""

    sets: dict[str, DatasetConfig] = setting(meaning="held-out data sets by name", factory=dict)
    every_steps: int = setting(0, "steps between evaluations; 0: only before and after training", unit="steps", ge=0)


class FollowConfig(Config):
    """A reference that follows the policy (TR-DPO, arXiv 2404.09656), instead of staying the policy before training."""

    every_steps: int = setting(meaning="training steps between two moves of the reference", unit="steps", ge=1)
    mixup: float = setting(
        1.0, "a move sets the reference to mixup * policy + (1 - mixup) * reference; 1: the policy itself", gt=0, le=1
    )


class ReferenceConfig(Config):
    """The model that the policy is compared with."""

    model: ModelConfig | None = setting(None, "its weights; default: the policy before training")
    follow: FollowConfig | None = setting(None, "how the reference follows the policy; default: it never changes")
