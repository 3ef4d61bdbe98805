#!/bin/sh
# No kernel keeps anything in local memory, and what is written down of their resources is so.
set -eu
logs=$(find "${CKPTDELTA_BUILD:?}/obj/kernels/cuda" -name '*.ptxas' 2>/dev/null || true)
if [ -z "$logs" ]; then
    echo "SKIP: the CUDA backend was not built here"
    exit 77
fi
# shellcheck disable=SC2086 # one word each
"${PYTHON:-python3}" scripts/cuda_resources.py $logs --check kernels/cuda/RESOURCES.md
# It says so when there is something.
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
for log in $logs; do sed 's/Used \([0-9]*\) registers/Used \1 registers, 8 bytes cumulative stack size/' "$log"; done >"$temporary/log"
if "${PYTHON:-python3}" scripts/cuda_resources.py "$temporary/log" --check kernels/cuda/RESOURCES.md >/dev/null; then
    echo "a stack went unnoticed"
    exit 1
fi
