"""Stand-ins of the other projects: servers that speak their protocols, and packages with their interfaces."""

import os
import sys
from pathlib import Path

STAND_INS = str(Path(__file__).parent / "stand_ins")
sys.path.append(STAND_INS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STAND_INS]))

from tests.envs.conftest import finish, forward, gap, tiny, tokenizer  # noqa: E402, F401  fixtures
