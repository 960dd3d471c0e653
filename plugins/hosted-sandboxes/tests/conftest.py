"""Stand-ins of the services: a server that speaks their wires, and a package with Modal's interface."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "stand_ins"))
