"""`hone report` as a command: where the page is, and one clear line for a folder that is no run."""

import subprocess
import sys


def hone(*arguments):
    code = "import sys; from hone.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_the_page_is_built_and_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    done = hone("report", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"report: {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    done = hone("report", tmp_path)
    assert done.returncode == 2
    assert done.stderr == (f"error: {tmp_path} is not a run folder: it has no metrics.jsonl, config.yaml or run.json\n")
    assert hone("report", tmp_path / "nowhere").stderr == f"error: no run folder {tmp_path / 'nowhere'}\n"
    assert hone("report").returncode == 2
