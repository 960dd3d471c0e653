"""The built-in engine's server, 4 ms slower per token: a test can act while a tiny model is still generating."""

import sys
import time

from hone.rollout.builtin.scheduler import Scheduler
from hone.workers.inside import builtin

step = Scheduler.step


def slow_step(scheduler):
    time.sleep(0.004)
    step(scheduler)


Scheduler.step = slow_step
builtin.main(sys.argv[1:])
