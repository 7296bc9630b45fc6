#!/bin/sh
# Runs a command beside others, and shows what it has written when it has ended: lines of several would be mixed.
out=$(mktemp)
trap 'rm -f "$out"' EXIT
echo "$*: begins"
"$@" >"$out" 2>&1
code=$?
echo "$*:"
cat "$out"
exit $code
