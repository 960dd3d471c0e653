#!/usr/bin/env bash
# Runs the GPU kit on a machine without network: bash benchmarks/gpu_kit/run.sh [STAGE ...]
# Installs the wheels of .gpu-kit/ into a folder of its own, then runs the stages; results go to $OUT (default .gpu-kit/out).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
site=$(mktemp -d)
if compgen -G ".gpu-kit/wheels/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .gpu-kit/wheels/*.whl
fi
export PYTHONPATH="$site:$PWD" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec python3 benchmarks/gpu_kit/stages.py --out "${OUT:-.gpu-kit/out}" "$@"
