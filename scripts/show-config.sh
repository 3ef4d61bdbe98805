#!/bin/sh
# `make config`: what a build would use. The Makefile passes what it found in the environment.
set -u
show() { printf '%-18s %s\n' "$1" "$2"; }
first() { "$@" 2>/dev/null | head -n 1; }
library() {
    v=$(${PKG_CONFIG:-pkg-config} --modversion "$1" 2>/dev/null) || v=
    [ -n "${DEPS_PREFIX:-}" ] && v="from DEPS_PREFIX"
    show "$1" "${v:-not known to pkg-config; the usual paths are tried}"
}

show "version" "$VERSION"
show "build folder" "$B"
show "machine" "$(uname -sm), $(nproc 2>/dev/null || echo '?') cores"
show "C compiler" "$(first $CC --version) ($(command -v ${CC%% *} || echo 'NOT FOUND'))"
show "flags" "$CFLAGS_SHOWN"
show "sanitizers" "${SAN:-none}"
[ -n "${DEPS_PREFIX:-}" ] && show "DEPS_PREFIX" "$DEPS_PREFIX"
for lib in libzstd liblz4 libxxhash sqlite3 jansson cmocka; do library "$lib"; done
python=$(scripts/find-python.sh --check) || python=
show "python for tests" "${python:-none has pytest, numpy, zstandard, lz4 and xxhash (make test installs them)}"
if [ -n "$CUDA_WHY" ]; then
    show "CUDA backend" "$CUDA_WHY"
else
    show "CUDA backend" "yes: $CUDA_ARCHS_SHOWN"
fi
show "MPI library" "${MPI_WHY:-yes: ${MPICC:-mpicc}}"
show "S3 library" "${S3_WHY:-yes}"
show "nvcc" "${NVCC:+$NVCC, $($NVCC --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')}"
show "GPU" "$(first nvidia-smi -L || true)"
for tool in clang clang-format clang-tidy cppcheck; do
    show "$tool" "$(first $tool --version | sed 's/^ *//')"
done
exit 0
