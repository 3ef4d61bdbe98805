#!/bin/sh
# train_gpt --eval-batches: the validation loss is of that many batches, 16 by default. Training does not change.
set -eu
trainer=${CKPTDELTA_BUILD:?the build folder}/train_gpt
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
seq 1 60000 >"$dir/text"

# train NAME OPTION...: a tiny model. Its losses go to one file, and the validation losses to another.
train() {
    name=$1
    shift
    "$trainer" --width 16 --heads 2 --layers 1 --context 16 --batch 2 --threads 1 --text "$dir/text" --steps 4 \
        --eval-every 2 --losses "$dir/$name" "$@" >"$dir/output" 2>"$dir/errors" &&
        sed -n 's/.*validation loss //p' "$dir/output" >"$dir/$name.validation"
}
fail() {
    echo "check_eval_batches: $1" >&2
    cat "$dir/errors" >&2
    exit 1
}

train default || fail "training failed"
train same --eval-batches 16 || fail "training failed"
train more --eval-batches 48 || fail "training failed with more batches"

cmp -s "$dir/default" "$dir/more" || fail "the number of batches changed the training"
cmp -s "$dir/default.validation" "$dir/same.validation" || fail "the default is not 16 batches"
cmp -s "$dir/default.validation" "$dir/more.validation" && fail "other batches gave the same validation losses"
[ "$(wc -l <"$dir/more.validation")" = 2 ] || fail "not a validation loss every two steps"
grep -Eq '^[0-9]+\.[0-9]{6}$' "$dir/more.validation" || fail "the loss has no six decimals"
train refused --eval-batches 0 && fail "no batch at all was accepted"
exit 0
