"""Matrix products on a CPU in each of the ways that hone may choose, held against float64."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from hone.config import ConfigError
from hone.models.numerics import products

SHAPES = ((1, 8, 5), (2, 64, 32), (3, 64, 32), (40, 64, 96), (0, 8, 5), (7, 0, 5))  # rows, inner, columns
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def inputs(rows, inner, columns, dtype):
    torch.manual_seed(rows + columns)
    return torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype), torch.randn(columns).to(dtype)


@torch.no_grad()
def gap(found, exact):
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1.0)) if exact.numel() else 0.0


def every_product(dtype):
    """Largest error of each kind of product, as a share of the largest number."""
    errors = {}
    for rows, inner, columns in SHAPES:
        x, weight, bias = (one.requires_grad_() for one in inputs(rows, inner, columns, dtype))
        wide = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
        found, exact = F.linear(x, weight, bias), F.linear(*wide)
        assert found.dtype == dtype
        assert found.shape == exact.shape
        upstream = torch.randn(exact.shape).to(dtype)
        given = torch.autograd.grad(found, (x, weight, bias), upstream)
        wanted = torch.autograd.grad(exact, wide, upstream.double())
        names = ("linear", "to x", "to weight", "to bias")
        for name, one, other in zip(names, (found, *given), (exact, *wanted), strict=True):
            errors[name] = max(errors.get(name, 0.0), gap(one, other))
        left, right = x.detach(), weight.detach().t()
        strange = {
            "strided": (left[:, ::2] @ right[::2], left.double()[:, ::2] @ right.double()[::2]),
            "into a tensor": (
                torch.mm(left, right, out=torch.full((columns, rows), 7.0, dtype=dtype).t()),
                left.double() @ right.double(),
            ),
            "scaled": (
                torch.addmm(bias.detach(), left, right, beta=0.5, alpha=3),
                torch.addmm(wide[2].detach(), left.double(), right.double(), beta=0.5, alpha=3),
            ),
            "column": (
                torch.addmm(left[:, :1] if inner else left.new_zeros(rows, 1), left, right),
                (left[:, :1].double() if inner else 0.0) + left.double() @ right.double(),
            ),
        }
        for name, pair in strange.items():
            errors[name] = max(errors.get(name, 0.0), gap(*pair))
    a, b, c = (torch.randn(size).to(dtype) for size in ((6, 5, 16), (6, 16, 9), (1, 1, 9)))
    errors["batched"] = gap(torch.bmm(a, b), torch.bmm(a.double(), b.double()))
    errors["added"] = gap(
        torch.baddbmm(c, a, b, beta=2, alpha=0.5), torch.baddbmm(c.double(), a.double(), b.double(), beta=2, alpha=0.5)
    )
    ends = torch.tensor([3, 3, 16], dtype=torch.int32)  # the second group is empty
    x, experts = torch.randn(16, 16).to(dtype), torch.randn(3, 16, 8).to(dtype)
    exact = [x[start:end].double() @ experts[i].double() for i, (start, end) in enumerate(((0, 3), (3, 3), (3, 16)))]
    errors["grouped"] = gap(F.grouped_mm(x, experts, offs=ends), torch.cat(exact))
    return errors


def forced(names, way):
    """The way and the errors of each dtype, in a process in which those that know the way take it."""
    code = (
        "import json; from hone.models.numerics.products import prepare; from tests.models import test_products as t\n"
        f"print(json.dumps({{name: [prepare(t.NAMES[name]), t.every_product(t.NAMES[name])] for name in {names}}}))"
    )
    environment = {**os.environ, products.VARIABLE: way, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("limits", "way"), [({"float32": 2e-6}, "onednn"), ({"bfloat16": 2**-8, "float16": 2**-11}, "float32")]
)
def test_every_product_is_right_when_a_way_is_forced(limits, way):
    if way == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    for name, (taken, errors) in forced(list(limits), way).items():
        assert taken == way
        assert max(errors.values()) <= limits[name], errors


EVER_NEW = """
import torch
from hone import machine
from hone.models.numerics.products import prepare
from hone.platforms.host_memory import give_back

def held():
    give_back()
    return machine.resident()[0]

prepare(torch.float32)
weights = torch.ones(128, 128)
for rows in range(3, 700):
    if rows == 103:
        before = held()
    torch.mm(torch.ones(rows, 128), weights)
print(held() - before)
"""


def test_products_of_ever_new_shapes_do_not_fill_the_memory():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    environment = {**os.environ, products.VARIABLE: "onednn", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EVER_NEW], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8 * 2**20


def test_torch_s_own_products_stay_when_they_are_forced(monkeypatch):
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setenv(products.VARIABLE, "torch")
    assert [products.prepare(one) for one in (torch.float32, torch.bfloat16, torch.float64)] == ["torch"] * 3
    assert products.described(torch.bfloat16) == "torch"


def test_an_unknown_way_is_refused(monkeypatch):
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setenv(products.VARIABLE, "mkl")
    with pytest.raises(ConfigError, match=r"HONE_CPU_PRODUCTS=mkl: choose torch, onednn or float32"):
        products.prepare(torch.float32)


def test_a_run_keeps_the_way_of_its_first_launch(monkeypatch, tmp_path):
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(products, "_settled", set())
    monkeypatch.delenv(products.VARIABLE, raising=False)
    file, dtypes = tmp_path / "run" / products.CHOICE_FILE, (torch.float32, torch.bfloat16)
    products.settle(file)
    first = file.read_text()
    measured = [products.prepare(dtype) for dtype in dtypes]
    assert set(first.split(",")) == set(measured) - {"torch"} or (first, set(measured)) == ("torch", {"torch"})
    for kept, wanted in (("torch", ["torch", "torch"]), ("float32,onednn", ["onednn", "float32"])):
        file.write_text(kept)
        products.settle(file)
        assert ([products.prepare(dtype) for dtype in dtypes], os.environ[products.VARIABLE]) == (wanted, kept)
    other = tmp_path / "other"  # another run of this process measures for itself
    products.settle(other)
    assert other.read_text() == first
    monkeypatch.setenv(products.VARIABLE, "float32")
    products.settle(file)
    assert [products.prepare(dtype) for dtype in dtypes] == ["torch", "float32"]
    assert file.read_text() == "float32,onednn"
    monkeypatch.delenv(products.VARIABLE)
    file.write_text("mkl")
    with pytest.raises(ConfigError, match=r"run/\.products=mkl: choose torch, onednn or float32"):
        products.settle(file)


@pytest.mark.parametrize("bias", [(), (96,), (40, 1), (40, 96), (1,)])
def test_a_large_operand_is_widened_some_columns_at_a_time(monkeypatch, bias):
    x, weight, _ = inputs(40, 64, 96, torch.bfloat16)
    added = torch.randn(bias).bfloat16()
    whole = torch.addmm(added.float(), x.float(), weight.float().t()).bfloat16()
    monkeypatch.setattr(products, "_chosen", {torch.bfloat16: products.FLOAT32})
    monkeypatch.setattr(products, "_WIDEST", 64 * 20)  # 20 of 96 columns
    found = products._addmm(None, added, x, weight.t())
    assert gap(found, whole.double()) <= 2**-8
    assert gap(products._mm(None, x, weight.t()), (x.float() @ weight.float().t()).double()) <= 2**-8
