#!/bin/sh
# demo.sh BUILD_DIR: kills a training run without warning, resumes it, and compares it with an uninterrupted run.
# BUILD_DIR has the programs train_gpt and ckptdelta. Works in a temporary directory ($TMPDIR), which it removes.
# Exits 1 with a message if a result is wrong. Takes about a minute; DEMO_STEPS sets the length of training.
set -u

build=${1:?usage: demo.sh BUILD_DIR}
build=$(cd "$build" && pwd) || exit 1
steps=${DEMO_STEPS:-240} # saved every 1/20 of it, killed at about 2/3
every=$((steps / 20))
kill_at=$((every * 13))
trainer=

say() {
    printf '\n== %s\n' "$*"
}

fail() {
    printf 'demo: FAILED: %s\n' "$*" >&2
    exit 1
}

# Prints a command and runs it.
run() {
    printf '$ %s\n' "$*"
    "$@"
}

clean_up() {
    if [ -n "$trainer" ]; then
        kill -9 "$trainer" 2>/dev/null
        wait "$trainer" 2>/dev/null
    fi
    cd / && rm -rf "$dir"
}

for program in train_gpt ckptdelta; do
    [ -x "$build/$program" ] || fail "there is no $build/$program; run make first"
done
[ "$every" -ge 1 ] || fail "DEMO_STEPS must be at least 20"
PATH=$build:$PATH
dir=$(mktemp -d "${TMPDIR:-/tmp}/ckptdelta-demo.XXXXXX") || exit 1
trap clean_up EXIT
trap 'exit 1' HUP INT TERM
cd "$dir" || exit 1

say "1. Train a small GPT to step $steps without a break. This is what every other run has to reproduce."
run train_gpt --steps "$steps" --log-every $((steps / 5)) --store store --run straight --losses straight.txt ||
    fail "the trainer stopped"

say "2. Train it again, saving weights and both AdamW moments every $every steps, and kill it (SIGKILL) in a save."
set -- train_gpt --steps "$steps" --log-every $((steps / 5)) --store store --run killed --save-every "$every"
printf '$ %s --losses killed.txt &\n' "$*"
"$@" --losses killed.txt >killed.log 2>&1 &
trainer=$!
# The trainer writes the loss of a step, then saves. So it is inside the save right after this line appears.
until grep -q "^$kill_at " killed.txt 2>/dev/null; do
    kill -0 "$trainer" 2>/dev/null || { cat killed.log; fail "the trainer ended before it was killed"; }
    sleep 0.01
done
run kill -9 "$trainer"
wait "$trainer" 2>/dev/null
status=$?
trainer=
cat killed.log
[ "$status" -eq 137 ] || fail "the trainer was not killed (exit status $status)"
printf 'killed after step %s; the last save that it reported is above\n' "$(tail -n 1 killed.txt | cut -d ' ' -f 1)"

say "3. What the store holds now. A save that was cut short is not there; every checkpoint that is there is whole."
run ckptdelta list store || fail "the store cannot be listed after the kill"
run ckptdelta verify store || fail "the store is damaged after the kill"

say "4. Start the same command again with --resume: it goes on from the newest checkpoint."
printf '$ %s --losses resumed.txt --resume\n' "$*"
"$@" --losses resumed.txt --resume >resumed.log 2>&1 || { cat resumed.log; fail "the trainer did not resume"; }
cat resumed.log
grep -q '^resumed from killed at step' resumed.log || fail "the trainer started afresh instead of resuming"

say "5. Compare: from the resume to step $steps, every loss must equal that of the run without a break, bit for bit."
first=$(head -n 1 resumed.txt | cut -d ' ' -f 1)
[ "$first" -gt "$every" ] || fail "the resume went back to step $first"
tail -n "+$first" straight.txt >expected.txt
printf 'without a break: step %s\nresumed:         step %s\n' "$(tail -n 1 expected.txt)" "$(tail -n 1 resumed.txt)"
run cmp expected.txt resumed.txt || fail "the losses differ after the resume"
head -n "$(wc -l <killed.txt)" straight.txt | cmp - killed.txt || fail "the losses differ before the kill"
printf '%s losses from step %s on are identical.\n' "$(wc -l <resumed.txt)" "$first"

say "6. The losses are equal, so is the state? Load the last step of both runs as safetensors files."
run ckptdelta load store --run straight --step "$steps" --out straight.safetensors || fail "the load failed"
run ckptdelta load store --run killed --step "$steps" --out killed.safetensors || fail "the load failed"
run cmp straight.safetensors killed.safetensors || fail "the states differ"
printf 'Identical: %s bytes of weights, moments and counters.\n' "$(wc -c <killed.safetensors)"

say "7. Any other step is there as well; --tensor picks what to load."
run ckptdelta load store --run killed --step "$((every * 5))" --tensor 'blocks.0.*' --out block0.safetensors ||
    fail "the load failed"
[ -s block0.safetensors ] || fail "block0.safetensors is empty"

say "8. One checkpoint in detail, and what the store as a whole takes compared with full copies."
run ckptdelta show store --run killed --step "$((every * 5))" >show.txt || fail "show failed"
head -n 24 show.txt
printf '... (%s lines in all)\n' "$(wc -l <show.txt)"
run ckptdelta report store || fail "report failed"

say "Done: killed, resumed, and not one bit differs."
