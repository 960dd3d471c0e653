"""Patches on torchtitan: each is still needed."""

import inspect

import pytest

pytest.importorskip("torchtitan")

import hone_torchtitan.quiet_import  # noqa: F401  isort: skip
from torchtitan.tools import utils

from hone_torchtitan import cpu_patches


def test_every_patch_is_still_needed():
    assert [patch.__name__ for patch in cpu_patches.PATCHES] == ["meshes"]
    assert '_get_available_device_type() or "cuda"' in inspect.getsource(utils)
    source = inspect.getsource(cpu_patches.parallel_dims)
    assert "import device_type" in source, "meshes no longer take the type of the machine: remove the patch"


def test_meshes_are_opened_on_the_cpu(monkeypatch):
    monkeypatch.setattr(cpu_patches.parallel_dims, "device_type", "cuda")
    cpu_patches.patch_for_cpu()
    assert cpu_patches.parallel_dims.device_type == "cpu"
