"""Kill a training service at random changes on disk: `python -m tests.faults.service_kills --kills 300 --seed 0`.

Each run trains two models with every kind of command, and its service kills itself up to eight times. It has to end
with the results, samples, weights and optimizer state of a run that nobody disturbed.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from tests.service.test_kills import Mortal, Run, at_random, check

KILLS = 8  # of one run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    random = Random(chosen.seed)
    with tempfile.TemporaryDirectory() as name:
        server = Mortal(Path(name))
        try:
            undisturbed, runs = Run(server).results(), 0
            while len(server.kills) < chosen.kills:
                run = Run(server)
                server.plan = at_random(random, KILLS)
                server.kill()
                check(server, run, undisturbed)
                run.post(f"sessions/{run.name}/finish", reason={"type": "success"})
                runs += 1
        finally:
            server.close()
    for where, count in Counter(server.kills).most_common():
        print(f"{count:5}  {where}")
    print(f"{len(server.kills)} kills in {runs} runs: each ended as the one that was not disturbed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
