"""The set-up of tests/, for the tests of plug-ins: threads, seeds, which process runs which files."""

from tests.conftest import (  # noqa: F401  fixtures and hooks
    _one_thread_and_a_seed,
    deterministic,
    each_device,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_xdist_make_scheduler,
)
