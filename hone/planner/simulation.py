"""Predicted speed of an asynchronous run and age of its tokens, from the costs of its parts.

    trainer   admit --> wait for the next groups in draw order --> train --> copy weights --> admit --> ...
                |              ^                                                 |
    fleet       `--> answers of draws, scored when all to a prompt have ended    `--> send to servers that may take them

`Window` and `moves` come from `hone.schedule`, as in a run; only time is simulated: a queue of events, each a time and
what happens then. Two events at the same time happen in the order in which they were planned, and lengths come from
one seed in the order of the draws, so the same settings give the same result, and every schedule the same answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

from hone.planner.costs import Costs
from hone.planner.fleet import Fleet
from hone.planner.lengths import Lengths
from hone.planner.replica import Answer, SimulatedReplica
from hone.schedule.window import Window

MEASURED = 10  # steps that are measured, by default


@dataclass(frozen=True, slots=True)
class Setting:
    """A run to simulate."""

    costs: Costs
    lengths: Lengths
    prompts_per_step: int
    samples_per_prompt: int
    staleness: int = 0
    new_weights: str = "finish"  # as in `asynchrony.new_weights`
    replicas: int = 1
    seats: int = 512  # answers that a server writes at a time
    trainer_devices: float = 1.0
    prompt_tokens: int = 0  # of each prompt
    steps: int = MEASURED  # that are measured
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a simulated run between the end of its warm-up and its last full window."""

    steps_per_s: float
    tokens_per_s: float  # of answers
    staleness: float  # mean age of trained tokens, in updates
    staleness_max: int
    trainer_utilisation: float  # share of the time in which the trainer trains
    rollout_utilisation: float  # share of the time in which a server has an answer to write, mean over the servers


def simulate(setting: Setting) -> Outcome:
    """Run a simulation. Raises ScheduleError if the schedule lets a token become too old, which would be a bug."""
    return _Run(setting).outcome()


@dataclass(slots=True)
class _Group:
    """A drawn prompt."""

    answers: list[Answer]
    left: int  # answers that have not ended
    scored: bool = False


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums since the simulation began."""

    now: float
    trained_s: float
    busy_s: float  # of all servers
    tokens: int


class _Run:
    """One simulation: the trainer, and the queue of events."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._warm_up = setting.staleness + 2
        self._last = self._warm_up + setting.steps  # the last measured step
        self._random = Random(setting.seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        costs, keeps_cache = setting.costs, setting.new_weights == "keep_cache"
        replicas = [SimulatedReplica(costs, setting.prompt_tokens) for _ in range(setting.replicas)]
        self._fleet = Fleet(replicas, setting.seats, costs, keeps_cache)
        self._fleet.later, self._fleet.ended = self._later, self._answer_ended
        self._window = Window(
            setting.staleness, setting.prompts_per_step, self._last + setting.staleness, setting.new_weights == "finish"
        )
        self._groups: dict[int, _Group] = {}
        self._drawn = 0
        self._step = 0
        self._batch: Sequence[int] = []  # draws of the step, until they are trained
        self._trained_s = 0.0
        self._tokens = 0  # of answers that were trained
        self._at_end: dict[int, _Totals] = {}  # step -> sums
        self._ages: Counter[int] = Counter()  # age -> trained tokens, in what is measured

    def outcome(self) -> Outcome:
        self._begin_step(0.0)
        while self._last not in self._at_end:
            if not self._events:
                raise RuntimeError(f"the simulated run stands still in step {self._step}")
            now, _, call = heappop(self._events)
            call(now)
        before, after = self._at_end[self._warm_up], self._at_end[self._last]
        seconds, total = after.now - before.now, self._ages.total()
        return Outcome(
            steps_per_s=self._setting.steps / seconds,
            tokens_per_s=(after.tokens - before.tokens) / seconds,
            staleness=sum(age * tokens for age, tokens in self._ages.items()) / total,
            staleness_max=max(self._ages),
            trainer_utilisation=(after.trained_s - before.trained_s) / seconds,
            rollout_utilisation=(after.busy_s - before.busy_s) / seconds / self._setting.replicas,
        )

    # --------------------------------------------------------------------------------------------- the trainer

    def _begin_step(self, now: float) -> None:
        self._step += 1
        size = self._setting.prompts_per_step
        numbers = range(self._drawn, self._drawn + self._window.room(size, self._step))
        self._drawn = numbers.stop
        self._window = self._window.admitted(numbers, self._step, size)
        self._batch = [one.number for one in self._window.open[:size]]
        asked: list[Answer] = []
        for one in self._window.open[len(self._window.open) - len(numbers) :]:
            lengths = (self._setting.lengths.draw(self._random) for _ in range(self._setting.samples_per_prompt))
            group = [Answer(one.number, length, one.versions) for length in lengths]
            self._groups[one.number] = _Group(group, len(group))
            asked += group
        self._fleet.ask(asked, now)
        self._train(now)

    def _train(self, now: float) -> None:
        """Train on the step's groups, if all are there."""
        if not self._batch or not all(self._groups[draw].scored for draw in self._batch):
            return
        answers = [answer for draw in self._batch for answer in self._groups.pop(draw).answers]
        self._batch = []
        tokens = Counter[int]()
        for answer in answers:
            for version, length in answer.spans:
                tokens[version] += length
        ages = self._window.ages(tokens)
        if self._warm_up < self._step <= self._last:
            for version, length in tokens.items():
                self._ages[ages[version]] += length
        costs = self._setting.costs
        whole = tokens.total() + len(answers) * self._setting.prompt_tokens
        seconds = costs.train_step_s + costs.train_token_s * whole / self._setting.trainer_devices
        self._trained_s += seconds
        self._tokens += tokens.total()
        self._later(now + seconds, self._trained)

    def _trained(self, now: float) -> None:
        self._window = self._window.taken(self._setting.prompts_per_step).trained(self._step)
        self._later(now + self._setting.costs.copy_s, self._publish)

    def _publish(self, now: float) -> None:
        if self._step in (self._warm_up, self._last):
            busy_s = sum(one.busy_until(now) for one in self._fleet.replicas)
            self._at_end[self._step] = _Totals(now, self._trained_s, busy_s, self._tokens)
        self._fleet.publish(self._step, now)
        self._begin_step(now)

    def _answer_ended(self, answer: Answer, now: float) -> None:
        group = self._groups[answer.draw]
        group.left -= 1
        if not group.left:
            self._later(now + self._setting.costs.reward_s, lambda then: self._scored(group, then))

    def _scored(self, group: _Group, now: float) -> None:
        group.scored = True
        self._train(now)

    def _later(self, time: float, call: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._order), call))


__all__ = ["MEASURED", "Outcome", "Setting", "simulate"]
