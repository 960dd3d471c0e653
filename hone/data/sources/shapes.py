"""A vision task made on demand: small pictures of coloured squares, with questions about them.

A picture has 3 x 3 cells. `colour`: one square, "which colour?", a name. `count`: one to nine squares of one colour,
"how many?", a digit. `order`: three squares in a row, "which order?", the initials of their colours from left to right.
A model that guesses is right in 1/4, 1/9 and 1/64 of the rows.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from hone.data.settings import RowsConfig, ShapesSettings
from hone.data.sources.base import Row

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (235, 215, 60)}
CELLS = 3  # per side
QUESTIONS = {"colour": "which colour?", "count": "how many?", "order": "which order?"}


class ShapesRows:
    """Rows of the task; row i depends only on the seed and on i."""

    blocks = None
    fills_gaps = False
    columns: Mapping[str, str] = {"completion": "ground_truth"}

    def __init__(self, settings: ShapesSettings) -> None:
        self._settings = settings
        self.place = f"shapes (seed {settings.seed})"

    def __len__(self) -> int:
        return self._settings.size

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.place} has rows 0 to {len(self) - 1}, found {index}")
        rng = np.random.default_rng([self._settings.seed, index])
        if rng.random() < self._settings.text_share:
            letters = "".join(rng.choice([name[0] for name in COLOURS], 3))
            return _row("text", [{"type": "text", "text": f"repeat {letters}"}], letters)
        task = str(rng.choice(self._settings.tasks))
        squares, answer = _squares(task, rng)
        picture = {"type": "image", "image": _png(squares, self._settings.side, rng)}
        return _row(task, [picture, {"type": "text", "text": QUESTIONS[task]}], answer)

    def where(self, index: int) -> str:
        return f"{self.place} row {index}"

    def folder(self, index: int) -> Path:
        return Path()


def open_shapes(config: RowsConfig) -> ShapesRows:
    """Open generated pictures of coloured squares with questions about them."""
    assert isinstance(config.source, ShapesSettings)
    return ShapesRows(config.source)


def _row(task: str, content: list[Row], answer: str) -> Row:
    return {"messages": [{"role": "user", "content": content}], "ground_truth": answer, "data_source": f"shapes/{task}"}


def _squares(task: str, rng: np.random.Generator) -> tuple[dict[int, str], str]:
    """The colour of each cell that has a square, and the answer."""
    names = list(COLOURS)
    if task == "order":
        first = CELLS * int(rng.integers(CELLS))
        order = [str(name) for name in rng.choice(names, CELLS)]
        return {first + i: name for i, name in enumerate(order)}, "".join(name[0] for name in order)
    colour = str(rng.choice(names))
    number = int(rng.integers(1, CELLS**2 + 1)) if task == "count" else 1
    cells = rng.choice(CELLS**2, number, replace=False)
    return {int(cell): colour for cell in cells}, str(number) if task == "count" else colour


def _png(squares: Mapping[int, str], side: int, rng: np.random.Generator) -> bytes:
    """Draw the picture: grey noise, and squares of about two thirds of a cell's side, slightly off its middle."""
    picture: NDArray[np.uint8] = rng.integers(90, 120, (side, side, 3), dtype=np.uint8)
    cell = side // CELLS
    size = max(1, cell * 2 // 3)
    for number, colour in squares.items():
        top, left = (cell * part + int(rng.integers(cell - size + 1)) for part in divmod(number, CELLS))
        picture[top : top + size, left : left + size] = COLOURS[colour]
    buffer = io.BytesIO()
    Pillow.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


__all__ = ["ShapesRows", "open_shapes"]
