#!/bin/sh
# `make install` into an empty folder: the installed command runs from there, a program compiled against the installed
# ckptdelta.pc works with the shared and with the static library, in C and, where there is one, with a C++ compiler;
# `make uninstall` leaves nothing behind.
set -u
build=${CKPTDELTA_BUILD:?the build folder}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
die() {
    echo "FAILED: $1"
    exit 1
}
if ! command -v pkg-config >/dev/null 2>&1; then
    echo "SKIP: there is no pkg-config here"
    exit 77
fi
# install-files builds nothing: other tests use the build folder now.
install_options="BUILD=$build PREFIX=$root/prefix"
# shellcheck disable=SC2086
make $install_options install-files >"$root/log" 2>&1 || { cat "$root/log"; die "make install-files"; }

cat >"$root/program.c" <<'C'
#include <ckptdelta.h>
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) {
    ckd_store *store = 0;
    ckd_error err;
    ckd_status status;
    char expected[32];
    snprintf(expected, sizeof expected, "%d.%d.%d", CKD_VERSION_MAJOR, CKD_VERSION_MINOR, CKD_VERSION_PATCH);
    if (strcmp(ckd_version(), expected) != 0)
        return 2;
    if (strcmp(ckd_status_name(CKD_E_CORRUPT), "CORRUPT") != 0)
        return 3;
    memset(&err, 0, sizeof err);
    /* There is no such store: the call comes back with an error. */
    status = ckd_store_open(&store, argc > 1 ? argv[1] : "", CKD_OPEN_READ, 0, &err);
    if (status == CKD_OK || store != 0 || err.status != status || err.message[0] == '\0')
        return 4;
    return 0;
}
C
export PKG_CONFIG_PATH="$root/prefix/lib/pkgconfig"
[ "$(pkg-config --modversion ckptdelta)" = "$(sed -n 's/^.define CKD_VERSION_M[AI][JN]OR *//p; s/^.define CKD_VERSION_PATCH *//p' \
    include/ckptdelta.h | paste -sd.)" ] || die "ckptdelta.pc has another version than the header"
compile() { # compile NAME COMMAND...
    name=$1
    shift
    "$@" -Wall -Wextra -o "$root/$name" || die "compiling the $name program"
    "$root/$name" "$root/no-such-store" || die "the $name program exits with $?"
}
# CKPTDELTA_CFLAGS: the sanitizers of this build, if any. CKPTDELTA_LIBS: what the archive needs.
# shellcheck disable=SC2046,SC2086
{
    export LD_LIBRARY_PATH="$root/prefix/lib"
    compile shared ${CC:-gcc} ${CKPTDELTA_CFLAGS-} "$root/program.c" $(pkg-config --cflags --libs ckptdelta)
    readelf -dW "$root/shared" | grep -q 'NEEDED.*libckptdelta\.so\.' || die "the shared program is not linked to the library"
    unset LD_LIBRARY_PATH
    static="$root/prefix/lib/libckptdelta.a ${CKPTDELTA_LIBS--lzstd -llz4 -lsqlite3 -pthread -lm}"
    compile static ${CC:-gcc} ${CKPTDELTA_CFLAGS-} "$root/program.c" $(pkg-config --cflags ckptdelta) $static
    if [ -z "${CKPTDELTA_SAN-}" ] && command -v c++ >/dev/null 2>&1; then
        compile cxx c++ -x c++ "$root/program.c" -x none $(pkg-config --cflags ckptdelta) $static
    fi
}
"$root/prefix/bin/ckptdelta" --version >"$root/version" || die "the installed command does not run"
grep -q "$(pkg-config --modversion ckptdelta)" "$root/version" || die "the installed command says: $(cat "$root/version")"

# shellcheck disable=SC2086
make $install_options uninstall >"$root/log" 2>&1 || { cat "$root/log"; die "make uninstall"; }
left=$(find "$root/prefix" ! -type d)
[ -z "$left" ] || die "left behind: $left"
echo "installed, used and uninstalled"
