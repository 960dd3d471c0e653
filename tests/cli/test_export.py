"""`hone export`: the model card, and the upload to a hub, against a server on this machine that speaks its protocol."""

import base64
import errno
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from hone import __version__
from hone.cli.main import main
from hone.composition import ConfigError
from hone.config import load
from hone.models.settings import ModelConfig
from hone.models.vision.image_processor import save_language
from hone.trainers.exports.card import write_card
from hone.trainers.exports.checkpoint import _written
from hone.trainers.exports.push import planned
from hone.trainers.policy.settings import DistillRunConfig, PolicyRunConfig
from hone.trainers.run.checkpoints import Checkpoint
from tests.trainers.tiny import recipe

REPOSITORY, TOKEN = "team/reverse", "hf_of_the_test"


class Hub(BaseHTTPRequestHandler):
    """A hub that takes an upload of huggingface_hub: repository, kinds of files, large files, one commit."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, body))
        root = f"http://127.0.0.1:{self.server.server_port}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.say({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            return self.say({"url": f"{root}/{REPOSITORY}"})
        if self.path == "/api/validate-yaml":
            return self.say({"errors": [], "warnings": []})
        if self.path == f"/api/models/{REPOSITORY}/preupload/main":
            modes = {True: "lfs", False: "regular"}
            names = [one["path"] for one in json.loads(body)["files"]]
            kinds = [{"path": name, "uploadMode": modes[name.endswith(".safetensors")]} for name in names]
            return self.say({"files": [{**one, "shouldIgnore": False} for one in kinds]})
        if self.path == f"/{REPOSITORY}.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            actions = [{**one, "actions": {"upload": {"href": f"{root}/large/{one['oid']}"}}} for one in objects]
            return self.say({"transfer": "basic", "objects": actions})
        assert self.path == f"/api/models/{REPOSITORY}/commit/main"
        return self.say({"success": True, "commitOid": "0" * 40, "commitUrl": f"{root}/{REPOSITORY}/commit/0"})

    def do_GET(self):
        assert self.path == f"/api/models/{REPOSITORY}"
        self.say({"id": REPOSITORY, "private": self.server.private})

    def do_PUT(self):
        self.server.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.say({})

    def say(self, answer, status=200):
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        """The test looks at what was asked."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one step."""
    folder = tmp_path_factory.mktemp("export")
    assert main(["train", str(recipe(folder, {"run": {"steps": 1}}))]) == 0
    return folder / "run"


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.large, server.private = [], {}, True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def export(run, output, hub, *options, token=TOKEN):
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    home = {"HF_HOME": str(run.parent / "home"), "HF_TOKEN": token, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "hone", "export", str(run), str(output), "--push", REPOSITORY, *options]
    direct = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**direct, **address, **home})


def test_every_export_has_a_model_card(run):
    _, header, text = (run / "export" / "README.md").read_text().split("---\n", 2)
    facts = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["hone", "rl"]}
    assert yaml.safe_load(header) == facts
    assert f"Trained by reinforcement learning with hone {__version__}." in text
    assert "| algorithm | advantage grpo, loss ppo; 4 prompts x 4 answers in a step |" in text
    assert "| data | task.py:rows (python) |" in text
    assert "| reward | 1 x share |" in text
    assert "| optimizer | AdamW, learning rate 0.003 |" in text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = (f"{line['eval/held_out/share']:.4f}" for line in lines)
    assert f"| held_out/share | {before} | {after} |" in text


def test_the_card_of_a_packaged_base_names_the_model_on_the_hub_and_its_licence(tmp_path):
    config = load(PolicyRunConfig, recipe(tmp_path, {"model": {"path": "packaged:smollm2-135m-instruct"}})).config
    write_card(tmp_path, tmp_path, config)
    _, header, text = (tmp_path / "README.md").read_text().split("---\n", 2)
    facts = {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"}
    assert facts.items() <= yaml.safe_load(header).items()
    assert "| base | packaged:smollm2-135m-instruct |" in text


def test_the_card_of_a_distillation_names_the_teachers_and_the_loss(tmp_path):
    teachers = {"sums": {"model": {"path": "/models/large"}}, "words": {"model": {"path": "owner/name"}}}
    distillation = {"teachers": teachers, "teacher_field": "topic", "loss": {"name": "forward_top_k"}, "coef": 0.5}
    config = load(DistillRunConfig, recipe(tmp_path, {"kind": "distill", "distillation": distillation})).config
    write_card(tmp_path, tmp_path, config)
    text = (tmp_path / "README.md").read_text()
    assert "| teachers | sums: large, words: owner/name |" in text
    assert "| distillation | loss forward_top_k in the loss, weight 0.5; task reward x 0 |" in text


def test_a_damaged_record_does_not_cost_the_weights(run, tmp_path, caplog):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with (copy / "metrics.jsonl").open("a") as record:
        record.write("{damaged}\n")
    assert main(["export", str(copy), str(tmp_path / "out")]) == 0
    assert "## Held-out figures\n\nmetrics.jsonl of the run is damaged.\n" in (tmp_path / "out/README.md").read_text()
    assert "the model card is without figures" in caplog.text
    assert "metrics.jsonl" in caplog.text


def test_a_dry_run_asks_nobody_and_the_upload_sends_every_file(run, hub, tmp_path):
    output = tmp_path / "export"
    tried = export(run, output, hub, "--dry-run", "--private", token="")
    assert tried.returncode == 0, tried.stderr
    files = {path.name: path.read_bytes() for path in output.iterdir()}
    assert f"would upload {len(files)} files" in tried.stdout
    assert all(f"{len(data):>14,} {name}" in tried.stdout for name, data in files.items())
    assert "nothing was uploaded; no token was found" in tried.stdout
    assert hub.asked == []
    done = export(run, output, hub, "--private")
    assert done.returncode == 0, done.stderr
    asked = dict(hub.asked)
    assert json.loads(asked["/api/repos/create"])["visibility"] == "private"
    sent = {}
    for line in asked[f"/api/models/{REPOSITORY}/commit/main"].splitlines():
        entry = json.loads(line)
        if entry["key"] == "file":
            sent[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        elif entry["key"] == "lfsFile":
            data = hub.large[entry["value"]["oid"]]
            assert hashlib.sha256(data).hexdigest() == entry["value"]["oid"]
            sent[entry["value"]["path"]] = data
    assert sent == files
    assert "model.safetensors" in sent
    assert f"{REPOSITORY}/commit/0" in done.stdout


def test_a_private_upload_to_a_public_repository_sends_nothing(run, hub, tmp_path):
    hub.private = False
    done = export(run, tmp_path / "export", hub, "--private")
    assert done.returncode == 2
    assert "--private: this repository is there already, and public; nothing was uploaded" in done.stderr
    assert [path for path, _ in hub.asked] == ["/api/repos/create"]


def test_hidden_files_stay_here_and_links_that_lead_out_are_refused(tmp_path):
    folder = tmp_path / "export"
    (folder / ".git").mkdir(parents=True)
    for name in ("config.json", ".env", ".git/config", "a[1].json"):
        (folder / name).write_text("{}")
    assert [path for path, _ in planned(folder, REPOSITORY, False).files] == ["a[1].json", "config.json"]
    (tmp_path / "secret").write_text("x")
    (folder / "linked").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"linked is a link out of .*export; put the file itself there"):
        planned(folder, REPOSITORY, False)


def test_a_refusal_says_what_the_hub_said(run, hub):
    done = export(run, run / "export", hub, token="wrong")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --push {REPOSITORY}: the hub refused it: Invalid username or password.")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--push", "reverse"], "--push reverse: a repository is named OWNER/NAME"),
        (["--dry-run"], "name the repository with --push OWNER/NAME"),
    ],
)
def test_options_of_an_upload_that_cannot_be(options, expected, run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out"), *options]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@contextmanager
def files_of_at_most(size):
    """Larger ones fail with "File too large", as on a file system with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_export_that_cannot_be_written_is_one_error_and_leaves_nothing(run, tmp_path, capfd):
    output = tmp_path / "out"
    with files_of_at_most(2000):  # the weights have more
        code = main(["export", str(run), str(output)])
    shown = capfd.readouterr().err
    assert code == 2
    (error,) = (line for line in shown.splitlines() if line.startswith("error:"))
    assert re.fullmatch(
        rf"error: {output} cannot be written \(.*File too large.*\) and is not there; {run}/checkpoints/step_00000001 "
        "is unchanged: make room, or name another folder",
        error,
    )
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert main(["export", str(run), str(tmp_path / "file" / "out")]) == 2
    assert f"because {tmp_path / 'file'} is no folder that can be written to" in capfd.readouterr().err


def test_an_export_names_the_file_that_failed_and_leaves_files_elsewhere_to_their_own_error(tmp_path):
    checkpoint = Checkpoint(tmp_path / "checkpoints", 1, {}, None)
    with pytest.raises(FileNotFoundError) as caught, _written(tmp_path / "out", checkpoint):
        (tmp_path / "base" / "merges.txt").read_text()
    assert caught.value.filename == str(tmp_path / "base" / "merges.txt")
    missing = tmp_path / ".out.partial" / "none"
    expected = re.escape(
        f"{tmp_path / 'out'} cannot be written (No such file or directory: {missing}) and is not there"
    )
    with pytest.raises(ConfigError, match=expected), _written(tmp_path / "out", checkpoint):
        missing.write_text("")
    expected = r"cannot be written \(No space left on device\) and is not there"
    with pytest.raises(ConfigError, match=expected), _written(tmp_path / "out", checkpoint):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_system(run, tmp_path):
    """The library that writes tokenizer.json has one class for all its errors, so a full disk was not waited for."""
    with files_of_at_most(2000), pytest.raises(OSError, match="File too large") as caught:
        save_language(ModelConfig(path=str(run / "export")), tmp_path)
    assert caught.value.errno == errno.EFBIG
