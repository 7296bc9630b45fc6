"""Control socket clients that wait for an item (awaiters), a change of a job (watchers), or output (followers)."""

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
from forq.broker.keys import handed_channels, progress_channels, queue_base, queue_of_channel
from forq.broker.leases import Lease, Leases
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.errors import ForqError, OutcomeUnknown, RedisUnavailable, UnknownJob, UsageError
from forq.job import new_id
from forq.output.files import OutputReader
from forq.procs.loop import Loop
from forq.redis_url import database_of
from forq.services.rpc import PendingReply, internal_error
from forq.values import check_job_id, check_queue_name, shown

log = logging.getLogger("forq")

RETRY_SECONDS = 0.5
# Awaiters served before the clerk handles other requests again.
SLICE = 200


@dataclass(eq=False)
class Awaiter:
    """`until`: end of its wait, on the monotonic clock, which all processes of a machine share."""

    leases: Leases
    name: str
    job_id: str | None
    mode: str
    lease_ms: int | None
    until: float
    due: float = 0.0
    reply: PendingReply = field(default_factory=PendingReply)


class Awaiters:
    """Serves all awaiters of the control socket without blocking for any.

    1. Registers each in Redis under its own name, and renews it after half of the registration's validity.
    2. Subscribes to a channel of its own. A message there names an awaiter that has a new item; fetches the item.
    3. Checks every awaiter after the subscription broke: messages were lost in the meantime.
    4. Awaiters stay while Redis is unreachable, each until its own time is up.
    """

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
        self._due_heap: list[tuple[float, int, Awaiter]] = []
        self._order = count()
        self._redis_down_until = 0.0

    def __len__(self) -> int:
        return len(self._awaiters)

    def wait_for_item(self, params: dict[str, Any]) -> object:
        """The verb `await`: an item, or None at `until` (None: waits forever)."""
        until = params["until"]
        awaiter = Awaiter(
            leases=Leases(self._link, self._prefix, params["name"]),
            name=params["awaiter"],
            job_id=params["id"],
            mode=params["mode"],
            lease_ms=params["lease_ms"],
            until=float("inf") if until is None else until,
        )
        if awaiter.until <= self._now():
            return self._request_once(awaiter)
        self._awaiters[awaiter.name] = awaiter
        try:
            item = self._fetch(awaiter)
        except ForqError:
            del self._awaiters[awaiter.name]
            raise
        if item is None:
            return awaiter.reply
        del self._awaiters[awaiter.name]
        return item

    def leave(self, params: dict[str, Any]) -> object:
        """The verb `leave`: the client is gone. An item that it was handed in the meantime is returned."""
        awaiter = self._awaiters.pop(params["awaiter"], None)
        if awaiter is not None:
            awaiter.reply.resolve(None)
        try:
            Leases(self._link, self._prefix, params["name"]).leave(params["awaiter"])
        except RedisUnavailable as exc:
            log.info("cannot remove an awaiter; its registration will expire queue=%s error=%s", params["name"], exc)
        return {}

    def _receive(self) -> None:
        fd = self._subscription.fileno()
        try:
            messages = self._subscription.receive()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("lost the subscription of awaiters; subscribing again awaiters=%s error=%s", len(self), exc)
            for awaiter in self._awaiters.values():
                self._set_due(awaiter, self._now())
            return
        for _, name in messages:
            if name in self._awaiters:
                self._set_due(self._awaiters[name], self._now())

    def tick(self) -> float | None:
        """Serves awaiters that are due. Returns the seconds until the next one is due, or None."""
        now = self._now()
        for _ in range(SLICE):
            if not self._due_heap or self._due_heap[0][0] > now:
                break
            entry = heapq.heappop(self._due_heap)
            if self._is_current(*entry):
                self._serve(entry[2])
        while self._due_heap and not self._is_current(*self._due_heap[0]):
            heapq.heappop(self._due_heap)
        return max(0.0, self._due_heap[0][0] - self._now()) if self._due_heap else None

    def _serve(self, awaiter: Awaiter) -> None:
        last = awaiter.until <= self._now()
        answer: object
        try:
            answer = self._fetch(awaiter)
        except ForqError as exc:
            answer = exc
        except Exception as exc:  # a bug must not end the clerk: all other clients would be disconnected
            log.exception("cannot serve an awaiter queue=%s", awaiter.leases.queue)
            answer = internal_error(exc)
        if answer is not None or last:
            del self._awaiters[awaiter.name]
            awaiter.reply.resolve(answer)

    def _fetch(self, awaiter: Awaiter) -> dict[str, Any] | None:
        """The item it was handed; None, with its next due time set, if there is none yet."""
        now = self._now()
        if now >= self._redis_down_until:
            try:
                self._subscribe()
                return self._request(awaiter)
            except RedisUnavailable:
                # Spares the other awaiters the same timeout.
                self._redis_down_until = self._now() + RETRY_SECONDS
        self._set_due(awaiter, min(self._redis_down_until, awaiter.until))
        return None

    def _request(self, awaiter: Awaiter) -> dict[str, Any] | None:
        """Renews its registration, or removes it if its time is up."""
        now = self._now()
        answer = awaiter.leases.request(
            awaiter.name,
            awaiter.job_id,
            mode=awaiter.mode,
            register=now < awaiter.until,
            lease_ms=awaiter.lease_ms,
            via=self._clerk,
        )
        if answer.lease is not None:
            return _describe(awaiter.name, answer.lease)
        self._set_due(awaiter, min(now + answer.valid_ms / 2000, awaiter.until))
        return None

    def _request_once(self, awaiter: Awaiter) -> dict[str, Any] | None:
        try:
            return self._request(awaiter)
        except OutcomeUnknown:
            # It may hold an item by now: the same request gets the same item.
            return self._request(awaiter)

    def _subscribe(self) -> None:
        if not self._subscription.connected:
            self._subscription.connect()
            self._loop.add_reader(self._subscription.fileno(), self._receive)

    def _set_due(self, awaiter: Awaiter, at: float) -> None:
        awaiter.due = at
        heapq.heappush(self._due_heap, (at, next(self._order), awaiter))

    def _is_current(self, at: float, _: int, awaiter: Awaiter) -> bool:
        """False for an awaiter that was served, or got another due time, in the meantime."""
        return awaiter.due == at and self._awaiters.get(awaiter.name) is awaiter


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
# A client that watches repeats its request at once: after this pause there is no such client.
UNSUBSCRIBE_SECONDS = 10.0
_SEEN = re.compile(r"([0-9]{1,20}) [0-9a-f]{16}")
_FIELDS = ("identifier", "retry_count", "stall_count", "timeout_count", "run_at", "progress", "error")
_END_FIELDS = ("ended_at", "result", "result_error")


@dataclass(eq=False)
class Watcher:
    """`seen`: tag of its last reply. `since`: attempts of the watched job have this fence or a later one."""

    inspector: Inspector
    job_id: str
    seen: str | None
    since: int
    until: float
    due: float = 0.0
    reply: PendingReply = field(default_factory=PendingReply)


class Watchers:
    """Replies to a watcher when its job has changed, or after a while.

    1. Subscribes to ids of jobs with new progress, and of jobs that ended or were returned after some; then reads them.
    2. Reads watched jobs once a second, because jobs without progress publish nothing: that would slow down every turn.
    3. Is subscribed only while clients watch.
    """

    def __init__(self, link: Link, prefix: str, loop: Loop, *, now: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._prefix = prefix
        self._loop = loop
        self._now = now
        self._subscription = Subscription(
            link.url, progress_channels(prefix, database_of(link.url)), name="forq-clerk-watch"
        )
        self._watchers: list[Watcher] = []
        self._requested_at = 0.0

    def __len__(self) -> int:
        return len(self._watchers)

    def watch(self, params: dict[str, Any]) -> object:
        """The verb `watch`: the job, once it differs from `seen` or after `wait` seconds."""
        name, job_id = check_queue_name(params.get("name")), check_job_id(params.get("id"))
        seen, wait_seconds = _read_seen(params.get("seen")), _read_wait(params.get("wait"))
        since = int(seen.partition(" ")[0]) if seen is not None else 0
        watcher = Watcher(Inspector(self._link, self._prefix, name), job_id, seen, since, self._now() + wait_seconds)
        self._requested_at = self._now()
        # Before the read: later changes are received.
        self._subscribe()
        answer = self._read(watcher)
        if answer["seen"] != seen or wait_seconds <= 0:
            return answer
        watcher.due = min(self._now() + WATCH_SECONDS, watcher.until)
        self._watchers.append(watcher)
        return watcher.reply

    def _receive(self) -> None:
        fd = self._subscription.fileno()
        try:
            messages = self._subscription.receive()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("lost the subscription of watchers; reading once a second watchers=%s error=%s", len(self), exc)
            return
        changed = {(queue_of_channel(channel), job_id) for channel, ids in messages for job_id in ids.split(" ")}
        for watcher in self._watchers:
            if (watcher.inspector.name, watcher.job_id) in changed:
                watcher.due = self._now()

    def tick(self) -> float | None:
        """Replies to watchers whose job has changed or whose time is up. Returns seconds until the next is due."""
        now = self._now()
        for watcher in [watcher for watcher in self._watchers if watcher.due <= now]:
            answer: object
            try:
                answer = self._read(watcher)
                watcher.due = min(now + WATCH_SECONDS, watcher.until)
                if answer["seen"] == watcher.seen and now < watcher.until:
                    continue
            except ForqError as exc:
                answer = exc
            except Exception as exc:  # a bug must not end the clerk: all other clients would be disconnected
                log.exception("cannot read a watched job queue=%s", watcher.inspector.name)
                answer = internal_error(exc)
            self._watchers.remove(watcher)
            watcher.reply.resolve(answer)
        if self._subscription.connected and not self._watchers and now >= self._requested_at + UNSUBSCRIBE_SECONDS:
            self._unsubscribe()
        due = [watcher.due for watcher in self._watchers]
        if not due and self._subscription.connected:
            due = [self._requested_at + UNSUBSCRIBE_SECONDS]
        return max(0.0, min(due) - self._now()) if due else None

    def _read(self, watcher: Watcher) -> dict[str, Any]:
        try:
            job = watcher.inspector.job(watcher.job_id)
        except UnknownJob:
            if watcher.seen is None:
                raise
            job = {"state": "gone"}
        if watcher.seen is None:
            watcher.since = job["fence"] if "fence" in job else self._server_us(watcher.inspector.name)
        elif job["state"] in ("dead", "done") and job["fence"] < watcher.since:
            # An earlier job of the same id; the watched job was removed.
            job = {"state": "gone"}
        reply = {
            "id": watcher.job_id,
            "state": job["state"],
            **{key: job[key] for key in _FIELDS + _END_FIELDS if key in job},
        }
        return {**reply, "seen": f"{watcher.since} {_digest(reply, job.get('fence'))}"}

    def _server_us(self, name: str) -> int:
        """The server's time: a fence is at least the time of its claim."""
        seconds, micros = self._link.call("TIME", at=queue_base(self._prefix, name))
        return int(seconds) * 1_000_000 + int(micros)

    def _subscribe(self) -> None:
        if not self._subscription.connected:
            self._subscription.connect()
            self._loop.add_reader(self._subscription.fileno(), self._receive)

    def _unsubscribe(self) -> None:
        self._loop.remove_reader(self._subscription.fileno())
        self._subscription.close()


def _digest(reply: dict[str, Any], fence: int | None) -> str:
    """Ignores the time of a progress report: the same progress again is not a change."""
    progress = reply.get("progress")
    brief = progress and [progress["fraction"], progress["text"]]
    return hashlib.blake2b(orjson.dumps([{**reply, "progress": brief}, fence]), digest_size=8).hexdigest()


def _read_seen(seen: object) -> str | None:
    if seen is not None and not (isinstance(seen, str) and _SEEN.fullmatch(seen)):
        raise UsageError(f"seen {shown(seen)} is not allowed: use the one of the last reply")
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
    """Replies to clients that read a queue's output, or wait for more. Files are checked only while clients wait."""

    def __init__(self, logs_dir: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self._reader = OutputReader(logs_dir)
        self._now = now
        self._followers: list[Follower] = []
        self._check_at = 0.0

    def __len__(self) -> int:
        return len(self._followers)

    def read_logs(self, params: dict[str, Any]) -> object:
        """The verb `logs`: records after `cursor`, once there are some or after `wait` seconds."""
        queue, job = check_queue_name(params.get("name")), params.get("job")
        if job is not None:
            check_job_id(job)
        wait_seconds = _read_number(params.get("wait"), "wait", LONGEST_WAIT_SECONDS) or 0.0
        tail = _read_number(params.get("lines"), "lines", MAX_TAIL)
        answer = self._reader.read(
            *(queue, params.get("cursor")),
            tail=DEFAULT_TAIL if tail is None else int(tail),
            job=job,
            small=bool(params.get("small")),
        )
        if answer["records"] or answer["more"] or answer["skipped"] or wait_seconds <= 0:
            return answer
        follower = Follower(queue, answer["cursor"], job, self._now() + wait_seconds)
        if not self._followers:
            self._check_at = self._now() + FOLLOW_SECONDS
        self._followers.append(follower)
        return follower.reply

    def tick(self) -> float | None:
        """Replies to followers with new output or whose time is up. Returns the seconds until the next check."""
        now = self._now()
        if self._followers and now >= self._check_at:
            self._check_at = now + FOLLOW_SECONDS
            for follower in list(self._followers):
                answer = self._read(follower, now)
                if answer is not None:
                    self._followers.remove(follower)
                    follower.reply.resolve(answer)
        return max(0.0, self._check_at - self._now()) if self._followers else None

    def _read(self, follower: Follower, now: float) -> object:
        try:
            if not self._reader.has_more(follower.queue, follower.cursor) and now < follower.until:
                return None
            answer = self._reader.read(follower.queue, follower.cursor, tail=0, job=follower.job)
        except ForqError as exc:
            return exc
        except Exception as exc:  # a bug must not end the clerk: all other clients would be disconnected
            log.exception("cannot read the output queue=%s", follower.queue)
            return internal_error(exc)
        if answer["records"] or answer["more"] or answer["skipped"] or now >= follower.until:
            return answer
        follower.cursor = answer["cursor"]
        return None


def _read_number(value: object, name: str, maximum: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise UsageError(f"{name} {shown(value)} is not allowed: use a number from 0 up")
    return min(float(value), maximum)
