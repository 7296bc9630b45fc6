"""forq against every peer, on one server, in one interleaved run.

    python benchmarks/compare.py [--quick] [--only drain,pickup] [--peers huey,sidekiq] [--output results.json]

1. Installs the peers (installing.py); an unavailable one is listed with the reason and skipped.
2. Rounds: each measure of measures.py for each peer, in rotating order. A trial during which other processes used more
   than 20 % of a core is repeated, and not averaged in.
3. For forq and the two fastest to drain: under_load.py. The limit, beside forq: prototype.py. For all: crash.py.
4. Writes results.json, prints the tables (tables.py), draws the chart (chart.py).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import installing, prototype, tables
from benchmarks.crash import DEATHS, crashes
from benchmarks.figures import Trial, summary
from benchmarks.measures import FULL, MEASURES, QUICK, Effort, Figures, drain
from benchmarks.processes import DISTURBED_CORES, Quiet, machine
from benchmarks.roster import Peer, roster
from benchmarks.servers import BenchServer, RedisServer, new_server
from benchmarks.under_load import LOADS, SERVICE_MS, STEADY_CONCURRENCY, backlog, load, load_floor, steady
from benchmarks.worker import Failed
from forq.procs.treekill import become_subreaper

HERE = Path(__file__).resolve().parent
FASTEST = 2
# For repeats of disturbed trials, in all: a busy machine must not make a run take hours.
SPARE_SECONDS = 15 * 60
# Skipped in a quick run.
SLOW = {"drain2", "load", "backlog", "crash_worker"}
Measure = Callable[[Peer, BenchServer, Effort, int], tuple[Figures, list[float]]]


@dataclass
class Run:
    """The trials so far, and their limits."""

    servers: Mapping[str, BenchServer]
    effort: Effort
    rounds: int
    repeats: int
    deadline: float
    spare_seconds: float = SPARE_SECONDS
    trials: list[Trial] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def series(self, measures: Mapping[str, Measure], peers: list[Peer]) -> None:
        """Runs these measures of these peers in all rounds, so that compared trials are close together."""
        for number in range(self.rounds):
            turn = number % max(1, len(peers))
            for name, measure in measures.items():
                for peer in peers[turn:] + peers[:turn]:
                    if peer.bulk or name != "bulk":
                        self._until_quiet(name, measure, peer, number)

    def _until_quiet(self, name: str, measure: Measure, peer: Peer, number: int) -> None:
        """Repeats a disturbed trial, within limits; a peer that failed here before is not tried again."""
        if any(trial.error for trial in self.trials if (trial.peer, trial.measure) == (peer.name, name)):
            return
        for attempt in range(1 + self.repeats):
            began = time.monotonic()
            if began > self.deadline:
                self.trials.append(Trial(peer.name, name, number, error="no time was left"))
                return
            self.say(f"{name}, round {number + 1} of {self.rounds}: {peer.name}" + (" again" if attempt else ""))
            trial = self._trial(name, measure, peer, number)
            self.trials.append(trial)
            if attempt:
                self.spare_seconds -= time.monotonic() - began
            if trial.error or not trial.disturbed or self.spare_seconds <= 0:
                return

    def _trial(self, name: str, measure: Measure, peer: Peer, number: int) -> Trial:
        trial = Trial(peer.name, name, number)
        server = self.servers[peer.database]
        quiet = Quiet()
        try:
            server.flush()
            trial.figures, trial.samples_ms = measure(peer, server, self.effort, number)
        except (Failed, OSError, installing.Unavailable) as exc:
            trial.error = str(exc)
        except Exception as exc:  # whatever is wrong with this peer, the others are still measured
            trial.error = f"{type(exc).__name__}: {exc}"
        trial.foreign_share = round(quiet.foreign_share(), 3)
        trial.disturbed = trial.foreign_share > DISTURBED_CORES
        return trial

    def say(self, text: str) -> None:
        took = time.monotonic() - self.began
        if sys.stderr.isatty():
            print(f"\r\033[K{took:4.0f} s  {text}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{took:4.0f} s  {text}", file=sys.stderr, flush=True)

    def summaries(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for peer, measure in dict.fromkeys((trial.peer, trial.measure) for trial in self.trials):
            same = [trial for trial in self.trials if (trial.peer, trial.measure) == (peer, measure)]
            found.setdefault(peer, {})[measure] = summary(same)
        return found


def available(wanted: list[str]) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be measured here, and the reasons for the others."""
    peers, left_out = [], {}
    for peer in roster():
        if peer.name in wanted or peer.name == "forq":
            try:
                peer.install(peer)
                peers.append(peer)
            except installing.Unavailable as exc:
                left_out[peer.name] = str(exc)
    return peers, left_out


def use_redis_of_debian() -> None:
    """Unless the machine has its own server. forq's bundled server uses the malloc of libc, which slows down as its
    heap grows; without any other it is used, and the tables mention it."""
    if not any(map(shutil.which, ("valkey-server", "redis-server"))):
        try:
            os.environ["PATH"] = f"{installing.redis_server()}:{os.environ['PATH']}"
        except installing.Unavailable as exc:
            print(f"no redis-server: {exc}", file=sys.stderr)


def start_others(servers: dict[str, BenchServer], peers: list[Peer], left_out: dict[str, str]) -> None:
    """Starts the other servers that the peers need. A peer whose server does not start is left out."""
    for peer in list(peers):
        if peer.database not in servers:
            try:
                servers[peer.database] = new_server(peer.database)
                servers[peer.database].start()
            except installing.Unavailable as exc:
                servers.pop(peer.database).remove()
                peers.remove(peer)
                left_out[peer.name] = str(exc)


def fastest(run: Run, peers: list[Peer]) -> list[Peer]:
    """forq, and the peers with the highest drain rates."""
    found = run.summaries()
    rates = {peer.name: found.get(peer.name, {}).get("drain", {}).get("per_second", 0.0) for peer in peers}
    others = sorted((peer for peer in peers if peer.name != "forq"), key=lambda peer: -rates[peer.name])
    return [peer for peer in peers if peer.name == "forq"] + others[:FASTEST]


def limit(run: Run, forq: Peer) -> None:
    """The bare loops and a drain of forq in turn, so that their ratio does not depend on when each ran."""
    loops = {batch: Peer(bare_loop(batch), "", "", 0, lambda _: None) for batch in prototype.BATCHES}

    def measure(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
        assert isinstance(server, RedisServer)
        batch = next(batch for batch, loop in loops.items() if loop is peer)
        return prototype.measure(server, int(50_000 * effort.drain_seconds), batch), []

    def either(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
        return (drain if peer is forq else measure)(peer, server, effort, number)

    run.series({"limit": either}, [*loops.values(), forq])


def bare_loop(batch: int) -> str:
    return f"bare loop, {batch} at a time"


def measure_all(run: Run, peers: list[Peer], only: set[str], crash_cap_seconds: float) -> None:
    run.series({name: measure for name, measure in MEASURES.items() if name in only}, peers)
    chosen = fastest(run, peers)
    if "steady" in only:
        steadies = {f"steady{workers}": partial(steady, concurrency=workers) for workers in STEADY_CONCURRENCY}
        run.series(steadies, chosen)
    if "load" in only:
        run.series({f"load{percent}": partial(load, percent=percent) for percent in LOADS}, chosen)
    if "backlog" in only:
        run.series({f"backlog{size}": partial(backlog, waiting=size) for size in run.effort.backlogs}, chosen)
    if "prototype" in only:
        limit(run, chosen[0])
    if deaths := [death for death in DEATHS if f"crash_{death}" in only]:
        run.trials += crashes(peers, deaths, crash_cap_seconds, run.deadline, run.say)


def results(run: Run, peers: list[Peer], left_out: dict[str, str], load_before: float, cap: float) -> dict[str, Any]:
    server = run.servers["redis"]
    assert isinstance(server, RedisServer)
    with server.connect() as client:
        info = client.info("server")
    name = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    version = info.get("valkey_version") or info["redis_version"]
    summaries = run.summaries()
    bare = {batch: summaries.pop(bare_loop(batch), {}).get("limit") for batch in prototype.BATCHES}
    floors = {f"load{p}": load_floor(p, run.effort.load_seconds, run.rounds) for p in LOADS}
    return {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_seconds": round(time.monotonic() - run.began),
        "commit": _commit(),
        "machine": machine(),
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
        "server": f"{name} {version}, unix socket, no persistence",
        "python": sys.version.split()[0],
        "rounds": run.rounds,
        "effort": vars(run.effort),
        "service_ms": SERVICE_MS,
        "crash_cap_seconds": cap,
        "disturbed_cores": DISTURBED_CORES,
        "disturbed_trials": sum(trial.disturbed for trial in run.trials),
        "peers": {peer.name: described(peer) for peer in peers},
        "left_out": left_out,
        "floors": floors,
        "prototype": {batch: found for batch, found in bare.items() if found is not None},
        "summaries": summaries,
        "trials": [trial.as_json() for trial in run.trials],
    }


def described(peer: Peer) -> dict[str, Any]:
    return {
        "version": peer.version,
        "released": peer.released and peer.released.isoformat(),
        "note": peer.note,
        "settings": peer.settings,
        "durable_settings": peer.durable,
    }


def _commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def draw(results_path: Path, chart_path: Path) -> None:
    """In its own environment: forq itself does not need matplotlib."""
    try:
        python = installing.chart_python()
        installing.run([str(python), str(HERE / "chart.py"), str(results_path), str(chart_path)])
        print(f"wrote {chart_path}", file=sys.stderr)
    except installing.Unavailable as exc:
        print(f"no chart: {exc}", file=sys.stderr)


def main() -> None:
    every = [*MEASURES, "steady", "load", "backlog", "prototype", *(f"crash_{death}" for death in DEATHS)]
    names = [peer.name for peer in roster() if peer.name != "forq"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few jobs: less than 5 minutes")
    parser.add_argument("--only", help=f"measures, of {','.join(every)}; default: all, quick: without {','.join(SLOW)}")
    parser.add_argument("--peers", default=",".join(names), help=f"default: {','.join(names)}")
    parser.add_argument("--rounds", type=int, help="default: 3, quick: 1")
    parser.add_argument("--repeats", type=int, help="of a disturbed trial, within 15 minutes; default: 3, quick: 0")
    parser.add_argument("--crash-cap", type=float, help="seconds to wait for a lost job; default: 120, quick: 10")
    parser.add_argument("--minutes", type=float, help="begin no trial after so many minutes; default: 120, quick: 4.5")
    parser.add_argument("--output", type=Path, default=HERE / ".results" / "results.json")
    given = parser.parse_args()
    only = set(given.only.split(",")) if given.only else set(every) - (SLOW if given.quick else set())
    wanted = given.peers.split(",")
    if unknown := (only - set(every)) | (set(wanted) - set(names)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    peers, left_out = available(wanted)
    use_redis_of_debian()
    # Orphans of a killed worker are adopted by this process and count as its own.
    become_subreaper()
    load_before = os.getloadavg()[0]
    rounds, repeats = given.rounds or (1 if given.quick else 3), 0 if given.quick else 3
    repeats = repeats if given.repeats is None else given.repeats
    cap = given.crash_cap or (10.0 if given.quick else 120.0)
    deadline = time.monotonic() + 60 * (given.minutes or (4.5 if given.quick else 120))
    servers: dict[str, BenchServer] = {"redis": RedisServer()}
    run = Run(servers, QUICK if given.quick else FULL, rounds, repeats, deadline)
    try:
        servers["redis"].start()
        start_others(servers, peers, left_out)
        measure_all(run, peers, only, cap)
        found = results(run, peers, left_out, load_before, cap)
    finally:
        for server in servers.values():
            server.remove()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    print(file=sys.stderr)
    print(tables.all_tables(found))
    print(f"wrote {given.output}", file=sys.stderr)
    draw(given.output, given.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
