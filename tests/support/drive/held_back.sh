#!/bin/sh
# Runs a command beside others and prints its output at its end, so that lines of several commands do not mix.
out=$(mktemp)
trap 'rm -f "$out"' EXIT
echo "$*: begins"
"$@" >"$out" 2>&1
code=$?
echo "$*:"
cat "$out"
exit $code
