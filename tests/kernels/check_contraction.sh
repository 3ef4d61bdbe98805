#!/bin/sh
# No instruction in the library multiplies and adds in one (-ffp-contract=off). Its result would differ in the
# last bit from that of a processor without such instructions.
set -u
library=$(ls "${CKPTDELTA_BUILD:?the build folder}"/libckptdelta.so.*.*.*)
[ "$(uname -m)" = x86_64 ] || { echo "SKIP: looks for instructions of x86-64"; exit 77; }
command -v objdump >/dev/null || { echo "SKIP: there is no objdump"; exit 77; }
code=$(mktemp)
trap 'rm -f "$code"' EXIT
objdump -d --no-show-raw-insn "$library" >"$code"
grep -q 'vmulps.*zmm' "$code" || { echo "FAILED: no AVX-512 instruction in $library"; exit 1; }
if grep -m 10 -E '\bvfn?m(add|sub)' "$code"; then
    echo "FAILED: fused multiplication and addition in $library"
    exit 1
fi
