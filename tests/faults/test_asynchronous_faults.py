"""A few faults of `python -m tests.faults.asynchronous`, each after a step of the run."""

import pytest

from hone.rollout.servers import connection
from tests.faults.asynchronous import count, disturbed, killed, undisturbed
from tests.trainers.test_asynchronous import assert_same
from tests.trainers.tiny import metrics

pytestmark = pytest.mark.slow

STEPS = 12
AFTER = {2: "kill", 4: "join", 6: "stop", 7: "notice", 8: "leave"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("whole"), STEPS)


@pytest.mark.ci
def test_servers_that_die_hang_come_and_go_change_nothing(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "GRACE_S", 1.0)

    def on_step(faults, step):
        if step in AFTER:
            getattr(faults, AFTER[step])()

    faults, run = disturbed(tmp_path, STEPS, on_step)
    assert faults.done == {"SIGKILL": 1, "SIGSTOP": 1, "noticed": 1, "join": 1, "leave": 1}
    assert count(run) == (4 * STEPS, 0, 0)
    assert_same(whole, run)


@pytest.mark.ci
def test_a_trainer_that_is_killed_twice_ends_as_one_that_is_not(whole, tmp_path):
    assert_same(whole, killed(tmp_path, STEPS, kills=2))


def test_where_answers_go_on_under_new_weights_kills_lose_no_prompt_and_age_no_token(tmp_path):
    """Which version samples a token depends on the load there, so the run is another one, and just as good."""
    run = killed(tmp_path, STEPS, kills=2, new_weights="recompute")
    assert count(run) == (4 * STEPS, 0, 0)
    assert [line["schedule/staleness_max"] <= 1 for line in metrics(run)[1:]] == [True] * STEPS
