"""Packages of tests are installed as a user installs them, by pip, into a folder of their own."""

import subprocess
import sys


def install(source, target):
    """Install the package in the folder `source` into the folder `target`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
