"""A service in a process of its own, with a base model that tests train in this process too."""

import pytest

from hone.models.settings import BuildConfig
from hone.testing.training import save_model
from tests.service.conftest import Server
from tests.trainers.tiny import recipe

SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64, "max_positions": 64, "characters": "abcd"}


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of the base model."""
    return save_model(BuildConfig(**SIZES), tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The folder of another model with the base's vocabulary."""
    return save_model(BuildConfig(**SIZES, seed=3), tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="session")
def server(tmp_path_factory, base):
    made = Server(tmp_path_factory.mktemp("service"), model={"path": str(base)}, training={"compute_dtype": "float32"})
    yield made
    made.close()


@pytest.fixture
def key(server, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", server.key)


@pytest.fixture
def run_file(tmp_path, base):
    """A function that writes a run file: with an address, a run on the service; without, in this process."""

    def write(name, url="", **changes):
        actor = {"compute_dtype": "float32", "optimizer": {"lr": 3e-3}, "lora": {"rank": 4}}
        rollout = {"sampling": {"max_response_tokens": 3}}
        sections = {"model": {"path": str(base)}, "actor": actor, "rollout": rollout, **changes}
        if url:
            service = {"name": "tinker", "url": url, "base_model": "tiny"}
            sections["runtime"] = {"threads": 1, "backend": service | sections.pop("service", {})}
        return recipe(tmp_path / name, sections)

    return write
