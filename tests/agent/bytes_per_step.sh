#!/bin/sh
# Prints what agents send to another node for each step of the example trainer, as a table: bytes_per_step.sh BUILD_FOLDER.
# Run by hand: docs/agent.md has the table.
set -eu
build=${1:?"usage: bytes_per_step.sh BUILD_FOLDER"}
folder=$(mktemp -d)
pids=
trap 'for p in $pids; do kill "$p" 2>/dev/null || :; done; wait; rm -rf "$folder"' EXIT
head -c 400000 "$build/ckptdelta" | base64 >"$folder/text"
(umask 077 && echo "a secret for one measurement" >"$folder/secret")
hosts=127.0.0.1:17071,127.0.0.1:17072

# measure NAME OPTIONS-OF-TRAIN_GPT...: a row
measure() {
    name=$1
    shift
    rm -rf "$folder/store"
    for n in 1 2; do
        "$build/ckptdelta" agent "$folder/store" --socket "$folder/agent$n" --peers $hosts --self 127.0.0.1:1707$n \
            --secret "$folder/secret" --copies "$folder/memory$n" --store-every 1h >"$folder/said$n" 2>&1 &
        pids="$pids $!"
        while ! grep -q listens "$folder/said$n"; do sleep 0.1; done
    done
    while ! "$build/ckptdelta" agent "$folder/store" --socket "$folder/agent1" --status | grep -q '^1 of 1'; do sleep 0.1; done
    CKPTDELTA_AGENT=$folder/agent1 "$build/train_gpt" --text="$folder/text" --store="$folder/store" --background=copy \
        --save-every=1 --width=128 --layers=2 --threads=1 "$@" >/dev/null
    "$build/ckptdelta" agent "$folder/store" --socket "$folder/agent1" --status --json |
        python3 -c 'import json, sys
c = json.load(sys.stdin)["copies"]
n, full, sent = c["states"], c["state_bytes"], sum(p["sent_bytes"] for p in c["peers"])
print(f"| {sys.argv[1]} | {full / n / 2**20:.2f} MiB | {sent / n / 2**20:.2f} MiB | {full / sent:.2f} |")' "$name"
    for n in 1 2; do "$build/ckptdelta" agent "$folder/store" --socket "$folder/agent$n" --stop -q; done
    wait
    pids=
}

echo "| trainer | full state | sent a step | ratio |"
echo "|---|---|---|---|"
measure "from the start, lr 1e-3" --steps=60
measure "the same, lr 1e-5" --steps=60 --lr=1e-5 --warmup=1
