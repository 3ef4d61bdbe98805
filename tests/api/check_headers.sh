#!/bin/sh
# Each public header can be included alone, in C and in C++.
set -eu
for header in include/*.h; do
    for language in c c++; do
        echo "#include <${header#include/}>" | ${CC:-cc} -Wall -Wextra -Werror -Iinclude -fsyntax-only -x "$language" - ||
            { echo "$header cannot be included alone in $language"; exit 1; }
    done
done
