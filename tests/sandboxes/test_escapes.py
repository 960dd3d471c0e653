"""Every probe of `probes.py` is refused, in both local back ends, as an ordinary user and as root."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hone.sandboxes.kernel import landlock
from tests.sandboxes.probes import NAMES, REFUSED

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
LEVELS = range(landlock.OLDEST, max(landlock.version(), landlock.OLDEST))  # older ones than this kernel's
ROOTS = pytest.mark.slow


def interpreter(user: int) -> str:
    """A Python that the user may run; skips if there is none."""
    if user == os.geteuid() == 0:
        return "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
    for path in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run(
                [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], user=user, timeout=60
            )
        except (OSError, ValueError):
            continue
        if done.returncode == 0:
            return path
    pytest.skip(f"no Python 3.11 that user {user} may run (the tests' own is in a folder that is closed to it)")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("landlock", "ordinary"), marks=pytest.mark.ci),
        pytest.param(("bubblewrap", "ordinary"), marks=pytest.mark.ci),
        pytest.param(("landlock", "root"), marks=ROOTS),
        pytest.param(("bubblewrap", "root"), marks=ROOTS),
        *(("landlock", "ordinary", str(level)) for level in LEVELS),
    ],
    ids="-".join,
)
def verdicts(request) -> dict[str, str]:
    """Name of a probe -> how it got out; empty if it did not. All run in one process, with one warm parent."""
    backend, who, *level = request.param
    if who == "root" and os.geteuid() != 0:
        pytest.skip("the tests do not run as root")
    user = 0 if who == "root" else (NOBODY if os.geteuid() == 0 else os.geteuid())
    command = [interpreter(user), "-m", "tests.sandboxes.probes", backend, *level]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/tmp"}
    alone = {"user": user, "group": user, "extra_groups": []} if os.geteuid() == 0 else {}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, cwd=ROOT, **alone)
    if done.returncode == REFUSED:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_program_does_not_get_out(verdicts, name):
    assert verdicts[name] == ""
