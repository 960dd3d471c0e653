"""Settings of asynchronous training. Does not import torch."""

from __future__ import annotations

from typing import Literal

from hone.config import Config, setting


class AsynchronyConfig(Config):
    """Generation that goes on while the trainer trains. Without this section the two take turns."""

    staleness: int = setting(
        0,
        "most updates between the weights that sampled a token and the weights that it trains; 0: generate and train "
        "in turns, 1: generate the next batch while this one trains",
        unit="updates",
        ge=0,
    )
    new_weights: Literal["finish", "recompute", "keep_cache"] = setting(
        "finish",
        "what new weights do to answers that are being written: finish lets them end first, recompute goes on under "
        "the new weights with the KV cache computed again, keep_cache goes on with the old KV cache",
    )
    stream: bool = setting(
        False,
        "train each mini-batch as soon as its groups are there, in draw order, while the rest of the step is generated",
    )
    lend_trainer: bool = setting(
        False,
        "start one more server, on the trainer's device: it generates while the trainer waits for answers, and sleeps "
        "while it trains",
    )
    drain_timeout_s: float = setting(
        900.0,
        "longest wait for open answers before an evaluation, a checkpoint or the end of the run; longer than an "
        "episode's deadline, or an evaluation could not begin",
        unit="s",
        gt=0,
    )


__all__ = ["AsynchronyConfig"]
