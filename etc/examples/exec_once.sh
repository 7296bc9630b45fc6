#!/bin/sh
# A worker in POSIX sh for `--handler exec-once:/path/exec_once.sh DIRECTORY`: it is started for each job.
#
# The data comes on stdin, as one line of JSON. Status 0: done. 65: failed, and not to be tried again. Any other: failed.
# What it writes is in forq's log. This one keeps the data of each job in a file.

set -eu

directory=${1:?where to}
case $FORQ_JOB_ID in */*) echo "an id with a slash is no file name" >&2; exit 65 ;; esac

# Written under another name first: a job may be killed at any time, and runs again.
trap 'rm -f "$directory/.$FORQ_JOB_ID.$$"' EXIT
cat > "$directory/.$FORQ_JOB_ID.$$"
mv "$directory/.$FORQ_JOB_ID.$$" "$directory/$FORQ_JOB_ID.json"
echo "kept $FORQ_JOB_ID of $FORQ_QUEUE, attempt $FORQ_ATTEMPT"
