#!/bin/sh
# `make lint`: lint.sh SOURCE..., with the include flags in CKD_LINT_FLAGS. Runs what is installed; fails on findings.
set -u
status=0
ran=
# Off: checks that see one file at a time and so cannot know that a function of another file that fills in an error never
# returns CKD_OK (NullDereference, NonNullParamChecker, UndefinedBinaryOperatorResult), or that
# mistake arrays of pointers (sizeof-expression).
if command -v clang-tidy >/dev/null 2>&1; then
    ran=yes
    # shellcheck disable=SC2086
    clang-tidy --quiet --warnings-as-errors='*' --checks="-*,bugprone-*,clang-analyzer-*,cert-err34-c,cert-flp30-c,\
misc-redundant-expression,performance-*,\
-bugprone-easily-swappable-parameters,-bugprone-reserved-identifier,-bugprone-implicit-widening-of-multiplication-result,\
-clang-analyzer-security.insecureAPI.*,-clang-analyzer-valist.Uninitialized,-performance-no-int-to-ptr,\
-clang-analyzer-core.NullDereference,-clang-analyzer-core.NonNullParamChecker,\
-clang-analyzer-core.UndefinedBinaryOperatorResult,-bugprone-sizeof-expression,-bugprone-narrowing-conversions,-bugprone-misplaced-widening-cast" \
        "$@" -- -std=gnu11 $CKD_LINT_FLAGS || status=1
fi
if command -v cppcheck >/dev/null 2>&1; then
    ran=yes
    # It cannot parse every compound literal (internalAstError), and does not see what a call fills in (uninitStructMember).
    # shellcheck disable=SC2086
    cppcheck --quiet --std=c11 --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
        --suppress=missingIncludeSystem --suppress=internalAstError --suppress=uninitStructMember $CKD_LINT_FLAGS "$@" || status=1
fi
[ -n "$ran" ] || { echo "neither clang-tidy nor cppcheck is installed"; exit 1; }
exit $status
