"""Measures when a job runs again whose worker was killed with -9.

Two deaths: `process`, the process that runs the job; `worker`, the whole worker with all its processes. The dead part
is restarted at once, as a process manager would. Each peer has its own server and is left waiting while others are
tried, since most take minutes or never recover.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.figures import Trial
from benchmarks.installing import Unavailable
from benchmarks.processes import DISTURBED_CORES, Quiet
from benchmarks.roster import Peer
from benchmarks.servers import new_server
from benchmarks.worker import Bench, Failed

DEATHS = ("process", "worker")
# How long to wait for a peer before the next one begins.
_SOON_SECONDS = 1.5
# Longer than the test, so that no job ends by itself.
_HOLD_MS = 3_600_000
_START_SECONDS = 60.0


@dataclass
class _Killed:
    trial: Trial
    bench: Bench
    killed_ns: int
    attempts: int

    def look(self) -> bool:
        """Whether the job has begun again; records after how long."""
        again = [r.started_ns for r in self.bench.records()[self.attempts :] if r.started_ns > self.killed_ns]
        if again and not self.trial.figures:
            self.trial.figures["seconds"] = (min(again) - self.killed_ns) / 1e9
        return bool(again)


def crashes(
    peers: list[Peer], deaths: Sequence[str], cap_seconds: float, deadline: float, say: Callable[[str], None]
) -> list[Trial]:
    """A trial per peer and death; one without figures did not run again in time. None begins after the deadline."""
    trials, waiting = [], []
    with ExitStack() as stack:
        for death in deaths:
            for peer in peers:
                say(f"crash, {death} killed: {peer.name}")
                trial = Trial(peer.name, f"crash_{death}", 0)
                trials.append(trial)
                if time.monotonic() > deadline:
                    trial.error = "no time was left"
                    continue
                quiet = Quiet()
                try:
                    killed = _kill(trial, peer, death, stack)
                except (Failed, OSError, Unavailable) as exc:
                    trial.error = str(exc)
                    continue
                _wait(killed, min(_SOON_SECONDS, cap_seconds))
                # A later recovery waits for a timeout, which other trials do not disturb.
                trial.foreign_share = round(quiet.foreign_share(), 3)
                trial.disturbed = trial.foreign_share > DISTURBED_CORES
                waiting.append(killed)
        for killed in waiting:
            say(f"crash: waiting for {killed.trial.peer}, at most {cap_seconds:.0f} s from its kill")
            _wait(killed, cap_seconds)
    return trials


def _kill(trial: Trial, peer: Peer, death: str, stack: ExitStack) -> _Killed:
    server = new_server(peer.database)
    stack.callback(server.remove)
    server.flush()
    bench = stack.enter_context(Bench(peer, server, concurrency=1, durable=True))
    worker = bench.work()
    bench.warm(_START_SECONDS)
    known = len(bench.records())
    bench.arrive([0], _HOLD_MS)
    running = bench.wait_for_records(known + 1, _START_SECONDS)[known]
    time.sleep(0.2)  # kill it while it runs, not in its first microseconds
    killed_ns = time.monotonic_ns()
    if death == "worker":
        bench.kill(worker)
    else:
        os.kill(running.pid, signal.SIGKILL)
        _forget_if_dead(bench, worker)
    if not bench.workers:
        bench.work()
    return _Killed(trial, bench, killed_ns, known + 1)


def _forget_if_dead(bench: Bench, worker: subprocess.Popen[bytes]) -> None:
    """Whether the job's process was the whole worker: then the worker has exited."""
    try:
        worker.wait(0.5)
    except subprocess.TimeoutExpired:
        return
    bench.kill(worker)


def _wait(killed: _Killed, seconds: float) -> None:
    deadline = killed.killed_ns + int(seconds * 1e9)
    while not killed.look() and time.monotonic_ns() < deadline:
        time.sleep(0.02)
