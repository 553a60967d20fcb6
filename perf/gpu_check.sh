#!/usr/bin/env bash
# Checks megamoe on one GPU in under eight minutes, without network and without the compiler.
#
#   on any machine with the compiler:   python perf/prepare_images.py
#   on the machine with the GPU:        perf/gpu_check.sh
#   anywhere, to try everything but the driver's calls:   perf/gpu_check.sh --dry --out DIR
#
# Needs torch and cuda-python there; $PYTHON names the interpreter. Writes perf/results/gpu_check-*.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z "${PYTHON:-}" ]]; then
    if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
# One hardware queue a stream: PEs that share the GPU wait for each other.
export CUDA_DEVICE_MAX_CONNECTIONS=32
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" perf/gpu_check.py "$@"
