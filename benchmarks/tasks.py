"""A typed task of forq against a plain handler, and against tasks of Taskiq, Dramatiq and Celery.

    python benchmarks/tasks.py [--rounds 9] [--no-peers]

Each job has two typed arguments and does nothing. All run on one server, interleaved: three rounds with all, then more
rounds with forq alone, since its two rows differ by less than the noise of three. The table shows medians. Exits with 1
if a task is more than 15 % slower than a handler at enqueue or drain, or takes more than four times as long at bulk.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compare import Run, use_redis_of_debian
from benchmarks.installing import Unavailable
from benchmarks.measures import MEASURES, Effort
from benchmarks.roster import Peer, task_roster
from benchmarks.servers import RedisServer
from benchmarks.tables import markdown, number
from forq.procs.treekill import become_subreaper

EFFORT = Effort(1.5, 1.5, 0, 0.0, 0.0, 0.0, 0.0, (), 0, patience_seconds=60.0)
PEER_ROUNDS = 3
# The least share of the handler's rate that a task may have.
LEAST_SHARE = {"enqueue": 0.85, "bulk": 0.25, "drain": 0.85}


def installed(peers: list[Peer]) -> list[Peer]:
    found = []
    for peer in peers:
        try:
            peer.install(peer)
            found.append(peer)
        except Unavailable as exc:
            print(f"left out: {peer.name}: {exc}", file=sys.stderr)
    return found


def rates(run: Run) -> dict[str, dict[str, float]]:
    """Jobs per second, by peer and measure."""
    summaries: dict[str, dict[str, Any]] = run.summaries()
    return {
        peer: {name: found["per_second"] for name, found in measures.items() if "per_second" in found}
        for peer, measures in summaries.items()
    }


def table(found: dict[str, dict[str, float]]) -> str:
    rows = [[peer, *(number(measures.get(name)) for name in LEAST_SHARE)] for peer, measures in found.items()]
    return markdown(["", *(f"{name} /s" for name in LEAST_SHARE)], rows)


def too_slow(found: dict[str, dict[str, float]]) -> list[str]:
    """The measures in which a task is slower than allowed."""
    task, handler = found["forq task"], found["forq"]
    return [
        f"{name}: a task reaches {task[name] / handler[name]:.0%} of a handler's rate, at least {share:.0%} is required"
        for name, share in LEAST_SHARE.items()
        if task[name] < share * handler[name]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of forq's task and handler (default: 9)")
    parser.add_argument("--no-peers", action="store_true", help="only forq's task and handler")
    given = parser.parse_args()
    peers = [peer for peer in task_roster() if peer.name.startswith("forq") or not given.no_peers]
    peers = installed(peers)
    for peer in peers:
        peer.environ["BENCH_TYPED"] = "1"
    use_redis_of_debian()
    become_subreaper()
    server = RedisServer()
    measures = {name: MEASURES[name] for name in LEAST_SHARE}
    run = Run({"redis": server}, EFFORT, min(given.rounds, PEER_ROUNDS), repeats=1, deadline=time.monotonic() + 600)
    try:
        server.start()
        run.series(measures, peers)
        run.rounds = given.rounds - run.rounds
        run.series(measures, [peer for peer in peers if peer.name.startswith("forq")])
    finally:
        server.remove()
    for trial in run.trials:
        if trial.error:
            print(f"failed: {trial.peer}, {trial.measure}: {trial.error}", file=sys.stderr)
    found = rates(run)
    print(f"\n{table(found)}\n")
    disturbed = sum(trial.disturbed for trial in run.trials)
    print(f"{disturbed} of {len(run.trials)} trials were disturbed; load average {os.getloadavg()[0]:.2f}")
    slow = too_slow(found)
    print("\n".join(slow) or "a task is as fast as required")
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()
