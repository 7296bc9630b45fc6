"""Those who await an item through the control socket: the clerk speaks for all of them, and blocks for none.

1. Each is registered in Redis under a name of its own, and renewed in half the time that this is valid for.
2. The clerk hears on a channel of its own who was handed something, and asks for it.
3. What was published while nobody heard it is lost: when that connection breaks, all of them ask again on the next one.
4. While Redis is away they wait on, each until its own time is up.

Those who watch a job through the control socket: each is answered when something has changed, or after a while.

1. The clerk hears whose progress has changed, or is over because the job has ended or gone back; then it looks.
2. Of jobs that tell no progress nobody says when they begin or end: that would cost every turn of every worker. The
   clerk looks at a job that is watched once a second instead; one that nobody watches costs nothing.
3. It listens only while somebody watches.

The verb `logs`: those who read the output of a queue through the control socket, and those who wait for more.

The files are looked at every 0.2 s while somebody waits, and not at all while nobody does.
"""

import hashlib
import heapq
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from forq.broker.inspect import Inspector
from forq.broker.keys import progress_channels, queue_base, queue_of_channel
from forq.broker.leases import Lease, Leases, handed_channels
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.errors import ForqError, OutcomeUnknown, RedisUnavailable, UnknownJob, UsageError
from forq.job import new_id
from forq.output.files import OutputReader
from forq.procs.loop import Loop
from forq.redis_url import database_of
from forq.services.rpc import PendingReply
from forq.values import check_job_id, check_queue_name, shown

log = logging.getLogger("forq")

RETRY_SECONDS = 0.5
# How many are looked after before the clerk's other requests get their turn again.
SLICE = 200


@dataclass(eq=False)
class Awaiter:
    """`until`: when its time is up, on the monotonic clock, which all processes of a machine share."""

    leases: Leases
    name: str
    job_id: str | None
    mode: str
    lease_ms: int | None
    until: float
    due: float = 0.0
    reply: PendingReply = field(default_factory=PendingReply)


class Awaiters:
    def __init__(self, link: Link, prefix: str, loop: Loop, *, now: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._prefix = prefix
        self._loop = loop
        self._now = now
        self._clerk = new_id()
        self._subscription = Subscription(
            link.url, handed_channels(prefix, database_of(link.url), self._clerk), name="forq-clerk-subscription"
        )
        self._awaiters: dict[str, Awaiter] = {}
        self._plans: list[tuple[float, int, Awaiter]] = []
        self._order = count()
        self._away_until = 0.0

    def __len__(self) -> int:
        return len(self._awaiters)

    def ask(self, params: dict[str, Any]) -> object:
        """The verb: an item, or None when time is up (`until`, None: never)."""
        until = params["until"]
        one = Awaiter(
            leases=Leases(self._link, self._prefix, params["name"]),
            name=params["awaiter"],
            job_id=params["id"],
            mode=params["mode"],
            lease_ms=params["lease_ms"],
            until=float("inf") if until is None else until,
        )
        if one.until <= self._now():
            return self._ask_once(one)
        self._awaiters[one.name] = one
        try:
            item = self._look(one)
        except ForqError:
            del self._awaiters[one.name]
            raise
        if item is None:
            return one.reply
        del self._awaiters[one.name]
        return item

    def leave(self, params: dict[str, Any]) -> object:
        """The verb: whoever asked is gone. What it was handed meanwhile goes back in line."""
        one = self._awaiters.pop(params["awaiter"], None)
        if one is not None:
            one.reply.resolve(None)
        try:
            Leases(self._link, self._prefix, params["name"]).leave(params["awaiter"])
        except RedisUnavailable as exc:
            log.info("an awaiter is forgotten when its lease lapses queue=%s error=%s", params["name"], exc)
        return {}

    def _hear(self) -> None:
        """Somebody has something in its list."""
        fd = self._subscription.fileno()
        try:
            heard = self._subscription.receive()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("awaiters are deaf until the next connect awaiters=%s error=%s", len(self), exc)
            for one in self._awaiters.values():
                self._plan(one, self._now())
            return
        for _, name in heard:
            if name in self._awaiters:
                self._plan(self._awaiters[name], self._now())

    def tick(self) -> float | None:
        """Looks after those whose time has come; how long nothing is due then."""
        now = self._now()
        for _ in range(SLICE):
            if not self._plans or self._plans[0][0] > now:
                break
            plan = heapq.heappop(self._plans)
            if self._is_current(*plan):
                self._serve(plan[2])
        while self._plans and not self._is_current(*self._plans[0]):
            heapq.heappop(self._plans)
        return max(0.0, self._plans[0][0] - self._now()) if self._plans else None

    def _serve(self, one: Awaiter) -> None:
        last = one.until <= self._now()
        answer: object
        try:
            answer = self._look(one)
        except ForqError as exc:
            answer = exc
        except Exception as exc:  # a fault of ours must not end the clerk: all others would lose theirs too
            log.exception("cannot serve an awaiter queue=%s", one.leases.queue)
            answer = ForqError(f"internal error: {type(exc).__name__}: {exc}")
        if answer is not None or last:
            del self._awaiters[one.name]
            one.reply.resolve(answer)

    def _look(self, one: Awaiter) -> dict[str, Any] | None:
        """What it was handed; None if there is nothing yet, and then the next look is planned."""
        now = self._now()
        if now >= self._away_until:
            try:
                self._listen()
                return self._ask(one)
            except RedisUnavailable:
                # One that fails is enough: the others need not wait for their own timeouts.
                self._away_until = self._now() + RETRY_SECONDS
        self._plan(one, min(self._away_until, one.until))
        return None

    def _ask(self, one: Awaiter) -> dict[str, Any] | None:
        """Registers it again; not if its time is up: then it is forgotten."""
        now = self._now()
        answer = one.leases.request(
            one.name, one.job_id, mode=one.mode, register=now < one.until, lease_ms=one.lease_ms, via=self._clerk
        )
        if answer.lease is not None:
            return _describe(one.name, answer.lease)
        self._plan(one, min(now + answer.valid_ms / 2000, one.until))
        return None

    def _ask_once(self, one: Awaiter) -> dict[str, Any] | None:
        try:
            return self._ask(one)
        except OutcomeUnknown:
            # It may hold an item by now: the same question again gets the same one.
            return self._ask(one)

    def _listen(self) -> None:
        if not self._subscription.connected:
            self._subscription.connect()
            self._loop.add_reader(self._subscription.fileno(), self._hear)

    def _plan(self, one: Awaiter, at: float) -> None:
        one.due = at
        heapq.heappush(self._plans, (at, next(self._order), one))

    def _is_current(self, at: float, _: int, one: Awaiter) -> bool:
        """Not one that was served, or planned anew, meanwhile."""
        return one.due == at and self._awaiters.get(one.name) is one


def _describe(awaiter: str, lease: Lease) -> dict[str, Any]:
    return {
        "id": lease.job_id,
        "identifier": lease.record.identifier or lease.job_id,
        "data": lease.record.data,
        "fence": lease.fence,
        "awaiter": awaiter,
        "lease_seconds": lease.lease_ms / 1000,
    }


WATCH_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 5.0
# Who watches asks again at once: so long after the last question nobody does.
LISTEN_SECONDS = 10.0
_SEEN = re.compile(r"([0-9]{1,20}) [0-9a-f]{16}")
_FIELDS = ("identifier", "retry_count", "stall_count", "timeout_count", "run_at", "progress", "error")
_AT_ITS_END = ("ended_at", "result", "result_error")


@dataclass(eq=False)
class Watcher:
    """`seen`: what its last answer was called. `since`: an attempt of the watched job has this fence or a later one."""

    inspector: Inspector
    job_id: str
    seen: str | None
    since: int
    until: float
    due: float = 0.0
    reply: PendingReply = field(default_factory=PendingReply)


class Watchers:
    def __init__(self, link: Link, prefix: str, loop: Loop, *, now: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._prefix = prefix
        self._loop = loop
        self._now = now
        self._subscription = Subscription(
            link.url, progress_channels(prefix, database_of(link.url)), name="forq-clerk-watch"
        )
        self._watchers: list[Watcher] = []
        self._asked_at = 0.0

    def __len__(self) -> int:
        return len(self._watchers)

    def watch(self, params: dict[str, Any]) -> object:
        """The verb: what there is to say of the job, once that differs from `seen`, or after `wait` seconds."""
        name, job_id = check_queue_name(params.get("name")), check_job_id(params.get("id"))
        seen, wait_seconds = _read_seen(params.get("seen")), _read_wait(params.get("wait"))
        since = int(seen.partition(" ")[0]) if seen is not None else 0
        one = Watcher(Inspector(self._link, self._prefix, name), job_id, seen, since, self._now() + wait_seconds)
        self._asked_at = self._now()
        # Before the look: what changes after it is heard.
        self._listen()
        answer = self._look(one)
        if answer["seen"] != seen or wait_seconds <= 0:
            return answer
        one.due = min(self._now() + WATCH_SECONDS, one.until)
        self._watchers.append(one)
        return one.reply

    def _hear(self) -> None:
        fd = self._subscription.fileno()
        try:
            heard = self._subscription.receive()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("watchers are deaf until the next one comes watchers=%s error=%s", len(self), exc)
            return
        changed = {(queue_of_channel(channel), job_id) for channel, ids in heard for job_id in ids.split(" ")}
        for one in self._watchers:
            if (one.inspector.name, one.job_id) in changed:
                one.due = self._now()

    def tick(self) -> float | None:
        """Looks at what is due, and answers those who have something to hear or have waited long enough; how long
        nothing is due then."""
        now = self._now()
        for one in [one for one in self._watchers if one.due <= now]:
            answer: object
            try:
                answer = self._look(one)
                one.due = min(now + WATCH_SECONDS, one.until)
                if answer["seen"] == one.seen and now < one.until:
                    continue
            except ForqError as exc:
                answer = exc
            except Exception as exc:  # a fault of ours must not end the clerk: all others would lose theirs too
                log.exception("cannot look at a job that is watched queue=%s", one.inspector.name)
                answer = ForqError(f"internal error: {type(exc).__name__}: {exc}")
            self._watchers.remove(one)
            one.reply.resolve(answer)
        if self._subscription.connected and not self._watchers and now >= self._asked_at + LISTEN_SECONDS:
            self._stop_listening()
        due = [one.due for one in self._watchers]
        if not due and self._subscription.connected:
            due = [self._asked_at + LISTEN_SECONDS]
        return max(0.0, min(due) - self._now()) if due else None

    def _look(self, one: Watcher) -> dict[str, Any]:
        try:
            job = one.inspector.job(one.job_id)
        except UnknownJob:
            if one.seen is None:
                raise
            job = {"state": "gone"}
        if one.seen is None:
            one.since = job["fence"] if "fence" in job else self._server_us(one.inspector.name)
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
        if not self._subscription.connected:
            self._subscription.connect()
            self._loop.add_reader(self._subscription.fileno(), self._hear)

    def _stop_listening(self) -> None:
        self._loop.remove_reader(self._subscription.fileno())
        self._subscription.close()


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


FOLLOW_SECONDS = 0.2
DEFAULT_TAIL = 100
MAX_TAIL = 1_000_000


@dataclass(eq=False)
class Follower:
    queue: str
    cursor: str
    job: str | None
    until: float
    reply: PendingReply = field(default_factory=PendingReply)


class Followers:
    def __init__(self, logs_dir: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self._reader = OutputReader(logs_dir)
        self._now = now
        self._followers: list[Follower] = []
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._followers)

    def logs(self, params: dict[str, Any]) -> object:
        """The verb: records behind `cursor`; if there are none, once there are some, or after `wait` seconds."""
        queue, job = check_queue_name(params.get("name")), params.get("job")
        if job is not None:
            check_job_id(job)
        wait_seconds = _number(params.get("wait"), "wait", LONGEST_WAIT_SECONDS) or 0.0
        tail = _number(params.get("lines"), "lines", MAX_TAIL)
        answer = self._reader.read(
            queue, params.get("cursor"), tail=DEFAULT_TAIL if tail is None else int(tail), job=job
        )
        if answer["records"] or answer["more"] or answer["skipped"] or wait_seconds <= 0:
            return answer
        one = Follower(queue, answer["cursor"], job, self._now() + wait_seconds)
        if not self._followers:
            self._look_at = self._now() + FOLLOW_SECONDS
        self._followers.append(one)
        return one.reply

    def tick(self) -> float | None:
        """Answers those for whom something has come, or who have waited long enough; how long nothing is due then."""
        now = self._now()
        if self._followers and now >= self._look_at:
            self._look_at = now + FOLLOW_SECONDS
            for one in list(self._followers):
                answer = self._look(one, now)
                if answer is not None:
                    self._followers.remove(one)
                    one.reply.resolve(answer)
        return max(0.0, self._look_at - self._now()) if self._followers else None

    def _look(self, one: Follower, now: float) -> object:
        try:
            if not self._reader.has_more(one.queue, one.cursor) and now < one.until:
                return None
            answer = self._reader.read(one.queue, one.cursor, tail=0, job=one.job)
        except ForqError as exc:
            return exc
        except Exception as exc:  # a fault of ours must not end the clerk: all others would lose theirs too
            log.exception("cannot read the output queue=%s", one.queue)
            return ForqError(f"internal error: {type(exc).__name__}: {exc}")
        if answer["records"] or answer["more"] or answer["skipped"] or now >= one.until:
            return answer
        one.cursor = answer["cursor"]
        return None


def _number(value: object, what: str, most: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise UsageError(f"{what} {shown(value)} is not allowed: a number from 0 on")
    return min(float(value), most)
