#!/bin/sh
# Makes sure that what a build (or the tests) needs is there: setup-deps.sh [--check] build|test|python|mpi
#
# Finds out by looking for headers, commands and modules, which takes milliseconds. What is missing is installed from
# Debian packages if this is root, or sudo asks for no password; otherwise (and always with --check) one line says what
# to install. CC and DEPS_PREFIX are taken from the environment.
set -eu
cd "$(dirname "$0")/.."

check_only=no
[ "${1-}" = --check ] && { check_only=yes; shift; }
what=${1-}
case $what in build | test | python | mpi) ;; *) echo "usage: setup-deps.sh [--check] build|test|python|mpi" >&2; exit 2 ;; esac

prefix=${DEPS_PREFIX-}
include_flags=
if [ -n "$prefix" ]; then
    for dir in "$prefix/include" "$prefix/usr/include" "$prefix"/usr/include/*-linux-gnu; do
        [ -d "$dir" ] && include_flags="$include_flags -I$dir"
    done
fi

# has_headers HEADER...: does the compiler find them all?
has_headers() {
    for header; do
        # pkg-config knows about headers off the usual paths; the build asks it, too.
        printf '#include <%s>\n' "$header"
    done | ${CC:-gcc} -E $include_flags $pc_cflags -o /dev/null - 2>/dev/null
}

# missing PACKAGE HEADER...: adds PACKAGE to the list if the compiler lacks one of the headers.
need_header() {
    package=$1
    shift
    has_headers "$@" || missing="$missing $package"
}

need_command() {
    command -v "$2" >/dev/null 2>&1 || missing="$missing $1"
}

need_python() {
    python=${PYTHON:-$(scripts/find-python.sh)}
    packages=$("$python" python/can_build.py "$@" --debian 2>/dev/null || echo python3 python3-cffi python3-dev)
    missing="$missing $packages"
}

find_missing() {
    missing=
    compiler=${CC:-gcc}
    need_command make make
    need_command binutils ld
    need_command binutils objcopy
    if command -v "${compiler%% *}" >/dev/null 2>&1 && echo '#include <stdlib.h>' | $compiler -E -o /dev/null - 2>/dev/null; then
        pc_cflags=$(pkg-config --cflags libzstd liblz4 libxxhash sqlite3 jansson 2>/dev/null || true)
        all="zstd.h lz4.h xxhash.h sqlite3.h jansson.h"
        # One run of the compiler when all is there, which is nearly always.
        # shellcheck disable=SC2086
        if ! has_headers $all; then
            need_header libzstd-dev zstd.h
            need_header liblz4-dev lz4.h
            need_header libxxhash-dev xxhash.h
            need_header libsqlite3-dev sqlite3.h
            need_header libjansson-dev jansson.h
        fi
        if [ "$what" = test ]; then
            need_header libcmocka-dev stdarg.h stddef.h stdint.h setjmp.h cmocka.h
            need_header libcurl4-openssl-dev curl/curl.h # for libckptdelta_s3, which is optional
            need_header libexpat1-dev expat.h
            need_header libssl-dev openssl/evp.h
            need_header libisal-dev stdint.h isa-l/erasure_code.h # opened at run time; nothing is compiled with it
            need_header libucx-dev ucp/api/ucp.h                  # optional; without it links over UCX are not tested
        fi
    elif [ "${compiler%% *}" != gcc ]; then
        echo "ckptdelta: CC=$compiler cannot be run, or finds no <stdlib.h>" >&2
        exit 1
    else
        missing="$missing gcc libc6-dev libzstd-dev liblz4-dev libxxhash-dev libsqlite3-dev libjansson-dev"
        [ "$what" = test ] && missing="$missing libcmocka-dev libisal-dev libcurl4-openssl-dev libexpat1-dev libssl-dev libucx-dev"
    fi
    [ -n "$prefix" ] || need_command pkg-config "${PKG_CONFIG:-pkg-config}"
    if [ "$what" = test ]; then
        need_command sqlite3 sqlite3
        need_command curl curl
        need_command openssl openssl
        need_command valgrind valgrind
        scripts/find-python.sh --check >/dev/null ||
            missing="$missing python3 python3-pytest python3-numpy python3-zstandard python3-lz4 python3-xxhash"
    fi
    # The Python package, and wheels of it.
    case $what in
        test) need_python ;;
        python) need_python --wheel ;;
    esac
    if [ "$what" = mpi ]; then
        need_command openmpi-bin mpirun
        need_command libopenmpi-dev mpicc
    fi
    missing=$(echo $missing)
}

say_and_fail() {
    echo "ckptdelta: missing for $what: $missing ($1)" >&2
    exit 1
}

find_missing
[ -z "$missing" ] && exit 0
[ $check_only = yes ] && say_and_fail "install these Debian packages or their like, or run scripts/setup-deps.sh $what"
command -v apt-get >/dev/null 2>&1 || say_and_fail "no apt-get here: install these or their like, or set DEPS_PREFIX"

as_root=
if [ "$(id -u)" != 0 ]; then
    if sudo -n true 2>/dev/null; then as_root="sudo -n"; else say_and_fail "run: sudo apt-get install $missing"; fi
fi

echo "ckptdelta: installing $missing"
install_missing() {
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2 -qq \
        install -y --no-install-recommends $missing </dev/null >"$log" 2>&1
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Package lists may be absent (a fresh container) or old: fetch them only if the first try fails.
install_or_fail() {
    install_missing && return
    $as_root apt-get -o Acquire::Retries=2 -qq update </dev/null >"$log" 2>&1 || true
    if ! install_missing; then
        tail -n 5 "$log" >&2
        say_and_fail "apt-get failed, see above; run: apt-get update && apt-get install $missing"
    fi
}
install_or_fail
find_missing
# The system's Python may be preferred only now that it has packages, and lack others.
if [ -n "$missing" ]; then
    install_or_fail
    find_missing
fi
[ -z "$missing" ] || say_and_fail "still not found after installing them${PYTHON:+; if $PYTHON is not the Python of the system, install them for it with pip}"
