"""What the members of a broadcast group agree on."""

import pytest

from hone.weights.transports.collective import backend_for

GPU = {"backends": ["gloo", "nccl"]}


@pytest.mark.parametrize(
    ("members", "backend"),
    [
        ([{**GPU, "device": "a"}, {**GPU, "device": "b"}, {**GPU, "device": "c"}], "nccl"),
        ([{**GPU, "device": "a"}, {**GPU, "device": "b"}, {**GPU, "device": "a"}], "gloo"),
        ([{**GPU, "device": "a"}, {"backends": ["gloo"], "device": ""}], "gloo"),
        ([{"backends": ["gloo"], "device": ""}, {"backends": ["gloo"], "device": ""}], "gloo"),
        ([{**GPU, "device": "a"}, {}], "gloo"),
    ],
)
def test_nccl_is_for_members_that_all_have_a_device_of_their_own(members, backend):
    assert backend_for(members) == backend
