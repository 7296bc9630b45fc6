#!/bin/sh
# A worker in POSIX sh for `--handler exec:/path/exec_worker.sh`: it is kept running and reads one job per line.
#
# sh and sed read no JSON, so this takes from the line what has a fixed form: the id, at the beginning of the payload,
# which has no quotes or backslashes unless you chose such ids. For data, use exec-once, jq, or another language.

while IFS= read -r line; do
  uuid=$(printf '%s\n' "$line" | sed 's/^{"topic":"job_assignment","payload":{"uuid":"\([^"\\]*\)".*/\1/')
  echo "working on $uuid" >&2
  printf '{"topic":"job_finished","payload":{"uuid":"%s"}}\n' "$uuid"
done
