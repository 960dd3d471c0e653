"""Shared set-up: one thread per process (two cores are shared), deterministic seeds; which process runs which files."""

import gc
import os
import re
import signal
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HONE_DEVICE_FACTS"] = os.devnull  # not what a developer's `hone plan --calibrate` wrote
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or NVIDIA's products may not repeat (`deterministic`)

import pytest
import torch
from hypothesis import settings

from hone.plugins import GROUP, VARIABLE
from hone.processes.garbage import collect_rarely

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
collect_rarely()
settings.register_profile("hone", deadline=None)  # how long an example takes says nothing about whether it is right
settings.load_profile("hone")


ROOT = Path(__file__).resolve().parents[1]


def _find_plugins() -> None:
    """Let this process and its children find all plug-ins, installed or not: their settings need hone only."""
    folders = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
    projects = [tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in folders]
    values = [value for one in projects for value in one["project"]["entry-points"][GROUP].values()]
    paths = [str(path) for path in (ROOT, *folders)]
    sys.path += paths[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *paths])
    os.environ[VARIABLE] = ",".join(values)


_find_plugins()

CLUSTERS = (
    "tests/deploy/test_slurm.py",
    "tests/runtime/test_policy_ranks.py",
    "tests/runtime/test_preference_ranks.py",
    "tests/runtime/test_ray",
    "tests/runtime/test_servers_on_nodes.py",
)
"""Files whose tests are many processes each: never two of them at once, and all in one process, with one Ray."""

LONG = "tests/workers/test_deaths.py", "tests/workers/test_snapshots.py", "tests/schedule/test_every_order.py"
"""Files that take minutes, most of them in waiting for servers that hang: not the last ones."""

OLD = tuple(map(int, version("transformers").split(".")[:2])) < (5, 19)


def scope_of(nodeid):
    """What one process of `make test` runs as a whole: a file, or all clusters."""
    return "clusters" if nodeid.startswith(CLUSTERS) else nodeid.partition("::")[0]


def pytest_collection_finish():
    """The garbage collector need not look again at what was imported, until a test trains here (which unfreezes)."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Clusters first, then files with slow tests: no process is left with a long file when the other has ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(CLUSTERS),
            item.path not in slow,
            not item.nodeid.startswith(LONG),
        )
    )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last cluster, end Ray: its daemons would take a few percent of a core until all tests have ended."""
    last = nextitem is None or not nextitem.nodeid.startswith(CLUSTERS)
    if last and item.nodeid.startswith(CLUSTERS) and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With an old transformers (`make test-oldest`), skip a test of what hone refuses to do with it."""
    report = yield
    if report.failed and OLD:
        found = re.search(r"\S+ = \d+ needs transformers 5\.19, found [0-9.]+", str(call.excinfo.value))
        if found is not None:
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"Skipped: {found[0]}")
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """In place of xdist's own order, which is by the number of tests in a file."""
    from xdist.scheduler import LoadScopeScheduling  # in this hook: who calls it has xdist

    class InOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return InOrder(config, log)


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def each_device(request, monkeypatch):
    """A device's name in torch: that of the CPU, which is then the process's platform, and of an accelerator."""
    from hone.platforms.base import PLATFORM_VARIABLE, current_platform

    if request.param == "cpu":
        monkeypatch.setenv(PLATFORM_VARIABLE, "cpu")
        return "cpu"
    if current_platform().device == "cpu":
        pytest.skip("there is no accelerator here")
    return current_platform().device


@pytest.fixture
def deterministic(each_device):
    """Only kernels that repeat to the bit, on that device too."""
    from hone.platforms.base import use_deterministic_kernels

    use_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
