"""Freezes what a process has imported that ranks are forked from, so that they do not look at it for garbage.

These are half a million objects: a full collection takes half a second in each rank (AMD EPYC).
"""

import gc
import sys

from tests.forks import PRELOADED

skipped = [name for name in PRELOADED if name not in sys.modules]
assert not skipped, f"cannot be imported: {skipped}"
gc.collect()
gc.freeze()
gc.set_threshold(20_000)
