#!/bin/sh
# An external worker of forq in POSIX sh, with sed: external_worker.sh QUEUE [UUID]
# It starts a bridge of its own (docs/guide/external-workers.md; FORQ_BRIDGE, else `forq bridge`) and runs jobs of command "sh", whose args are a
# text for sh -c; exit status 0 is success. Text in a message must need no escapes here: for more than that use a real JSON parser.
set -u
queue=$1
uuid=${2:-sh-$$-$(date +%s)}
bridge=${FORQ_BRIDGE:-forq bridge}
tick=${TICK_SECONDS:-2} # less than the tick of the bridge

# One descriptor reads messages from the bridge, one writes messages to it: two named pipes, for a moment.
dir=$(mktemp -d) || exit 1
mkfifo "$dir/in" "$dir/out"
$bridge <"$dir/in" >"$dir/out" &
exec 3>"$dir/in" 4<"$dir/out"
rm -r "$dir"

say() {
  printf '{"topic":"%s","payload":{"queue_name":"%s","worker_uuid":"%s"%s}}\n' "$1" "$queue" "$uuid" "${2:-}" >&3
}

text_of() { printf '%s\n' "$line" | sed -n 's/.*"'"$1"'":"\([^"\\]*\)".*/\1/p'; }
number_of() { printf '%s\n' "$line" | sed -n 's/.*"'"$1"'":\([0-9][0-9]*\).*/\1/p'; }

# The clock: it asks for something, and the answer wakes the loop below. It ends with this shell.
( while kill -0 $$ 2>/dev/null; do say list_workers; sleep "$tick"; done ) 4<&- &

run() {
  held=",\"uuid\":\"$1\",\"fence\":$2"
  say job_accepted "$held"
  echo "accepted $1 $2"
  # Signs of life while the job runs; the last one may come late, and is refused then.
  ( while sleep "$tick" && kill -0 $$ 2>/dev/null; do say worker_progress "$held,\"progress\":0.5"; done ) 4<&- &
  beat=$!
  if sh -c "$3" 3>&- 4<&- </dev/null; then outcome=job_finished; else outcome=job_failed; fi
  kill "$beat"
  wait "$beat" 2>/dev/null
  if [ "$outcome" = job_finished ]; then echo "ended $1 $2"; else held="$held,\"error\":\"it ended badly\""; fi
  say "$outcome" "$held"
}

say worker_idle
last=0
while IFS= read -r line <&4; do
  case $line in
    '{"topic":"workers",'*) say worker_idle ;;
    '{"topic":"job_assignment",'*)
      fence=$(number_of fence)
      # The same assignment may come twice.
      if [ "$fence" -gt "$last" ]; then
        last=$fence
        run "$(text_of uuid)" "$fence" "$(text_of args)"
      fi ;;
    '{"topic":"error",'*) printf '%s\n' "$line" >&2 ;;
  esac
done
