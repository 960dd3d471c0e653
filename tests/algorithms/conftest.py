"""Small packed batches, written by hand or drawn at random."""

import dataclasses

import pytest
import torch

from hone.types import COLUMNS, Axis, Batch


def build(masks, groups=None, episodes=None, dtype=torch.float64, **fields):
    """A batch from the loss masks of its sequences, e.g. [[0, 1, 1], [0, 1]]; other fields as flat lists."""
    lengths = torch.tensor([len(mask) for mask in masks])
    total = int(lengths.sum())
    tensors = {}
    for name, value in fields.items():
        if name in ("extras", "sequence_extras", "components"):
            tensors[name] = {key: torch.as_tensor(inner) for key, inner in value.items()}
        else:
            tensors[name] = torch.as_tensor(value, dtype=dtype)
    return Batch(
        token_ids=torch.arange(total),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        loss_mask=torch.tensor([bool(m) for mask in masks for m in mask]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        group_index=torch.tensor(groups if groups is not None else [0] * len(masks)),
        episode_index=torch.tensor(episodes if episodes is not None else list(range(len(masks)))),
        **tensors,
    )


def positions(batch, rows):
    """Where the tokens of the given sequences are, in the order of `rows`."""
    starts = batch.cu_seqlens
    return torch.cat([torch.arange(int(starts[row]), int(starts[row + 1])) for row in rows])


def take(batch, rows):
    """The batch that holds only the given sequences, in that order."""
    at = positions(batch, rows)
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])[rows]
    changes = {"cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if field.name == "cu_seqlens" or value is None:
            continue
        if field.name == "extras":
            changes["extras"] = {key: inner[at] for key, inner in value.items()}
        elif field.name in ("components", "sequence_extras"):
            changes[field.name] = {key: inner[rows] for key, inner in value.items()}
        else:
            changes[field.name] = value[at] if COLUMNS[field.name].axis is Axis.TOKEN else value[rows]
    return dataclasses.replace(batch, **changes)


class Batches:
    build = staticmethod(build)
    take = staticmethod(take)
    positions = staticmethod(positions)


@pytest.fixture(scope="session")
def batches():
    return Batches


@pytest.fixture
def close():
    def check(actual, expected, tolerance=1e-6):
        torch.testing.assert_close(
            torch.as_tensor(actual).double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0
        )

    return check
