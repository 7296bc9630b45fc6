#!/bin/sh
# Checks the models with Spin: with all guards they must hold, without any one they must fail. `make model` runs this.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
for tool in spin gcc; do
  command -v "$tool" > /dev/null || { echo "model: $tool is not installed (on Debian: apt install spin gcc)" >&2; exit 69; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

model=claim.pml
optimize=-O2
# check NAME WANTED GCC-OPTIONS PAN-OPTIONS [SPIN-OPTIONS]: WANTED is `holds` or `fails`.
check() {
  spin -a ${5:-} "$here/$model" > spin.log 2>&1 || { cat spin.log >&2; exit 1; }
  gcc $optimize -w $3 -o pan pan.c
  ./pan -m100000 $4 > pan.log || { cat pan.log >&2; exit 1; }
  grep -q 'max search depth too small' pan.log && { cat pan.log >&2; exit 1; }
  errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.log)
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
  found=fails
  [ "$errors" = 0 ] && found=holds
  echo "$1: $found ($states states)"
  [ "$found" = "$2" ] || { cat pan.log >&2; echo "model: $1: expected: $2" >&2; exit 1; }
}

on_time='-DDEATHS=2 -DMISTAKES=2 -DDELAYS=0'
check 'fenced: only the current attempt settles' holds '-DSAFETY -DNOCLAIM' '' "$on_time"
check 'fenced: settled at most once' holds '' '-a -N once' "$on_time"
check 'fenced: the job is done in the end' holds '-DNFAIR=5' '-a -f -N ends' "$on_time"
check 'numbered: no late request makes the job run again' holds '-DSAFETY -DNOCLAIM' ''
check 'numbered: settled at most once' holds '' '-a -N once'
check 'numbered: the job is done in the end' holds '-DNFAIR=5' '-a -f -N ends'

# fails NAME WHAT SPIN-OPTIONS: prints the shortest failure.
fails() {
  check "$1" fails '-DSAFETY -DNOCLAIM -DREACH' '-i' "$3"
  echo "shortest failure without $2:"
  spin -k claim.pml.trail $3 "$here/claim.pml" | sed -n 's/^ *\(\(worker\|turn\|a late\|the job\) .*\)/  \1/p'
}

fails 'unfenced: a zombie settles a job that another worker runs' 'the fence' "$on_time -DUNFENCED"
fails 'unnumbered: a late request takes a running job away' 'the number' -DUNNUMBERED

model=taken.pml
check 'marked: a returned job is not begun' holds '-DSAFETY' ''
check 'unmarked: a worker that does not read the mark begins a returned job' fails '-DSAFETY' '' '-DUNMARKED'
check 'misordered: so does one that reads the mark before it publishes its position' fails '-DSAFETY' '' '-DMARK_FIRST'
check 'uncompared: so does one if the rescue does not compare turn numbers' fails '-DSAFETY' '' '-DUNNUMBERED'

model=flows.pml
# Compilation takes longer than most of these runs.
optimize=-O0
exact='-DSAFETY -DNOCLAIM'
fair='-DNFAIR=6'
check 'batch: each callback once, after the seal and the last end' holds "$exact" '' -DREUSED
check 'batch: it ends in the end' holds "$fair" '-a -f'
check 'child: the same if a running member adds the other' holds "$exact" '' -DCHILD
check 'child: it ends in the end' holds "$fair" '-a -f' -DCHILD
check 'again: the same if two processes open the batch' holds "$exact" '' -DAGAIN
check 'held: ready once, after both have ended as required' holds "$exact" '' '-DHELD -DREUSED'
check 'held: it is ready or dead in the end' holds "$fair" '-a -f' -DHELD
check 'unverified: without verify, a batch waits for ever for a member that nobody stored' fails "$fair" '-a -f' -DUNVERIFIED

# breaks NAME WHAT SPIN-OPTIONS: prints the shortest failure.
breaks() {
  check "$1" fails '-DSAFETY -DNOCLAIM -DBFS' '' "$3"
  echo "shortest failure without $2:"
  spin -k flows.pml.trail $3 "$here/flows.pml" | sed -n 's/^ *> /  /p'
}

breaks 'doubled: a report that two pulses deliver counts twice' 'HDEL = 1' -DCOUNTED_TWICE
breaks 'removed: a report gets lost that is removed before it is delivered' 'that order' -DREMOVED_FIRST
breaks 'unpending: verify loses a member whose report is on its way' 'a look at the reports' -DUNPENDING
breaks 'edgeless: verify loses a member whose edge is stored after it' 'the edge in the same call' -DEDGELESS
breaks 'nonceless: a report for an earlier batch of this id counts' 'the nonce' '-DREUSED -DNONCELESS'
breaks 'nonceless: so does one for an earlier held job' 'the nonce' '-DHELD -DREUSED -DNONCELESS'
breaks 'unsealed: a batch ends before it is sealed' 'the seal' -DUNSEALED
breaks 'forgetful: a callback becomes ready twice' 'a memory of the callbacks' '-DAGAIN -DFORGETFUL'
breaks 'undated: verify loses a member that is being stored' 'the time of its number' '-DCHILD -DUNDATED'
breaks 'late: verify loses a member that is stored after 10 minutes' 'that limit' -DSLOW
breaks 'unstamped: lose ends a number that has been reserved again' 'the comparison' '-DCHILD -DUNSTAMPED'
breaks 'unstamped: lose ends a dependency of a later job of this id' 'the comparison' '-DHELD -DUNSTAMPED'
