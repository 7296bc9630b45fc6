"""Every fault that a run can have: how often it comes, how it is done, what it hit.

A fault is a function of the stage and of its own random choices. It returns None while there is nothing that it could
hit (it is tried again shortly after), else a Hit.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import psutil

from forq import Client, ForqError
from tests.chaos.crash_points import CRASH_POINTS
from tests.chaos.ground import append, lines
from tests.chaos.producer import MISDEEDS, ONCE
from tests.chaos.stage import EXPIRY_SECONDS, QUEUES, Stage, Supervisor

# What was drawn among the last so many ids may still be in its queue.
_RECENT_BYTES = 20_000
_LONGEST_ZOMBIE_SECONDS = 5 * EXPIRY_SECONDS
_TOOK_OVER = "took over from silent processors"


@dataclass(frozen=True)
class Hit:
    """`undo` is called after `seconds`, or as soon as `enough` says so, and again until it says that it is done."""

    what: str
    undo: Callable[[], bool] | None = None
    seconds: float = 0.0
    enough: Callable[[], bool] = lambda: False


Fault = Callable[[Stage, random.Random], Hit | None]


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
    """Its whole tree, the supervisor first, so that it replaces nobody; new ones until there are none."""
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
    """Whether the other one has evicted this one since now, from some queue; the others follow within milliseconds."""
    other = next(each for each in stage.supervisors if each is not supervisor)
    before = other.log.count(_TOOK_OVER)
    return lambda: other.log.count(_TOOK_OVER) > before


def _runs_a_job(stage: Stage, pids: set[int]) -> bool:
    """Whether one of these processes is in the midst of a job, by what the trace has last."""
    size = stage.ground.trace.stat().st_size if stage.ground.trace.exists() else 0
    if size == 0:
        return False
    with open(stage.ground.trace, "rb") as trace:
        trace.seek(max(0, size - _RECENT_BYTES))
        recent = [line.decode().split(" ") for line in trace.read().splitlines()[1:]]
    last = {(job, fence): event for _, job, fence, pid, event, *_ in recent if int(pid) in pids}
    return any(event in ("start", "slice") for event in last.values())


def zombie(stage: Stage, chance: random.Random) -> Hit | None:
    """Frozen in the midst of a job until the other supervisor has it; then its children wake before it, or after."""
    supervisor = stage.any_supervisor(chance)
    if supervisor is None or not supervisor.queue_children() or not stage.take(supervisor.name, "redis"):
        return None
    enough = _has_taken_over(stage, supervisor)
    children = {pid for pid, _ in supervisor.queue_children()}
    try:
        stopped = _stop_tree(supervisor)
    except psutil.NoSuchProcess:
        stopped = []
    if not _runs_a_job(stage, children & {process.pid for process in stopped}):
        _resume(stopped)
        stage.release(supervisor.name, "redis")
        return None
    ahead = chance.choice((0.0, 0.1, 0.3))  # how long nobody tells the children that they were evicted
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
    """Its handlers go on while the server hears nothing of it, until the other supervisor has its jobs."""
    supervisor = stage.any_supervisor(chance)
    if supervisor is None or not stage.take(supervisor.name, "redis"):
        return None
    enough = _has_taken_over(stage, supervisor)
    supervisor.proxy.freeze()

    def undo() -> bool:
        supervisor.proxy.thaw()
        return stage.release(supervisor.name, "redis")

    return Hit(supervisor.name, undo, _LONGEST_ZOMBIE_SECONDS, enough)


def kill_redis(stage: Stage, chance: random.Random) -> Hit | None:
    if not stage.take("redis"):
        return None
    stage.server.kill()

    def undo() -> bool:
        stage.server.start()
        return stage.release("redis")

    return Hit("the server, its data read again", undo, chance.choice((0.0, 0.3, 0.8)))


def freeze_redis(stage: Stage, chance: random.Random) -> Hit | None:
    if not stage.take("redis"):
        return None
    os.kill(stage.server.pid, signal.SIGSTOP)

    def undo() -> bool:
        os.kill(stage.server.pid, signal.SIGCONT)
        return stage.release("redis")

    return Hit("the server", undo, chance.choice((0.2, 0.8, 1.5 * EXPIRY_SECONDS)))


def _with_redis(stage: Stage, *command: str) -> bool:
    """Asks the server itself; False while it is down or frozen."""
    if not stage.take("redis"):
        return False
    try:
        with stage.connect() as client:
            client.execute_command(*command)
    finally:
        stage.release("redis")
    return True


def client_kill(stage: Stage, chance: random.Random) -> Hit | None:
    kind = chance.choice(("normal", "normal", "pubsub"))
    return Hit(f"{kind} clients") if _with_redis(stage, "CLIENT", "KILL", "TYPE", kind) else None


def forget_scripts(kind: str, stage: Stage, chance: random.Random) -> Hit | None:
    return Hit("the server") if _with_redis(stage, kind, "FLUSH") else None


def out_of_memory(stage: Stage, chance: random.Random) -> Hit | None:
    if not stage.take("memory"):
        return None
    if not _with_redis(stage, "CONFIG", "SET", "maxmemory", "1"):
        stage.release("memory")
        return None

    def undo() -> bool:
        return _with_redis(stage, "CONFIG", "SET", "maxmemory", "0") and stage.release("memory")

    return Hit("the server", undo, chance.choice((0.3, 1.0)))


def pause(stage: Stage, chance: random.Random) -> Hit | None:
    queue = chance.choice(QUEUES)
    if not stage.take(f"queue {queue}"):
        return None

    def undo() -> bool:
        return _set_paused(stage, queue, paused=False) and stage.release(f"queue {queue}")

    if not _set_paused(stage, queue, paused=True):
        stage.release(f"queue {queue}")
        return None
    return Hit(queue, undo, chance.choice((0.2, 1.0)))


def _set_paused(stage: Stage, queue: str, *, paused: bool) -> bool:
    if not stage.take("redis"):
        return False
    try:
        with stage.registry() as registry:
            registry.pause(queue, paused=paused)
    finally:
        stage.release("redis")
    return True


def cancel(stage: Stage, chance: random.Random) -> Hit | None:
    """Takes away what was enqueued lately, with `cancel` or with `remove`."""
    producers = sorted(stage.ground.verdicts.iterdir())
    if not producers:
        return None
    recent = chance.choice(producers).read_bytes()[-_RECENT_BYTES:].decode().splitlines()[1:]
    stored = [words for line in recent if (words := line.split(" "))[0] == "ok" and words[1] in ONCE]
    if not stored or not stage.take("redis"):
        return None
    words = chance.choice(stored[-50:])
    queue, job_id, how = words[1], chance.choice(words[2:]), chance.choice(("cancel", "remove"))
    try:
        client = Client(stage.server.url)
        taken = getattr(client.queue(queue), how)(job_id)
        client.close()
    except ForqError:
        append(stage.ground.taken_away, f"unknown {how} {job_id}")
        return None
    finally:
        stage.release("redis")
    if taken:
        append(stage.ground.taken_away, f"yes {how} {job_id}")
    return Hit(f"{how}: {'yes' if taken else 'too late'}")


def drop_reply(stage: Stage, chance: random.Random) -> Hit | None:
    """Counted when it has happened: `fired` looks at the proxies."""
    number = chance.randrange(3)
    stage.proxies[number].drop_reply(chance.choice((1, 2, 3, 5, 8, 13)))
    return Hit(_LINKS[number])


def cut(stage: Stage, chance: random.Random) -> Hit | None:
    number = chance.randrange(3)
    connections = stage.proxies[number].connections()
    stage.proxies[number].cut()
    return Hit(f"connections of {_LINKS[number]}") if connections else None


def delay(stage: Stage, chance: random.Random) -> Hit | None:
    number = chance.randrange(3)
    stage.proxies[number].delay(chance.choice((0.002, 0.01, 0.05)))

    def undo() -> bool:
        stage.proxies[number].delay(0.0)
        return True

    return Hit(_LINKS[number], undo, chance.choice((0.5, 1.5)))


def freeze_link(stage: Stage, chance: random.Random) -> Hit | None:
    """For less than an expiry; `partition` is for more."""
    number = chance.randrange(3)
    holder = "producers" if number == 0 else stage.supervisors[number - 1].name
    if not stage.take(holder):
        return None
    stage.proxies[number].freeze()

    def undo() -> bool:
        stage.proxies[number].thaw()
        return stage.release(holder)

    return Hit(_LINKS[number], undo, chance.choice((0.1, 0.5, 1.0)))


def half_open(stage: Stage, chance: random.Random) -> Hit | None:
    number = chance.randrange(3)
    if not stage.proxies[number].connections():
        return None
    stage.proxies[number].half_open(chance.random())
    return Hit(f"a connection of {_LINKS[number]}")


def crash_at(point: str, stage: Stage, chance: random.Random) -> Hit | None:
    """Arms the point; counted when somebody has died there. For a recovery somebody has to die first."""
    (stage.ground.armed / point).touch()
    if point.endswith("_recover"):
        kill_child(stage, chance)
    return Hit(CRASH_POINTS[point])


_LINKS = ("producers", "supervisor 1", "supervisor 2")

FAULTS: dict[str, tuple[float, Fault]] = {
    "kill_child": (40, kill_child),
    "kill_pulse": (6, partial(kill_service, "pulse")),
    "kill_clerk": (4, partial(kill_service, "clerk")),
    "kill_scribe": (4, partial(kill_service, "scribe")),
    "kill_producer": (3, kill_producer),
    "kill_supervisor": (4, kill_supervisor),
    "zombie": (4, zombie),
    "partition": (2, partition),
    "kill_redis": (3, kill_redis),
    "freeze_redis": (3, freeze_redis),
    "client_kill": (6, client_kill),
    "script_flush": (6, partial(forget_scripts, "SCRIPT")),
    "function_flush": (6, partial(forget_scripts, "FUNCTION")),
    "out_of_memory": (4, out_of_memory),
    "pause": (5, pause),
    "cancel": (90, cancel),
    "drop_reply": (60, drop_reply),
    "cut": (6, cut),
    "delay": (4, delay),
    "freeze_link": (4, freeze_link),
    "half_open": (3, half_open),
    **{f"crash_{point}": (6.0, partial(crash_at, point)) for point in CRASH_POINTS},
}
# Those that jobs bring along: `fired` looks at the trace.
HANDLER_FAULTS = tuple(f"handler_{what}" for what in MISDEEDS)
ALL_FAULTS = (*FAULTS, *HANDLER_FAULTS)


def fired(stage: Stage, struck: dict[str, list[str]]) -> dict[str, list[str]]:
    """What each fault has hit: what the nemesis knows, or where that only armed it, the evidence."""
    found = {name: list(hits) for name, hits in struck.items()}
    if "drop_reply" in found:
        found["drop_reply"] = [
            link for link, proxy in zip(_LINKS, stage.proxies, strict=True) for _ in range(proxy.dropped)
        ]
    crashed = [words[0] for words in lines(stage.ground.crashed)]
    for point, whom in CRASH_POINTS.items():
        if f"crash_{point}" in found:
            found[f"crash_{point}"] = [whom] * crashed.count(point)
    done = [words[4] for words in lines(stage.ground.trace)]
    for name in set(HANDLER_FAULTS) & set(found):
        what = name.removeprefix("handler_")
        found[name] = ["a handler"] * done.count(what)
    return found
