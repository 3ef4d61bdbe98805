#!/bin/sh
# demo.sh BUILD_DIR: what each kind of checkpoint takes, what a resume from it costs, and a kill that loses not a bit.
# BUILD_DIR has the programs train_gpt and ckptdelta. The store and the report stay in BUILD_DIR/demo, which is replaced.
# Exits 1 with a message if a result is wrong. Takes about two minutes; DEMO_STEPS sets the length of training.
set -u

build=${1:?usage: demo.sh BUILD_DIR}
build=$(cd "$build" && pwd) || exit 1
steps=${DEMO_STEPS:-250} # saved every 1/5 of it; resumes begin at 4/5
every=$((steps / 5))
from=$((every * 4))
kill_at=$((from + every * 3 / 5))
dir=$build/demo
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
}

# Prints the mean stored and full bytes of a run's checkpoints after its first step, in human units, and their ratio.
takes() {
    ckptdelta report store --csv | awk -F, -v run="$1" -v after="$2" '
        function size(b) { return b < 1048576 ? sprintf("%.0f KiB", b / 1024) : sprintf("%.1f MiB", b / 1048576) }
        $1 == "checkpoint" && $2 == run && $7 > after { count++; full += $10; stored += $11 }
        END { if (!count) exit 1
              ratio = full / stored
              printf "%10s %7s\n", size(stored / count), sprintf(ratio < 10 ? "%.1fx" : "%.0fx", ratio) }'
}

# Prints the validation loss at the end of a log.
loss_of() {
    sed -n 's/^step [0-9]*  validation loss //p' "$1" | tail -n 1
}

for program in train_gpt ckptdelta; do
    [ -x "$build/$program" ] || fail "there is no $build/$program; run make first"
done
[ "$every" -ge 5 ] || fail "DEMO_STEPS must be at least 25"
PATH=$build:$PATH
trap clean_up EXIT
trap 'exit 1' HUP INT TERM
rm -rf "$dir"
mkdir "$dir" && cd "$dir" || exit 1
set -- train_gpt --steps "$steps" --log-every "$every" --store store

say "1. Train a small GPT to step $steps. Weights and both AdamW moments are saved every $every steps, exactly."
printf '$ %s --save-every %s\n' "$*" "$every"
"$@" --save-every "$every" --losses straight.txt >gpt.log 2>&1 || { cat gpt.log; fail "the trainer stopped"; }
cat gpt.log

say "2. Save the same states again: near, for resuming, and coarse, the smallest."
step=$every
while [ "$step" -le "$from" ]; do
    ckptdelta load store "gpt@$step" -o state.safetensors --blob gpt.config=config --force -q || fail "the load failed"
    for fidelity in near coarse; do
        ckptdelta save store "$fidelity@$step" --fidelity "$fidelity" state.safetensors --blob gpt.config=config \
            --metric "loss=$(sed -n "s/^$step .* //p" straight.txt)" -q || fail "the save failed"
    done
    step=$((step + every))
done
ckptdelta list store || fail "the store cannot be listed"

say "3. Resume from step $from of each and train $every steps on the same batches."
for fidelity in near coarse; do
    printf '$ %s --resume-run %s --resume-step %s --run from-%s\n' "$*" "$fidelity" "$from" "$fidelity"
    "$@" --resume-run "$fidelity" --resume-step "$from" --run "from-$fidelity" >"$fidelity.log" 2>&1 ||
        { cat "$fidelity.log"; fail "the trainer did not resume"; }
    grep 'validation loss' "$fidelity.log"
done

say "4. Resume from gpt@$from again, save after every step with the optimizer's settings, and kill it (SIGKILL) in a save."
printf '$ %s --run killed --resume-run gpt --resume-step %s --save-every 1 &\n' "$*" "$from"
"$@" --run killed --resume-run gpt --resume-step "$from" --save-every 1 --losses killed.txt >killed.log 2>&1 &
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
[ "$status" -eq 137 ] || fail "the trainer was not killed (exit status $status)"
printf 'killed after step %s; its last finished save:\n' "$(tail -n 1 killed.txt | cut -d ' ' -f 1)"
grep '^saved' killed.log | tail -n 1
run ckptdelta verify store || fail "the store is damaged after the kill"

say "5. The same run continues from its newest checkpoint. Losses must be those of the first training, bit for bit."
printf '$ %s --run killed --resume --save-every 1\n' "$*"
"$@" --run killed --resume --save-every 1 --losses resumed.txt >resumed.log 2>&1 ||
    { cat resumed.log; fail "the trainer did not resume"; }
grep '^resumed from killed at step' resumed.log || fail "the trainer did not continue from its own checkpoint"
first=$(head -n 1 resumed.txt | cut -d ' ' -f 1)
tail -n "+$first" straight.txt | cmp - resumed.txt || fail "the losses differ after the resume"
sed -n "$((from + 1)),$(tail -n 1 killed.txt | cut -d ' ' -f 1)p" straight.txt | cmp - killed.txt ||
    fail "the losses differ before the kill"
for name in gpt killed; do
    ckptdelta load store "$name@$steps" -o "$name.safetensors" -q || fail "the load failed"
done
cmp gpt.safetensors killed.safetensors || fail "the states differ"
printf '%s losses from step %s on are identical, and so are all %s bytes of the state.\n' "$(wc -l <resumed.txt)" \
    "$first" "$(wc -c <killed.safetensors)"

rm -f state.safetensors config gpt.safetensors killed.safetensors
ckptdelta report store --html report.html -q || fail "report failed"

exact=$(loss_of gpt.log)
line() {
    printf '| %-31s %18s | %-29s |\n' "$1" "$2" "$3"
}
rule() {
    printf '+%s+%s+\n' "$(printf '%52s' '' | tr ' ' -)" "$(printf '%31s' '' | tr ' ' -)"
}
change() {
    awk -v of="$(loss_of "$1")" -v exact="$exact" 'BEGIN { printf "%.4f, %+.4f", of, of - exact }'
}
size=$(ckptdelta report store --csv | awk -F, '$1 == "checkpoint" { printf "%.1f MiB", $10 / 1048576; exit }')
printf '\n'
rule
line "A checkpoint of $size takes:" '' "loss $every steps after a resume"
line "exact, saved every $every steps" "$(takes gpt "$every")" "$(printf %.4f "$exact"), not one bit differs"
line "exact, saved after every step" "$(takes killed "$from")" "$(printf %.4f "$exact"), not one bit differs"
line "near, saved every $every steps" "$(takes near "$every")" "$(change near.log)"
line "coarse, saved every $every steps" "$(takes coarse "$every")" "$(change coarse.log)"
rule
printf '\nThe report: %s/report.html\nNow try, in %s:\n' "$dir" "$dir"
printf '    ../ckptdelta %s\n' "list store" "diff store gpt@$every gpt@$from" "timeline store --svg saves.svg"
