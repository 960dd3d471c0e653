"""Metrics of a step's groups: turns and tool calls, counted by hand."""

from hone.trainers.policy.group_metrics import describe
from hone.types import Called, Metric, Prompt, Status, StopReason, Trajectory, TrajectoryGroup, TurnSpan

PROMPT = Prompt("set/0", (1,), (), "a", "set")


def played(spans, mask=(0, 1, 0, 0, 1), **changes):
    size = len(mask)
    one = Trajectory("set/0", 0, (5,) * size, 1, mask, (0.0,) * size, (-1,) * size, "x", StopReason.STOP, spans=spans)
    return one.with_(**changes)


def test_calls_are_counted_by_tool_and_names_that_the_policy_made_up_are_no_metrics():
    first = TurnSpan(
        1,
        2,
        calls=(
            Called("add", "{}", "3", seconds=1.0),
            Called("add", "{}", "error: a", seconds=3.0, fault="arguments"),
            Called("wait", "{}", "error: late", seconds=5.0, fault="timeout"),
            Called("made up by the policy", "{}", "error: no such tool", fault="unknown"),
            Called("", "[ad", "error: not closed", fault="broken"),
        ),
    )
    one = played((first, TurnSpan(4, 5)), metrics={"rooms": Metric.mean(2.0)})
    two = played((TurnSpan(1, 2),), mask=(0, 1), sample=1, episode=1, metrics={"rooms": Metric.mean(4.0)})
    branch = played((TurnSpan(1, 2),), mask=(0, 1), sample=1, episode=1)
    lost = played((first,), status=Status.ENV_FAILED)
    found = describe([TrajectoryGroup(PROMPT, (one, two, branch, lost))])
    told = {name: metric.value for name, metric in found.items()}
    assert told["rollout/turns"] == 4 / 3
    assert told["rollout/turns_max"] == 2
    assert told["rollout/observation_tokens"] == 2 / 3
    assert told["rollout/tracks_per_episode"] == 1.5
    assert told["rollout/rooms"] == 3.0
    assert {name: value for name, value in told.items() if "tools/" in name or "calls/" in name} == {
        "rollout/tools/add/calls": 4,
        "rollout/tools/add/errors": 2,
        "rollout/tools/add/timeouts": 0,
        "rollout/tools/add/seconds": 2.0,
        "rollout/tools/wait/calls": 2,
        "rollout/tools/wait/errors": 0,
        "rollout/tools/wait/timeouts": 2,
        "rollout/tools/wait/seconds": 5.0,
        "rollout/calls/unknown": 2,
        "rollout/calls/broken": 2,
    }


def test_episodes_of_one_turn_have_no_metrics_of_turns():
    found = describe([TrajectoryGroup(PROMPT, (played((TurnSpan(1, 2),), mask=(0, 1)),))])
    assert not [name for name in found if "turns" in name or "tools" in name]
