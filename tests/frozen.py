"""Imported last by a process that ranks are forked from: their garbage collector leaves alone what is there by now.

Half a million objects are, and a full collection of them takes half a second in each rank.
"""

import gc

gc.collect()
gc.freeze()
gc.set_threshold(20_000)
