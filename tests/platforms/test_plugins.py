"""A vendor's package, installed by pip as a user would, brings a platform that hone finds and computes on."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.installing import install
from tests.trainers.tiny import recipe

PLATFORM = """
    PLUGIN_API = 1

    from hone.platforms.base import PlatformRegistry
    from hone.platforms.cpu import CpuPlatform


    @PlatformRegistry.register(platform="toy")
    class ToyPlatform(CpuPlatform):
        vendor = "toy"
        priority = 50
        ray_resource = "TOY"

        def why_unavailable(self):
            import os
            return "" if os.environ.get("TOY_CARD") else "no toy card (TOY_CARD is not set)"

        def device_name(self, index=0):
            return f"toy card {index}"
"""

PYPROJECT = """
    [build-system]
    requires = ["setuptools"]
    build-backend = "setuptools.build_meta"
    [project]
    name = "hone-{name}"
    version = "1.0"
    [project.entry-points."hone.plugins"]
    {name} = "hone_{name}"
"""

TRAIN = """
    import torch
    from hone.platforms.base import PlatformRegistry, current_platform
    from hone.plugins import load_plugins

    torch.set_num_threads(1)
    print(load_plugins())
    print(PlatformRegistry.choose().name, PlatformRegistry.probe(), flush=True)
    platform = current_platform()
    platform.seed(0)
    device = platform.torch_device(0)
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 4, device=device)
    targets = inputs.sum(1, keepdim=True)
    losses = []
    for _ in range(20):
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    platform.synchronize()
    assert losses[-1] < losses[0] / 10, losses
    print(platform.name, platform.vendor, platform.device, platform.device_name(), platform.ray_resource, sep=",")
"""


def write_and_install(folder, target, name, code):
    """Write a package with an entry point, and install it into `target`."""
    source = folder / f"source_{name}"
    (source / f"hone_{name}").mkdir(parents=True)
    (source / "pyproject.toml").write_text(textwrap.dedent(PYPROJECT.format(name=name)))
    (source / f"hone_{name}" / "__init__.py").write_text(textwrap.dedent(code))
    install(source, target)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which two plug-ins are installed: `toy` works, `torn` raises when it is imported."""
    folder = tmp_path_factory.mktemp("plugins")
    target = folder / "site"
    write_and_install(folder, target, "toy", PLATFORM)
    write_and_install(folder, target, "torn", "raise RuntimeError('torn off')\n")
    return target


def python(code, path, **variables):
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    for name in ("HONE_PLATFORM", "HONE_USE_EXTERNAL_MODULES", "TOY_CARD"):
        environment.pop(name, None)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_an_installed_plug_in_is_found_and_trains_on_its_device(installed):
    done = python(TRAIN, installed, TOY_CARD="1", HONE_PLATFORM="toy")
    assert done.returncode == 0, done.stderr
    plugins, probed, chosen = done.stdout.splitlines()
    assert chosen == "toy,toy,cpu,toy card 0,TOY"
    assert probed.startswith("toy {")  # found without being named, too
    assert "'toy': ''" in plugins
    assert "'torn': 'RuntimeError: torn off'" in plugins  # reported, and in nobody's way


@pytest.mark.slow
def test_a_whole_run_trains_on_the_platform_that_the_plug_in_brings(installed, tmp_path):
    command = [sys.executable, "-m", "hone", "train", str(recipe(tmp_path)), "run.steps=2", "evaluation.every_steps=0"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "TOY_CARD": "1", "HONE_PLATFORM": "toy"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "on toy (toy card 0)" in done.stderr
    assert "warning: plug-in torn failed to load: RuntimeError: torn off" in done.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_without_its_hardware_the_plug_in_is_named_with_its_reason(installed):
    done = python(TRAIN, installed, HONE_PLATFORM="toy")
    assert done.returncode == 1
    assert "\ncpu {" in done.stdout
    assert "'toy': 'no toy card (TOY_CARD is not set)'" in done.stdout
    error = done.stderr.splitlines()[-1]
    assert "HONE_PLATFORM=toy: platform 'toy' is not available: no toy card (TOY_CARD is not set)" in error
    assert "plug-in torn failed: RuntimeError: torn off" in error


def test_a_module_named_in_the_environment_is_a_plug_in_too(tmp_path):
    (tmp_path / "toy_module.py").write_text(textwrap.dedent(PLATFORM))
    modules = "toy_module, missing_module"
    done = python(TRAIN, tmp_path, HONE_USE_EXTERNAL_MODULES=modules, TOY_CARD="1")
    assert done.returncode == 0, done.stderr
    plugins, _, chosen = done.stdout.splitlines()
    assert chosen == "toy,toy,cpu,toy card 0,TOY"
    assert "'missing_module': \"ModuleNotFoundError: No module named 'missing_module'\"" in plugins
