"""The built-in engine's server, which dies of one request: the first that comes while the file `poison` is there.

The request's id is written into the file; whichever server gets it again dies too.
"""

import os
import sys
from pathlib import Path

from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.servers.builtin import BuiltinServer
from hone.workers.inside import builtin

VARIABLE = "HONE_TEST_POISON"  # environment variable: the file
taste = builtin.EngineApp._generate


class Poisoned(BuiltinServer):
    """The adapter, as a plug-in: HONE_USE_EXTERNAL_MODULES=tests.faults.poisoned_server."""

    program = (str(Path(__file__)),)


async def die_of(app, asked):
    file, request = Path(os.environ[VARIABLE]), asked["request_id"].partition("+")[0]
    if file.exists() and file.read_text() in ("", request):
        file.write_text(request)
        os._exit(9)
    return await taste(app, asked)


if __name__ == "__main__":
    builtin.EngineApp._generate = die_of
    builtin.main(sys.argv[1:])
elif "poisoned" not in ROLLOUT_ENGINES:
    ROLLOUT_ENGINES.register("poisoned", "tests.faults.poisoned_server:Poisoned")
