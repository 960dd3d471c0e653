"""Commands of other programs on the pages and in deploy/: they parse, and name what there is."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import PAGES, ROOT, Block, read_blocks
from tests.docs.commands import check_hone

BLOCKS = [block for page in PAGES for block in read_blocks(page) if block.commands]
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
JOB = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "rayjob.yaml").read_text(encoding="utf-8"))
LOCKS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "requirements").glob("*.lock"))


def commands(program: str) -> list[tuple[Block, list[str]]]:
    """Each command of a program, with its block and its words after the program's name."""
    found = []
    for block in BLOCKS:
        for line in block.commands:
            for part in line.split(" && "):
                words = shlex.split(part)
                if Path(words[0]).name == program:
                    found.append((block, words[1:]))
    assert found, program
    return found


def docker(verb: str) -> argparse.ArgumentParser:
    """The options of `docker build` and `docker run` that pages use, each with as many values as docker reads."""
    parser = argparse.ArgumentParser(verb, exit_on_error=False, allow_abbrev=False)
    if verb == "build":
        parser.add_argument("-f", "--file", required=True)
        parser.add_argument("-t", "--tag", required=True)
        parser.add_argument("--build-arg", action="append", default=[])
        parser.add_argument("context")
    else:
        parser.add_argument("--rm", action="store_true")
        for option in ("--gpus", "--shm-size", "--network", "--entrypoint"):
            parser.add_argument(option)
        parser.add_argument("-v", "--volume", action="append", default=[])
        parser.add_argument("-p", "--publish", action="append", default=[])
        parser.add_argument("image")
        parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in BLOCKS))
def test_the_shell_reads_every_command(page):
    lines = [line for block in BLOCKS if block.page == page for line in block.commands]
    done = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_docker_builds_with_arguments_that_the_file_has_and_runs_what_it_built(monkeypatch):
    monkeypatch.chdir(ROOT)
    built: dict[str, set[str]] = {}
    for block, (verb, *words) in commands("docker"):
        given = docker(verb).parse_args(words)
        if verb == "build":
            assert (ROOT / given.file).read_text(encoding="utf-8") == DOCKERFILE
            assert {one.partition("=")[0] for one in given.build_arg} <= set(
                re.findall(r"^ARG (\w+)", DOCKERFILE, re.M)
            )
            (device,) = [one.removeprefix("DEVICE=") for one in given.build_arg if one.startswith("DEVICE=")]
            assert f" AS {device}-wheels\n" in DOCKERFILE
            built.setdefault(block.page, set()).add(given.tag)
        else:
            assert given.image in built[block.page]
            assert 'ENTRYPOINT ["hone"]' in DOCKERFILE
            check_hone(shlex.join(given.command), block)
            mounted = [one.split(":")[1] for one in given.volume]
            named = re.findall(r"(?<![\w.])/[\w/.]+", shlex.join(given.command))
            assert all(any(path.startswith(f"{one}/") for one in mounted) for path in named)


def test_ray_knows_the_options_of_its_commands():
    scripts = pytest.importorskip("ray.scripts.scripts")
    asked = [words for _, words in commands("ray")]
    slurm = (ROOT / "deploy" / "slurm" / "ray.sbatch").read_text(encoding="utf-8")
    found = re.findall(r'"\$bin/ray" ([a-z-]+ .*?)(?= >|$)', slurm, re.M)
    asked += [shlex.split(re.sub(r"\$port", "6379", one)) for one in found]
    assert len(asked) == 5
    for verb, *words in asked:
        scripts.cli.commands[verb].make_context(verb, words)  # raises for an unknown option or a wrong value


def test_slurm_gets_options_that_the_script_has_and_arguments_that_hone_reads(monkeypatch):
    monkeypatch.chdir(ROOT)
    for block, words in commands("sbatch"):
        options = [one for one in words if one.startswith("--")]
        script, *arguments = words[len(options) :]
        text = (ROOT / script).read_text(encoding="utf-8")
        for option in options:
            assert re.search(rf"^#SBATCH {option.partition('=')[0]}=\d", text, re.M), option
        check_hone(shlex.join(arguments), block)


def test_kubectl_names_the_job_of_the_manifest():
    name = JOB["metadata"]["name"]
    for _, (verb, *words) in commands("kubectl"):
        if verb == "apply":
            option, path = words
            assert (option, yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))) == ("-f", JOB)
        elif verb == "get":
            assert words == [JOB["kind"].lower(), name]
        else:
            assert (verb, words) == ("logs", ["-f", "-l", f"job-name={name}"])


PARSE = """
import json, sys
from pip._internal.commands import create_command
install = create_command("install")
parsed = [install.parse_args(words) for words in json.load(sys.stdin)]
print(json.dumps([[packages, bool(packages or found.requirements or found.editables)] for found, packages in parsed]))
"""


def test_pip_knows_its_options_and_pins_what_the_locks_pin():
    """In a process of its own: where pip was imported, setuptools no longer can be."""
    if not list(metadata.distributions(name="pip")):
        pytest.skip("this Python has no pip")
    blocks, given = zip(*commands("pip"), strict=True)
    assert {verb for verb, *_ in given} == {"install"}
    said = json.dumps([words for _, *words in given])
    done = subprocess.run([sys.executable, "-c", PARSE], input=said, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for block, (packages, installs) in zip(blocks, json.loads(done.stdout), strict=True):
        assert installs, block.place
        for name, version in (one.split("==") for one in packages if "==" in one):
            locked = re.search(rf"^{re.escape(name)}(?:-cpu)?==(\S+)", LOCKS, re.M)
            assert locked is None or locked[1] == version, (block.place, name)


def test_scripts_know_the_options_that_pages_give_them():
    for block, words in commands("python"):
        if words[0].endswith(".py"):
            path = words[0].removeprefix("../../")  # the page of the presets is in runs/presets by then
            source = (ROOT / path).read_text(encoding="utf-8")
            assert [one for one in words if one.startswith("--") and f'"{one}"' not in source] == [], block.place
