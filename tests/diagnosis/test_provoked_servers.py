"""Rules about servers and old tokens, provoked for real in asynchronous runs with servers of their own."""

import os
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.diagnosis.test_provoked import train
from tests.faults.asynchronous import arguments_of, servers

SHORT = {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}, "start_timeout_s": 240}


def ahead(staleness):
    return {"asynchrony": {"staleness": staleness}, "algorithm": {"correction": {"old": "rollout"}}}


@contextmanager
def stopped_most_of_the_time(process):
    """Stop a process for 90 ms of every 100, as another tenant of its device would."""
    ended = threading.Event()

    def stop_and_go():
        with suppress(ProcessLookupError):  # the run has ended, and its server with it
            while not ended.is_set():
                os.kill(process, signal.SIGSTOP)
                ended.wait(0.09)
                os.kill(process, signal.SIGCONT)
                ended.wait(0.01)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_replica_whose_device_is_shared_and_that_dies(tmp_path):
    with ExitStack() as faults:

        def share(step, metrics):
            if step in (1, 8):
                (second,) = [one for one in servers() if "builtin-1" in arguments_of(one)[4]]
                if step == 1:
                    faults.enter_context(stopped_most_of_the_time(second))
                else:
                    os.kill(second, signal.SIGKILL)

        told, _ = train(tmp_path, 9, {"rollout": {**SHORT, "replicas": 2}}, on_step=share)
    assert told["a rollout replica is slow"]["seen"].startswith("replica 1 generates at ")
    assert told["a rollout server failed"]["seen"] in (
        "1 restarts, the first in step 9",
        "1 of 2 replicas served from step 9",
    )


OWN = """
import time
from hone.algorithms.advantages import Advantages, Episodes, sequence_rewards

calls = []

def slow_at_first(batch):
    calls.append(1)
    if len(calls) <= 8:
        time.sleep(0.3)
    rewards = sequence_rewards(batch)
    episodes = Episodes.of(batch, rewards)
    return Advantages(episodes.on_tokens(episodes.rewards - episodes.mean(episodes.rewards), batch, rewards.dtype))

def slow_later(response, ground_truth, row):
    calls.append(1)
    if len(calls) > 16 * 11:
        time.sleep(0.04)
    return response.count("a") / 3
"""


@pytest.mark.slow
def test_a_generator_that_is_far_ahead_of_the_trainer_and_then_waits_for_rewards(tmp_path):
    """A slow driver in 8 steps: servers idle, and tokens become old. Then slow rewards, for which both sides wait."""
    (tmp_path / "own.py").write_text(OWN)
    own = {
        "algorithm": {"correction": {"old": "rollout"}, "advantage": {"name": f"{tmp_path}/own.py:slow_at_first"}},
        "reward": {"components": {"late": {"reward": f"{tmp_path}/own.py:slow_later"}}, "workers": 1},
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 0.02}},
    }
    told, found = train(tmp_path, 15, ahead(2), own, {"rollout": SHORT})
    assert told["tokens are as old as allowed"]["seen"] == "schedule/staleness 2.00 of at most 2"
    assert told["the driver takes a large share of a step"]["seen"].startswith("perf/driver_fraction ")
    assert told["rollout servers idle"]["meaning"].startswith("Training is the bottleneck")
    gap = next(one for title, one in told.items() if title.startswith(("rollout and trainer", "the gap between")))
    assert gap["meaning"].endswith(
        "Likely, from the metrics and settings: old weights, because answers are drawn ahead."
    )
    waits = found["the trainer waits for answers"]
    assert waits.meaning.startswith("Neither side works: answers wait for their rewards")
    assert waits.tries[0] == "raise reward.workers"
    assert "rollout servers idle" not in found
