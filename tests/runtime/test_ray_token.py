"""A cluster that a run starts has a token of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os, ray
from hone.runtime.ray_cluster import connect
from hone.runtime.settings import RaySettings

@ray.remote
def token():
    return os.environ["RAY_AUTH_TOKEN"]

found = []
for _ in range(2):
    connect(RaySettings())
    found.append(ray.get(token.remote(), timeout=60))
    ray.shutdown()
print(*(len(one) for one in found), len(set(found)), "RAY_AUTH_TOKEN" in os.environ)
"""


def test_each_cluster_has_a_token_that_is_in_no_file_and_in_no_other_process(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == ["64", "64", "2", "False"], done.stderr[-2000:]
    assert not (tmp_path / ".ray").exists()
