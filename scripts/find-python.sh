#!/bin/sh
# Prints the first python3 that has what the tests need; falls back to plain python3, so that the error names the module.
# Debian's own comes first: its packages are what setup-deps.sh installs, and another python3 on PATH may lack them.
modules="'pytest', 'numpy', 'zstandard', 'lz4', 'xxhash'"
for python in /usr/bin/python3 python3; do
    if "$python" -c "import importlib.util as u, sys
sys.exit(any(u.find_spec(m) is None for m in ($modules)))" 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
[ "${1-}" = --check ] && exit 1
echo python3
