"""Number of items in a pass over the training sets, for runs whose length is given in epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hone.data.rendering import Renderer
from hone.data.settings import DataConfig, DatasetConfig
from hone.data.stream import MakerOf, each_item, named_sets


def count_items(
    maker: MakerOf[Any], config: DataConfig, renderer: Renderer, drops: Callable[[DatasetConfig], bool]
) -> int:
    """Count the items of one pass over the training sets. Reads every row of a set that `drops` some for length."""
    makers = [(one, maker(name, one, renderer, where)) for name, one, where in named_sets(config, "data")]
    return sum(sum(1 for _ in each_item(made)) if drops(one) else len(made.reader) for one, made in makers)


__all__ = ["count_items"]
