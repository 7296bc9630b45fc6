"""Faults of forq's own processes: killed, frozen, cut off, or made to die at a crash point."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from forq.errors import ForqError
from tests.chaos.crash_points import CRASH_POINTS
from tests.chaos.ground import append
from tests.chaos.hit import Hit
from tests.chaos.producer import COROUTINES, ONCE
from tests.chaos.stage import EXPIRY_SECONDS, QUEUES, Stage, Supervisor

# Lines of the trace: recently running jobs.
_RECENT_BYTES = 20_000
_LONGEST_ZOMBIE_SECONDS = 5 * EXPIRY_SECONDS
_FROZEN_SECONDS = 4.0
_TOOK_OVER = "evicted processors without heartbeats"


def _kill(pid: int, what: str) -> Hit | None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Hit(what)


def kill_child(stage: Stage, chance: random.Random) -> Hit | None:
    supervisor = chance.choice(stage.supervisors)
    children = [] if supervisor.down else supervisor.queue_children()
    if not children:
        return None
    pid, title = chance.choice(children)
    return _kill(pid, " ".join(title.split(" ")[1:3]))


def kill_service(name: str, stage: Stage, chance: random.Random) -> Hit | None:
    supervisor = chance.choice(stage.supervisors)
    pids = [] if supervisor.down else [pid for pid, title in supervisor.children() if title.startswith(f"forq: {name}")]
    return _kill(pids[0], supervisor.name) if pids else None


def _freeze(process: psutil.Process, what: str) -> Hit | None:
    """Freezes it longer than allowed. A process that runs a job wakes up again; any other is replaced by then."""
    try:
        process.suspend()
    except psutil.NoSuchProcess:
        return None

    def undo() -> bool:
        _resume([process])
        return True

    return Hit(what, undo, _FROZEN_SECONDS, lambda: not process.is_running())


def freeze_child(stage: Stage, chance: random.Random) -> Hit | None:
    supervisor = chance.choice(stage.supervisors)
    children = [] if supervisor.down else supervisor.queue_children()
    if not children:
        return None
    pid, title = chance.choice(children)
    with suppress(psutil.NoSuchProcess):
        return _freeze(psutil.Process(pid), " ".join(title.split(" ")[1:3]))
    return None


def freeze_service(stage: Stage, chance: random.Random) -> Hit | None:
    supervisor = chance.choice(stage.supervisors)
    name = chance.choice(("pulse", "scribe", "clerk", "logger"))
    pids = [] if supervisor.down else [pid for pid, title in supervisor.children() if title.startswith(f"forq: {name}")]
    with suppress(psutil.NoSuchProcess):
        return _freeze(psutil.Process(pids[0]), f"{name} of {supervisor.name}") if pids else None
    return None


def kill_producer(stage: Stage, chance: random.Random) -> Hit | None:
    living = [producer for producer in stage.producers if producer.poll() is None]
    if not living:
        return None
    producer = chance.choice(living)
    producer.kill()
    producer.wait()
    stage.start_producer()
    return Hit("producer")


def kill_supervisor(stage: Stage, chance: random.Random) -> Hit | None:
    supervisor = stage.any_supervisor(chance)
    if supervisor is None or not stage.take(supervisor.name):
        return None
    supervisor.kill()

    def undo() -> bool:
        supervisor.start(ready=False)
        return stage.release(supervisor.name)

    return Hit(supervisor.name, undo, chance.choice((0.0, 0.2, 1.5 * EXPIRY_SECONDS)))


def _stop_tree(supervisor: Supervisor) -> list[psutil.Process]:
    """Stops the whole tree, the supervisor first, so that it replaces none; repeats until no new process appears."""
    stopped: dict[int, psutil.Process] = {}
    while True:
        new = [process for process in supervisor.processes() if process.pid not in stopped]
        if not new:
            return list(stopped.values())
        for process in new:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
            stopped[process.pid] = process


def _has_taken_over(stage: Stage, supervisor: Supervisor) -> Callable[[], bool]:
    """Whether the other supervisor has evicted this one from any queue since now; the rest follows within ms."""
    other = next(each for each in stage.supervisors if each is not supervisor)
    before = other.log.count(_TOOK_OVER)
    return lambda: other.log.count(_TOOK_OVER) > before


def _running_jobs(stage: Stage, pids: set[int]) -> list[tuple[str, str]]:
    """(queue, id) of the jobs that these processes are running, according to the last trace lines."""
    size = stage.ground.trace.stat().st_size if stage.ground.trace.exists() else 0
    if size == 0:
        return []
    with open(stage.ground.trace, "rb") as trace:
        trace.seek(max(0, size - _RECENT_BYTES))
        recent = [line.decode().split(" ") for line in trace.read().splitlines()[1:]]
    last = {(queue, job, fence): event for queue, job, fence, pid, event, *_ in recent if int(pid) in pids}
    return [(queue, job) for (queue, job, _), event in last.items() if event in ("start", "slice")]


def kill_job(stage: Stage, chance: random.Random) -> Hit | None:
    """Kills a running job through the control socket: it is cancelled, or returned. Coroutines rather than others: the
    faults that kill processes do not cancel any."""
    supervisor = stage.any_supervisor(chance)
    if supervisor is None:
        return None
    jobs = _running_jobs(stage, {pid for pid, _ in supervisor.queue_children()})
    jobs = [job for job in jobs if job[0] == COROUTINES] or jobs
    if not jobs or not stage.take(supervisor.name):
        return None
    queue, job_id = chance.choice(jobs)
    retry = queue not in ONCE or chance.random() < 0.5
    if not retry:
        append(stage.ground.taken_away, f"unknown kill {job_id}")
    try:
        supervisor.call("kill", name=queue, id=job_id, retry=retry)
    except ForqError:
        # It has ended, or its process is being replaced.
        return None
    finally:
        stage.release(supervisor.name)
    return Hit(f"{queue}, {'returned' if retry else 'cancelled'}")


def restart_queue(stage: Stage, chance: random.Random) -> Hit | None:
    """Deploys: new processes join while the old ones run jobs. Other faults hit both."""
    supervisor = stage.any_supervisor(chance)
    if supervisor is None or not stage.take(supervisor.name):
        return None
    queue = chance.choice(QUEUES)
    try:
        supervisor.call("queue.restart", name=queue, wait=2)
    except ForqError:
        # A fault hit the new processes: the old ones stay.
        return None
    finally:
        stage.release(supervisor.name)
    return Hit(queue)


def zombie(stage: Stage, chance: random.Random) -> Hit | None:
    """Frozen during a job until the other supervisor has it; then its children wake before it, or after."""
    supervisor = stage.any_supervisor(chance)
    if supervisor is None or not supervisor.queue_children() or not stage.take(supervisor.name, "redis"):
        return None
    enough = _has_taken_over(stage, supervisor)
    children = {pid for pid, _ in supervisor.queue_children()}
    try:
        stopped = _stop_tree(supervisor)
    except psutil.NoSuchProcess:
        stopped = []
    if not _running_jobs(stage, children & {process.pid for process in stopped}):
        _resume(stopped)
        stage.release(supervisor.name, "redis")
        return None
    ahead = chance.choice((0.0, 0.1, 0.3))  # how long the children do not learn that they were evicted
    woken_at: list[float] = []

    def undo() -> bool:
        if not woken_at:
            _resume([process for process in stopped if process.pid in children])
            woken_at.append(time.monotonic())
        if time.monotonic() - woken_at[0] < ahead:
            return False
        _resume(stopped)
        return stage.release(supervisor.name, "redis")

    return Hit(f"{len(stopped)} processes of {supervisor.name}", undo, _LONGEST_ZOMBIE_SECONDS, enough)


def _resume(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def partition(stage: Stage, chance: random.Random) -> Hit | None:
    """Its handlers continue without the server until the other supervisor has its jobs."""
    supervisor = stage.any_supervisor(chance)
    if supervisor is None or not stage.take(supervisor.name, "redis"):
        return None
    enough = _has_taken_over(stage, supervisor)
    supervisor.proxy.freeze()

    def undo() -> bool:
        supervisor.proxy.thaw()
        return stage.release(supervisor.name, "redis")

    return Hit(supervisor.name, undo, _LONGEST_ZOMBIE_SECONDS, enough)


def crash_at(point: str, stage: Stage, chance: random.Random) -> Hit | None:
    """Arms the point; counted when a process has died there. A recovery needs a victim first."""
    (stage.ground.armed / point).touch()
    if point.endswith("_recover"):
        kill_child(stage, chance)
    return Hit(CRASH_POINTS[point])
