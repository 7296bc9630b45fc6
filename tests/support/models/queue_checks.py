"""Checks a real queue against its model after each step."""

import re
from collections import Counter
from dataclasses import dataclass

import orjson

from forq.broker.record import Record, unpack
from forq.broker.results import read_done
from tests.support.drive.one_queue import OneQueue, State
from tests.support.models.held_checks import HeldChecks
from tests.support.models.journal_replay import Replay
from tests.support.models.limits_checks import LimitChecks
from tests.support.models.queue import ModelQueue

MINUTE_MS = 60_000
FAR = 9007199254740991  # in lua/enqueue.lua


@dataclass(frozen=True)
class Times:
    """State does not include these."""

    scheduled: dict[str, int]  # id -> ms
    blocked: dict[str, int]  # id -> enqueue time (µs)
    attempts: dict[str, int]
    progress: dict[str, str]  # id -> text


class Checks:
    def __init__(self, queue: OneQueue, model: ModelQueue) -> None:
        self._queue = queue
        self._model = model
        self.limits = LimitChecks(queue, model)
        self.held = HeldChecks(queue, model)
        self._replay = Replay()
        # Id -> the enqueue times of its jobs.
        self._enqueue_times: dict[str, set[int]] = {}
        self._read_up_to = b"-"

    def pass_time(self, ms: int) -> None:
        """Accounts for timers moved earlier: for the journal, the clock has to advance instead."""
        self._replay.pass_time(ms)

    def forget_ends(self, max_ends: int) -> None:
        """The scripts remember so few ends."""
        self.held.max_ends = max_ends
        self._replay.forgets = True

    def all(self) -> None:
        state, times = self._queue.state(), self._times()
        self._check_jobs(state)
        self._check_times(times)
        self._check_enqueue_times(state, times)
        self._check_hints(state)
        self._check_waking(state)
        self._check_counts()
        self._check_journal()
        self._check_done()
        self.held.all()

    def claimable(self, state: State, lane: str = "main") -> list[str]:
        """Waiting jobs that this lane serves and whose hint must be in its lists (a lower bound)."""
        return [
            job_id
            for job_id, job in self._model.jobs.items()
            if job.waits
            and job.suspect == (lane != "main")
            and (state.suspects if job.suspect else state.waiting.get(job.priority, [])).count(job_id)
            > state.stale.get(f"{job.place}:{job_id}", 0)
        ]

    def _times(self) -> Times:
        with self._queue.redis.pipeline(transaction=False) as look:
            look.zrange(self._queue.key("scheduled"), 0, -1, withscores=True)
            look.hgetall(self._queue.key("blocked"))
            look.hgetall(self._queue.key("attempts"))
            look.hgetall(self._queue.key("progress"))
            scheduled, blocked, attempts, progress = look.execute()
        return Times(
            {job_id.decode(): int(due) for job_id, due in scheduled},
            {job_id.decode(): int(entry.split(b"\n")[0].split(b" ")[6]) for job_id, entry in blocked.items()},
            {job_id.decode(): len(lines.splitlines()) for job_id, lines in attempts.items()},
            {job_id.decode(): text.decode().split(" ", 2)[2] for job_id, text in progress.items()},
        )

    def _check_jobs(self, state: State) -> None:
        """Every job exists in its expected state, and an active one is in the list of exactly one owner."""
        jobs = self._model.jobs
        records = {job_id: unpack(packed) for job_id, packed in state.records.items()}
        seen = {
            job_id: (record.data, record.priority, record.retry_count, record.stall_count, record.timeout_count)
            for job_id, record in records.items()
        }
        assert seen == {
            job_id: (job.data, job.priority, job.retries, job.stalls, job.timeouts) for job_id, job in jobs.items()
        }
        assert {job_id: (_own(record), record.snooze_count) for job_id, record in records.items()} == {
            job_id: (job.options, job.snoozes) for job_id, job in jobs.items()
        }
        for job_id, record in records.items():
            expires_ms = (record.options and record.options.expires_ms) or 0
            assert abs(expires_ms - jobs[job_id].expires) < MINUTE_MS, f"{job_id} expires at another time"
        assert {job_id: record.suspect for job_id, record in records.items()} == {
            job_id: job.suspect for job_id, job in jobs.items()
        }
        assert state.owners == {
            job_id: job.owner + (":removed" if job.removed else "") for job_id, job in jobs.items() if job.owner
        }
        for job_id, name in state.active.items():
            assert job_id in state.processing.get(name, []), f"{name} owns {job_id} and does not hold it"

    def _check_times(self, times: Times) -> None:
        jobs = self._model.jobs
        assert set(times.scheduled) == {job_id for job_id, job in jobs.items() if job.scheduled}
        for job_id, due in times.scheduled.items():
            # A backoff begins when the script runs; the model knows that time only to the minute.
            assert abs(due - jobs[job_id].run_at) < MINUTE_MS, f"{job_id} is due at another time"
            jobs[job_id].run_at = due
        assert set(times.blocked) == {job_id for job_id, job in jobs.items() if job.blocked}
        assert all(jobs[job_id].owner for job_id in times.blocked)
        assert times.attempts == {job_id: job.attempts for job_id, job in jobs.items() if job.attempts}
        assert times.progress == {job_id: job.progress for job_id, job in jobs.items() if job.owner and job.progress}

    def _check_enqueue_times(self, state: State, times: Times) -> None:
        """A job keeps its enqueue time, also when it is unblocked, and no other job of its id has it."""
        held = {job_id: hold.job for job_id, hold in self._model.held.items()}
        records = state.records | state.held_records
        for job_id, job in (self._model.jobs | held).items():
            enqueued_us = unpack(records[job_id]).enqueued_us
            known = self._enqueue_times.setdefault(job_id, set())
            assert job.enqueued_us in (0, enqueued_us), f"the enqueue time of {job_id} has changed"
            assert job.enqueued_us or enqueued_us not in known, f"two jobs {job_id} have the same enqueue time"
            blocked_us = times.blocked.get(job_id, 0)
            assert job.blocked_us in (0, blocked_us), f"the enqueue time of the blocked job {job_id} has changed"
            assert job.blocked_us or blocked_us not in known, f"a blocked job {job_id} has the time of another one"
            job.enqueued_us, job.blocked_us = enqueued_us, blocked_us
            known |= {enqueued_us, blocked_us} - {0}

    def _check_hints(self, state: State) -> None:
        """There are as many hints as stale ones plus waiting jobs: fewer would lose a job, more would run it twice."""
        hints = Counter(f"{priority}:{job_id}" for priority, ids in state.waiting.items() for job_id in ids)
        moved = [job_id for name in state.processing for job_id in self._not_begun(state, name) if job_id]
        hints += Counter(f"5:{job_id}" for job_id in moved)
        hints += Counter(f"s:{job_id}" for job_id in state.suspects)
        live = Counter(f"{job.place}:{job_id}" for job_id, job in self._model.jobs.items() if job.waits)
        assert hints == live + Counter(state.stale)
        others = sum(len(ids) for priority, ids in state.waiting.items() if priority != 5) + len(state.swept.get(5, []))
        assert state.summary.other_hints == others
        assert state.summary.suspects == len(state.suspects)
        assert all(not field.startswith("s:") for field in state.stale)
        for job_id, ms in state.suspect_ms.items():
            enqueued_ms = unpack(state.records[job_id]).enqueued_us // 1000
            assert ms == enqueued_ms or (ms > enqueued_ms and not self._model.jobs[job_id].by_age)

    def _not_begun(self, state: State, name: str) -> list[str]:
        left = list(state.processing[name])
        for job_id, owner in state.active.items():
            if owner == name:
                left.remove(job_id)
        return left

    def _check_waking(self, state: State) -> None:
        """There is at most one token, and while work can be claimed, an idle worker finds a list that is not empty."""
        assert state.tokens <= 1
        assert state.retry_tokens <= 1
        under_way = any(self._not_begun(state, name) for name in state.processing)
        if self.claimable(state) and not self._model.paused and not under_way:
            assert state.tokens or len(state.waiting.get(5, [])) > len(state.swept.get(5, []))
        if self.claimable(state, "retry") and not self._model.paused and not under_way:
            assert state.retry_tokens or self._may_sleep_on_suspects(state)

    def _may_sleep_on_suspects(self, state: State) -> bool:
        """The retry child has requested a place and there is none, or pulse is about to look for one."""
        if not self._model.limits:
            return False
        asked = self.limits.left_to_suspects(state) > 0 and self.limits.room(state, "retry") == 0
        return asked or self._model.limits.promised

    def _check_counts(self) -> None:
        jobs = self._model.jobs.values()
        counts = self._queue.inspector.counts()
        assert counts.waiting == sum(job.waits for job in jobs)
        assert counts.scheduled == sum(job.scheduled for job in jobs)
        assert counts.blocked == sum(bool(job.blocked) for job in jobs)
        assert counts.held == len(self._model.held)
        assert counts.active == sum(job.owner is not None for job in jobs)
        assert (counts.done, counts.dead, counts.dropped) == (self._model.processed, self._model.dead, 0)
        assert counts.failed == self._model.dead
        assert counts.paused == self._model.paused

    def _check_done(self) -> None:
        """Compares the kept done jobs, and moves the clock on, so that the next one ends in another millisecond."""
        ended = dict(self._queue.redis.zrange(self._queue.key("done"), 0, -1, withscores=True))
        stored = self._queue.redis.hgetall(self._queue.key("done:jobs"))
        assert set(ended) == set(stored)
        seen = {job_id.decode(): read_done(packed) for job_id, packed in stored.items()}
        kept = {job_id: (str(done.fence), done.result, len(done.attempts)) for job_id, done in seen.items()}
        assert kept == {
            job_id: (done.fence, orjson.loads(done.result) if done.result else None, done.attempts)
            for job_id, done in self._model.kept.items()
        }
        assert self._queue.inspector.counts().kept == len(kept)
        newest_ms = max(ended.values(), default=0)
        while self._server_ms() <= newest_ms:
            pass
        self._model.step += 1

    def _server_ms(self) -> int:
        seconds, micros = self._queue.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def _check_journal(self) -> None:
        """Replaying the journal from its beginning gives the queue; each step adds its own events."""
        for entry_id, fields in self._queue.redis.xrange(self._queue.key("events"), self._read_up_to):
            self._replay.read(fields)
            self._read_up_to = b"(" + entry_id
        jobs, replay = self._model.jobs, self._replay
        assert replay.ready == {
            job_id: job.run_at if job.scheduled else None for job_id, job in jobs.items() if job.owner is None
        }
        running = {job_id: job for job_id, job in jobs.items() if job.owner}
        assert replay.active == {job_id: int((job.owner or "").partition(":")[2]) for job_id, job in running.items()}
        assert replay.attempts == {
            job_id: 1 + job.retries + job.stalls + job.timeouts for job_id, job in running.items()
        }
        everything = jobs | {job_id: hold.job for job_id, hold in self._model.held.items()}
        assert {job_id: _without_expiry(replay.options.get(job_id, "")) for job_id in everything} == {
            job_id: job.options for job_id, job in everything.items()
        }
        assert {
            job_id: (hold.when, {each.name for each in hold.dependencies if not each.how})
            for job_id, hold in replay.held.items()
        } == {
            job_id: (hold.after.when, {each.name for each in hold.open().values()})
            for job_id, hold in self._model.held.items()
        }
        assert replay.marked == {job_id for job_id, job in running.items() if job.removed}
        assert replay.blocked == {job_id for job_id, job in jobs.items() if job.blocked}
        assert replay.paused == self._model.paused
        assert replay.dropped == 0
        counts = self._queue.inspector.counts()
        assert (counts.epoch, counts.journal_sequence, counts.journal_hash) == (
            replay.epoch,
            replay.sequence,
            replay.hash,
        )
        assert counts.dead == len(replay.archived)


def pass_time(queue: OneQueue, ms: int) -> None:
    """Moves the times of scheduled, blocked and done jobs back."""
    for job_id in queue.redis.zrange(queue.key("done"), 0, -1):
        queue.redis.zincrby(queue.key("done"), -ms, job_id)
    for job_id, due in queue.redis.zrange(queue.key("scheduled"), 0, -1, withscores=True):
        queue.set_due({job_id: due - ms})
    for job_id, entry in queue.redis.hgetall(queue.key("blocked")).items():
        head, _, body = entry.partition(b"\n")
        update, reset, priority, own, lo, hi, enqueued_us, *options = head.decode().split(" ")
        moved = [t if int(t) == FAR else str(max(0, int(t) - ms)) for t in (own, lo, hi)]
        parts = [update, reset, priority, *moved, enqueued_us, *(_sooner(each, ms) for each in options)]
        queue.redis.hset(queue.key("blocked"), job_id, " ".join(parts).encode() + b"\n" + body)
    for job_id, entry in queue.redis.hgetall(queue.key("held")).items():
        parts = entry.decode().split(" ")
        parts[3] = str(max(0, int(parts[3]) - ms))
        queue.redis.hset(queue.key("held"), job_id, " ".join(parts))
    for job_id, packed in queue.redis.hgetall(queue.key("jobs")).items():
        head, _, body = packed.partition(b"\n")
        if b"x=" in head:
            queue.redis.hset(queue.key("jobs"), job_id, _sooner(head.decode(), ms).encode() + b"\n" + body)


def _sooner(options: str, ms: int) -> str:
    return re.sub(r"x=(\d+)", lambda expiry: f"x={int(expiry[1]) - ms}", options)


def _own(record: Record) -> str:
    return "" if record.options is None else record.options.pack()


def _without_expiry(options: str) -> str:
    return "" if options == "-" else re.sub(r",?x=\d+", "", options)
