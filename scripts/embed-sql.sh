#!/bin/sh
# Prints FILE as a C string constant: embed-sql.sh NAME FILE
set -eu
[ $# -eq 2 ] || { echo "usage: embed-sql.sh NAME FILE" >&2; exit 2; }
printf '/* Generated from %s; change that. */\nstatic const char %s[] =\n' "$2" "$1"
sed -e 's/\\/\\\\/g' -e 's/["?]/\\&/g' -e 's/^/    "/' -e 's/$/\\n"/' "$2"
printf '    "";\n'
