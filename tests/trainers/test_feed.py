"""What is trained on does not depend on which answers come first."""

import random
from concurrent.futures import Future

from hone.envs.episode import Play
from hone.schedule.journal import Journal
from hone.schedule.window import Window
from hone.tracking.metrics import Timer
from hone.trainers.policy.feed import Feed
from hone.trainers.run.recorder import Recorder
from hone.types import Prompt, SamplingParams, TrajectoryGroup

PER_STEP, STALENESS, STEPS = 4, 2, 50
_random = random.Random(0)
LENGTHS = [_random.randint(1, 10) * (20 if _random.random() < 1 / 16 else 1) for _ in range(PER_STEP * STEPS)]


class ShortestFirst:
    """Plays prompts; the answers of those that are open end in the order of their lengths."""

    def __init__(self):
        self.open = []
        self.arrived = []

    def start(self, prompt, play, versions, recorded=None):
        future = Future()
        self.open.append((LENGTHS[prompt.draw], prompt, future))
        return future

    def end_all(self):
        for length, prompt, future in sorted(self.open, key=lambda one: one[0]):
            future.set_result(TrajectoryGroup(prompt, ()))
            self.arrived.append(length)
        self.open = []

    def complete(self, groups):
        return list(groups)

    def publish(self, actor, version):
        pass


def distance(some, others):
    """The largest difference of two empirical distributions (Kolmogorov and Smirnov)."""
    return max(
        abs(sum(a <= x for a in some) / len(some) - sum(b <= x for b in others) / len(others)) for x in (*some, *others)
    )


def test_lengths_that_are_trained_on_are_distributed_as_those_that_are_drawn(tmp_path):
    """One answer in 16 is 20 times as long, and the short ones always arrive first."""
    arrivals = ShortestFirst()
    window = Window(STALENESS, PER_STEP, STEPS)
    feed = Feed(window, arrivals, arrivals, Recorder(Timer()), Journal(tmp_path / "schedule.jsonl"), 1.0)
    play = Play(None, SamplingParams(max_tokens=1), seed=0, samples=1)
    trained, draws = [], iter(range(len(LENGTHS)))
    for step in range(1, STEPS + 1):
        numbers = [next(draws) for _ in range(feed.room(PER_STEP, step))]
        feed.admit([Prompt(f"rows/{n}", (1,), (), "", "rows", draw=n) for n in numbers], play.at(step), PER_STEP, {})
        arrivals.end_all()
        trained += [LENGTHS[group.prompt.draw] for group in feed.take(PER_STEP)]
        feed.publish(None, step)
        assert distance(trained, LENGTHS[: len(trained)]) == 0.0
    first = LENGTHS[: PER_STEP * (1 + STALENESS)]  # that were drawn in step 1
    assert distance(arrivals.arrived[:PER_STEP], first) > 0.4, "the order of arrival would have been no different"
