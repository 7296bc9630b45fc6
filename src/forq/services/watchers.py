"""Those who watch a job through the control socket: each is answered when something has changed, or after a while.

1. The clerk hears whose progress has changed, or is over because the job has ended or gone back; then it looks.
2. Of jobs that tell no progress nobody says when they begin or end: that would cost every turn of every worker. The
   clerk looks at a job that is watched once a second instead; one that nobody watches costs nothing.
3. It listens only while somebody watches.
"""

import hashlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from forq.broker.inspect import Viewer
from forq.broker.keys import progress_channels, queue_base, queue_of_channel
from forq.broker.link import Link
from forq.broker.pubsub import Listener
from forq.errors import ForqError, RedisUnavailable, UnknownJob, UsageError
from forq.procs.loop import Loop
from forq.redis_url import database_of
from forq.services.desk import Later
from forq.values import check_job_id, check_queue_name, shown

LOOK_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 5.0
# Who watches asks again at once: so long after the last question nobody does.
LISTEN_SECONDS = 10.0
_SEEN = re.compile(r"([0-9]{1,20}) [0-9a-f]{16}")
_FIELDS = ("identifier", "retry_count", "stall_count", "timeout_count", "run_at", "progress", "error")
_AT_ITS_END = ("ended_at", "result", "result_error")

log = logging.getLogger("forq")


@dataclass(eq=False)
class Watcher:
    """`seen`: what its last answer was called. `since`: an attempt of the watched job has this fence or a later one."""

    viewer: Viewer
    job_id: str
    seen: str | None
    since: int
    until: float
    due: float = 0.0
    later: Later = field(default_factory=Later)


class Watchers:
    def __init__(self, link: Link, prefix: str, loop: Loop, *, now: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._prefix = prefix
        self._loop = loop
        self._now = now
        self._ears = Listener(link.url, progress_channels(prefix, database_of(link.url)), name="forq-clerk-watch")
        self._watchers: list[Watcher] = []
        self._asked_at = 0.0

    def __len__(self) -> int:
        return len(self._watchers)

    def watch(self, params: dict[str, Any]) -> object:
        """The verb: what there is to say of the job, once that differs from `seen`, or after `wait` seconds."""
        name, job_id = check_queue_name(params.get("name")), check_job_id(params.get("id"))
        seen, wait_seconds = _read_seen(params.get("seen")), _read_wait(params.get("wait"))
        since = int(seen.partition(" ")[0]) if seen is not None else 0
        one = Watcher(Viewer(self._link, self._prefix, name), job_id, seen, since, self._now() + wait_seconds)
        self._asked_at = self._now()
        # Before the look: what changes after it is heard.
        self._listen()
        answer = self._look(one)
        if answer["seen"] != seen or wait_seconds <= 0:
            return answer
        one.due = min(self._now() + LOOK_SECONDS, one.until)
        self._watchers.append(one)
        return one.later

    def _hear(self) -> None:
        fd = self._ears.fileno()
        try:
            heard = self._ears.hear()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("watchers are deaf until the next one comes watchers=%s error=%s", len(self), exc)
            return
        changed = {(queue_of_channel(channel), job_id) for channel, ids in heard for job_id in ids.split(" ")}
        for one in self._watchers:
            if (one.viewer.name, one.job_id) in changed:
                one.due = self._now()

    def tick(self) -> float | None:
        """Looks at what is due, and answers those who have something to hear or have waited long enough; how long
        nothing is due then."""
        now = self._now()
        for one in [one for one in self._watchers if one.due <= now]:
            answer: object
            try:
                answer = self._look(one)
                one.due = min(now + LOOK_SECONDS, one.until)
                if answer["seen"] == one.seen and now < one.until:
                    continue
            except ForqError as exc:
                answer = exc
            except Exception as exc:  # a fault of ours must not end the clerk: all others would lose theirs too
                log.exception("cannot look at a job that is watched queue=%s", one.viewer.name)
                answer = ForqError(f"internal error: {type(exc).__name__}: {exc}")
            self._watchers.remove(one)
            one.later.answer(answer)
        if self._ears.connected and not self._watchers and now >= self._asked_at + LISTEN_SECONDS:
            self._stop_listening()
        due = [one.due for one in self._watchers]
        if not due and self._ears.connected:
            due = [self._asked_at + LISTEN_SECONDS]
        return max(0.0, min(due) - self._now()) if due else None

    def _look(self, one: Watcher) -> dict[str, Any]:
        try:
            job = one.viewer.job(one.job_id)
        except UnknownJob:
            if one.seen is None:
                raise
            job = {"state": "gone"}
        if one.seen is None:
            one.since = job["fence"] if "fence" in job else self._server_us(one.viewer.name)
        elif job["state"] in ("dead", "done") and job["fence"] < one.since:
            # That was an earlier job of that id: this one has left in another way.
            job = {"state": "gone"}
        told = {
            "id": one.job_id,
            "state": job["state"],
            **{key: job[key] for key in _FIELDS + _AT_ITS_END if key in job},
        }
        return {**told, "seen": f"{one.since} {_digest(told, job.get('fence'))}"}

    def _server_us(self, name: str) -> int:
        """A fence is at least the time of its claim."""
        seconds, micros = self._link.call("TIME", at=queue_base(self._prefix, name))
        return int(seconds) * 1_000_000 + int(micros)

    def _listen(self) -> None:
        if not self._ears.connected:
            self._ears.connect()
            self._loop.add_reader(self._ears.fileno(), self._hear)

    def _stop_listening(self) -> None:
        self._loop.remove_reader(self._ears.fileno())
        self._ears.close()


def _digest(told: dict[str, Any], fence: int | None) -> str:
    """The same progress told again is no change."""
    progress = told.get("progress")
    brief = progress and [progress["fraction"], progress["text"]]
    return hashlib.blake2b(orjson.dumps([{**told, "progress": brief}, fence]), digest_size=8).hexdigest()


def _read_seen(seen: object) -> str | None:
    if seen is not None and not (isinstance(seen, str) and _SEEN.fullmatch(seen)):
        raise UsageError(f"seen {shown(seen)} is not allowed: use the one of the last answer")
    return seen


def _read_wait(wait: object) -> float:
    if wait is None:
        return LONGEST_WAIT_SECONDS
    if isinstance(wait, bool) or not isinstance(wait, int | float):
        raise UsageError(f"wait {shown(wait)} is not a number of seconds")
    return min(float(wait), LONGEST_WAIT_SECONDS)
