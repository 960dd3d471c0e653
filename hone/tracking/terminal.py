"""A console whose reader may go away."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class LastingConsole(Console):
    """Falls silent when its pipe is closed (`hone train run.yaml | head`); rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is still written, also by Python at its end, is lost
