"""One run: play, heal, drain, stop, check. `make chaos SEED=… SECONDS=… FAULTS=…`

Exits with 0 if there was no violation and every fault has fired; else with 1, the findings, the command that repeats
the run, and the directory with its evidence.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forq.broker.inspect import Inspector
from forq.broker.keys import DEFAULT_PREFIX, fail_queue, main_queue, queue_base
from forq.broker.link import Link
from tests.chaos.checker import violations
from tests.chaos.evidence import Evidence, collect
from tests.chaos.faults import ALL_FAULTS, FAULTS, fired
from tests.chaos.nemesis import Nemesis
from tests.chaos.producer import MISDEEDS, USUAL
from tests.chaos.schedule import draw
from tests.chaos.stage import QUEUES, Stage
from tests.chaos.unfenced import MUTANT, use_what_is_asked_for
from tests.support.drive.supervisor import BIN
from tests.support.drive.wait import wait_until

_LIVE = ("waiting", "scheduled", "blocked", "held", "retry", "fail_jobs", "active", "in_flight")
_SHOWN = 40


@dataclass(frozen=True)
class Outcome:
    found: list[str]
    fired: dict[str, list[str]]
    figures: dict[str, int]
    directory: Path
    phases: dict[str, float]  # seconds per phase


def play(
    seed: int, seconds: float, faults: Mapping[str, float], *, audit: bool, drain_seconds: float = 180.0
) -> Outcome:
    """Plays these faults, with their frequency per minute. The caller removes the directory."""
    directory = Path(tempfile.mkdtemp(prefix="forq-chaos-"))
    misdeeds = [what for what in MISDEEDS if what in USUAL or f"handler_{what}" in faults]
    stage = Stage(directory, seed, misdeeds)
    watch = _Stopwatch()
    try:
        stage.open()
        watch.lap("open")
        strikes = draw(seed, seconds, {name: rate for name, rate in faults.items() if name in FAULTS})
        nemesis = Nemesis(stage, strikes, list(faults), seconds)
        nemesis.run()
        watch.lap("play")
        found = _drain(stage, drain_seconds)
        watch.lap("drain")
        stage.stop_supervisors()
        watch.lap("stop")
        evidence = collect(stage, fired(stage, nemesis.struck))
        found += violations(evidence)
        if audit:
            found += _audited(stage)
        watch.lap("check")
        if found:
            for number, supervisor in enumerate(stage.supervisors, 1):
                (directory / f"log-{number}").write_text(supervisor.log)
        return Outcome(found, evidence.fired, _figures(evidence), directory, watch.laps)
    finally:
        stage.close()


class _Stopwatch:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._since = now - self._since, now


def _drain(stage: Stage, seconds: float) -> list[str]:
    """Heals, stops the producers, and waits until every queue is empty; returns what is left if they are not."""
    stage.heal()
    stage.stop_producers()
    try:
        wait_until(lambda: _is_drained(stage), seconds, "drained")
    except AssertionError:
        return [f"not drained after {seconds:.0f} s: {_standing(stage)}"]
    return []


def _is_drained(stage: Stage) -> bool:
    stage.watch()
    if not stage.batches_have_ended() or any(_standing(stage).values()):
        return False
    with stage.connect() as client:
        bases = [queue_base(DEFAULT_PREFIX, name) for name in QUEUES]
        if client.exists(*(f"{base}:{name}" for base in bases for name in ("reports", "resolving"))):
            return False
        outboxes = [f"{DEFAULT_PREFIX}queue:{{{name}}}:outbox" for name in QUEUES]
        return not client.exists(*outboxes) and not any(
            next(client.scan_iter(match=f"{outbox}:*", count=10_000), None) for outbox in outboxes
        )


def _standing(stage: Stage) -> dict[str, dict[str, int]]:
    """The contents of the queues that are not empty."""
    link = Link(stage.server.url, name="chaos")
    try:
        found = {}
        for name in (each for queue in QUEUES for each in (queue, fail_queue(queue))):
            counts = _counts(link, name)
            found[name] = {state: counts[state] for state in _LIVE if counts[state]}
        return {name: states for name, states in found.items() if states}
    finally:
        link.close()


def _counts(link: Link, name: str) -> dict[str, Any]:
    """Also of a fail queue, which no user can name."""
    inspector = Inspector(link, DEFAULT_PREFIX, main_queue(name))
    inspector._base = queue_base(DEFAULT_PREFIX, name)
    return asdict(inspector.counts())


def _audited(stage: Stage) -> list[str]:
    command = [str(BIN / "forq"), "pipeline", "audit", "--redis", stage.server.url]
    done = subprocess.run(
        [*command, "--history", str(stage.ground.directory / "history")], capture_output=True, text=True, check=False
    )
    print(done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr[-500:])
    return [] if done.returncode == 0 else [f"the audit ended with {done.returncode}: {done.stdout[-2000:]}"]


def _figures(evidence: Evidence) -> dict[str, int]:
    verdicts = Counter(verdict for _, verdict in evidence.verdicts.values())
    events = Counter(event.verb for queue in evidence.queues.values() for event in queue.events)
    ends = (
        "done",
        "dead",
        "cancelled",
        "retried",
        "snoozed",
        "stalled",
        "timed_out",
        "suspected",
        "interrupted",
        "returned",
    )
    wanted = ("claimed", *ends, "held", "met", "unmet", "batch_opened", "batch_ended")
    return {**verdicts, **{verb: events[verb] for verb in wanted}, "evictions": len(evidence.evicted)}


def table(outcome: Outcome) -> str:
    """One line per fault: how often it fired, what it hit."""
    rows = []
    for name in ALL_FAULTS:
        if name in outcome.fired:
            hits = Counter(outcome.fired[name])
            shown = ", ".join(f"{times} {what}" for what, times in hits.most_common(6))
            rows.append(f"  {name:<22} {sum(hits.values()):>5}  {shown}")
    return "\n".join(rows)


def main() -> int:
    given = _arguments()
    use_what_is_asked_for()
    try:
        faults = faults_of(given.faults)
    except ValueError as exc:
        print(f"chaos: {exc}", file=sys.stderr)
        return 2
    # Ending the run ends its processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    print(f"seed {given.seed}, {given.seconds:g} s, {len(faults)} faults", flush=True)
    outcome = play(given.seed, given.seconds, faults, audit=given.audit)
    print(table(outcome))
    print("  " + ", ".join(f"{what} {times:,}" for what, times in outcome.figures.items()))
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in outcome.phases.items())
    took = f"{time.monotonic() - began:.0f} s ({phases})"
    print(f"seed {given.seed}: {len(outcome.found)} violations, {took}", flush=True)
    if not outcome.found:
        shutil.rmtree(outcome.directory)
        return 0
    for said in outcome.found[:_SHOWN]:
        print(f"  {said}")
    which = f" FAULTS={given.faults}" if given.faults else ""
    print(f"again: make chaos SEED={given.seed} SECONDS={given.seconds:g}{which}; evidence: {outcome.directory}")
    return 1


def faults_of(text: str) -> dict[str, float]:
    """NAME or NAME:PER_MINUTE, separated by commas; '' means all."""
    faults = {}
    for part in text.split(",") if text else ALL_FAULTS:
        name, _, rate = part.partition(":")
        if name not in ALL_FAULTS or (rate and not rate.isdigit()):
            raise ValueError(f"fault {part!r} is not allowed: NAME or NAME:PER_MINUTE, of {', '.join(ALL_FAULTS)}")
        faults[name] = float(rate) if rate else FAULTS[name][0] if name in FAULTS else 0.0
    return faults


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, epilog=f"{MUTANT}=unfenced: without fences")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--faults", default="", help="NAME or NAME:PER_MINUTE, with commas; default: all")
    parser.add_argument("--no-audit", dest="audit", action="store_false", help="leave out the audit with Spark")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
