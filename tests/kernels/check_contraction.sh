#!/bin/sh
# No instruction in the library multiplies and adds in one (-ffp-contract=off). Its result would differ in the
# last bit from that of a processor without such instructions. No build takes -ffast-math: mk/config.mk undoes it, and
# kernels/scalar.h refuses it.
set -u
if ${CC:-cc} -ffast-math -I. -fsyntax-only -x c kernels/scalar.h 2>/dev/null; then
    echo "FAILED: kernels/scalar.h can be compiled with -ffast-math"
    exit 1
fi
reorders() {
    echo 'float sum(const float *v, int n) { float s = 0; for (int i = 0; i < n; i++) s += v[i]; return s; }' |
        ${CC:-cc} "$@" -w -fno-sanitize=all -mno-avx512f -S -x c -o - - | grep -Eq '\bv?addps'
}
flags=$(make -s --no-print-directory CFLAGS='-Ofast -funsafe-math-optimizations' print-cflags) || exit 1
library=$(ls "${CKPTDELTA_BUILD:?the build folder}"/libckptdelta.so.*.*.*)
[ "$(uname -m)" = x86_64 ] || { echo "SKIP: looks for instructions of x86-64"; exit 77; }
command -v objdump >/dev/null || { echo "SKIP: there is no objdump"; exit 77; }
code=$(mktemp)
trap 'rm -f "$code"' EXIT
# shellcheck disable=SC2086 # a list of options
if reorders $flags; then
    echo "FAILED: CFLAGS=-Ofast reorders additions"
    exit 1
fi
# shellcheck disable=SC2086
reorders $flags -O3 -ffast-math || { echo "FAILED: the check above sees nothing"; exit 1; }
objdump -d --no-show-raw-insn "$library" >"$code"
grep -q 'vmulps.*zmm' "$code" || { echo "FAILED: no AVX-512 instruction in $library"; exit 1; }
if grep -m 10 -E '\bvfn?m(add|sub)' "$code"; then
    echo "FAILED: fused multiplication and addition in $library"
    exit 1
fi
