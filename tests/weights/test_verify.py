"""A weight sync is proven by every replica, or it is an error."""

import pytest

from hone.rollout.base import WeightReceipt
from hone.weights.base import Sent, WeightSyncError, verify

SENT = Sent(version=3, digest="abc", tensors=2, bytes=8)


def receipt(version=3, digest="abc", replica="r0"):
    return WeightReceipt(replica, version, digest, 2, 8)


def test_equal_version_and_digest_pass():
    verify(SENT, [receipt(), receipt(replica="r1")])


@pytest.mark.parametrize(
    ("receipts", "message"),
    [
        ([], "no replica acknowledged weight version 3"),
        ([receipt(), receipt(version=2, replica="r1")], "r1 serves weight version 2, sent was 3"),
        ([receipt(), receipt(digest="abd", replica="r1")], "r1 serves weights with digest abd"),
    ],
)
def test_anything_else_stops_the_step(receipts, message):
    with pytest.raises(WeightSyncError, match=message):
        verify(SENT, receipts)
