"""Rubrics with real processes: values, weights, and every way in which a reward can fail."""

import asyncio
import logging
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.processes.request_process import ChildLost
from hone.rewards.hosting import lateness
from hone.rewards.pool import PoolClosed
from hone.rewards.rubric import Rubric
from hone.rewards.settings import RewardConfig
from hone.types import Status, TurnSpan


def gone(pid):
    """Whether a process ends soon (a zombie of a parent that does not wait has ended)."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_the_reward_is_the_weighted_sum_of_the_components(score, group, user):
    components = {
        "right": {"reward": "gsm8k", "options": {"extraction": "strict"}},
        "style": {"reward": user("parts"), "weight": -0.5},
        "length": {"reward": user("length"), "weight": 0.0, "options": {"scale": 2}},
    }
    (scored,), metrics = score(components, [group(["#### 1,000", "1000"], 1000)])
    first, second = scored.trajectories
    assert (first.reward, second.reward) == (0.75, -0.25)  # 1 - 0.5 * 0.5 and 0 - 0.5 * 0.5; length counts nothing
    assert first.components == {
        "right": 1.0,
        "style": 0.5,
        "style/format": 1.0,
        "style/length": 10.0,
        "length": 20.0,
    }
    assert second.components["right"] == 0.0
    assert [t.status for t in scored.trajectories] == [Status.OK, Status.OK]
    assert metrics["reward/scored"] == 2
    assert metrics["reward/failed"] == metrics["reward/timeouts"] == metrics["reward/worker_restarts"] == 0
    assert metrics["perf/reward_call_seconds"] >= 0


def test_rewards_of_turns_are_added(score, group):
    """An environment may be the only source of rewards; without any source, a trajectory is not worth 0."""
    played = group(["4", "5"], 4)
    first, second = played.trajectories
    turns = (TurnSpan(0, 1, reward=0.5), TurnSpan(1, 2, reward=-0.25), TurnSpan(2, 3))
    played = type(played)(played.prompt, (first.with_(spans=turns), second))
    (scored,), _ = score({"right": {"reward": "exact_match"}}, [played])
    assert [one.reward for one in scored.trajectories] == [1.25, 0.0]
    assert [one.components for one in scored.trajectories] == [{"right": 1.0, "environment": 0.25}, {"right": 0.0}]
    (alone,), _ = score({}, [played])
    assert [one.status for one in alone.trajectories] == [Status.OK, Status.REWARD_FAILED]
    assert alone.trajectories[0].reward == 0.25
    assert alone.trajectories[1].error == "reward.components is empty, and the environment gave no reward"


@pytest.mark.parametrize("function", ["temper", "async_temper"])
@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("raise", r"^a: RuntimeError: no verdict on two lines \(at .*user_rewards.py:\d+\)$"),
        ("nan", "the reward is nan; expected a finite number"),
        ("inf", "the reward's 'part' is -inf"),
        ("none", "the reward is None"),
        ("text", "the reward is '1.0'"),
        ("keyless", "without the key 'reward'"),
        ("exit", "SystemExit: leaving"),
        ("die", "the reward process ended with exit status 3; it printed: goodbye"),
    ],
)
def test_a_failing_reward_fails_its_trajectory_only(score, group, user, function, response, error):
    responses = ["fine", response, "fine", "fine"]
    (scored,), metrics = score({"a": {"reward": user(function)}}, [group(responses)])
    first, failed, *others = scored.trajectories
    assert failed.status is Status.REWARD_FAILED
    assert failed.components == {}
    assert re.search(error, failed.error), failed.error
    assert [(t.status, t.reward) for t in (first, *others)] == [(Status.OK, 1.0)] * 3
    assert (metrics["reward/scored"], metrics["reward/failed"]) == (3, 1)
    if response == "die" and function == "temper":  # its successor had to answer the rest
        assert metrics["reward/worker_restarts"] == 1
    elif response != "die":
        assert metrics["reward/worker_restarts"] == 0


@pytest.mark.parametrize(
    ("function", "response"),
    [
        ("temper", "sleep"),
        ("temper", "spin"),
        ("async_temper", "sleep"),
        ("async_temper", "block"),
        ("async_temper", "stubborn"),
    ],
)
def test_a_late_reward_is_a_failure_and_its_process_is_replaced(score, group, user, monkeypatch, function, response):
    monkeypatch.setattr("hone.rewards.pool.GRACE_S", 0.2)
    components = {"a": {"reward": user(function), "timeout_s": 1.5}}  # what is fine has to answer within it too
    groups = [group([response]), group(["fine", "fine"])]
    (late, fine), metrics = score(components, groups, workers=1)
    assert late.trajectories[0].status is Status.REWARD_FAILED
    assert late.trajectories[0].error == "a: no answer within 1.5 s"
    if response == "block":  # what blocks the event loop makes its neighbours late too
        return
    assert [t.status for t in fine.trajectories] == [Status.OK] * 2
    assert metrics["reward/timeouts"] == 1
    if function == "temper":  # its successor had to answer the other group
        assert metrics["reward/worker_restarts"] == 1


def test_printing_without_line_ends_moves_no_deadline(score, group, user):
    began = time.monotonic()
    (scored,), metrics = score({"a": {"reward": user("temper"), "timeout_s": 1.5}}, [group(["flood", "fine"])])
    assert time.monotonic() - began < 20
    assert scored.trajectories[0].error == "a: no answer within 1.5 s"
    assert scored.trajectories[1].reward == 1.0
    assert metrics["reward/timeouts"] == 1


def test_a_reward_that_forks_gives_no_other_item_its_value(score, group, user):
    """The forked copy comes back from the function too, with 99, while its parent is at the next items."""
    components = {"a": {"reward": user("temper")}, "b": {"reward": user("temper")}}
    (scored,), _ = score(components, [group(["fork", "slow", "slow", "slow"])])
    assert [t.components for t in scored.trajectories] == [{"a": 1.0, "b": 1.0}] * 4


def test_a_reward_that_is_late_again_and_again_is_passed_over_until_the_next_step(group, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lateness, "TELL_S", 0.2)
    (tmp_path / "away").touch()
    (tmp_path / "judge.py").write_text(
        "import asyncio, pathlib\n"
        "async def f(response):\n"
        f"    while pathlib.Path({str(tmp_path / 'away')!r}).exists():\n"
        "        await asyncio.sleep(0.02)\n"
        "    return 2.0\n"
    )

    async def play():
        component = {"reward": f"{tmp_path / 'judge.py'}:f", "timeout_s": 1.0}
        rubric = Rubric(RewardConfig(components={"a": component}, workers=1))
        try:
            await rubric.start()
            first = await rubric.score(group(["x"] * 200))
            late = rubric.metrics()["reward/timeouts"].value
            (tmp_path / "away").unlink()
            return first, late, await rubric.score(group(["x"] * 3))
        finally:
            await rubric.close()

    first, late, second = asyncio.run(play())
    errors = Counter(one.error for one in first.trajectories)
    assert late == errors["a: no answer within 1 s"]
    assert 32 <= late <= 31 + 64  # a batch has at most 64
    passed_over = "a: not asked, because 32 calls in a row had no answer within reward.components.a.timeout_s = 1; "
    assert errors[f"{passed_over}raise it, or try the function with hone score"] == 200 - late
    assert [one.reward for one in second.trajectories] == [2.0] * 3
    assert "rewards: 200 calls are open; 0 ended in the last 0.2 s, 0 of them without an answer in time" in caplog.text


def test_a_late_rewards_child_in_a_session_of_its_own_ends_with_it(score, group, user, tmp_path):
    pid_file = tmp_path / "pid"
    components = {"a": {"reward": user("temper"), "timeout_s": 1.5}}
    (scored,), _ = score(components, [group(["detached"], pid_file=str(pid_file))])
    assert scored.trajectories[0].error == "a: no answer within 1.5 s"
    assert gone(int(pid_file.read_text()))


def test_what_a_reward_prints_is_in_the_run_folder(group, user, tmp_path):
    rubric = Rubric(RewardConfig(components={"a": {"reward": user("noisy")}}, workers=1), logs=tmp_path / "rewards")

    async def play():
        await rubric.start()
        await rubric.score(group(["one"]))
        await rubric.close()

    asyncio.run(play())
    assert "I print one" in (tmp_path / "rewards" / "functions-0.log").read_text()


def test_a_reward_that_wants_most_of_the_machines_memory_fails_alone(score, group, user):
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (scored,), metrics = score({"a": {"reward": user("hungry")}}, [group(["10", str(most // 10 * 6), "20"])])
    assert [one.status for one in scored.trajectories] == [Status.OK, Status.REWARD_FAILED, Status.OK]
    assert "MemoryError" in scored.trajectories[1].error
    assert metrics["reward/worker_restarts"] == 0


def test_the_deadline_is_each_calls_own_not_the_batchs(score, group, user, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef f(response, ground_truth, row):\n    time.sleep(0.25)\n    return 1\n")
    (scored,), metrics = score({"a": {"reward": f"{slow}:f", "timeout_s": 1.5}}, [group(["x"] * 16)])
    assert [t.status for t in scored.trajectories] == [Status.OK] * 16  # 4 s in all, in batches of up to 2 s
    assert metrics["reward/timeouts"] == 0


def test_trajectories_that_had_failed_are_left_alone_and_truncated_ones_are_scored(score, group, user):
    built = group(["raise", "fine", "fine"])
    failed, truncated, fine = built.trajectories
    failed = failed.with_(status=Status.ENV_FAILED, error="sandbox")
    truncated = truncated.with_(status=Status.TRUNCATED)
    built = type(built)(built.prompt, (failed, truncated, fine))
    (scored,), metrics = score({"a": {"reward": user("temper")}}, [built])
    assert scored.trajectories[0] == failed
    assert (scored.trajectories[1].status, scored.trajectories[1].reward) == (Status.TRUNCATED, 1.0)
    assert metrics["reward/scored"] == 2


def test_one_failing_component_fails_the_trajectory_and_keeps_the_others_values(score, group, user):
    components = {"good": {"reward": user("length")}, "bad": {"reward": user("temper"), "weight": 0.0}}
    (scored,), _ = score(components, [group(["raise"])])
    assert scored.trajectories[0].status is Status.REWARD_FAILED
    assert scored.trajectories[0].components == {"good": 5.0}
    assert scored.trajectories[0].error.startswith("bad: RuntimeError")


def test_an_overflowing_sum_is_a_failure(score, group, user):
    components = {name: {"reward": user("length"), "weight": 1.7e308} for name in ("a", "b")}
    (scored,), _ = score(components, [group(["x"])])
    assert scored.trajectories[0].status is Status.REWARD_FAILED
    assert "weighted sum" in scored.trajectories[0].error


def test_a_row_that_cannot_be_sent_fails_its_group_by_name(score, group, user):
    (bad, good), metrics = score({"a": {"reward": user("temper")}}, [group(["x", "y"], image=b"png"), group(["x"])])
    assert [t.status for t in bad.trajectories] == [Status.REWARD_FAILED] * 2
    assert "column 'image'" in bad.trajectories[0].error
    assert good.trajectories[0].reward == 1.0
    assert metrics["reward/failed"] == 2


def test_printing_does_not_disturb_the_protocol(score, group, user, caplog):
    caplog.set_level(logging.INFO, logger="hone.processes")
    (scored,), metrics = score({"a": {"reward": user("noisy")}}, [group(["one", "two"])])
    assert [t.reward for t in scored.trajectories] == [1.0, 1.0]
    assert metrics["reward/worker_restarts"] == 0
    assert any("I print one" in record.message for record in caplog.records)


def test_the_row_has_the_columns_and_what_rendering_took(score, group, tmp_path):
    file = tmp_path / "sees.py"
    file.write_text(
        "def f(response, ground_truth, row):\n"
        "    assert row['messages'][0]['content'] == '?' and row['prompt_id'] == 'set/0', row\n"
        "    assert row['data_source'] == 'my own' and ground_truth == {'x': [1, None]}, row\n"
        "    return row['level']\n"
    )
    built = group(["a"], {"x": [1, None]}, level=3, data_source="my own")
    (scored,), _ = score({"a": {"reward": f"{file}:f"}}, [built])
    assert (scored.trajectories[0].reward, scored.trajectories[0].error) == (3.0, "")


def test_coroutines_wait_together(score, group, user):
    groups = [group(["a", "b"], n=n) for n in range(4)]
    scored, _ = score({"a": {"reward": user("meeting"), "timeout_s": 20}}, groups)
    assert [[t.reward for t in g.trajectories] for g in scored] == [[float(n)] * 2 for n in range(4)]


@pytest.mark.parametrize(("function", "value"), [("judge", 0.25), ("hidden_coroutine", 0.25)])
def test_objects_and_functions_that_return_coroutines(score, group, user, function, value):
    (scored,), _ = score({"a": {"reward": user(function)}}, [group(["x", "y"])])
    assert [t.reward for t in scored.trajectories] == [value, value]


def test_a_thousand_rows_come_back_each_with_its_own_value(score, group, user):
    groups = [group(["x", "xx"], n=n) for n in range(500)]
    components = {"n": {"reward": user("number")}, "length": {"reward": user("length"), "weight": 0.5}}
    scored, metrics = score(components, groups, workers=3)
    assert [[t.reward for t in g.trajectories] for g in scored] == [[n + 0.5, n + 1.0] for n in range(500)]
    assert metrics["reward/scored"] == 1000


def test_values_do_not_depend_on_the_number_of_workers_nor_on_the_order(score, group, user):
    groups = [group([f"r{n}", f"s{n}"], word=f"w{n}") for n in range(20)]
    components = {"a": {"reward": user("drawn")}}
    one, _ = score(components, groups, workers=1)
    three, _ = score(components, groups[::-1], workers=3)
    values = [[t.reward for t in g.trajectories] for g in one]
    assert values == [[t.reward for t in g.trajectories] for g in three[::-1]]
    assert len({value for row in values for value in row}) == 40


def test_a_rubric_lives_through_several_event_loops(group, user):
    rubric = Rubric(RewardConfig(components={"a": {"reward": user("number")}}, workers=1))
    asyncio.run(rubric.start())
    try:
        for n in (1, 2):
            scored = asyncio.run(rubric.score(group(["x"], n=n)))
            assert scored.trajectories[0].reward == n
            assert rubric.metrics()["reward/scored"].value == 1
    finally:
        asyncio.run(rubric.close())
    assert rubric.metrics()["reward/scored"].value == 0


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"reward": "no_such_module:f"}, "component 'a': 'no_such_module:f' cannot be loaded: ModuleNotFoundError"),
        ({"reward": "user:lenght"}, "did you mean 'length'"),
        ({"reward": "gsm8k", "options": {"extraction": "strct"}}, "did you mean 'strict'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_stops_the_start(user, component, message):
    if component["reward"].startswith("user:"):
        component = {"reward": user(component["reward"].removeprefix("user:"))}
    rubric = Rubric(RewardConfig(components={"a": component}, workers=2))
    with pytest.raises(ConfigError, match=message):
        asyncio.run(rubric.start())


def test_a_module_that_kills_the_process_stops_the_start(tmp_path):
    file = tmp_path / "deadly.py"
    file.write_text("import os, sys\nprint('no licence', file=sys.stderr)\nsys.stderr.flush()\nos._exit(7)\n")
    rubric = Rubric(RewardConfig(components={"a": {"reward": f"{file}:f"}}, workers=1))
    with pytest.raises(ChildLost, match="ended with exit status 7; it printed: no licence"):
        asyncio.run(rubric.start())


def test_a_process_that_cannot_be_replaced_ends_the_wait(group, user, tmp_path):
    file = tmp_path / "once.py"
    file.write_text("import os\ndef f(response, ground_truth, row):\n    os._exit(1)\n")
    rubric = Rubric(RewardConfig(components={"a": {"reward": f"{file}:f"}}, workers=1))

    async def play():
        await rubric.start()
        file.unlink()
        first = await rubric.score(group(["x"]))
        assert first.trajectories[0].status is Status.REWARD_FAILED
        with pytest.raises(PoolClosed, match=r"cannot be replaced: .*no file"):
            await rubric.score(group(["x"]))

    try:
        asyncio.run(play())
    finally:
        asyncio.run(rubric.close())


def test_closing_ends_calls_under_way_and_every_process(group, user, tmp_path):
    pid_file = tmp_path / "pid"
    rubric = Rubric(RewardConfig(components={"a": {"reward": user("temper")}}, workers=2))

    async def play():
        await rubric.start()
        pids = [process.pid for process in rubric._pool._processes.values()]
        call = asyncio.create_task(rubric.score(group(["child", "sleep", "sleep"], pid_file=str(pid_file))))
        while not (pid_file.is_file() and pid_file.read_text()):
            await asyncio.sleep(0.02)
        await rubric.close()
        with pytest.raises(PoolClosed, match="were closed"):
            await call
        return [*pids, int(pid_file.read_text())]

    assert all(gone(pid) for pid in asyncio.run(play()))


def test_cancelled_calls_do_not_stop_the_pool(group, user):
    rubric = Rubric(RewardConfig(components={"a": {"reward": user("temper"), "timeout_s": 1.5}}, workers=1))

    async def play():
        await rubric.start()
        call = asyncio.create_task(rubric.score(group(["sleep", *["fine"] * 50])))
        await asyncio.sleep(0.1)
        call.cancel()
        return await rubric.score(group(["fine"]))

    try:
        assert asyncio.run(play()).trajectories[0].reward == 1.0
    finally:
        asyncio.run(rubric.close())
