"""Faults of the server, and operations on its queues: killed, frozen, full; queues are paused, jobs cancelled.

A fault that queries the server holds it meanwhile, so that it is neither down nor frozen.
"""

import os
import random
import signal

from forq import Client, ForqError
from tests.chaos.ground import append
from tests.chaos.hit import Hit
from tests.chaos.producer import ONCE
from tests.chaos.stage import EXPIRY_SECONDS, QUEUES, Stage

# From a producer's verdicts: ids that may still be in the queue.
_RECENT_BYTES = 20_000


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
    """Runs a command on the server; False while it is down or frozen."""
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
    """Cancels recently enqueued jobs, with `cancel` or `remove`."""
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
