"""When a queue's process has served long enough and is to be replaced: after so many jobs, at some age or size.

It is looked at between jobs only, so no job is ever cut short by it.

The worker's loop: claim, run, settle.

1. A turn settles what ran and claims what comes next, in one call; only when nothing waits does the worker block.
2. Before each job it publishes its position in one word of the scoreboard, so that whoever finds this worker dead or
   held up knows which job was running, which ones had run, and which had not been started.
3. After a slow job it takes a turn before it starts another job that it already holds: the rest of its batch may have
   been given to others meanwhile. A batch that takes longer than its budget is cut short, and the rest given back.
   The same before the first job, if its slot says that what it was given is being taken away.
4. After a lost reply it takes the same turn again and keeps nothing: the script sorts out what it holds.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from forq.broker.claim import Consumer, Limits, Results, Settled, Turn
from forq.broker.replies import Fate
from forq.errors import BackPressure, ForqError, RedisUnavailable
from forq.output.streams import finish_output, mark_job_end
from forq.procs.backoff import Backoff, reconnecting
from forq.procs.cgroups import pss_bytes
from forq.procs.scoreboard import (
    DONE,
    GUARDED,
    HELD,
    INDEX_SHIFT,
    POSITION,
    STARTED,
    STATE,
    TAKEN,
    TICK_MASK,
    TICK_NS_SHIFT,
    TICK_SHIFT,
    TIMEOUT,
    TURN,
    TURN_MASK,
    TURN_SHIFT,
    Slot,
    State,
    WorkerStats,
)
from forq.procs.treekill import descendants_of
from forq.settings import Value
from forq.workers.attempt import NO_RESULT, AttemptRunner
from forq.workers.exec_handlers import running_programs
from forq.workers.grant import Grant
from forq.workers.job_log import DroppedResult, FailedAttempt, JobLog

log = logging.getLogger("forq")


class Recycling:
    """Shared by the workers of one process. `replace` is called once, with the reason: it stops them all."""

    def __init__(
        self,
        options: Mapping[str, Value],
        slots: Sequence[Slot],
        replace: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_jobs = int(options.get("max_jobs", 0))
        self._max_age_seconds = float(options.get("max_age", 0))
        self._max_memory = int(options.get("max_memory", 0))
        self._slots = slots
        self._replace = replace
        self._now = now
        self._born = now()
        self._over = False

    def claimable(self, want: int, unsettled: int) -> int:
        """How many of `want` jobs a worker may still claim; it has run `unsettled` ones that do not show yet."""
        if not self._max_jobs:
            return want
        left = self._max_jobs - unsettled - sum(slot.done for slot in self._slots)
        if left <= 0:
            self._end(f"max_jobs = {self._max_jobs}")
            return 0
        # Several workers claim at once: none takes what the others may take too.
        return min(want, max(1, left // len(self._slots)))

    def check(self) -> None:
        """From the minder, about once a second while jobs run."""
        if self._max_age_seconds and self._now() - self._born > self._max_age_seconds:
            self._end(f"max_age = {self._max_age_seconds:g}s")
        if self._max_memory and (memory := pss_bytes() + programs_memory_bytes()) > self._max_memory:
            self._end(f"max_memory = {self._max_memory}, it has {memory}")

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._replace(reason)


def programs_memory_bytes() -> int:
    """The memory of the programs of exec handlers, and of what they have started."""
    programs = running_programs()
    return sum(pss_bytes(pid) for program in programs for pid in (program, *descendants_of(program)))


MAX_BATCH = 128
# A batch is sized to take about this long; jobs slower than PREFETCH_BELOW are never taken ahead of time.
TARGET_BATCH_NS = 16_000_000
PREFETCH_BELOW_NS = 8_000_000
# A batch that has taken this long is not what it was sized for: the rest of it goes back, for workers that are idle.
MAX_BATCH_NS = 2 * TARGET_BATCH_NS
# Of jobs above this a worker that was idle takes one: others may be idle too, and jobs would wait for each other.
QUICK_JOB_NS = 500_000
# Well below the age at which pulse rescues the rest of a batch (pulse.RESCUE_AFTER_MS): see duty 3.
SLOW_JOB_NS = 10_000_000
# Results go with the turn, and many large ones would make one that no server takes: with more than this in hand, a turn
# comes before the next job.
MAX_RESULTS_BYTES = 4 << 20

# What shorter jobs write past Python may go without their ids: to look at the end of each would take too long.
MARK_END_MIN_US = 100

REFUSED_LOG_INTERVAL_NS = 60 * 10**9
DROPPED_LOG_INTERVAL_NS = 10**9

OUT_OF_MEMORY_SECONDS = 1.0

Batch = list[tuple[bytes, bytes]]  # id, record


class TurnNumbers:
    """Counts the turns of one worker, over all queues that it works on: a position then belongs to one of them only.

    A number is never used again, not even for a turn whose answer was lost: by it the server tells a request that
    arrives late, over a connection that the worker has given up, from what the worker has sent since.
    """

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class WorkerLoop:
    """One worker of one queue: one connection, one processing list, one slot of the scoreboard."""

    def __init__(
        self,
        consumer: Consumer,
        attempts: AttemptRunner,
        slot: Slot,
        *,
        expiry_ms: int,
        limits: Limits,
        grant: Grant,
        recycling: Recycling,
        on_batch: Callable[[int], None],
        on_unguarded: Callable[[], None],
        numbers: TurnNumbers | None = None,
        max_batch: int = MAX_BATCH,
        claims_ahead: bool = True,
        idle_state: State = State.IDLE,
        stats: WorkerStats | None = None,
        job_log: JobLog | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.consumer = consumer
        self.queue = consumer.queue
        self.slot = slot
        self._blocking = False
        self._attempts = attempts
        self._expiry_ms = expiry_ms
        self._limits = limits
        self._grant = grant
        self._recycling = recycling
        self._on_batch = on_batch
        self._on_unguarded = on_unguarded
        self._numbers = numbers or TurnNumbers()
        self._max_batch = max_batch
        self._claims_ahead = claims_ahead
        self._idle_state = idle_state
        self._stats = stats
        self._micros: list[int] = []
        self._failures = 0
        self._job_log = job_log or JobLog()
        # An attempt that is to be told when it is known what follows.
        self._failed_attempt: FailedAttempt | None = None
        # Done jobs whose result cannot be kept: the last one, and how many there were since that was told.
        self._dropped: DroppedResult | None = None
        self._dropped_count = self._next_dropped_log_ns = 0
        self._now = clock_ns
        self._stop = threading.Event()
        self._number = 0
        self._want = self._want_when_idle = 1
        # Halved when a job of a batch is slow; grows by a quarter with each batch in which none is.
        self._max_want = max_batch
        self._done: Settled = []
        self._failed: Settled = []
        self._results: Results = []
        self._results_bytes = 0
        self._unsettled = 0
        self._parked: State | None = None
        # A turn that was taken while it waited for work.
        self._prefetched: Turn | None = None
        self._out_of_memory_logged = False
        self._refused = self._next_refused_log_ns = 0
        self._fence = ""

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Asks the loop to end after the job that is running."""
        self._stop.set()
        self._grant.stop()

    def blocked_client_id(self) -> int | None:
        """The number Redis knows this worker's connection by, while it may be blocked there."""
        return self.consumer.link.client_id if self._blocking else None

    def title_text(self) -> str | None:
        return None

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until it is stopped; raises UnknownQueue or Fenced when its place is gone."""
        if not self.join():
            return
        on_ready()
        while not self.stopping:
            if not self.serve_batch() and not self.stopping:
                self.wait_for_work()
        self.leave()

    def join(self) -> bool:
        """Registers with the queue; False if it was stopped before it could."""
        backoff = reconnecting()
        while not self.stopping:
            try:
                self.slot.epoch = int(self.consumer.join(self._expiry_ms))
                return True
            except RedisUnavailable as exc:
                self._back_off(backoff, exc)
        return False

    def serve_batch(self) -> bool:
        """Settles what ran, claims a batch and runs it; False if there was none."""
        if not self._acquire_capacity():
            return False
        batch = self._claim()
        if batch:
            self._run_batch(batch)
            if self._stats is not None:
                self._count_batch(self._stats, batch)
        if self._grant.yield_requested:
            self.settle()
            self._grant.give_back()
        return bool(batch)

    def _acquire_capacity(self) -> bool:
        """Whether this worker has the capacity for a job; waits for it. False if it was stopped meanwhile."""
        if self._grant.acquire(self._limits.size, self._limits.priority):
            return True
        # What waiting has brought goes back first: a worker elsewhere may have room for it.
        self._prefetched = None
        self._take_turn(keep=0, want=0)
        self._show_waiting(State.PARKED)
        return self._grant.wait()

    def lane_may_have_jobs(self) -> bool:
        """Whether there is anything in the lists that only the retry child claims from."""
        try:
            return self.consumer.lane_has_jobs()
        except RedisUnavailable:
            return True

    def settle(self) -> None:
        """Says what ran, without claiming anything."""
        if self._unsettled:
            self._take_turn(keep=0, want=0)

    def _claim(self) -> Batch:
        """Settles what ran, claims the next batch."""
        turn, self._prefetched = self._prefetched, None
        if turn is None:
            turn = self._take_turn(keep=0, want=self._recycling.claimable(self._want, self._unsettled))
        if turn is None:
            return []
        self._parked = State.PARKED if turn.paused else State.LIMITED if turn.limited else None
        self._fence = turn.fence
        jobs = turn.jobs
        return list(zip(jobs[::2], jobs[1::2], strict=True))

    def _take_turn(self, keep: int, want: int) -> Turn | None:
        """One turn, repeated until an answer arrives; None if the worker is stopped meanwhile."""
        backoff: Backoff | None = None
        while True:
            self._number = self._numbers.next()
            try:
                turn = self.consumer.turn(self._number, self._done, self._failed, keep, want, self._results)
                break
            except RedisUnavailable as exc:
                keep = 0
                self._log_failure("what follows is decided when Redis is back")
                backoff = backoff or reconnecting()
                self._back_off(backoff, exc)
                if self.stopping:
                    return None
            except ForqError as exc:
                self._log_failure(f"what follows is not known: {exc}")
                raise
        if backoff is not None:
            # What it held before went back with the first of these calls that arrived.
            turn = replace(turn, held=False)
        self._turn_done(turn)
        return turn

    def _turn_done(self, turn: Turn) -> None:
        """All that had run is settled."""
        if turn.refused:
            self._log_refused(len(turn.refused))
        self._publish_turn()
        self.slot.words[DONE] += self._unsettled
        self._limits = turn.limits
        self._done, self._failed, self._unsettled = [], [], 0
        self._results, self._results_bytes = [], 0
        self._log_fate(turn)
        if self._dropped is not None:
            self._log_dropped_results()

    def _log_fate(self, turn: Turn) -> None:
        # A worker takes a turn after each failure, so there is one at most.
        if turn.fates:
            self._log_failure(turn.fates[0])
            self._failed_attempt = None

    def _note_dropped_result(self, job: str, result: bytes) -> None:
        about, reason = self._attempts, result[len(NO_RESULT) :].decode(errors="replace")
        self._dropped = DroppedResult(about.queue, job, reason, self._dropped_count)
        self._dropped_count += 1

    def _log_dropped_results(self) -> None:
        """Every job of a queue may return such a thing: one line a second tells how many."""
        if self._dropped is not None and self._now() >= self._next_dropped_log_ns:
            self._job_log.write(self._dropped)
            self._dropped, self._dropped_count, self._next_dropped_log_ns = (
                None,
                0,
                self._now() + DROPPED_LOG_INTERVAL_NS,
            )

    def _log_failure(self, follows: Fate | str) -> None:
        if self._failed_attempt is not None and (isinstance(follows, Fate) or not self._failed_attempt.logged):
            self._job_log.log_failure(self._failed_attempt, follows)

    def _log_refused(self, jobs: int) -> None:
        """Every rescue brings some: one line a minute tells how many."""
        self._refused += jobs
        if self._now() >= self._next_refused_log_ns:
            log.info("already settled or given back queue=%s jobs=%s", self.consumer.queue, self._refused)
            self._refused, self._next_refused_log_ns = 0, self._now() + REFUSED_LOG_INTERVAL_NS

    def _publish_turn(self) -> None:
        """The position at the start of this turn. The whole number first: see Slot.read_position."""
        words = self.slot.words
        words[TURN] = self._number
        words[POSITION] = self._turn_bits()

    def _turn_bits(self) -> int:
        return (self._number & TURN_MASK) << TURN_SHIFT

    def _run_batch(self, batch: Batch) -> None:
        words = self.slot.words
        count = len(batch)
        words[HELD] = count
        words[STATE] = State.BUSY
        self._apply_limits()
        self._on_batch(count)
        first_started = self._now()
        index, base, previous = 0, self._turn_bits(), 0
        ran = 0
        while index < count and not self.stopping:
            started = self._now()
            # Before the position: whoever finds the job by its id must not find the position of the one before.
            self.slot.job = batch[index][0]
            if not self._failed:
                words[POSITION] = (started >> TICK_NS_SHIFT & TICK_MASK) << TICK_SHIFT | base | index << INDEX_SHIFT | 1
            # The clock is read again after the position was published: whoever saw the position before this one for
            # long enough to rescue the batch saw it before now, so the difference shows it here.
            taken = not index and words[TAKEN] == self._number
            slow = previous and self._now() - previous > SLOW_JOB_NS
            overrun = ran and started - first_started > MAX_BATCH_NS
            if slow or overrun:
                # What was taken ahead of time behind it went back, or will: that costs more than it saves.
                self._max_want = max(1, self._max_want // 2)
                self._want = min(self._want, self._max_want)
            if overrun:
                # The next turn settles what ran and keeps nothing.
                break
            if self._failed or slow or taken or self._results_bytes > MAX_RESULTS_BYTES:
                if not self._failed:
                    words[POSITION] = base | index << INDEX_SHIFT
                turn = self._take_turn(keep=count - index, want=0)
                if turn is None or not turn.held:
                    return
                words[STATE] = State.BUSY
                self._apply_limits()
                batch, count, index = batch[index:], count - index, 0
                base, previous = self._turn_bits(), 0
                continue
            self._run_one(batch[index], started)
            previous = started
            index += 1
            ran += 1
        # A failed job must not look like one that ran: its position stays "running" until it is settled.
        if not self._failed:
            words[POSITION] = base | index << INDEX_SHIFT
        finish_output()
        self._adapt_batch_size((self._now() - first_started) // max(ran, 1))

    def _count_batch(self, stats: WorkerStats, batch: Batch) -> None:
        """What came back, once per batch. A fence is the server's time in µs at the claim."""
        micros, failures = self._micros, self._failures
        self._micros, self._failures = [], 0
        if micros:
            stats.count(int(self._fence), batch, micros, failures, self._now())

    def _apply_limits(self) -> None:
        """What holds for the jobs of this batch. The parent keeps the time; it is told when it has no timer yet."""
        words, timeout_ms = self.slot.words, self._limits.timeout_ms
        self._attempts.max_result_bytes = self._limits.max_result_bytes
        changed = words[TIMEOUT] != timeout_ms
        words[TIMEOUT] = timeout_ms
        self._attempts.timeout_seconds = timeout_ms / 1000
        if timeout_ms and (changed or not words[GUARDED]):
            self._on_unguarded()

    def _run_one(self, claimed: tuple[bytes, bytes], started: int) -> None:
        job_id, record = claimed
        self.slot.words[STARTED] = started
        # forq makes no id that is no text; who writes to Redis past it may, and that must not end the worker.
        named = job_id.decode(errors="replace")
        failure = self._attempts.run(named, record, int(self._fence))
        micros = (self._now() - started) // 1000
        if micros >= MARK_END_MIN_US:
            mark_job_end(named)
        self._unsettled += 1
        if self._stats is not None:
            self._micros.append(micros)
        if failure is None:
            self._done += (job_id, self._fence, micros)
            if (result := self._attempts.result) is not None:
                self._results += (len(self._done) // 3, result)
                self._results_bytes += len(result)
                if result.startswith(NO_RESULT):
                    self._note_dropped_result(named, result)
        else:
            self.slot.words[STATE] = State.SETTLING
            self._failures += 1
            about, raised = self._attempts, self._attempts.raised
            job = named.rpartition(":")[0] if about.of_fail_handler else named
            self._failed_attempt = FailedAttempt(about.queue, job, failure, raised, about.of_fail_handler)
            about.raised = raised = None
            retry_at = "" if failure.retry_at_ms is None else failure.retry_at_ms
            what = (failure.error, failure.brief, failure.kind, retry_at, f"{random.random():.4f}")
            self._failed += (job_id, self._fence, micros, *what)

    def _adapt_batch_size(self, per_job_ns: int) -> None:
        """How many jobs to take next time: several only while a round trip for each costs more than that they wait for
        one another, and none of them was slow lately."""
        self._max_want = min(self._max_batch, self._max_want + self._max_want // 4 + 1)
        if per_job_ns > PREFETCH_BELOW_NS:
            self._want = 1
        else:
            self._want = max(1, min(self._max_want, self._want * 4, TARGET_BATCH_NS // max(per_job_ns, 1)))
        self._want_when_idle = self._want if per_job_ns <= QUICK_JOB_NS else 1

    def wait_for_work(self) -> None:
        """Blocks until there may be work."""
        self._show_waiting(self._idle_state if self._parked is None else self._parked)
        may_claim = self._grant.stop_using() and self._claims_ahead
        self._blocking = True
        try:
            self.consumer.fetch_client_id()
            if self._parked is not None:
                if not self.stopping:
                    self.consumer.wait_for_wake()
                return
            if may_claim:
                self._wait_for_turn()
            else:
                while not self.stopping and not self.consumer.wait_for_job():
                    pass
        except RedisUnavailable as exc:
            self._back_off(reconnecting(), exc)
        except BackPressure as exc:
            # Out of memory BLMOVE is refused, but a turn is not.
            if not self._out_of_memory_logged:
                log.warning("redis is out of memory queue=%s error=%s", self.consumer.queue, exc)
            self._out_of_memory_logged = True
            self._stop.wait(OUT_OF_MEMORY_SECONDS)
        else:
            self._out_of_memory_logged = False
        finally:
            self._blocking = False

    def _wait_for_turn(self) -> None:
        """Waits with the claim sent along: a job begins one round trip earlier."""
        while not self.stopping and self._prefetched is None:
            self._number = self._numbers.next()
            turn = self.consumer.wait_for_turn(self._number, self._recycling.claimable(self._want_when_idle, 0))
            if turn is None:
                return
            self._turn_done(turn)
            if turn.jobs or turn.paused or turn.limited:
                self._prefetched = turn

    def _show_waiting(self, state: State) -> None:
        words = self.slot.words
        words[HELD] = 0
        words[STATE] = state
        self.slot.job = b""

    def _back_off(self, backoff: Backoff, exc: RedisUnavailable) -> None:
        if not backoff.failures:
            log.warning("redis is gone, trying again queue=%s error=%s", self.consumer.queue, exc)
        self._stop.wait(backoff.fail())

    def leave(self) -> None:
        """Settles, hands back what was not started, and unregisters. Best effort: recovery does the same."""
        self.slot.words[STATE] = State.STOPPING
        try:
            self._number = self._numbers.next()
            turn = self.consumer.turn(self._number, self._done, self._failed, 0, 0, self._results)
            self._publish_turn()
            self._log_fate(turn)
            self._next_dropped_log_ns = 0
            self._log_dropped_results()
            self.consumer.leave(self._number)
        except ForqError as exc:
            self._log_failure(f"what follows is decided by its recovery, since Redis is not there: {exc}")
            log.warning("could not leave in order, recovery will do it queue=%s error=%s", self.consumer.queue, exc)
        finally:
            self.consumer.close()

    def close(self) -> None:
        """Ends what the handlers have left running in this worker."""
        self._attempts.close()
