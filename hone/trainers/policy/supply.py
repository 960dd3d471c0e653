"""The groups of a step: prompts are drawn and played until enough of them can be trained on.

    stream --draw--> ledger --admit--> feed --take--> scored groups --filters--> kept | dropped, with a reason
      ^------------- put back: drawn by oversampling, and not needed ------'

Dynamic sampling draws again in place of dropped groups. With oversampling, each draw has more prompts than it may need.
Those after the last that it used go back to the stream, which gives them again to the next step, first and with the
same draw numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.algorithms.filtering.group_filter import GroupFilter
from hone.algorithms.filtering.history import SKIPPED
from hone.data.stream import PromptStream
from hone.envs.episode import Play
from hone.schedule.window import Enough, PromptLedger
from hone.trainers.policy.feed import Feed
from hone.trainers.policy.group_metrics import count_statuses, describe, describe_greedy, describe_lengths
from hone.trainers.run.randomness import draw_chance
from hone.types import Metric, Metrics, Prompt, TrajectoryGroup, merge_metrics

CheckFn = Callable[[Sequence[Prompt]], None]


@dataclass(slots=True)
class StepGroups:
    """The groups of one step, in draw order within each draw, and what was measured of them."""

    played: list[TrajectoryGroup] = field(default_factory=list)  # as they were scored
    settled: list[TrajectoryGroup] = field(default_factory=list)  # after the filters: a dropped one trains nothing
    metrics: Metrics = field(default_factory=dict)

    @property
    def kept(self) -> list[TrajectoryGroup]:
        """The groups to train on."""
        return [group for group in self.settled if group.trainable]

    def measure(self) -> Metrics:
        """All metrics of the step's groups."""
        skipped: Metrics = {"train/skipped_updates": Metric.sum(1)} if not self.kept else {}
        return merge_metrics(self.metrics, describe_lengths(self.played, self.kept), skipped)


class PromptSupply:
    """Collects the groups of each step, and notes in the ledger what becomes of every prompt."""

    before: Mapping[str, Any]
    """The position of the stream before the last draw."""

    def __init__(
        self,
        stream: PromptStream,
        feed: Feed,
        groups: GroupFilter,
        rollout_metrics: Callable[[], Metrics],
        seed: int,
        checks: Sequence[CheckFn],
    ) -> None:
        """`rollout_metrics` gives those since the last call; `checks` see every prompt before it is played."""
        self.stream = stream
        self.ledger = PromptLedger()
        self._feed = feed
        self._groups = groups
        self._rollout_metrics = rollout_metrics
        self._seed = seed
        self._checks = checks
        self._drawn: list[int] = []  # in the last draw, without those that were put back
        self._skipped: list[int] = []
        self._put_back = 0

    def collect(self, play: Play, count: int) -> StepGroups:
        """The groups of a step that trains on `count` of them, or on fewer if the last draw leaves some out."""
        found = StepGroups()
        for _ in range(self._groups.max_draws):
            self._settle(found, self._groups.shape(self._draw_and_take(play, count - len(found.kept))))
            if len(found.kept) == count:
                break
        return found

    def trained(self) -> None:
        """Note that all prompts that have ended are trained on or dropped."""
        self.ledger.trained_all_finished(self._feed.ahead)

    # ------------------------------------------------------------------------------------------------- its parts

    def _draw_and_take(self, play: Play, missing: int) -> list[TrajectoryGroup]:
        """The scored groups of new prompts: of all, or with oversampling until `missing` of them can be kept."""
        wanted = self._groups.prompts_for(missing)
        prompts = self._draw(self._feed.room(wanted, play.step))
        self._feed.admit(prompts, play, wanted, self.before)
        taken = self._take(wanted, missing, play.step)
        if len(taken) < wanted:
            self._return(after=taken[-1].prompt.draw)
        return taken

    def _take(self, wanted: int, missing: int, step: int) -> list[TrajectoryGroup]:
        return self._feed.take(wanted, Enough(missing, self._groups.keeps) if wanted > missing else None)

    def _settle(self, found: StepGroups, played: list[TrajectoryGroup]) -> None:
        """Add played groups: those to train on, then the others, marked as not trainable and dropped in the ledger."""
        self.ledger.finished(group.prompt.draw for group in played)
        kept, dropped = self._groups.keep(played)
        for one in dropped:
            self.ledger.dropped([one.group.prompt.draw], one.reason)
        settled = [*kept, *(one.group for one in dropped)]
        found.played += played
        found.settled += settled
        found.metrics = merge_metrics(
            found.metrics,
            self._measure(),
            {**describe(played), **describe_greedy(played)},
            self._rollout_metrics(),
            self._groups.measure(),
            {**count_statuses(settled), "rollout/groups_dropped": Metric.sum(len(dropped))},
        )

    def _draw(self, count: int) -> list[Prompt]:
        """The next prompts of the stream, without those that are skipped; the ledger notes them as in flight."""
        self.before = self.stream.state_dict()
        prompts, skipped = self.stream.take_unless(self._skips, count)
        self._drawn = [prompt.draw for prompt in prompts]
        self._skipped = [prompt.draw for prompt in skipped]
        self._put_back = 0
        self.ledger.drawn(sorted(self._drawn + self._skipped))
        self.ledger.skipped(self._skipped, SKIPPED)
        for check in self._checks:
            check(prompts)
        return prompts

    def _skips(self, prompt: Prompt) -> bool:
        """Return whether a prompt is skipped because its last groups had no variance; the same in every launch."""
        probability = self._groups.skip_probability(prompt.prompt_id)
        return probability > 0 and draw_chance(self._seed, prompt.draw) < probability

    def _return(self, after: int) -> None:
        """Return the prompts after draw number `after`, all of the last draw, to the stream."""
        self.ledger.put_back(after + 1, sum(draw > after for draw in self._skipped), SKIPPED)
        self.stream.back_to(self.before, after + 1)
        self._put_back = sum(draw > after for draw in self._drawn)
        self._drawn = [draw for draw in self._drawn if draw <= after]
        self._skipped = [draw for draw in self._skipped if draw <= after]

    def _measure(self) -> Metrics:
        """Figures of the last draw."""
        found: Metrics = {
            "rollout/epoch": Metric.max(self.stream.epoch),
            "rollout/prompts_too_long": Metric.max(sum(self.stream.dropped.values())),
        }
        if self._groups.skips_prompts:
            found["rollout/prompts_skipped"] = Metric.sum(len(self._skipped))
        if self._groups.oversamples:
            found["rollout/prompts_used"] = Metric.sum(len(self._drawn))
            found["rollout/prompts_put_back"] = Metric.sum(self._put_back)
        return found


__all__ = ["PromptSupply", "StepGroups"]
