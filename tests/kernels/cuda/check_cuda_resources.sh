#!/bin/sh
# No kernel uses local memory, and kernels/cuda/RESOURCES.md has the resources of each kernel.
set -eu
build=${CKPTDELTA_BUILD:?}
if [ ! -e "$build/libckptdelta_cuda.so" ]; then
    echo "SKIP: the CUDA backend was not built here"
    exit 77
fi
logs=$(find "$build/obj/kernels/cuda" -name '*.ptxas')
[ -n "$logs" ] || { echo "the compiler's reports are missing"; exit 1; }
resources() { "${PYTHON:-python3}" scripts/cuda_resources.py "$@" --check kernels/cuda/RESOURCES.md; }
# shellcheck disable=SC2086 # one word each
resources $logs
# The check reports local memory, and resources that differ from the file.
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
finds() { # MESSAGE SED_SCRIPT: logs changed by the script give this message
    for log in $logs; do sed "$2" "$log"; done >"$temporary/log"
    if resources "$temporary/log" >"$temporary/said" || ! grep -q "$1" "$temporary/said"; then
        echo "went unnoticed: $2"
        exit 1
    fi
}
finds 'in local memory' 's/Used \([0-9]*\) registers/Used \1 registers, 8 bytes cumulative stack size/'
finds 'in local memory' 's/0 bytes spill loads/4 bytes spill loads/'
finds 'is not what the compiler says' 's/Used [0-9]* registers/Used 3 registers/'
