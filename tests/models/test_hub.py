"""Models of a hub: the hub's own client against a small server, a run that is pinned to its commit, one clear error."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from tests.models.hub_server import NAME, serve

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 32, "layers": 3, "heads": 2, "mlp_size": 32, "max_positions": 64, "tie_embeddings": False}
TASK = """
def rows(seed, size):
    for number in range(size):
        yield {"prompt": str(number), "completion": str(2 * number)}
"""


def write(folder, seed):
    """A tiny model in several files with an index."""
    build = ModelConfig(build=BuildConfig(**SIZES, seed=seed))
    with without_progress_bars():
        load_language_model(build).save_pretrained(folder, max_shard_size="30KB")
    load_tokenizer(build).save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


@pytest.fixture
def hub(tmp_path):
    with serve() as made:
        yield made


@pytest.fixture
def python(hub, tmp_path):
    """`python(*arguments)`: a process whose hubs are the small server; (exit code, stdout, stderr)."""

    def run(*arguments, **environment):
        told = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        told |= {"MODELSCOPE_ENDPOINT": hub.endpoint, "MODELSCOPE_CACHE": str(tmp_path / "cache")}
        told |= {"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        found = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **told},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        return found.returncode, found.stdout, found.stderr

    return run


def recipe(folder, **model):
    (folder / "task.py").write_text(TASK)
    settings = {
        "kind": "sft",
        "run": {"dir": str(folder / "run"), "steps": 1},
        "model": {"path": NAME, **model},
        "data": {"train": {"source": {"name": "python", "function": f"{folder}/task.py:rows", "size": 16}}},
        "samples_per_step": 4,
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 1e-9}},
        "tracking": {"trackers": ["jsonl"]},
        "runtime": {"threads": 1},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "sft.yaml")


@pytest.mark.slow
def test_a_run_keeps_the_commit_it_began_with(hub, python, tmp_path):
    """Files in parts, one download cut off and tried again; then the branch moves on, and the run does not."""
    first = hub.add(write(tmp_path / "first", 0))
    parts = sorted(path.name for path in (tmp_path / "first").glob("model-*.safetensors"))
    hub.cut = {parts[1]}
    code, _, stderr = python("-m", "hone", "sft", recipe(tmp_path))
    assert code == 0, stderr
    record = json.loads((tmp_path / "run" / "model_source.json").read_text())
    assert record == {"path": NAME, "revision": None, "commit": first}
    fetched = [sum(line.startswith(f"GET /{NAME}") and part in line for line in hub.asked) for part in parts]
    assert fetched[:3] == [1, 2, 1]  # once each, and again what broke off
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    for one, other in zip(exported.parameters(), served.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)

    second = hub.add(write(tmp_path / "second", 1))
    code, _, stderr = python("-m", "hone", "sft", recipe(tmp_path), "run.steps=2")
    assert code == 0, stderr
    assert not any(second in line for line in hub.asked)
    assert json.loads((tmp_path / "run" / "model_source.json").read_text())["commit"] == first


FIND = """
import sys
from hone.models.errors import ModelError
from hone.models.source import locate
for source, revision in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        found = locate(source, "model.path", revision or None, weights=False)
        print(found.commit, sorted(path.name for path in found.folder.iterdir()))
    except ModelError as error:
        print(error)
"""


def test_what_is_not_on_the_hub_is_one_sentence(hub, python, tmp_path):
    commit = hub.add(write(tmp_path / "first", 0))
    asked = [NAME, commit, NAME, "", NAME, "v9", "acme/tyni", "", "no/such/folder", ""]
    code, stdout, stderr = python("-c", FIND, *asked)
    assert code == 0, stderr
    by_commit, by_branch, revision, name, path = stdout.splitlines()
    assert by_commit == by_branch
    assert by_commit.startswith(commit)
    assert "model.safetensors.index.json" in by_commit
    assert "model-00001" not in by_commit  # without the weights
    assert revision.startswith("model.path 'acme/tiny' has no revision 'v9' on the hub")
    assert name.startswith("model.path 'acme/tyni' is neither a local folder nor a model on the hub")
    assert path.startswith("model.path: no folder no/such/folder")


@pytest.mark.slow
def test_without_the_hub_the_cache_is_enough(hub, python, tmp_path):
    commit = hub.add(write(tmp_path / "first", 0))
    assert python("-c", FIND, NAME, "")[0] == 0
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    _, stdout, _ = python("-c", FIND, NAME, commit, NAME, "", "acme/other", "", **gone)
    by_commit, by_branch, other = stdout.splitlines()
    assert by_commit.startswith(commit)
    assert by_branch == by_commit
    assert other == (
        "model.path 'acme/other' is not a local folder and not complete in the cache; "
        "http://127.0.0.1:9 cannot be reached"
    )
    _, stdout, _ = python("-c", FIND, "acme/other", "", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in stdout


def test_modelscope_asks_for_its_package(python):
    """A package of that name that cannot be imported stands in for none."""
    blocked = "import sys; sys.modules['modelscope'] = None\n"
    _, stdout, _ = python("-c", blocked + FIND, f"modelscope:{NAME}", "")
    assert stdout.strip() == (f"model.path 'modelscope:{NAME}' needs the package modelscope: pip install modelscope")


@pytest.mark.skipif(importlib.util.find_spec("modelscope") is None, reason="modelscope is not installed")
def test_modelscope_by_its_own_client(hub, python, tmp_path):
    hub.add(write(tmp_path / "first", 0))
    load = FIND.replace("weights=False", "weights=True")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, stdout, stderr = python("-c", load, f"modelscope:{NAME}", "", f"modelscope:{NAME}", "v9", PYTHONPATH=paths)
    assert code == 0, stderr
    found, revision = stdout.splitlines()[-2:]
    assert found.startswith("master")
    assert "model-00001" in found
    assert revision.startswith(f"model.path 'modelscope:{NAME}' (revision 'v9') cannot be downloaded from ModelScope")
