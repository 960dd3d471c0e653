"""Contract suites: what a part of hone has to do, as classes of tests that a plug-in inherits.

    from hone.testing import RewardContract

    class TestBrief(RewardContract):
        cases = (("4", "4", 1.0), ("it is 4", "4", 0.0))

        def make(self):
            return "my_package.rewards:brief"

`contract` has what all suites share. One file for each kind of part: `environment`, `reward`, `tracker`, `source` (of
data), `sandbox`, `platform`, `transport` (of weights; `receiver` is the process that it sends to), `rollout` (engines
in this process and servers; `serving` has their models and requests) and `engine` (of training; `training` has its
models, batches and losses). pytest collects the classes; the suites themselves need no pytest, so `hone doctor
--conformance` runs them on a device too. docs/extend.md writes a plug-in with them.
"""

from typing import TYPE_CHECKING, Any

from hone.registry import resolve, unknown

if TYPE_CHECKING:
    from hone.testing.contract import Absent, Broken, Contract, require
    from hone.testing.engine import TrainingEngineContract
    from hone.testing.environment import EnvironmentContract
    from hone.testing.platform import PlatformContract
    from hone.testing.reward import RewardContract
    from hone.testing.rollout import RolloutEngineContract, RolloutServerContract
    from hone.testing.sandbox import SandboxContract
    from hone.testing.source import SourceContract
    from hone.testing.tracker import TrackerContract
    from hone.testing.transport import TransportContract

_FILES = {
    "EnvironmentContract": "environment",
    "PlatformContract": "platform",
    "RewardContract": "reward",
    "RolloutEngineContract": "rollout",
    "RolloutServerContract": "rollout",
    "SandboxContract": "sandbox",
    "SourceContract": "source",
    "TrackerContract": "tracker",
    "TrainingEngineContract": "engine",
    "TransportContract": "transport",
}

__all__ = [
    "Absent",
    "Broken",
    "Contract",
    "EnvironmentContract",
    "PlatformContract",
    "RewardContract",
    "RolloutEngineContract",
    "RolloutServerContract",
    "SandboxContract",
    "SourceContract",
    "TrackerContract",
    "TrainingEngineContract",
    "TransportContract",
    "require",
]


def __getattr__(name: str) -> Any:
    """Import a suite with its first use: a reward's plug-in needs no torch to be tested."""
    if name not in __all__:
        raise AttributeError(unknown("name in hone.testing", name, list(__all__)))
    return resolve(f"hone.testing.{_FILES.get(name, 'contract')}:{name}")
