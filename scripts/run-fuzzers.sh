#!/bin/sh
# run-fuzzers.sh SECONDS FUZZER...: each for so long, starting from its corpus in tests/corpus/ and what it found before.
# New inputs stay in the build folder ($B); one that crashes is left there, named in the output, and fails the run.
set -eu
seconds=$1
shift
[ $# -gt 0 ] || { echo "no tests/fuzz_*.c to run"; exit 1; }
bad=
for fuzzer; do
    name=$(basename "$fuzzer")
    found=$B/fuzz/corpus/${name#fuzz_}
    mkdir -p "$found"
    seeds=tests/corpus/${name#fuzz_}
    [ -d "$seeds" ] || seeds=
    echo "== $name, $seconds s"
    # shellcheck disable=SC2086
    "$fuzzer" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0 \
        -artifact_prefix="$found-" "$found" $seeds || bad="$bad $name"
done
[ -z "$bad" ] || { echo "findings in:$bad"; exit 1; }
echo "no findings"
