"""Numbers of other implementations, where they are installed: `make oracle` makes an environment that has them."""

import importlib.util

MISSING = [name for name in ("verl", "trl") if importlib.util.find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header(config):
    if MISSING:
        return f"tests/oracle: not collected, {' and '.join(MISSING)} not installed here (make oracle)"
    return None
