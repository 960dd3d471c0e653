"""When Transformer Engine computes attention, and what it gets: a stand-in that reads `thd` rows as its docs say."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from hone.models.attention.packed import Packing
from hone.platforms.cpu import CpuPlatform
from hone.platforms.cuda import CudaPlatform
from hone.platforms.rocm import RocmPlatform
from hone_megatron.modules.attention import PackedAttention, PackedRow
from hone_megatron.modules.thd import ThdAttention, choose_attention, thd_row

SHAPE = SimpleNamespace(
    params_dtype=torch.bfloat16,
    context_parallel_size=1,
    tensor_model_parallel_size=1,
    latent=None,
    has_sinks=False,
    windows=(None, None),
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
)


class DotProductAttention(nn.Module):
    """Attention of segments whose queries and keys have lengths of their own, the mask ending at the last of both."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups,
        attention_dropout,
        qkv_format,
        attn_mask_type,
        tp_size,
        tp_group,
        layer_number,
        softmax_scale,
    ):
        super().__init__()
        self.scale, self.shared = softmax_scale, num_attention_heads // num_gqa_groups

    def forward(self, q, k, v, *, qkv_format, attn_mask_type, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal_bottom_right")
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert (int(cu_seqlens_q.diff().max()), int(cu_seqlens_kv.diff().max())) == (max_seqlen_q, max_seqlen_kv)
        assert (len(q), len(k)) == (int(cu_seqlens_q[-1]), int(cu_seqlens_kv[-1]))
        k, v = (x.repeat_interleave(self.shared, 1) for x in (k, v))
        parts = []
        for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_kv, cu_seqlens_kv[1:], strict=False):
            scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * self.scale
            hidden = torch.ones(b - a, d - c, dtype=torch.bool).triu(int((d - c) - (b - a)) + 1)
            parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[c:d]))
        return torch.cat(parts).flatten(1)


@pytest.fixture
def installed(monkeypatch):
    """The stand-in under the name of the package."""
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.__spec__, pytorch.DotProductAttention = SimpleNamespace(name="transformer_engine"), DotProductAttention
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)


@pytest.mark.parametrize(
    ("platform", "changes", "reason"),
    [
        (CudaPlatform, {}, ""),
        (CpuPlatform, {}, "it runs on NVIDIA GPUs"),
        (RocmPlatform, {}, "it runs on NVIDIA GPUs"),
        (CudaPlatform, {"params_dtype": torch.float32}, "its packed rows are 16-bit"),
        (CudaPlatform, {"context_parallel_size": 2}, "context ranks share heads in hone's attention"),
        (CudaPlatform, {"latent": object()}, "latent attention is hone's"),
        (CudaPlatform, {"has_sinks": True}, "hone adds the sinks"),
        (CudaPlatform, {"windows": (None, 6)}, "windows differ between layers"),
    ],
)
def test_attention_is_chosen_once_by_model_and_platform(platform, changes, reason, installed):
    found = choose_attention(SimpleNamespace(**{**vars(SHAPE), **changes}), platform())
    assert found.why_not_thd == reason
    assert found.module is (PackedAttention if reason else ThdAttention)
    row = found.lay(Packing.of(torch.tensor([0, 3, 5])), 1.0)
    assert (row.thd is None) == bool(reason)


def test_without_the_package_attention_is_that_of_hone():
    assert choose_attention(SHAPE, CudaPlatform()).why_not_thd == "transformer_engine is not installed"


PACKINGS = {
    "apart": ([0, 3, 5, 9], None),
    "shared": ([0, 4, 6, 8, 9, 12, 15, 18, 20], [None, 0, 0, 0, None, None, 5, None]),
    "two prompts of one length": ([0, 3, 6, 8, 10], [None, None, 1, 0]),
}


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("scale", [1.0, 1.2])
def test_its_rows_mean_what_they_mean_to_hone(name, scale, installed):
    ends, parents = PACKINGS[name]
    packing = Packing.of(torch.tensor(ends), parents)
    config = SimpleNamespace(**{**vars(SHAPE), "params_dtype": torch.float32})
    ours, theirs = PackedAttention(config, 1), ThdAttention(config, 1)
    row = PackedRow(packing, scale)
    query, key, value = (torch.randn(ends[-1], 1, heads, 8) for heads in (4, 2, 2))
    wanted = ours(query, key, value, None, packed_seq_params=row)
    found = theirs(query, key, value, None, packed_seq_params=replace(row, thd=thd_row(packing)))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
