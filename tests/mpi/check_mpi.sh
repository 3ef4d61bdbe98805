#!/bin/sh
# Saves and loads under mpirun. 4 ranks save; 2, 3 and 1 continue the chain. Overlapping layouts are refused.
# If a rank cannot join, no rank can. If one has no memory, all fail, and none waits. If a rank is killed, no
# committed checkpoint is lost. What 4 ranks store is at most 1.15 times what one stores.
set -u
build=${CKPTDELTA_BUILD:?the build folder}
program=$build/tests/mpi_ranks
if [ ! -x "$program" ]; then
    echo "SKIP: built without MPI (Open MPI's mpicc is not here, or MPI=0, or a sanitizer is on)"
    exit 77
fi
if ! command -v mpirun >/dev/null 2>&1; then
    echo "SKIP: there is no mpirun here"
    exit 77
fi
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
die() {
    echo "FAILED: $1"
    exit 1
}
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,vader,tcp OMPI_MCA_btl_vader_single_copy_mechanism=none
run() { # run PROGRAM N ARGUMENT...
    program=$build/tests/$1
    n=$2
    shift 2
    # In containers root runs it.
    timeout 120 mpirun --allow-run-as-root --oversubscribe -n "$n" "$program" "$@" 2>"$root/log"
}
ranks() {
    run mpi_ranks "$@"
}
loads() {
    run mpi_load "$@" || { cat "$root/log"; die "mpirun -n $* (loading)"; }
}
must() {
    ranks "$@" || { cat "$root/log"; die "mpirun -n $*"; }
}
store=$root/store
must 4 "$store" save 0 3
must 2 "$store" save 3 1
must 3 "$store" refuse 4
must 3 "$store" closed 0
ranks 4 "$store" die 5 && die "a rank was killed, and nobody noticed"
must 4 "$store" save 5 2
must 1 "$store" save 7 1
"$build/ckptdelta" verify "$store" >"$root/log" 2>&1 || { cat "$root/log"; die "verify"; }
[ "$("$build/ckptdelta" list "$store" --json | grep -c '"step"')" = 8 ] || die "there are other checkpoints than 0 to 7"
must 1 "$root/one" save 0 1
four=$(must 1 "$store" bytes 0)
one=$(must 1 "$root/one" bytes 0)
[ $((four * 100)) -le $((one * 115)) ] || die "4 ranks store $four bytes, one stores $one"
[ -z "$(ls "$store/data/i")" ] || die "something was left over: $(ls "$store/data/i")"
echo "4 ranks store $four bytes, one $one"

# Each stride starts elsewhere with another seed.
seed=${CKD_SWEEP_SEED:-0}
run mpi_nomem 3 "$root/nomem" plan $((1 + seed % 7)) 7 || { cat "$root/log"; die "a plan without memory"; }
run mpi_nomem 3 "$root/nomem" save $((1 + seed % 31)) 31 || { cat "$root/log"; die "a save without memory"; }
"$build/ckptdelta" verify "$root/nomem" >"$root/log" 2>&1 || { cat "$root/log"; die "verify after saves without memory"; }

# Other numbers of ranks load together what 4 ranks saved. They get the bits of a plain load, and read each
# stored byte once.
store=$root/loads
loads 4 "$store" save exact 6
file=$(find "$store/data" -name '*.ckd' -printf '%s %p\n' | sort -rn | sed -n '1s/^[0-9]* //p')
loads 4 "$store" save near 5
counts="4 3 8 1"
if [ "${CKD_TEST_LEVEL:-full}" = quick ]; then
    # shellcheck disable=SC2086
    set -- $counts
    shift $((${CKD_SWEEP_SEED:-0} % 4))
    counts=$1
fi
for n in $counts; do
    loads "$n" "$store" load exact
    loads "$n" "$store" load near
done
loads 4 "$store" mismatch exact
# This is within a payload of the base. The middle of the file would be where one matrix ends.
at=$(($(wc -c <"$file") * 2 / 5))
byte=$(od -An -tu1 -j "$at" -N 1 "$file")
chmod u+w "$file"
printf "\\$(printf %o $((byte ^ 255)))" | dd of="$file" bs=1 seek="$at" conv=notrunc 2>/dev/null
loads 4 "$store" damaged "${file##*/}"
loads 8 "$store" damaged "${file##*/}"
