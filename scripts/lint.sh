#!/bin/sh
# `make lint`: lint.sh SOURCE..., with the include flags in CKD_LINT_FLAGS. Runs what is installed; fails on findings.
set -u
status=0
ran=
if command -v clang-tidy >/dev/null 2>&1; then
    ran=yes
    # shellcheck disable=SC2086
    clang-tidy --quiet --warnings-as-errors='*' --checks="-*,bugprone-*,clang-analyzer-*,cert-err34-c,cert-flp30-c,\
misc-redundant-expression,performance-*,\
-bugprone-easily-swappable-parameters,-bugprone-reserved-identifier,\
-clang-analyzer-security.insecureAPI.DeprecatedOrUnsafeBufferHandling,-performance-no-int-to-ptr" \
        "$@" -- -std=gnu11 $CKD_LINT_FLAGS || status=1
fi
if command -v cppcheck >/dev/null 2>&1; then
    ran=yes
    # shellcheck disable=SC2086
    cppcheck --quiet --std=c11 --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
        --suppress=missingIncludeSystem $CKD_LINT_FLAGS "$@" || status=1
fi
[ -n "$ran" ] || { echo "neither clang-tidy nor cppcheck is installed"; exit 1; }
exit $status
