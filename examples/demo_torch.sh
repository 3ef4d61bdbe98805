#!/bin/sh
# demo_torch.sh BUILD_DIR: trains with PyTorch on two processes, kills them, and resumes on two, then on one.
# BUILD_DIR has the Python package. PYTHON has torch. Works in a temporary directory ($TMPDIR), which it removes.
# Exits 1 with a message if a result is wrong. DEMO_STEPS sets the length of training.
set -u

build=${1:?usage: demo_torch.sh BUILD_DIR}
build=$(cd "$build" && pwd) || exit 1
examples=$(cd "$(dirname "$0")" && pwd) || exit 1
python=${PYTHON:-python3}
steps=${DEMO_STEPS:-100} # saved every 1/20 of it, killed at about 2/3
every=$((steps / 20))
trainer=

say() {
    printf '\n== %s\n' "$*"
}

fail() {
    printf 'demo: FAILED: %s\n' "$*" >&2
    exit 1
}

clean_up() {
    [ -z "$trainer" ] || kill -9 "$trainer" 2>/dev/null
    cd / && rm -rf "$dir"
}

# train PROCESSES LOSSES OPTIONS...
train() {
    processes=$1 losses=$2
    shift 2
    printf '$ torchrun --nproc-per-node %s train_torch.py --store store --every %s %s\n' "$processes" "$every" "$*"
    set -- "$examples/train_torch.py" --store store --every "$every" --losses "$losses" "$@"
    exec "$python" -W ignore -m torch.distributed.run --standalone --nproc-per-node "$processes" "$@"
}

[ "$every" -ge 1 ] || fail "DEMO_STEPS must be at least 20"
"$python" -c 'import torch' 2>/dev/null || fail "$python has no torch: set PYTHON to one that has it, or pip install torch"
[ -d "$build/python/ckptdelta" ] || fail "there is no Python package in $build: run make python-package"
export PYTHONPATH="$build/python" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_CPP_LOG_LEVEL=ERROR
PATH=$build:$PATH
dir=$(mktemp -d "${TMPDIR:-/tmp}/ckptdelta-demo.XXXXXX") || exit 1
trap clean_up EXIT
trap 'exit 1' HUP INT TERM
cd "$dir" || exit 1

say "1. Train a small GPT on two processes (FSDP2) to step $steps without a break."
(train 2 straight.txt --name straight --steps "$steps") || fail "training failed"

say "2. Train it again and kill both processes (SIGKILL)."
(train 2 killed.txt --name killed --steps "$steps") >killed.log 2>&1 &
trainer=$!
until grep -q "^$((every * 13)) " killed.txt 2>/dev/null; do
    kill -0 "$trainer" 2>/dev/null || { cat killed.log; fail "training ended before it was killed"; }
    sleep 0.1
done
kill -9 $(ps -o pid= --ppid "$trainer") "$trainer"
wait "$trainer" 2>/dev/null
trainer=
sleep 1
printf 'killed after step %s\n' "$(tail -n 1 killed.txt | cut -d ' ' -f 1)"
ckptdelta verify store || fail "the store is damaged after the kill"

say "3. The same command again: it goes on from the newest checkpoint."
(train 2 resumed.txt --name killed --steps "$steps") || fail "training did not go on"
first=$(head -n 1 resumed.txt | cut -d ' ' -f 1)
[ "$first" -gt "$every" ] || fail "it went back to step $first"
tail -n "+$first" straight.txt | cmp - resumed.txt || fail "the losses differ after the kill"
printf '%s losses from step %s on are identical, bit for bit.\n' "$(wc -l <resumed.txt)" "$first"

say "4. One process goes on from what two have saved."
(train 1 one.txt --name killed --steps "$((steps + every))") || fail "training did not go on"
[ "$(head -n 1 one.txt | cut -d ' ' -f 1)" -eq $((steps + 1)) ] || fail "it did not go on from step $steps"

say "5. What it took, compared with full copies."
ckptdelta report store || fail "report failed"
ckptdelta verify store || fail "the store is damaged"

say "Done: killed, resumed, and not one bit differs."
