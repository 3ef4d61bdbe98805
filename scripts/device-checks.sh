#!/bin/sh
# All that takes a GPU: parity with the CPU, stores, compute-sanitizer, benchmarks. device-checks.sh FOLDER [STAGE...]
#
#   build      everything below, and what was detected
#   tests      parity of all operations, and stores, lossy and exact saves, loads, sessions on the device
#   sanitize   the parity tests under compute-sanitizer's four tools
#   kernels    each operation beside the device's own copy
#   save-N     saves, sessions and loads of a state of N million parameters
#   python     the Python package, with the torch of PYTHON, and how long its saves keep a training
#
# Without stages all but the last one, of 10, 100 and 1000 million parameters, some 20 minutes with 16 cores. What takes longer than it may is ended, and the rest goes
# on; each stage can be repeated by itself. Logs and JSON go to FOLDER. DEPS_PREFIX, CUBLAS_PREFIX as for make: libraries that are not installed.
# With CKPTDELTA_BUILD, the programs are taken from that build folder and nothing is built: no compiler is needed.
set -u
out=${1:?folder for results}
shift
[ $# -gt 0 ] || set -- build tests sanitize kernels save-10 save-100 save-1000
mkdir -p "$out"
export DEPS_PREFIX="${DEPS_PREFIX:-}" CUBLAS_PREFIX="${CUBLAS_PREFIX:-}" CKD_REQUIRE_GPU=1 PYTHON="${PYTHON:-python3}"
tests="test_cuda_parity test_cuda_store test_cuda_lossy test_cuda_exact test_cuda_load test_cuda_parents test_cuda_session \
    test_cuda_small test_cuda_masters"
make="make -j$(nproc) CUDA=1 WERROR=1"
failed=0

run() { # NAME SECONDS COMMAND...: may take so many
    name=$1 seconds=$2
    shift 2
    echo "== $name" >>"$out/checks.log"
    start=$(date +%s)
    timeout "$seconds" "$@" >"$out/now" 2>&1
    code=$?
    case $code in
    0) echo "$name: ok, $(($(date +%s) - start)) s" ;;
    124) echo "$name: FAILED, ended after $seconds s" ;;
    77) echo "$name: FAILED, skipped" ;;
    *) echo "$name: FAILED ($code)" ;;
    esac
    [ $code = 0 ] || { tail -n 15 "$out/now"; failed=1; }
    cat "$out/now" >>"$out/checks.log"
}
build() {
    [ -z "$given" ] || return 0
    programs=""
    for program in $tests; do
        programs="$programs $build/tests/$program"
    done
    run build 500 $make programs $programs "$build/bench/bench_kernels" "$build/bench/bench_save"
    [ $failed = 0 ] || exit 1
}
run_tests() {
    for test in $tests; do
        run "$test" 200 "$build/tests/$test"
    done
}
sanitize() {
    for tool in memcheck racecheck initcheck synccheck; do
        run "$tool" 300 compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/tests/test_cuda_parity"
    done
}
bench() { # NAME COMMAND...: prints what it measured
    run "$1" 580 "$2" --json "$out/$1.json" $3
    cat "$out/now"
}

# The package as it was built, if it was: where there is no compiler, build it elsewhere.
python() {
    [ -e "$build/python/ckptdelta/libckptdelta_cuda.so" ] || run python-package 500 $make PYTHON="$PYTHON" python-package
    run python 500 "$PYTHON" -m pytest -q -rs --rootdir tests tests/python/test_python_cuda.py
    cat "$out/now"
    run bench_cuda 300 env PYTHONPATH="$build/python" "$PYTHON" bench/python/bench_cuda.py
    cat "$out/now"
}

trap 'rm -f "$out/now"' EXIT
nvidia-smi -L || exit 1
given=${CKPTDELTA_BUILD:-}
build=${given:-$($make -s print-build-dir)}
export CKPTDELTA_BUILD="$build"
for stage; do
    case $stage in
    build) build ;;
    tests) run_tests ;;
    sanitize) sanitize ;;
    kernels) bench bench_kernels-device "$build/bench/bench_kernels" "--device 0" ;;
    python) python ;;
    save-*) bench "bench_$stage-million" "$build/bench/bench_save" "--parameters ${stage#save-}000000 --side 3072" ;;
    *)
        echo "device-checks.sh: no stage '$stage': build, tests, sanitize, kernels, save-N, python" >&2
        exit 2
        ;;
    esac
done
exit $failed
