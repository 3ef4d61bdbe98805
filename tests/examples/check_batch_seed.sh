#!/bin/sh
# train_gpt --batch-seed: a branch of a run continues with other batches, and nothing else does. Its saves
# record the seed.
set -eu
trainer=${CKPTDELTA_BUILD:?the build folder}/train_gpt
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
seq 1 60000 >"$dir/text"

# train LOSSES OPTION...: a tiny model, into one store.
train() {
    losses=$1
    shift
    "$trainer" --width 16 --heads 2 --layers 1 --context 16 --batch 2 --threads 1 --schedule constant \
        --text "$dir/text" --store "$dir/store" --losses "$dir/$losses" "$@" >/dev/null 2>"$dir/errors"
}
fail() {
    echo "check_batch_seed: $1" >&2
    cat "$dir/errors" >&2
    exit 1
}

train whole --run whole --steps 8 --save-every 4 || fail "training failed"
train same --run same --resume-run whole --resume-step 4 --batch-seed 1 --steps 8 || fail "no branch with the seed's own batches"
train other --run other --resume-run whole --resume-step 4 --batch-seed 9 --steps 8 || fail "no branch with other batches"

tail -n 4 "$dir/whole" | cmp -s - "$dir/same" || fail "the same batch seed changed the losses"
cmp -s "$dir/same" "$dir/other" && fail "another batch seed changed no loss"
[ "$(wc -l <"$dir/other")" = 4 ] || fail "not a loss for each step"

train refused --run other --resume --steps 9 && fail "the branch went on with batches of the old seed"
train further --run other --resume --seed 9 --steps 9 || fail "the branch does not go on with its own seed"
train refused --run new --batch-seed 9 --steps 9 && fail "--batch-seed was taken without --resume-run"
exit 0
