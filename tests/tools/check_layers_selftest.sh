#!/bin/sh
# scripts/check_layers.py finds each kind of violation, and none in a tree without violations.
set -eu
check=$PWD/scripts/check_layers.py
python=${PYTHON:-python3}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failed=0

# A small tree without violations, with lines that look like some.
clean_tree() {
    rm -rf "${tree:?}"/*
    for folder in include base codec catalog kernels/cuda engine cli examples bench tests; do mkdir -p "$tree/$folder"; done
    echo '#include "include/ckptdelta.h"' >"$tree/base/file.h"
    : >"$tree/include/ckptdelta.h"
    : >"$tree/include/ckptdelta_more.h"
    : >"$tree/engine/store.h"
    : >"$tree/codec/codec.h"
    : >"$tree/cli/cli.h"
    printf '#include <fcntl.h>\n#include <xxhash.h>\n#include "base/file.h"\nint f(void)\n{\n    return open("a", 0);\n}\n' \
        >"$tree/base/file.c"
    printf '#include <sqlite3.h>\n#include "catalog_schema.h"\n#include "base/file.h"\n' >"$tree/catalog/catalog.c"
    printf '#include <zstd.h>\n#include "codec.h"\n#include "base/file.h"\n#include "ckptdelta.h"\n' >"$tree/codec/codec.c"
    printf '#include <cuda_runtime.h>\n' >"$tree/kernels/cuda/kernels.cu"
    printf '#include "codec/codec.h"\n#include "store.h"\n/* open(x), "a" */\nint g(int a,\n      int b) {\n    %s\n%s\n}\n' \
        'file_open(a); io->open(b); io.fsync(b); const char *s = "open(1) \" abort()";' \
        '    return a; // abort() /* not a comment' >"$tree/engine/save.c"
    printf '#include "ckptdelta.h"\n#include "cli.h"\n#include <jansson.h>\nint main(void) {\n    printf("");\n}\n' \
        >"$tree/cli/main.c"
    printf '#include "engine/store.h"\n#include "codec/codec.h"\n#include <sqlite3.h>\n' >"$tree/tests/test_x.c"
    printf '#include "ckptdelta.h"\n#include "codec/codec.h"\n#include <zstd.h>\n' >"$tree/bench/bench_x.c"
    mkdir -p "$tree/engine/save" "$tree/engine/store"
    printf '#include "engine/store/store.h"\n#include "engine/save/save.h"\n#include "engine/save/private.h"\n' >"$tree/engine/save/room.c"
    printf '#include "engine/store/view.h"\n' >"$tree/tests/test_view.c"
    printf 'void f(void) {\n    p = mmap(0);\n}\n' >"$tree/base/shared_memory.c"
    printf 'int six(int a, int (*b)(int, int), int c, int d, int e,\n        int f) {\n    return a;\n}\n' >"$tree/engine/save/six.c"
}

fail() {
    echo "FAILED: $1"
    failed=1
}

# finds FILE LINE TEXT: if TEXT is appended to FILE, there is exactly one finding, at that line of that file.
finds() {
    clean_tree
    mkdir -p "$tree/$(dirname "$1")"
    printf '%b\n' "$3" >>"$tree/$1"
    if output=$("$python" "$check" "$tree"); then fail "$1: nothing found in: $3"; return; fi
    case $output in
        *"
"*) fail "$1: more than one finding for: $3
$output" ;;
        "$1:$2: "*) ;;
        *) fail "$1: expected line $2 for: $3
$output" ;;
    esac
}

clean_tree
"$python" "$check" "$tree" >"$tree/output" || fail "findings in a clean tree: $(cat "$tree/output")"

finds base/new.c 1 '#include "codec/codec.h"'
finds base/new.c 2 '\n#include "engine/store.h"'
finds base/new.c 1 '#include "ckptdelta_more.h"'
finds codec/new.c 1 '#include "../engine/store.h"' # by a relative path
finds codec/new.c 1 '#include "kernels/kernels.h"'
finds codec/new.c 1 '#include "catalog/catalog.h"'
finds codec/new.c 1 '#include "catalog_schema.h"'
finds catalog/new.c 1 '#include "codec/codec.h"'
finds kernels/new.c 1 '#include "codec/codec.h"'
finds kernels/cuda/new.cu 1 '#include "engine/store.h"'
finds engine/new.c 1 '#include "cli/cli.h"'
finds engine/new.c 1 '#include "tests/support/x.h"'
finds cli/new.c 1 '#include "base/file.h"'
finds cli/new.c 1 '#include "include/ckptdelta.h"'
finds cli/new.c 1 '#include "engine/store.h"'
finds cli/new.c 1 '#  include "ckptdelta_more.h"'
finds cli/new.c 1 '#include "supervise/internal.h"'
finds supervise/new.c 1 '#include "cli/cli.h"'
finds supervise/new.c 1 '#include "base/file.h"'
finds engine/new.c 1 '#include "supervise/supervise.h"'
finds engine/new.c 1 '#include "agent/agent.h"'
finds cli/new.c 1 '#include "agent/internal.h"'
finds agent/new.c 1 '#include "engine/store/store.h"'
finds agent/new.c 1 '#include "engine/slots/private.h"'
finds peers/new.c 1 '#include "engine/slots/slots.h"'
finds agent/new.c 1 '#include "peers/internal.h"'
finds agent/new.c 1 '#include <ucp/api/ucp.h>'
finds agent/new.c 1 '#include "codec/entropy/entropy.h"'
finds agent/new.c 2 'void f(void) {\n    x = open (a);\n}'
finds examples/new.c 1 '#include "base/file.h"'
finds bench/new.c 1 '#include "catalog/catalog.h"'
# Rooms: a room that uses one above it, a folder that is no room, and a call without an include.
finds engine/store/new.c 1 '#include "engine/decode/values.h"'
finds engine/save/new.c 1 '#include "engine/store/view.h"'
finds engine/new.c 1 '#include "engine/store/view.h"'
finds engine/store/new.c 1 '#include "codec/chunk/record.h"'
finds codec/common/new.c 1 '#include "codec/chunk/chunk.h"'
finds cli/files/new.c 1 '#include "cli/commands/commands.h"'
finds engine/parlour/new.c 1 'int x;'
clean_tree
mkdir -p "$tree/engine/store" "$tree/engine/save" "$tree/objects/engine/store" "$tree/objects/engine/save"
printf 'int above(void);\nint below(void);\nint below(void) {\n    return above();\n}\n' >"$tree/engine/store/below.c"
printf 'int above(void);\nint above(void) {\n    return 1;\n}\n' >"$tree/engine/save/above.c"
for source in store/below save/above; do ${CC:-gcc} -c -o "$tree/objects/engine/$source.o" "$tree/engine/$source.c"; done
"$python" "$check" "$tree" >/dev/null || fail "a call without an include is found without objects"
output=$("$python" "$check" "$tree" --objects "$tree/objects") && fail "a call to a room above is not found"
case $output in
    "engine/store/below.c:1: engine/store must not call above"*) ;;
    *) fail "a call to a room above: $output" ;;
esac
# ring COUNT: files 1 to COUNT of a room each call the next one, and the last one calls the first. Another
# file only calls into the ring.
ring() {
    clean_tree
    mkdir -p "$tree/engine/store" "$tree/objects/engine/store"
    for i in $(seq "$1") outside; do
        case $i in outside) next=1 ;; "$1") next=1 ;; *) next=$((i + 1)) ;; esac
        printf 'int ring_%s(void);\nint ring_%s(void);\nint ring_%s(void) {\n    return ring_%s();\n}\n' "$i" "$next" "$i" "$next" \
            >"$tree/engine/store/f$i.c"
        ${CC:-gcc} -c -o "$tree/objects/engine/store/f$i.o" "$tree/engine/store/f$i.c"
    done
}
ring 5
output=$("$python" "$check" "$tree" --objects "$tree/objects") || fail "a circle of 5 files: $output"
ring 6
"$python" "$check" "$tree" >/dev/null || fail "a circle of files is found without objects"
output=$("$python" "$check" "$tree" --objects "$tree/objects") && fail "a circle of 6 files is not found"
wanted="engine/store/f1.c:1: 6 files of engine/store call each other in a circle, 5 are the limit: f1 f2 f3 f4 f5 f6 \
(f1 calls ring_2 of f2, f2 calls ring_3 of f3, f3 calls ring_4 of f4, f4 calls ring_5 of f5, f5 calls ring_6 of f6, f6 calls ring_1 of f1)"
[ "$output" = "$wanted" ] || fail "a circle of 6 files: $output"
# Without one of its calls there is no circle.
printf 'int ring_6(void);\nint ring_6(void) {\n    return 1;\n}\n' >"$tree/engine/store/f6.c"
${CC:-gcc} -c -o "$tree/objects/engine/store/f6.o" "$tree/engine/store/f6.c"
output=$("$python" "$check" "$tree" --objects "$tree/objects") || fail "a row of 6 files: $output"

finds engine/new.c 1 '#include <sqlite3.h>'
finds engine/new.c 1 '#include <zstd.h>'
finds kernels/new.c 1 '#include <lz4hc.h>'
finds codec/new.c 1 '#include <xxhash.h>'
finds kernels/new.c 1 '#include <cuda_runtime.h>'
finds kernels/new.c 1 '#include <cublas_v2.h>'
finds engine/new.c 1 '#include <jansson.h>'
finds examples/new.c 1 '#include <sqlite3.h>'
finds engine/new.c 3 'int f(void)\n{\n    return open("a", 0);\n}'
for call in openat creat rename renameat2 link unlink fsync fdatasync fopen flock fcntl; do
    finds codec/new.c 2 "void f(void) {\\n    x = ${call} (a);\\n}"
done
finds catalog/new.c 1 '#define OPEN(x) open(x, 0)'
finds base/new.c 2 'void f(void) {\n    abort();\n}'
finds engine/new.c 2 'void f(void) {\n    fprintf(stderr, "x");\n}'
finds codec/new.c 2 'void f(void) {\n    assert(x);\n}'
finds base/new.c 2 'void f(void) {\n    p = mmap(0);\n}'

lines() { awk -v n="$1" -v text="$2" 'BEGIN { while (n-- > 0) printf "%s\\n", text }'; }
finds engine/new.c 1 'int f(int a, int b, int c,\n      int (*d)(int, int), int e, int f, int g) {\n    return a;\n}'
finds engine/new.c 601 "$(lines 600 '')int x;"
finds engine/new.c 1 "void f(void) {\\n$(lines 59 '    x();')}"
finds cli/new.c 3 "void f(int a,\\n       int b)\\n{\\n$(lines 59 '    x();')}"
finds examples/new.c 2 "void f(int a,\\n       int b) {\\n$(lines 59 '    x();')}"
finds bench/save/new.c 1 "void f(void) {\\n$(lines 59 '    x();')}"
finds kernels/cuda/new.cu 1 "__global__ void f(int a) {\\n$(lines 59 '    x();')}"
finds engine/new.c 1 'void f(void) {\n    x();\n    }'
finds engine/new.c 1 'static void f(int a, int b, int c, int d, int e, int f, int g) {\n}'
finds engine/new.c 1 'static __attribute__((noinline, target("avx2"))) void f(int a, int b, int c, int d, int e, int f, int g) {\n}'

# At the limits there are no findings. A long table is no function.
clean_tree
{ printf 'void f(void) {\n%b}\n' "$(lines 58 '    x();')"; printf 'static int a[] = {\n%b};\n' "$(lines 530 '    1,')"; } \
    >"$tree/engine/new.c"
"$python" "$check" "$tree" >"$tree/output" || fail "findings at the limits: $(cat "$tree/output")"
rm -rf "${tree:?}"/*
if "$python" "$check" "$tree" >/dev/null; then fail "an empty tree passes"; fi
[ $failed = 0 ] && echo "every violation was found"
exit $failed
