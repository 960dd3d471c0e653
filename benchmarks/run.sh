#!/usr/bin/env bash
# The same as `make bench`: run.py with the Python of hone's environment ($PYTHON, default .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" benchmarks/run.py "$@"
