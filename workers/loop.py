"""One worker of one queue: claims a batch of jobs, runs it, and settles it with the next claim.

1. A turn settles the jobs that ran and claims the next batch, in one call. The worker blocks in Redis only when no job
   is ready. If its last job came alone, it settles that job with the next wait.
2. Before each job the worker publishes its position in one word of the scoreboard. If the worker dies or hangs, that
   word shows which job was running, which jobs had run, and which had not started.
3. Jobs that have not started can be rescued: pulse returns them to the queue when their worker is slow. So after a slow
   job, or when pulse has marked the batch as taken, the worker takes a turn first, to learn whether it still holds the
   rest. A batch that overruns its time is cut short; the next turn returns the rest.
4. After a lost reply the worker takes another turn and keeps nothing. The script looks up which jobs it holds.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

from forq.broker.claim import Consumer, Limits, Results, Settled, Turn
from forq.broker.scripts import Fate
from forq.errors import BackPressure, ForqError, RedisUnavailable
from forq.output.streams import finish_output, mark_job_end
from forq.procs.backoff import Backoff, reconnecting
from forq.procs.scoreboard import (
    DONE,
    GUARDED,
    HELD,
    INDEX_SHIFT,
    JOB_AT,
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
    write_job,
)
from forq.workers.attempt import NO_RESULT, AttemptRunner, Failure
from forq.workers.event_loop import Cancelled, Run
from forq.workers.grant import Grant
from forq.workers.job_log import DroppedResult, FailedAttempt, JobLog
from forq.workers.recycling import Recycling

log = logging.getLogger("forq")


MAX_BATCH = 128
# A batch is sized to take about this long. Jobs slower than PREFETCH_BELOW_NS are claimed one at a time.
TARGET_BATCH_NS = 16_000_000
PREFETCH_BELOW_NS = 8_000_000
# A batch that takes longer than this is cut short, so that idle workers can run the rest.
MAX_BATCH_NS = 2 * TARGET_BATCH_NS
# An idle worker claims a single job if jobs take longer than this: other workers may be idle too.
QUICK_JOB_NS = 500_000
# A wait that took longer than this was probably for a job that did not exist yet.
WAITED_NS = 300_000
# Values per job in Settled, of one that succeeded.
SETTLED_LENGTH = 3
# See duty 3. Must be well below the age at which pulse rescues the rest of a batch (pulse.RESCUE_AFTER_MS).
SLOW_JOB_NS = 10_000_000
# Results are sent with the turn. Above this total the worker takes a turn at once, or the call might be too large.
MAX_RESULTS_BYTES = 4 << 20

# Of records without options of their own.
PLAIN_FLAG = ord("p")

# Raw output of shorter jobs may lack a job id: marking the end of every job would cost too much.
MARK_END_MIN_US = 100

# As they are sent: packing a number takes five times as long as packing bytes. Run times are often that short.
SMALL_NUMBERS = tuple(b"%d" % number for number in range(100))

REFUSED_LOG_INTERVAL_NS = 60 * 10**9
DROPPED_LOG_INTERVAL_NS = 10**9

OUT_OF_MEMORY_SECONDS = 1.0

Batch = list[tuple[bytes, bytes]]  # id, record


class TurnNumbers:
    """Numbers the turns of one worker across all queues it serves, so that a position belongs to one queue only.

    A number is never reused, not even after a lost reply: the server uses it to refuse a late request that arrives
    over an abandoned connection.
    """

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class BatchProgress:
    """How far a worker has run its batch: either its thread or the event loop continues with it."""

    __slots__ = ("base", "first_started", "index", "jobs", "lost", "previous", "ran", "started", "turn_due")

    def __init__(self, jobs: Batch, base: int, now_ns: int) -> None:
        # The jobs of the last turn; the turn number, as it stands in a position; the next job.
        self.jobs, self.base, self.index = jobs, base, 0
        # Start times: of the batch, of the current job, and of the job before it in this turn (0: none).
        self.first_started, self.started, self.previous = now_ns, 0, 0
        self.ran = 0
        # A turn is due before the next job.
        self.turn_due = False
        # The rest belongs to other workers, or the worker was stopped.
        self.lost = False


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
        # Places in the batch of interrupted jobs, which are in no statistics.
        self._uncounted: list[int] = []
        self._failures = 0
        self._job_log = job_log or JobLog()
        # Logged after the next turn, whose reply has the outcome for the job.
        self._failed_attempt: FailedAttempt | None = None
        # Results that could not be stored since the last log line: the latest, and their number.
        self._dropped: DroppedResult | None = None
        self._dropped_count = self._next_dropped_log_ns = 0
        self._now = clock_ns
        self._stop = threading.Event()
        attempts.stopping, attempts.read_inputs = self._stop.is_set, consumer.read_inputs
        self._number = 0
        self._want = self._want_when_idle = 1
        # Halved after a slow job; grows by a quarter with each batch without one.
        self._max_want = max_batch
        self._done: Settled = []
        self._failed: Settled = []
        self._results: Results = []
        self._results_bytes = 0
        self._unsettled = 0
        # The next job may have another timeout than the slot shows.
        self._own_timeouts = False
        self._parked: State | None = None
        # The last job had to be waited for, and came alone.
        self._arrives_singly = False
        self._waits_since_ns = 0
        # The reply to a turn that was sent along with a blocking wait.
        self._prefetched: Turn | None = None
        self._out_of_memory_logged = False
        self._refused = self._next_refused_log_ns = 0
        self._fence = ""

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until stopped. Raises UnknownQueue or Fenced when this worker is no longer registered."""
        if not self.join():
            return
        on_ready()
        while not self.stopping:
            if not self.serve_batch() and not self.stopping:
                self.wait_for_work()
        self.leave()

    def join(self) -> bool:
        """Registers with the queue; False if stopped first."""
        backoff = reconnecting()
        while not self.stopping:
            try:
                self.slot.epoch = int(self.consumer.join(self._expiry_ms))
                return True
            except RedisUnavailable as exc:
                self.back_off(backoff, exc)
        return False

    def serve_batch(self) -> bool:
        """Settles the last batch, claims the next and runs it; False if there is none."""
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
        """Waits until this worker may run jobs; False if stopped first."""
        if self._grant.acquire(self._limits.size, self._limits.priority):
            return True
        # Returns prefetched jobs first: another worker may have the capacity to run them.
        self._prefetched = None
        self._take_turn(keep=0, want=0)
        self._show_waiting(State.PARKED)
        return self._grant.wait()

    def _claim(self) -> Batch:
        """Settles the last batch and claims the next."""
        turn, self._prefetched = self._prefetched, None
        if turn is None and self._settles_while_waiting():
            return []
        if turn is None:
            turn = self._take_turn(keep=0, want=self._recycling.claimable(self._want, self._unsettled))
        if turn is None:
            return []
        self._parked = State.PARKED if turn.paused else State.LIMITED if turn.limited else None
        self._fence = turn.fence
        jobs = turn.jobs
        return list(zip(jobs[::2], jobs[1::2], strict=True))

    def _run_batch(self, batch: Batch) -> None:
        words = self.slot.words
        words[HELD] = len(batch)
        words[STATE] = State.BUSY
        self._apply_limits()
        self._on_batch(len(batch))
        progress = BatchProgress(batch, self._turn_bits(), self._now())
        while (run := self._run_jobs(progress)) is not None:
            # The event loop runs this coroutine, and continues with the batch until it needs this thread.
            self._attempts.run_chain(run, partial(self._continue_batch, progress))
        if progress.lost:
            return
        finish_output()
        self._adapt_batch_size((self._now() - progress.first_started) // max(progress.ran, 1))

    def _continue_batch(self, progress: BatchProgress, run: Run) -> Run | None:
        """On the event loop: the coroutine of the current job has ended. Returns the one of the next job; None if the
        worker's thread has to continue: the batch has ended, a turn is due, or the next handler is not async."""
        failure = self._attempts.end(run, int(self._fence))
        micros = (self._now() - progress.started) // 1000
        if micros >= MARK_END_MIN_US:
            mark_job_end(run.job_id or "")
        self._job_ended(progress.jobs[progress.index][0], run.job_id or "", micros, failure)
        progress.previous = progress.started
        progress.index += 1
        progress.ran += 1
        if failure is None:
            # Before the slot shows no coroutine: the job must not look overdue without one, whatever blocks the loop.
            self.slot.words[POSITION] = progress.base | progress.index << INDEX_SHIFT
        self._attempts.close_run(run)
        # A coroutine that was cancelled and returned nevertheless: see EventLoop.finish.
        return None if failure or run.cancelled else self._run_jobs(progress, on_loop=True)

    def _run_jobs(self, progress: BatchProgress, *, on_loop: bool = False) -> Run | None:
        """Runs the rest of the batch, up to the first job with an async handler: returns its coroutine.

        On the event loop, where nothing may block, it returns None before a turn and before other handlers."""
        while True:
            run = self._run_until_turn(progress, on_loop=on_loop)
            if not progress.turn_due or not self._confirm_rest(progress):
                return run

    def _run_until_turn(self, progress: BatchProgress, *, on_loop: bool) -> Run | None:
        """The same, up to the first job before which a turn is due."""
        # Looked up once: these are used for every job.
        slot_bytes, words, attempts = self.slot.bytes, self.slot.words, self._attempts
        now, is_stopping = self._now, self._stop.is_set
        fence, overrun_ns = int(self._fence), progress.first_started + MAX_BATCH_NS
        batch, first, index = progress.jobs, progress.index, progress.index
        base, previous = progress.base, progress.previous
        has_failed, settles = bool(self._failed), self._must_settle()
        run: Run | None = None
        # Run times of the jobs before `index` that are not noted as done yet.
        micros: list[int] = []
        # What the positions of jobs that start in the same tick have in common, and when that tick ends.
        in_tick = tick_ends = 0
        started = now()
        for job_id, record in islice(batch, first, None):
            if is_stopping():
                break
            # The id before the position: a reader that finds this id must not see the position of the job before.
            write_job(slot_bytes, JOB_AT, job_id)
            if not has_failed:
                if started >= tick_ends:
                    tick = started >> TICK_NS_SHIFT
                    in_tick, tick_ends = (tick & TICK_MASK) << TICK_SHIFT | base | 1, (tick + 1) << TICK_NS_SHIFT
                if self._own_timeouts or (record and record[0]) != PLAIN_FLAG:
                    own_ms = self._own_timeout_ms((job_id, record))
                    if on_loop and own_ms != words[TIMEOUT]:
                        # A chain has one timeout, and the message to the supervisor may block.
                        break
                    at = index << INDEX_SHIFT
                    self._publish_with_timeout(own_ms, in_tick | at, base | at, started)
                else:
                    words[POSITION] = in_tick | index << INDEX_SHIFT
            # TAKEN and the clock are read after the position is published. If pulse saw the previous position for long
            # enough to rescue the batch, that time has passed by now, so `slow` is true here.
            taken = not index and words[TAKEN] == self._number
            slow = previous and now() - previous > SLOW_JOB_NS
            overrun = started > overrun_ns and (index > first or progress.ran)
            if slow or overrun or taken or settles:
                if on_loop:
                    break
                if slow or overrun:
                    # The jobs behind it are returned anyway, so claim fewer next time.
                    self._max_want = max(1, self._max_want // 2)
                    self._want = min(self._want, self._max_want)
                # After an overrun the next turn returns the rest.
                progress.turn_due = not overrun
                break
            words[STARTED] = started
            # Another program may have stored an id that is not UTF-8. It must not end the worker.
            id_text = job_id.decode("utf-8", "replace")
            if attempts.chains and (run := attempts.begin(id_text, record, fence)) is not None:
                progress.started = started
                break
            if on_loop:
                break
            failure = attempts.run(id_text, record, fence)
            previous = started
            # The end of this job, and the start of the next.
            started = now()
            index += 1
            took = (started - previous) // 1000
            if took >= MARK_END_MIN_US:
                mark_job_end(id_text)
                started = now()
            if failure is None and attempts.result is None:
                micros.append(took)
            else:
                self._note_done(batch, index - 1, micros)
                self._job_ended(job_id, id_text, took, failure)
                micros, has_failed, settles = [], bool(self._failed), self._must_settle()
                started = now()
        # A failed job keeps the position "running" until it is settled: it must not look like a job that is done. After
        # any other it is left at once: a job that has ended must not look interrupted.
        if run is None and not has_failed:
            words[POSITION] = base | index << INDEX_SHIFT
        self._note_done(batch, index, micros)
        progress.index, progress.previous = index, previous
        progress.ran += index - first
        return run

    def _must_settle(self) -> bool:
        """Whether a turn is due before the next job."""
        return bool(self._failed) or self._results_bytes > MAX_RESULTS_BYTES

    def _confirm_rest(self, progress: BatchProgress) -> bool:
        """Takes a turn within a batch, to learn whether this worker still holds the rest; False if not."""
        index, progress.turn_due = progress.index, False
        turn = self._take_turn(keep=len(progress.jobs) - index, want=0)
        if turn is None or not turn.held:
            progress.lost = True
            return False
        self.slot.words[STATE] = State.BUSY
        self._apply_limits()
        progress.jobs, progress.index = progress.jobs[index:], 0
        progress.base, progress.previous = self._turn_bits(), 0
        return True

    def _note_done(self, batch: Batch, end: int, micros: list[int]) -> None:
        """Notes that the jobs before `end` have succeeded, without results that are kept: one per run time."""
        number = len(micros)
        if number:
            done: Settled = [self._fence] * (3 * number)
            done[::3] = [job_id for job_id, _ in batch[end - number : end]]
            done[2::3] = [SMALL_NUMBERS[each] if each < len(SMALL_NUMBERS) else each for each in micros]
            self._done += done
            self._unsettled += number
            if self._stats is not None:
                self._micros += micros

    def _job_ended(self, job_id: bytes, id_text: str, micros: int, failure: Failure | None) -> None:
        if failure is None or not failure.interrupted:
            self._unsettled += 1
            if self._stats is not None:
                self._micros.append(micros)
        elif self._stats is not None:
            self._uncounted.append(len(self._micros) + len(self._uncounted))
        if failure is None:
            self._done += (job_id, self._fence, micros)
            if (result := self._attempts.result) is not None:
                self._add_result(result)
                if result.startswith(NO_RESULT):
                    self._note_dropped_result(id_text, result)
        else:
            self.slot.words[STATE] = State.SETTLING
            self._failures += not failure.interrupted
            about, raised = self._attempts, self._attempts.raised
            job = id_text.rpartition(":")[0] if about.of_fail_handler else id_text
            self._failed_attempt = FailedAttempt(about.queue, job, failure, raised, about.of_fail_handler)
            about.raised = raised = None
            retry_at = "" if failure.retry_at_ms is None else failure.retry_at_ms
            chance = f"{random.random():.4f}"
            if about.task_options is not None and (packed := about.task_options.pack()):
                chance = f"{chance} {packed}"
            self._failed += (job_id, self._fence, micros, failure.error, failure.brief, failure.kind, retry_at, chance)

    def _add_result(self, result: bytes) -> None:
        number, keep_ms = len(self._done) // 3, self._attempts.keep_done_ms
        if not self._results:
            # Before the position of the next job: pulse must not settle these jobs without their results.
            self.slot.has_results = True
        self._results += (number if keep_ms is None else f"{number} {keep_ms}", result)
        self._results_bytes += len(result)

    def settle(self) -> None:
        """Settles without claiming."""
        if self._unsettled or self._failed:
            self._take_turn(keep=0, want=0)

    def _take_turn(self, keep: int, want: int) -> Turn | None:
        """Settles, keeps the last `keep` jobs of the batch, claims up to `want`. Retries until Redis replies; None if
        stopped first."""
        backoff: Backoff | None = None
        while True:
            self._number = self._numbers.next()
            try:
                turn = self.consumer.turn(self._number, self._done, self._failed, keep, want, self._results)
                break
            except RedisUnavailable as exc:
                keep = 0
                self._log_failure("outcome is decided when Redis is back")
                backoff = backoff or reconnecting()
                self.back_off(backoff, exc)
                if self.stopping:
                    return None
            except ForqError as exc:
                self._log_failure(f"outcome unknown: {exc}")
                raise
        if backoff is not None:
            # The first call that reached Redis returned the rest of the batch.
            turn = replace(turn, held=False)
        self._turn_done(turn)
        return turn

    def _turn_done(self, turn: Turn) -> None:
        """Publishes the turn and clears the settled jobs."""
        self._publish_turn()
        self._settled(turn.refused)
        self._limits = turn.limits
        self._failed = []
        if self._results:
            self._results, self._results_bytes = [], 0
            self.slot.has_results = False
        self._log_fate(turn)
        if self._dropped is not None:
            self._log_dropped_results()

    def _settled(self, refused: list[bytes]) -> None:
        if refused:
            self._log_refused(len(refused))
        self.slot.words[DONE] += self._unsettled
        self._done, self._unsettled = [], 0

    def _publish_turn(self) -> None:
        """The position at the start of this turn. The full number first: see Slot.read_position."""
        words = self.slot.words
        words[TURN] = self._number
        words[POSITION] = self._turn_bits()

    def _turn_bits(self) -> int:
        return (self._number & TURN_MASK) << TURN_SHIFT

    def _apply_limits(self) -> None:
        """Applies the queue's current timeout and result limit. The supervisor enforces the timeout; it is notified
        if it has no timer for this worker yet."""
        words, timeout_ms = self.slot.words, self._limits.timeout_ms
        self._attempts.limits = self._limits
        self._attempts.max_result_bytes = self._limits.max_result_bytes if self._limits.keeps_results else 0
        changed = words[TIMEOUT] != timeout_ms
        words[TIMEOUT] = timeout_ms
        self._attempts.timeout_seconds = timeout_ms / 1000
        self._own_timeouts = self._attempts.has_task_timeouts
        if timeout_ms and (changed or self._not_guarded_until(self._now() + timeout_ms * 1_000_000)):
            self._on_unguarded()

    def _own_timeout_ms(self, claimed: tuple[bytes, bytes]) -> int:
        own_ms = self._attempts.own_timeout_ms(*claimed, int(self._fence))
        return self._limits.timeout_ms if own_ms is None else own_ms

    def _publish_with_timeout(self, timeout_ms: int, position: int, not_running: int, started: int) -> None:
        """Publishes the position of a job that may have a timeout of its own.

        If the timeout changes, the position shows meanwhile that no job runs: the supervisor must not combine the start
        of one job with the timeout of the next. It is notified if it would check this job too late."""
        words = self.slot.words
        changed = words[TIMEOUT] != timeout_ms
        if changed:
            words[POSITION] = not_running
            words[TIMEOUT] = timeout_ms
            self._attempts.timeout_seconds = timeout_ms / 1000
        words[POSITION] = position
        self._own_timeouts = self._attempts.has_task_timeouts or timeout_ms != self._limits.timeout_ms
        if changed and timeout_ms and self._not_guarded_until(started + timeout_ms * 1_000_000):
            self._on_unguarded()

    def _not_guarded_until(self, due_ns: int) -> bool:
        """Whether the supervisor has no timer for this worker, or one that is later than this time."""
        guarded = self.slot.words[GUARDED]
        return not guarded or due_ns < guarded

    def _adapt_batch_size(self, per_job_ns: int) -> None:
        """Sets how many jobs to claim next. Batches pay off only while jobs are short compared with a round trip."""
        self._max_want = min(self._max_batch, self._max_want + self._max_want // 4 + 1)
        if per_job_ns > PREFETCH_BELOW_NS:
            self._want = 1
        else:
            self._want = max(1, min(self._max_want, self._want * 4, TARGET_BATCH_NS // max(per_job_ns, 1)))
        self._want_when_idle = self._want if per_job_ns <= QUICK_JOB_NS else 1

    def wait_for_work(self) -> None:
        """Blocks in Redis until there may be a job."""
        self._show_waiting(self._idle_state if self._parked is None else self._parked)
        may_claim = self._grant.stop_using() and self._claims_ahead
        if not may_claim or self._parked is not None:
            self.settle()
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
            self.back_off(reconnecting(), exc)
        except BackPressure as exc:
            # Redis refuses BLMOVE when out of memory, but not a turn.
            if not self._out_of_memory_logged:
                log.warning("redis is out of memory; retrying queue=%s error=%s", self.consumer.queue, exc)
            self._out_of_memory_logged = True
            self._stop.wait(OUT_OF_MEMORY_SECONDS)
        else:
            self._out_of_memory_logged = False
        finally:
            self._blocking = False

    def _wait_for_turn(self) -> None:
        """Sends the claim along with the wait: a job starts one round trip earlier."""
        while not self.stopping and self._prefetched is None:
            self._number = self._numbers.next()
            want = self._recycling.claimable(self._want_when_idle, self._unsettled)
            self._waits_since_ns = self._now()
            if self._done:
                turn = self.consumer.settle_and_wait(self._number, want, self._done, self._settled_before_wait)
            else:
                turn = self.consumer.wait_for_turn(self._number, want)
            if turn is None:
                return
            self._turn_done(turn)
            if turn.jobs or turn.paused or turn.limited:
                self._prefetched = turn
                self._arrives_singly = len(turn.jobs) == 2 and self._now() - self._waits_since_ns > WAITED_NS

    def _settled_before_wait(self, refused: list[bytes]) -> None:
        self._settled(refused)
        # A round trip is no wait: if a job was there, its reply comes with this one.
        self._waits_since_ns = self._now()

    def _settles_while_waiting(self) -> bool:
        """Whether to settle the last job with the next wait: it arrived alone, so probably no other one is there."""
        singly, self._arrives_singly = self._arrives_singly, False
        if not singly or len(self._done) != SETTLED_LENGTH or self._failed or self._results:
            return False
        if not self._claims_ahead or self.consumer.link.is_cluster:
            return False
        if not self._recycling.claimable(1, self._unsettled):
            return False
        self._want_when_idle = 1
        return True

    def _show_waiting(self, state: State) -> None:
        words = self.slot.words
        words[HELD] = 0
        words[STATE] = state
        self.slot.job = b""

    def use(self, attempts: AttemptRunner) -> None:
        """Runs jobs with these handlers from the next turn on. Called before the first turn."""
        self._attempts = attempts
        attempts.stopping, attempts.read_inputs = self._stop.is_set, self.consumer.read_inputs

    def lane_may_have_jobs(self) -> bool:
        """Whether the retry lane may have jobs. True if Redis does not answer."""
        try:
            return self.consumer.lane_has_jobs()
        except RedisUnavailable:
            return True

    def leave(self) -> None:
        """Settles, returns unstarted jobs, and unregisters. Best effort: recovery does the same."""
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
            self._log_failure(f"outcome is decided by recovery: {exc}")
            log.warning("failed to unregister; recovery will clean up queue=%s error=%s", self.consumer.queue, exc)
        finally:
            self.consumer.close()

    def close(self) -> None:
        """Stops the programs and tasks that handlers left running."""
        self._attempts.close()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends the loop after the running job."""
        self._stop.set()
        self._grant.stop()

    def cancel(self, position: int | None, outcome: Cancelled, cause: str) -> None:
        """Ends the coroutine of the job at this position (None: of any)."""
        self._attempts.cancel(position, outcome, cause)

    def coroutine_stack(self) -> str | None:
        return self._attempts.coroutine_stack()

    def blocked_client_id(self) -> int | None:
        """The Redis client id of this worker's connection while it may be blocked; else None."""
        return self.consumer.link.client_id if self._blocking else None

    def title_text(self) -> str | None:
        return None

    def back_off(self, backoff: Backoff, exc: RedisUnavailable) -> None:
        if not backoff.failures:
            log.warning("redis is gone; retrying queue=%s error=%s", self.consumer.queue, exc)
        self._stop.wait(backoff.fail())

    def _log_fate(self, turn: Turn) -> None:
        # A worker takes a turn after each failure, so there is at most one.
        if turn.fates:
            self._log_failure(turn.fates[0])
            self._failed_attempt = None

    def _note_dropped_result(self, job: str, result: bytes) -> None:
        about, reason = self._attempts, result[len(NO_RESULT) :].decode(errors="replace")
        self._dropped = DroppedResult(about.queue, job, reason, self._dropped_count)
        self._dropped_count += 1

    def _log_dropped_results(self) -> None:
        """At most once a second: every job of a queue may return such a value."""
        if self._dropped is not None and self._now() >= self._next_dropped_log_ns:
            self._job_log.write(self._dropped)
            self._dropped, self._dropped_count, self._next_dropped_log_ns = (
                None,
                0,
                self._now() + DROPPED_LOG_INTERVAL_NS,
            )

    def _log_failure(self, outcome: Fate | str) -> None:
        if self._failed_attempt is not None and (isinstance(outcome, Fate) or not self._failed_attempt.logged):
            self._job_log.log_failure(self._failed_attempt, outcome)

    def _log_refused(self, jobs: int) -> None:
        """At most once a minute: every rescue causes some."""
        self._refused += jobs
        if self._now() >= self._next_refused_log_ns:
            log.info("settle refused: already settled or returned queue=%s jobs=%s", self.consumer.queue, self._refused)
            self._refused, self._next_refused_log_ns = 0, self._now() + REFUSED_LOG_INTERVAL_NS

    def _count_batch(self, stats: WorkerStats, batch: Batch) -> None:
        """Once per batch. A fence is the server's time in µs at the claim."""
        micros, failures = self._micros, self._failures
        self._micros, self._failures = [], 0
        if self._uncounted:
            batch = [job for place, job in enumerate(batch) if place not in self._uncounted]
            self._uncounted = []
        if micros:
            stats.count(int(self._fence), batch, micros, failures, self._now())
