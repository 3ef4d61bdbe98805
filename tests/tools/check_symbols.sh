#!/bin/sh
# What the built libraries and programs export and need: only ckd_ names are defined, and at run time they
# need only the C library, zstd, LZ4 and SQLite, the command also jansson (no CUDA, MPI or BLAS).
set -u
build=${CKPTDELTA_BUILD:?the build folder}
failed=0
fail() {
    echo "FAILED: $1"
    failed=1
}

system='libc|libm|libpthread|libdl|librt|ld-linux[-_a-z0-9]*|libgcc_s|linux-vdso'
if [ -n "${CKPTDELTA_SAN-}" ]; then
    system="$system|lib[a-z]*san|libstdc\\+\\+"
    # The address sanitizer adds one marker to each exported variable.
    extra='|__odr_asan\..*'
fi

# defines_only_ckd WHAT NAMES: there are names, and all begin with ckd_.
defines_only_ckd() {
    foreign=$(printf '%s\n' "$2" | grep -vE "^(ckd_[a-z0-9_]+${extra-})$" | grep -v '^$')
    [ -z "$foreign" ] || fail "$1 defines names without ckd_: $(echo $foreign)"
    printf '%s\n' "$2" | grep -qx 'ckd_version' || fail "$1 does not define ckd_version"
}

# needs_only FILE PATTERN: the shared libraries that FILE names itself.
needs_only() {
    dynamic=$(readelf -dW "$1") || { fail "$1: readelf failed"; return; }
    needed=$(printf '%s\n' "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    [ -n "$needed" ] || fail "$1: readelf names no needed library"
    foreign=$(printf '%s\n' "$needed" | grep -vE "^($2)\.so")
    [ -z "$foreign" ] || fail "$1 needs $(echo $foreign)"
}

# loads_without FILE: the libraries that FILE needs bring in none of these either.
loads_without() {
    all=$(ldd "$1") || { fail "$1: ldd failed"; return; }
    printf '%s\n' "$all" | grep -q 'not found' && fail "$1: $(printf '%s\n' "$all" | grep 'not found')"
    printf '%s\n' "$all" | grep -iE 'cuda|cublas|nvidia|libmpi|blas|lapack|libckptdelta' && fail "$1 loads these"
}

names() {
    nm --format=posix --defined-only "$@" | awk 'NF >= 3 { sub(/@.*/, "", $1); if ($2 != "A") print $1 }'
}

shared=$build/libckptdelta.so
static=$(names -g "$build/libckptdelta.a") || fail "nm failed on the archive"
dynamic=$(names -D "$shared") || fail "nm failed on the shared library"
defines_only_ckd "libckptdelta.a" "$static"
defines_only_ckd "libckptdelta.so" "$dynamic"
[ "$(printf '%s\n' "$static" | grep '^ckd_' | sort)" = "$(printf '%s\n' "$dynamic" | grep '^ckd_' | sort)" ] ||
    fail "the archive and the shared library define different functions"

# Each function that the headers declare exists.
for name in $(sed -n 's/^CKD_API .*[ *]\(ckd_[a-z0-9_]*\)(.*/\1/p' include/ckptdelta*.h); do
    printf '%s\n' "$dynamic" | grep -qx "$name" || fail "ckptdelta.h declares $name, but nothing defines it"
done

readelf -dW "$shared" | grep -q 'SONAME.*\[libckptdelta\.so\.[0-9]*\]' || fail "libckptdelta.so has no soname"
needs_only "$shared" "libzstd|liblz4|libsqlite3|$system"
loads_without "$shared"
if [ -x "$build/ckptdelta" ]; then
    needs_only "$build/ckptdelta" "libzstd|liblz4|libsqlite3|libjansson|$system"
    loads_without "$build/ckptdelta"
fi
if [ -x "$build/train_gpt" ]; then
    needs_only "$build/train_gpt" "libzstd|liblz4|libsqlite3|$system"
    loads_without "$build/train_gpt"
fi
# The CUDA backend may need cuBLAS, but not the driver, which is missing on machines without a GPU.
if [ -e "$build/libckptdelta_cuda.so" ]; then
    needs_only "$build/libckptdelta_cuda.so" "libcublas|libcublasLt|libstdc\\+\\+|$system"
    defined=$(names -D "$build/libckptdelta_cuda.so")
    foreign=$(printf '%s\n' "$defined" | grep -v '^ckd_' | grep -v '^$')
    [ -z "$foreign" ] || fail "libckptdelta_cuda.so defines names without ckd_: $(echo $foreign)"
    [ -n "$defined" ] || fail "libckptdelta_cuda.so defines nothing"
fi

# Everything that the core library must not need.
if [ -e "$build/libckptdelta_s3.so" ]; then
    needs_only "$build/libckptdelta_s3.so" "libcurl|libexpat|libcrypto|libjansson|$system"
    defined=$(names -D "$build/libckptdelta_s3.so" | grep -v '__odr_asan' | tr '\n' ' ')
    [ "$defined" = 'ckd_s3_backend ' ] || fail "libckptdelta_s3.so defines $defined"
fi

# The MPI library uses only public functions.
if [ -e "$build/libckptdelta_mpi.so" ]; then
    needs_only "$build/libckptdelta_mpi.so" "libckptdelta|libmpi|libopen-rte|libopen-pal|libhwloc|$system"
    defined=$(names -D "$build/libckptdelta_mpi.so" | sort | tr '\n' ' ')
    [ "$defined" = 'ckd_mpi_join ckd_mpi_load_all ' ] || fail "libckptdelta_mpi.so defines $defined"
fi

[ $failed = 0 ] && echo "only ckd_ names, only the libraries allowed"
exit $failed
