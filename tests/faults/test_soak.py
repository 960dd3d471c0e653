"""Each fault of the soak at least once (`python -m tests.faults.soak --minutes 30` is the long one)."""

import pytest

from tests.faults.soak import Soak, check

SECONDS = 20


@pytest.mark.slow
def test_a_run_under_faults_loses_no_prompt_and_leaves_nothing_behind(tmp_path):
    soak = Soak(tmp_path, seed=0)
    try:
        soak.go(SECONDS)
        ended = soak.end()
    finally:
        soak.close()
    check(soak, *ended)
    assert set(soak.done) == {"kill", "stop", "starve", "talk_nonsense", "dawdle", "plant_poison"}
