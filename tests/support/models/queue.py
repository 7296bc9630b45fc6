"""A model of a queue: which jobs exist, in which state, and what the counters show.

Dispatches blocked behind an active job are kept one by one and applied in order; the scripts fold them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from forq.job_options import unpack_options
from tests.support.models.held import SUCCESS, After, Dependency, ModelHold, waiting_for
from tests.support.models.limits import ModelLimits

MAX_RETRIES = 2
MAX_STALLS = 1
MAX_TIMEOUTS = 0
MAX_ITEMS = 7
DONE_MAX = 3
KEEP_DONE_MS = 60 * 60_000
ATTEMPTS_KEPT = 10


@dataclass(frozen=True)
class Dispatch:
    """One enqueue of an id."""

    data: int
    priority: int = 5
    run_at: int = 0  # ms; 0: at once
    update_data: bool = True
    update_run_at: bool | str = True
    reset: bool | None = None
    options: str = ""  # packed, without the expiry
    expires: int = 0  # ms; 0: never
    expires_in: int = 0  # the same as a duration

    def new(self) -> "ModelJob":
        return ModelJob(self.data, self.priority, self.run_at, options=self.options, expires=self.expires)

    def on(self, job: "ModelJob") -> None:
        at = self.run_at
        run_at = {True: at, False: job.run_at, "if_later": max(job.run_at, at), "if_earlier": min(job.run_at, at)}
        job.run_at = run_at[self.update_run_at]
        if self.update_data:
            job.data, job.priority = self.data, self.priority
            job.options, job.expires = self.options, self.expires
        if self.update_data if self.reset is None else self.reset:
            job.retries = job.stalls = job.timeouts = job.attempts = job.snoozes = 0
            job.suspect = False


@dataclass(frozen=True)
class ModelDone:
    """A done job that is kept. `order`: the step in which it ended."""

    fence: str
    result: str  # as it is stored
    attempts: int
    ended_ms: int
    order: int


@dataclass(frozen=True)
class Failure:
    """How a handler failed; `retry_at` in ms, None: decided by the backoff."""

    kind: str = "retriable"
    retry_at: int | None = None


@dataclass
class ModelJob:
    data: int
    priority: int
    run_at: int = 0  # ms; 0 while it waits or runs
    scheduled: bool = False
    owner: str | None = None  # WORKER:FENCE while it is active
    removed: bool = False
    retries: int = 0
    stalls: int = 0
    timeouts: int = 0
    snoozes: int = 0
    options: str = ""
    expires: int = 0
    suspect: bool = False
    by_age: bool = False  # a suspect that is back in its place by age
    attempts: int = 0
    progress: str | None = None  # of this attempt
    blocked: list[Dispatch] = field(default_factory=list)
    # Enqueue times of this job and of the one blocked behind it; 0: not read yet. They never change.
    enqueued_us: int = 0
    blocked_us: int = 0
    # Whether a job that waits for this one, or for the one blocked behind it, wants its result.
    used: bool = False
    blocked_used: bool = False
    # Of a job that waited for others and uses their results.
    waited: ModelHold | None = None

    @property
    def waits(self) -> bool:
        return self.owner is None and not self.scheduled

    def is_spent(self, now_ms: int) -> bool:
        """The next claim moves it to dead."""
        return self.stalls > MAX_STALLS or self.timeouts > MAX_TIMEOUTS or 0 < self.expires <= now_ms

    @property
    def max_retries(self) -> int:
        own = unpack_options(self.options).max_retries
        return MAX_RETRIES if own is None else own

    def backoff_ms(self, of_queue: tuple[int, ...]) -> int:
        own = unpack_options(self.options).backoff_ms
        return own[min(self.retries, len(own) - 1)] if own else of_queue[self.retries]

    @property
    def place(self) -> str:
        return "s" if self.suspect else str(self.priority)

    def lost(self, outcome: str) -> None:
        """Its worker was lost while it ran."""
        self.tried()
        self.stalls += outcome == "stalled"
        self.timeouts += outcome == "timed_out"
        self.suspect = self.suspect or outcome == "suspect"

    def tried(self) -> None:
        self.attempts = min(self.attempts + 1, ATTEMPTS_KEPT)


@dataclass(frozen=True)
class LateTurn:
    """A turn sent over a connection that its worker has given up; it has not reached the server yet."""

    number: int
    want: int
    settled: tuple[str, str, Failure, str]


@dataclass
class ModelWorker:
    """A worker's own view: its batch, how many of it ran, and the position that others can read."""

    name: str
    processor: str
    lane: str = "main"
    fence: str = ""
    batch: str = ""
    index: int = 0
    running: bool = False
    seen_turn: int = 0
    # Registered in Redis, as opposed to the worker's view: they differ after a lost reply.
    turn: int = 0
    registered: int = 0  # at the end of the step before
    shift: int = 0
    # Sent again after a lost reply: (done, failed, how it failed, fence).
    unsettled: tuple[str, str, Failure, str] | None = None
    rescued: bool = False
    late: list[LateTurn] = field(default_factory=list)
    # No job may begin now, so it sleeps until it is woken.
    limited: bool = False


class Full(Exception):
    """max_items is reached."""


class Taken(Exception):
    """The id exists, and the call required that it does not."""


class Unknown(Exception):
    """A job would wait for one that the queue does not know."""


class NotKept(Exception):
    """A job would use the result of one that does not keep it."""


@dataclass
class ModelQueue:
    now_ms: int
    backoff_ms: tuple[int, ...]  # after the first failure, the second ...
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    processed: int = 0
    dead: int = 0
    fates: list[tuple[str, int, int]] = field(default_factory=list)
    paused: bool = False
    last_fence: int = 0
    keeps: bool = True
    kept: dict[str, ModelDone] = field(default_factory=dict)
    # The rule being executed: no two scripts of one rule settle what ran.
    step: int = 0
    limits: ModelLimits = field(default_factory=ModelLimits)
    held: dict[str, ModelHold] = field(default_factory=dict)
    # How jobs ended, from the first held one on.
    remembers: bool = False
    ends: dict[str, str] = field(default_factory=dict)
    just_ended: list[str] = field(default_factory=list)

    def enqueue(self, ids: list[str], dispatch: Dispatch, if_exists: str, token: str | None) -> list[str]:
        """Returns the reply of the call; raises Taken or Full, and then nothing has changed."""
        if token in self.tokens:
            return [self.tokens[token or ""]] * len(ids)
        self.store([(job_id, dispatch, None) for job_id in ids], if_exists)
        if token:
            self.tokens[token] = ids[0]
        return ids

    def store(self, lines: list[tuple[str, Dispatch, After | None]], if_exists: str) -> None:
        """Stores all lines or raises; a job waits for what was there before it."""
        new: dict[str, dict[str, str]] = {}  # id -> how its dependencies ended that are not live
        for job_id, _, after in lines:
            if job_id in new or self.lives(job_id):
                if if_exists == "refuse" or (after and if_exists == "update"):
                    raise Taken
            else:
                try:
                    new[job_id] = self._look_up(after, new)
                except (Unknown, NotKept):
                    # A later call may name a job that has ended by then.
                    self.remembers = True
                    raise
        ids = {job_id for job_id, _, _ in lines}
        behind = {
            job_id for job_id in ids & set(self.jobs) if self.jobs[job_id].owner and not self.jobs[job_id].blocked
        }
        growth = len(new) + (len(behind) if if_exists == "update" else 0)
        if growth and self.items() + growth > MAX_ITEMS:
            raise Full
        waiting: list[tuple[str, ModelHold, dict[str, str]]] = []
        for job_id, dispatch, after in lines:
            if after and job_id in new and not self.lives(job_id):
                self.remembers = True
                hold = ModelHold(dispatch.new(), after, dispatch.expires_in)
                hold.dependencies = [Dependency(name, "?") for name in after.names]
                self.held[job_id] = hold
                waiting.append((job_id, hold, new[job_id]))
            else:
                self._dispatch(job_id, dispatch, if_exists)
        for job_id, hold, ended in waiting:
            self._connect(job_id, hold, ended)

    def lives(self, job_id: str) -> bool:
        return job_id in self.jobs or job_id in self.held

    def _look_up(self, after: After | None, new: Iterable[str]) -> dict[str, str]:
        """How the dependencies ended that are not live."""
        ended = {}
        for name in (name for name in after.names if name not in new) if after else ():
            job = self.jobs.get(name)
            if job and after and after.use and job.owner and not job.blocked and not (self.keeps or job.used):
                raise NotKept
            if self.lives(name):
                continue
            how = self.how_ended(name)
            if how is None:
                raise Unknown
            if after and after.use and how in SUCCESS and not self._result_of_done(name):
                raise NotKept
            ended[name] = how
        return ended

    def how_ended(self, job_id: str) -> str | None:
        return self.ends.get(job_id, "done" if job_id in self.kept else None)

    def _result_of_done(self, job_id: str) -> str | None:
        return (self.kept[job_id].result or None) if job_id in self.kept else None

    def _connect(self, job_id: str, hold: ModelHold, ended: dict[str, str]) -> None:
        for number, dependency in enumerate(hold.dependencies, 1):
            name = dependency.name
            live = self.held[name].job if name in self.held else self.jobs.get(name)
            how = ended.get(name)
            if how is None and live:
                dependency.source = f"{name} blocked" if live.blocked else name
                if hold.after.use and live.blocked:
                    live.blocked_used = True
                elif hold.after.use:
                    live.used = True
                continue
            how = how or self.ends[name]
            result = self._result_of_done(name) if how in SUCCESS else None
            if self.held.get(job_id) is hold:
                self._follow(job_id, hold, number, how, result)

    def _follow(self, job_id: str, hold: ModelHold, number: int, how: str, result: str | None) -> None:
        outcome = hold.end(number, how, result)
        if not outcome:
            return
        del self.held[job_id]
        if outcome == "ready":
            job = hold.job
            job.expires = max(self.now_ms, job.run_at) + hold.expires_in if hold.expires_in else 0
            job.waited = hold if hold.after.use else None
            self.jobs[job_id] = self._ready(job)
            return
        self.dead += outcome == "dead"
        self._note_end(job_id, outcome)

    def _note_end(self, job_id: str, how: str, result: str | None = None) -> None:
        """Tells those that wait for this job, after it is gone."""
        if self.remembers:
            self.ends[job_id] = how
            self.just_ended.append(job_id)
        self._tell(job_id, how, result)

    def _tell(self, source: str, how: str, result: str | None = None) -> None:
        for job_id, hold, number in list(waiting_for(self.held, source)):
            if self.held.get(job_id) is hold:
                self._follow(job_id, hold, number, how, result)

    def _move_blocked(self, job_id: str) -> None:
        for _, hold, number in list(waiting_for(self.held, f"{job_id} blocked")):
            hold.dependencies[number - 1].source = job_id

    def restore(self, lines: list[tuple[str, str]], dispatch: Dispatch) -> list[str]:
        """The outcome of each (id, token): "stored", "known" or "left"; raises Full, and then nothing has changed."""
        ids, tokens, outcomes = set(self.jobs) | set(self.held), set(self.tokens), []
        for job_id, token in lines:
            outcomes.append("known" if token in tokens else "left" if job_id in ids else "stored")
            if outcomes[-1] == "stored":
                ids.add(job_id)
                tokens.add(token)
        stored = [line for line, outcome in zip(lines, outcomes, strict=True) if outcome == "stored"]
        if stored and self.items() + len(stored) > MAX_ITEMS:
            raise Full
        for job_id, token in stored:
            self._dispatch(job_id, dispatch, "leave")
            self.tokens[token] = job_id
        return outcomes

    def items(self) -> int:
        return len(self.jobs) + len(self.held) + sum(bool(job.blocked) for job in self.jobs.values())

    def _dispatch(self, job_id: str, dispatch: Dispatch, if_exists: str) -> None:
        job, hold = self.jobs.get(job_id), self.held.get(job_id)
        if hold:
            if if_exists == "update":
                dispatch.on(hold.job)
                hold.expires_in = dispatch.expires_in if dispatch.update_data else hold.expires_in
        elif job is None:
            self.jobs[job_id] = self._ready(dispatch.new())
        elif if_exists == "update" and job.owner:
            job.blocked.append(dispatch)
        elif if_exists == "update":
            dispatch.on(job)
            self._ready(job)

    def _ready(self, job: ModelJob) -> ModelJob:
        job.by_age = False
        job.scheduled = job.run_at > self.now_ms
        job.run_at = job.run_at if job.scheduled else 0
        return job

    def _keep(self, ended: dict[str, str]) -> None:
        """Keeps jobs that succeeded in one call, each with its result."""
        self.processed += len(ended)
        if not self.keeps or not ended:
            return
        for job_id, result in ended.items():
            job = self.jobs[job_id]
            fence = (job.owner or "").partition(":")[2]
            if not job.removed:
                self.kept[job_id] = ModelDone(fence, result, job.attempts, self.now_ms, self.step)
        if not all(self.jobs[job_id].removed for job_id in ended):
            self._forget()

    def _forget(self) -> None:
        in_order = sorted(self.kept, key=lambda job_id: (self.kept[job_id].order, job_id))
        young = [job_id for job_id in in_order if self.kept[job_id].ended_ms > self.now_ms - KEEP_DONE_MS]
        # Jobs over the age limit are removed with those over the count limit, or later: both remove the oldest.
        self.kept = {job_id: self.kept[job_id] for job_id in young[-DONE_MAX:]}

    def forget_in_time(self) -> None:
        """A heartbeat, or a call of promote."""
        if self.keeps:
            self._forget()
        else:
            self.kept = {}

    def _end(self, job_id: str, how: str, result: str | None = None) -> None:
        """The active job has ended: a dispatch blocked behind it becomes a job."""
        ended = self.jobs.pop(job_id)
        self._note_end(job_id, how, result)
        first, *others = ended.blocked or (None,)
        if first is None:
            return
        job = first.new()
        job.enqueued_us, job.used = ended.blocked_us, ended.blocked_used
        for dispatch in others:
            if dispatch:
                dispatch.on(job)
        self.jobs[job_id] = self._ready(job)
        self._move_blocked(job_id)

    def _come_back(self, job_id: str, run_at: int) -> None:
        """The active job will run again: a dispatch blocked behind it updates it."""
        job = self.jobs[job_id]
        self._move_blocked(job_id)
        job.used, job.blocked_used = job.used or job.blocked_used, False
        job.owner, job.run_at, job.progress = None, run_at, None
        for dispatch in job.blocked:
            dispatch.on(job)
        job.blocked, job.blocked_us = [], 0
        self._ready(job)

    def cancel(self, job_id: str, *, even_active: bool) -> bool:
        """Whether there was anything to cancel."""
        if self.held.pop(job_id, None):
            self._note_end(job_id, "cancelled")
            return True
        job = self.jobs.get(job_id)
        if job is None:
            return False
        if job.owner is None:
            del self.jobs[job_id]
            self._note_end(job_id, "cancelled")
            return True
        was_blocked, job.blocked, job.blocked_us, job.blocked_used = bool(job.blocked), [], 0, False
        self._tell(f"{job_id} blocked", "cancelled")
        job.removed = job.removed or even_active
        return was_blocked or even_active

    def run_now(self, job_id: str) -> bool | None:
        """Whether the job was scheduled; None: there is no such job."""
        job = self.jobs.get(job_id)
        if job is None or not job.scheduled:
            return False if self.lives(job_id) else None
        job.run_at = 0
        self._ready(job)
        return True

    def pass_time(self, ms: int) -> None:
        """Moves all timers closer; `now_ms` stays."""
        for job in self.jobs.values():
            job.run_at = max(0, job.run_at - ms)
            job.expires = job.expires and job.expires - ms
            job.blocked = [
                replace(
                    dispatch,
                    run_at=max(0, dispatch.run_at - ms),
                    expires=dispatch.expires and dispatch.expires - ms,
                )
                for dispatch in job.blocked
            ]
        for hold in self.held.values():
            hold.job.run_at = max(0, hold.job.run_at - ms)
        self.kept = {job_id: replace(done, ended_ms=done.ended_ms - ms) for job_id, done in self.kept.items()}

    def promote(self) -> None:
        for job in self.jobs.values():
            if job.scheduled:
                self._ready(job)

    def owned(self, worker: ModelWorker) -> list[str]:
        return [job_id for job_id, job in self.jobs.items() if (job.owner or "").partition(":")[0] == worker.name]

    def owns(self, worker: ModelWorker, job_id: str) -> bool:
        return job_id in self.owned(worker)

    def settle(self, worker: ModelWorker, done: str, failed: str, how: Failure, fence: str) -> list[str]:
        """Returns the refused ids. The fates of the failed ones are in `fates`."""
        refused = []
        self.fates = []
        owned = {job_id for job_id, job in self.jobs.items() if job.owner == f"{worker.name}:{fence}"}
        self._keep({job_id: result_of(job_id) for job_id in done if job_id in owned})
        for job_id in done + failed:
            if job_id not in owned:
                refused.append(job_id)
                if job_id in failed:
                    self.fates.append(("refused", 0, 0))
                continue
            job = self.jobs[job_id]
            if job_id in failed:
                self.fates.append(self._fate(job, how))
            if job_id in done:
                self._end(job_id, "done", result_of(job_id))
            elif job.removed or how.kind == "cancelled":
                self._end(job_id, "cancelled")
            elif how.kind == "interrupted":
                self.hand_back([job_id], job_id, how.kind)
            elif how.kind == "timeout":
                job.lost("timed_out")
                self._come_back(job_id, 0)
            elif how.kind == "snooze":
                job.snoozes += 1
                job.suspect = False
                self._come_back(job_id, how.retry_at or 0)
            elif how.kind == "permanent" or job.retries >= job.max_retries:
                self.dead += 1
                self._end(job_id, "dead")
            else:
                backoff = job.backoff_ms(self.backoff_ms)
                job.tried()
                job.retries += 1
                job.suspect = False
                self._come_back(job_id, self.now_ms + backoff if how.retry_at is None else how.retry_at)
        return refused

    def _fate(self, job: ModelJob, how: Failure) -> tuple[str, int, int]:
        """The next state, the number of the attempt, and the maximum of attempts."""
        if job.removed or how.kind == "cancelled":
            return "removed", 0, 0
        attempt = job.retries + job.stalls + job.timeouts + 1
        if how.kind == "timeout":
            left = max(0, MAX_TIMEOUTS - job.timeouts)
            return "returned" if left else "dead", attempt, attempt + left
        if how.kind == "snooze":
            return "snoozed", attempt, attempt
        if how.kind == "interrupted":
            return "suspect" if job.suspect else "interrupted", attempt, attempt
        left = max(0, job.max_retries - job.retries)
        return "dead" if how.kind == "permanent" or not left else "retried", attempt, attempt + left

    def ran(self, worker: ModelWorker, job_ids: str) -> None:
        """Marks jobs done without a report by the worker, unless another job needs their results."""
        ended = [job_id for job_id in job_ids if self.owns(worker, job_id) and not self.jobs[job_id].used]
        self._keep(dict.fromkeys(ended, ""))
        for job_id in ended:
            self._end(job_id, "done")

    def hand_back(self, job_ids: Iterable[str], running: str | None = None, outcome: str = "") -> None:
        for job_id in job_ids:
            job = self.jobs[job_id]
            if job.removed:
                self._end(job_id, "cancelled")
                continue
            if job_id == running:
                job.lost(outcome)
            self._come_back(job_id, 0)
            job.by_age = job.suspect and job.waits and not (job_id == running and outcome == "timed_out")

    def claim(self, worker: ModelWorker, job_ids: list[str], fence: str) -> None:
        assert int(fence) > self.last_fence, "fences grow"
        self.last_fence = int(fence)
        assert len(set(job_ids)) == len(job_ids), "no id twice in a batch"
        priorities = [self.jobs[job_id].priority for job_id in job_ids]
        assert priorities == sorted(priorities)
        for job_id in job_ids:
            job = self.jobs[job_id]
            assert job.waits, f"{job_id} is active twice, or begun before its time"
            assert not job.is_spent(self.now_ms), f"{job_id} is begun once too often"
            assert job.suspect == (worker.lane != "main"), f"{job_id} is begun in the wrong process"
            job.owner = f"{worker.name}:{fence}"
        self.limits.begin(len(job_ids), self.active())

    def active(self) -> int:
        return sum(job.owner is not None for job in self.jobs.values())

    def bury_spent(self, job_ids: Iterable[str], lane: str) -> None:
        """A claim in this lane found these and gave them to no worker."""
        for job_id in job_ids:
            job = self.jobs.pop(job_id)
            assert job.is_spent(self.now_ms)
            assert job.waits
            assert job.suspect == (lane != "main")
            self.dead += 1
            self._note_end(job_id, "dead")

    def lose_worker(self, worker: ModelWorker, outcome: str, only: str | None = None) -> None:
        """Loses the worker; its last visible position shows what it ran, else `only`, the one entry of its list."""
        running = None
        if worker.seen_turn == worker.turn:
            self.ran(worker, worker.batch[: worker.index])
            if worker.running:
                running = worker.batch[worker.index]
        elif only is not None and self.owns(worker, only):
            running = only
        self.hand_back(self.owned(worker), running, outcome)


def result_of(job_id: str) -> str:
    """The result that workers report for this job."""
    return f'"of {job_id}"'
