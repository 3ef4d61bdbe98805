#!/bin/sh
# All that takes a GPU, in one go: parity with the CPU, stores, compute-sanitizer, benchmarks. device-checks.sh FOLDER
# What it finds goes to FOLDER. DEPS_PREFIX as for make: the libraries that are not installed.
set -u
out=${1:?folder for results}
mkdir -p "$out"
failed=0
run() { # NAME COMMAND...
    name=$1
    shift
    if "$@" >"$out/$name.log" 2>&1; then
        echo "$name: ok"
    else
        echo "$name: FAILED ($?)"
        tail -n 15 "$out/$name.log"
        failed=1
    fi
}

nvidia-smi -L || exit 1
make CUDA=1 WERROR=1 DEPS_PREFIX="${DEPS_PREFIX:-}" programs >"$out/build.log" 2>&1 || { tail -n 20 "$out/build.log"; exit 1; }
build=$(make -s CUDA=1 WERROR=1 DEPS_PREFIX="${DEPS_PREFIX:-}" print-build-dir)
make CUDA=1 WERROR=1 DEPS_PREFIX="${DEPS_PREFIX:-}" "$build/tests/test_cuda_parity" "$build/tests/test_cuda_store" "$build/tests/test_cuda_lossy" \
    "$build/tests/test_cuda_exact" "$build/tests/test_cuda_load" "$build/tests/test_cuda_session" \
    "$build/bench/bench_kernels" "$build/bench/bench_save" >>"$out/build.log" 2>&1 || { tail -n 20 "$out/build.log"; exit 1; }

for test in test_cuda_parity test_cuda_store test_cuda_lossy test_cuda_exact test_cuda_load test_cuda_session; do
    run "$test" "$build/tests/$test"
done
for tool in memcheck racecheck initcheck synccheck; do
    run "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/tests/test_cuda_parity"
done
run bench_kernels "$build/bench/bench_kernels" --device 0 --json "$out/bench_kernels-device.json"
cat "$out/bench_kernels.log"
for parameters in 10000000 100000000 1000000000; do
    run "bench_save-$parameters" "$build/bench/bench_save" --parameters "$parameters" --side 3072 --json "$out/bench_save-$parameters.json"
    cat "$out/bench_save-$parameters.log"
done
exit $failed
