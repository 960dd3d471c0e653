"""Models in folders, and what every mesh made of them: its processes start once."""

import pytest

from hone.engines.registry import EngineRegistry
from tests.engines.contract.cases import FAMILIES, MIXTURES, MODELS, Mesh, names_of, save_model, train_models
from tests.ranks import run_ranks


def there(backend):
    package = EngineRegistry.packages.get(backend)
    return backend in EngineRegistry.backends and (package is None or package.is_installed)


@pytest.fixture
def needs_backend():
    """needs_backend("megatron") skips the test where the backend's plug-in or its package is not installed."""

    def need(backend):
        if not there(backend):
            pytest.skip(f"{backend} is not installed: make test-{backend}")

    return need


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Name -> the folder of a tiny model."""
    return {name: save_model(name, tmp_path_factory.mktemp("models") / name) for name in MODELS | MIXTURES | FAMILIES}


@pytest.fixture(scope="session")
def cases(folders):
    """What every mesh trains: (name, folder, settings)."""
    values = {"value": folders["llama"], "value-qwen3": folders["qwen3"]}
    value_models = [(name, folder, {"model_type": "value_model"}) for name, folder in values.items()]
    return [*((name, folders[name], {}) for name in MODELS), *value_models]


@pytest.fixture(scope="session")
def mixtures(folders):
    """The mixtures of experts, which fewer meshes divide."""
    return [(name, folders[name], {}) for name in MIXTURES]


@pytest.fixture(scope="session")
def alone(cases):
    """What fsdp2 makes of them in one process."""
    return train_models(Mesh("fsdp2", 1), cases)


@pytest.fixture(scope="session")
def trained(cases):
    """trained(mesh) -> what each rank of a mesh made of them."""
    found = {}

    def train(mesh):
        if str(mesh) not in found:
            has = [case for case in cases if case[0] in names_of(mesh)]
            found[str(mesh)] = run_ranks(mesh.world, train_models, mesh, has)
        return found[str(mesh)]

    return train
