#!/bin/sh
# run-fuzzers.sh SECONDS FUZZER...: shares the seconds out among them. Each starts from its corpus in tests/corpus/ and what it found before.
# tests/corpus/NAME.dict holds words that it may insert. New inputs stay in the build folder ($B); one that crashes is left there, named in
# the output, and fails the run. One allocation above 512 MiB is a finding, too: sizes are checked before memory is asked for.
set -eu
[ $# -gt 1 ] || { echo "no tests/fuzz/*.c to run"; exit 1; }
seconds=$(($1 / ($# - 1)))
[ "$seconds" -gt 0 ] || seconds=1
shift
bad=
for fuzzer; do
    name=$(basename "$fuzzer")
    found=$B/fuzz/corpus/${name#fuzz_}
    mkdir -p "$found"
    seeds=tests/corpus/${name#fuzz_}
    words=
    [ ! -f "$seeds.dict" ] || words=-dict=$seeds.dict
    [ -d "$seeds" ] || seeds=
    echo "== $name, $seconds s"
    # shellcheck disable=SC2086
    "$fuzzer" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -malloc_limit_mb=512 -print_final_stats=1 \
        -verbosity=0 $words -artifact_prefix="$found-" "$found" $seeds || bad="$bad $name"
done
[ -z "$bad" ] || { echo "findings in:$bad"; exit 1; }
echo "no findings"
