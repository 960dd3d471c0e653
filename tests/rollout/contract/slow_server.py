"""The built-in engine's server, 4 ms slower per token: a test can act while a tiny model is still generating."""

import sys
import time

from hone.rollout.builtin import BuiltinEngine
from hone.workers import serve

turn = BuiltinEngine._turn


def slow_turn(engine):
    time.sleep(0.004)
    turn(engine)


BuiltinEngine._turn = slow_turn
serve.main(sys.argv[1:])
