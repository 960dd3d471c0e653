"""What the tests of the suites share: run a suite without pytest, and collect why its checks fail."""

from hone.testing import Absent, Contract


def failures(suite: type[Contract], *only: str) -> dict[str, str]:
    """Method -> why it failed, of the checks of a suite that do (or of some of them)."""
    found = {}
    for method, _ in suite.checks():
        if only and method not in only:
            continue
        try:
            suite.perform(method, {})
        except Absent:
            continue
        except Exception as error:  # noqa: BLE001  the tests look at it
            found[method] = str(error)
    suite.teardown_class()
    return found
