#!/bin/sh
# `make install` to an empty folder. The installed command runs from there. A program that uses the installed
# ckptdelta.pc works with the shared and the static library, in C and, if there is a compiler, in C++. The
# installed examples work, also in a CMake project if cmake is installed. `man` finds the manual pages, and
# bash the completions. `make uninstall` removes everything it installed, and nothing else.
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
# install-files builds nothing, as other tests use the build folder now.
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
# CKPTDELTA_CFLAGS has the sanitizers of this build, if any. CKPTDELTA_LIBS has the libraries that the archive
# needs.
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


# The examples, as a user builds them.
share=$root/prefix/share
for example in save session; do
    # shellcheck disable=SC2046,SC2086
    ${CC:-gcc} ${CKPTDELTA_CFLAGS-} -Wall -Wextra -Werror -o "$root/$example" "$share/doc/ckptdelta/examples/$example.c" \
        -Wl,-rpath,"$root/prefix/lib" $(pkg-config --cflags --libs ckptdelta) || die "compiling the example $example"
done
"$root/save" "$root/store" >"$root/said" || die "the example save exits with $?"
grep -qx 'step 2: half of it loaded, bit for bit' "$root/said" || die "the example save says: $(cat "$root/said")"
# Training in two parts ends like training in one.
"$root/session" "$root/two" 10 >/dev/null || die "the example session"
"$root/session" "$root/two" 20 >"$root/said" || die "the example session, resuming"
grep -qx 'resumes after step 10' "$root/said" || die "the example session did not resume: $(cat "$root/said")"
"$root/session" "$root/one" 20 | tail -n 1 >"$root/straight" || die "the example session"
tail -n 1 "$root/said" | cmp -s - "$root/straight" || die "the example session ends differently after a break"

# A program that uses MPI, if libckptdelta_mpi was built. It calls nothing, and only shows that everything is
# found.
mpi=
if [ -e "$root/prefix/lib/libckptdelta_mpi.so" ] && command -v mpicc >/dev/null 2>&1; then
    mpi=yes
    printf '#include <ckptdelta_mpi.h>\nint main(int argc, char **argv) {\n    (void)argv;\n    return argc > 1 ? ckd_mpi_join(0, 0, MPI_COMM_WORLD, 0) : 0;\n}\n' \
        >"$root/mpi.c"
    # shellcheck disable=SC2046
    mpicc -Wall -o "$root/mpi" "$root/mpi.c" -Wl,-rpath,"$root/prefix/lib" $(pkg-config --cflags --libs ckptdelta_mpi) ||
        die "compiling a program with ckptdelta_mpi.pc"
    "$root/mpi" || die "the program of MPI exits with $?"
fi

if command -v cmake >/dev/null 2>&1; then
    mkdir "$root/project"
    cat >"$root/project/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.10)
project(uses_ckptdelta C)
find_package(ckptdelta $(pkg-config --modversion ckptdelta) REQUIRED)
add_executable(shared "$share/doc/ckptdelta/examples/save.c")
target_link_libraries(shared ckptdelta::ckptdelta)
add_executable(static "$share/doc/ckptdelta/examples/save.c")
target_link_libraries(static ckptdelta::static)
CMAKE
    [ -z "$mpi" ] || cat >>"$root/project/CMakeLists.txt" <<CMAKE
add_executable(mpi "$root/mpi.c")
target_link_libraries(mpi ckptdelta::mpi)
CMAKE
    configure() {
        cmake -S "$root/project" -B "$root/project/$1" -DCMAKE_PREFIX_PATH="$root/prefix" -DCMAKE_C_COMPILER="${CC:-gcc}" \
            -DCMAKE_C_FLAGS="${CKPTDELTA_CFLAGS-}" -DCMAKE_EXE_LINKER_FLAGS="${CKPTDELTA_LIBS-}" >"$root/log" 2>&1
    }
    configure build || { cat "$root/log"; die "the CMake project is not configured"; }
    cmake --build "$root/project/build" >"$root/log" 2>&1 || { cat "$root/log"; die "the CMake project is not built"; }
    for kind in shared static; do
        "$root/project/build/$kind" "$root/$kind-store" >/dev/null || die "the $kind program of the CMake project exits with $?"
    done
    [ -z "$mpi" ] || "$root/project/build/mpi" || die "the program of MPI of the CMake project exits with $?"
    readelf -dW "$root/project/build/static" | grep -q 'NEEDED.*libckptdelta' && die "ckptdelta::static links the shared library"
    # Before 1.0, another MINOR version has another interface (CHANGELOG.md).
    for version in 99.0 0.0; do
        sed -i "s/find_package(ckptdelta [0-9.]*/find_package(ckptdelta $version/" "$root/project/CMakeLists.txt"
        configure "not-$version" && die "the CMake project finds version $version, which is not there"
    done
fi

# Each command has its page. (A minimal system may have a `man` that only says that there are none.)
for name in ckptdelta ckptdelta-save ckptdelta-rebuild; do
    [ -s "$share/man/man1/$name.1" ] || die "there is no page $name"
done
if man -w -M "$share/man" ckptdelta-save >"$root/said" 2>/dev/null && [ -s "$root/said" ]; then
    MANWIDTH=80 LC_ALL=C.UTF-8 man --warnings -M "$share/man" ckptdelta-save >"$root/page" 2>"$root/said" || die "man ckptdelta-save"
    [ -s "$root/said" ] && die "man ckptdelta-save says: $(cat "$root/said")"
    grep -q 'ckptdelta save --\|ckptdelta save ckpts' "$root/page" || die "the page of save shows no example"
fi

# A completion must have the command's name to be found by bash-completion.
if command -v bash >/dev/null 2>&1; then
    COMP_LINE="$root/prefix/bin/ckptdelta show $root/store --run " bash --norc -c '
        source "$1" && complete -p ckptdelta >/dev/null && COMP_POINT=${#COMP_LINE} && _ckptdelta && echo "${COMPREPLY[*]}"
    ' bash "$share/bash-completion/completions/ckptdelta" >"$root/said" || die "the completion of bash"
    [ "$(cat "$root/said")" = toy ] || die "bash completes the runs of a store with: $(cat "$root/said")"
fi
for file in zsh/site-functions/_ckptdelta fish/vendor_completions.d/ckptdelta.fish doc/ckptdelta/LICENSE \
    doc/ckptdelta/docs/cli.md doc/ckptdelta/codec/FORMAT.md doc/ckptdelta/engine/save/DECISIONS.md; do
    [ -s "$share/$file" ] || die "there is no share/$file"
done

echo mine >"$share/doc/ckptdelta/mine"
# shellcheck disable=SC2086
make $install_options uninstall >"$root/log" 2>&1 || { cat "$root/log"; die "make uninstall"; }
[ -e "$share/doc/ckptdelta/mine" ] || die "make uninstall removes what is not its own"
rm "$share/doc/ckptdelta/mine"
left=$(find "$root/prefix" ! -type d)
[ -z "$left" ] || die "left behind: $left"
echo "installed, used and uninstalled"
