"""Routes: the experts of each token at rollout, from the engine to the batch. Imports no torch.

    turn 1    prompt, answer                      -> rows of all tokens but the last, which was not in a forward
    turn 2    prompt, answer, observation, answer -> rows of all of these; the rows of turn 1 are kept

A token keeps the experts that were recorded first, in the forward that sampled its successor. A later forward (the next
turn's prompt, the rest of an interrupted completion) may choose others.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.int16]  # [tokens, mixture layers, experts per token]


def joined_routes(first: Routes | None, then: Routes | None) -> Routes | None:
    """Join the routes of two requests, both from the first token on: the rows of `first`, then the rest of `then`.

    >>> joined_routes(np.zeros((2, 1, 1), np.int16), np.ones((3, 1, 1), np.int16)).ravel().tolist()
    [0, 0, 1]
    """
    if first is None or then is None:
        return first if then is None else then
    return np.concatenate([first, then[len(first) :]]) if len(then) > len(first) else first


def text_of_routes(routes: Routes | None) -> str | None:
    """Encode routes for JSON: an .npy file as base64."""
    if routes is None:
        return None
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def routes_of_text(text: str | None) -> Routes | None:
    """Decode routes from `text_of_routes` or vLLM. Raises ValueError unless they have three dimensions."""
    if text is None:
        return None
    found = np.lib.format.read_array(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    if found.ndim != 3 or found.dtype.kind not in "iu":
        raise ValueError(
            f"routed experts should be integers [tokens, layers, choices], found {found.dtype} {found.shape}"
        )
    routes: Routes = found.astype(np.int16)
    return routes


def mixture_rows(found: Routes | None, layers: Sequence[int], tokens: int) -> Routes:
    """Select the mixture layers from a server's routes, which have every layer: [tokens, layers, choices].

    Raises ValueError unless there is a row for each of `tokens` tokens, with all these layers.
    """
    if found is None or len(found) != tokens or found.shape[1] <= max(layers):
        raise ValueError(
            f"the server gave experts of shape {None if found is None else found.shape} (tokens, layers, choices); "
            f"expected {tokens} tokens and the layers {', '.join(map(str, layers))}"
        )
    return found[:, list(layers)]


def packed_routes(trajectories: list[Any]) -> Routes:
    """The routes of trajectories end to end, [T, layers, experts], -1 where none were recorded; at least one has some.

    Raises ValueError naming a trajectory whose routes end before its last trained token, or are of another shape.
    """
    noted: list[Routes | None] = [one.routed_experts for one in trajectories]
    shape = next(one.shape[1:] for one in noted if one is not None)
    rows = []
    for one, routes in zip(trajectories, noted, strict=True):
        length = len(one.token_ids)
        needed = max((i for i, trained in enumerate(one.loss_mask) if trained), default=0)
        found = (0, *shape) if routes is None else routes.shape
        if not needed <= found[0] <= length or found[1:] != shape:
            raise ValueError(
                f"trajectory {one.prompt_id} sample {one.sample}: the experts of its tokens have shape {found}; "
                f"expected {needed} to {length} tokens of {shape} each"
            )
        whole = np.full((length, *shape), -1, np.int16)
        if routes is not None:
            whole[: len(routes)] = routes
        rows.append(whole)
    return np.concatenate(rows)
