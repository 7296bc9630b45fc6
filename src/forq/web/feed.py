"""Takes at most one snapshot per second for all viewers together, and none without viewers.

1. `current` returns the newest view, taken now if it is older than a second. With so many queues that a snapshot takes
   long, snapshots are rarer: they may take a tenth of the time at most.
2. `views` yields each new view to the viewers of live pages.
3. `shared` computes something about a view once for all its viewers. What takes long is kept for further views, so that
   it takes a tenth of the time at most.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

from forq.api_types import SupervisorInfo
from forq.broker.inspect import Counts, counts_of
from forq.broker.registry import Registry
from forq.broker.supervisors import Supervisors
from forq.errors import ForqError
from forq.health import Fault
from forq.procs.minutes import Minute, MinuteRings
from forq.services.metrics import faults_in
from forq.services.snapshot import QUEUES_PER_CALL, Sampler, Snapshot
from forq.settings import WORK
from forq.web.source import Source

INTERVAL_SECONDS = 1.0
# The interval is this many times as long as a snapshot takes, within limits.
REST = 10
LONGEST_INTERVAL_SECONDS = 10.0
# After a snapshot without an answer: its time was a timeout, no work.
RETRY_SECONDS = 2.0
# How often the list of supervisors is read.
SUPERVISORS_SECONDS = 5.0
# Counters older than this give no rate "now".
OLDEST_RATE_SECONDS = 10.0

T = TypeVar("T")


class Rates(NamedTuple):
    """Jobs per second since the snapshot before; None: there is none."""

    done: float | None
    failed: float | None


NO_RATES = Rates(None, None)


@dataclass
class Answer:
    """What `shared` has computed, or computes: kept until this time."""

    future: "asyncio.Future[Any]"
    keep_until: float = float("inf")


@dataclass(frozen=True)
class QueueView:
    """One queue. `counts` is None while Redis does not answer."""

    name: str
    mode: str | None
    state: str
    app: str | None = None
    reason: str | None = None
    traceback: str | None = None
    restart_error: dict[str, Any] | None = None
    counts: Counts | None = None
    children: Sequence[dict[str, Any]] = ()
    rates: Rates = NO_RATES
    minutes: Sequence[Minute | None] = ()

    @property
    def running(self) -> list[dict[str, Any]]:
        """The running jobs, longest first."""
        found = [
            {"id": job, "seconds": seconds, "progress": progress, "pid": child["pid"], "role": child["role"]}
            for child in self.children
            for job, seconds, progress in zip(
                child["jobs"] or (), child["jobs_seconds"] or (), child["jobs_progress"] or (), strict=False
            )
        ]
        return sorted(found, key=lambda job: -(job["seconds"] or 0.0))

    @property
    def restarts(self) -> int:
        return sum(child["restarts"] for child in self.children)


@dataclass(frozen=True)
class View:
    """Everything that the pages show without a question of their own. `at`: epoch seconds."""

    number: int
    at: float
    queues: Mapping[str, QueueView]
    faults: Sequence[Fault]
    status: dict[str, Any] | None
    supervisors: Sequence[SupervisorInfo]
    redis_error: str
    status_error: str
    newest_minute: int = 0
    answers: dict[Hashable, Answer] = field(default_factory=dict, compare=False)

    def total(self, count: str) -> int | None:
        known = [getattr(queue.counts, count) for queue in self.queues.values() if queue.counts is not None]
        return sum(known) if known or not self.queues else None


class Feed:
    """`sampler` and `rings`: None without a supervisor."""

    def __init__(
        self,
        source: Source,
        sampler: Sampler | None = None,
        rings: MinuteRings | None = None,
        *,
        health_seconds: float = 60.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._sampler = sampler
        self._rings = rings
        self._health_seconds = health_seconds
        self._now = now
        self._view: View | None = None
        self._taken_at = float("-inf")
        self._interval = INTERVAL_SECONDS
        self._expired = False
        self._taking: asyncio.Task[None] | None = None
        self._supervisors: Sequence[SupervisorInfo] = ()
        self._supervisors_at = float("-inf")
        self._newest = 0
        self._minutes: Mapping[str, Sequence[Minute | None]] = {}
        self._counters: dict[str, tuple[float, int, int]] = {}

    async def current(self) -> View:
        while self._view is None or self._expired or self._now() - self._taken_at >= self._interval:
            await self._take()
        return self._view

    def expire(self) -> None:
        """An action has changed something: the next page shows a view taken from now on."""
        self._expired = True

    async def views(self, has_ended: Callable[[], bool] = lambda: False) -> AsyncIterator[View]:
        """The current view, then one per second, the same for all callers. `has_ended` is asked once a second."""
        seen = -1
        while not has_ended():
            view = await self.current()
            if view.number != seen:
                seen = view.number
                yield view
            await asyncio.sleep(min(INTERVAL_SECONDS, max(0.01, self._taken_at + self._interval - self._now())))

    async def shared(self, view: View, key: Hashable, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `compute`, which is called once per view and key, and more rarely if it takes long."""
        known = view.answers.get(key)
        if known is None:
            known = view.answers[key] = self._start(compute)
        # A viewer that leaves must not cancel it for the others.
        return cast(T, await asyncio.shield(known.future))

    def _start(self, compute: Callable[[], Coroutine[Any, Any, Any]]) -> Answer:
        began = self._now()
        answer = Answer(asyncio.ensure_future(compute()))

        def ended(_: object) -> None:
            now = self._now()
            answer.keep_until = now + min(LONGEST_INTERVAL_SECONDS, REST * (now - began))

        answer.future.add_done_callback(ended)
        return answer

    async def _take(self) -> None:
        """One at a time, whoever asks."""
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(self._take_one())
        await asyncio.shield(self._taking)

    async def _take_one(self) -> None:
        began, after_action, self._expired = self._now(), self._expired, False
        with_supervisors = began - self._supervisors_at >= SUPERVISORS_SECONDS
        snapshot, supervisors = await self._source.sample(lambda: self._sample(with_supervisors))
        if supervisors is not None:
            self._supervisors, self._supervisors_at = supervisors, self._now()
        self._taken_at = self._now()
        took = self._taken_at - began
        self._interval = min(LONGEST_INTERVAL_SECONDS, max(INTERVAL_SECONDS, REST * took))
        if snapshot.redis_error or (self._sampler is not None and snapshot.status is None):
            self._interval = RETRY_SECONDS
        self._source.redis_error = snapshot.redis_error
        before, self._view = self._view, self._read(snapshot, 0 if self._view is None else self._view.number + 1)
        if before is not None and not after_action:
            kept = {key: answer for key, answer in before.answers.items() if answer.keep_until > self._taken_at}
            self._view.answers.update(kept)

    def _sample(self, with_supervisors: bool) -> tuple[Snapshot, list[SupervisorInfo] | None]:
        link, prefix = self._source.link(), self._source.prefix
        snapshot = self._sample_redis() if self._sampler is None else self._sample_with_others(self._sampler)
        if self._rings is not None and self._rings.newest != self._newest:
            # A tenth of a second with a thousand queues, so only when a minute has ended.
            self._newest = self._rings.newest
            self._minutes = {name: hour.minutes for name, hour in self._rings.read_all().items()}
        supervisors = None
        if with_supervisors and not snapshot.redis_error:
            with suppress(ForqError):  # the snapshot of the next second reports it
                supervisors = Supervisors(link, prefix).all()
        return snapshot, supervisors

    def _sample_with_others(self, sampler: Sampler) -> Snapshot:
        """The sampler's snapshot, with the counts of queues that other supervisors serve."""
        snapshot = sampler.sample()
        if snapshot.redis_error:
            return snapshot
        link, prefix = self._source.link(), self._source.prefix
        try:
            others = sorted(Registry(link, prefix).names().keys() - snapshot.counts.keys())
            counts = dict(snapshot.counts)
            for at in range(0, len(others), QUEUES_PER_CALL):
                counts |= counts_of(link, prefix, others[at : at + QUEUES_PER_CALL])
        except ForqError as exc:
            return replace(snapshot, redis_error=str(exc))
        return replace(snapshot, counts=counts)

    def _sample_redis(self) -> Snapshot:
        """A snapshot without a supervisor."""
        began = time.monotonic()
        counts: dict[str, Counts | None] = {}
        redis_error = ""
        try:
            link, prefix = self._source.link(), self._source.prefix
            names = sorted(Registry(link, prefix).names())
            for at in range(0, len(names), QUEUES_PER_CALL):
                counts |= counts_of(link, prefix, names[at : at + QUEUES_PER_CALL])
        except ForqError as exc:
            counts, redis_error = {}, str(exc)
        now_ns = time.monotonic_ns()
        return Snapshot(
            status=None,
            status_error="",
            counts=counts,
            redis_error=redis_error,
            round_trip_seconds=None,
            stats={},
            activity={},
            now_ns=now_ns,
            took_seconds=now_ns / 1e9 - began,
            snapshots=0,
            errors={},
        )

    def _read(self, snapshot: Snapshot, number: int) -> View:
        newest, minutes = self._newest, self._minutes
        queues = {
            queue.name: queue for queue in (*self._served(snapshot, minutes), *self._not_served(snapshot, minutes))
        }
        self._counters = {name: counters for name, counters in self._counters.items() if name in queues}
        faults = [] if self._sampler is None else faults_in(snapshot, self._health_seconds)
        if self._sampler is None and snapshot.redis_error:
            faults = [Fault("redis", snapshot.redis_error)]
        return View(
            number=number,
            at=time.time(),
            queues=dict(sorted(queues.items())),
            faults=faults,
            status=snapshot.status,
            supervisors=self._supervisors,
            redis_error=snapshot.redis_error,
            status_error=snapshot.status_error,
            newest_minute=newest,
        )

    def _served(self, snapshot: Snapshot, minutes: Mapping[str, Sequence[Minute | None]]) -> list[QueueView]:
        found = []
        for queue in () if snapshot.status is None else snapshot.status["queues"]:
            counts = snapshot.counts.get(queue["name"])
            state = queue["state"]
            if state in ("running", "starting", "draining") and counts is not None and counts.paused:
                state = "paused"
            found.append(
                QueueView(
                    name=queue["name"],
                    mode=queue["mode"],
                    state=state,
                    app=queue["app"],
                    reason=queue["reason"],
                    traceback=queue["traceback"],
                    restart_error=queue["restart_error"],
                    counts=counts,
                    children=queue["children"],
                    minutes=minutes.get(queue["name"], ()),
                    rates=self._rates(queue["name"], counts),
                )
            )
        return found

    def _not_served(self, snapshot: Snapshot, minutes: Mapping[str, Sequence[Minute | None]]) -> list[QueueView]:
        """Queues that no supervisor serves; without a supervisor all queues."""
        served = {queue["name"] for queue in (snapshot.status or {"queues": ()})["queues"]}
        hosts = {name: each["host"] for each in self._supervisors for name in each["queues"]}
        found = []
        for name, counts in snapshot.counts.items():
            if name in served or counts is None:
                continue
            state, reason = _state_elsewhere(counts, hosts.get(name), here=self._sampler is not None)
            found.append(
                QueueView(name=name, mode=counts.mode, state=state, reason=reason, counts=counts,
                          minutes=minutes.get(name, ()), rates=self._rates(name, counts))
            )  # fmt: skip
        return found

    def _rates(self, name: str, counts: Counts | None) -> Rates:
        if counts is None:
            return NO_RATES
        now = self._now()
        before = self._counters.get(name)
        self._counters[name] = now, counts.done, counts.failed
        # Lower counters belong to a new queue with the same name.
        if before is None or not 0 < now - before[0] < OLDEST_RATE_SECONDS + self._interval or counts.done < before[1]:
            return NO_RATES
        seconds = now - before[0]
        return Rates((counts.done - before[1]) / seconds, max(0, counts.failed - before[2]) / seconds)


def _state_elsewhere(counts: Counts, host: str | None, *, here: bool) -> tuple[str, str]:
    """State and reason of a queue that no process of this supervisor serves. `here`: there is a supervisor."""
    if host is not None:
        state, reason = "elsewhere" if here else "running", f"served on {host}"
    elif counts.mode != WORK:
        state, reason = "running", f"mode {counts.mode} needs no supervisor of its own"
    else:
        state, reason = "unserved", "no supervisor serves it"
    return "paused" if counts.paused else state, reason
