"""Finds queues that somebody has left half made or half deleted, so that they can be mended.

Tells of attempts that ended with their process: nobody is left there to do so. The line goes to the queue's log, as
those of its processes do, and from there to stderr.

Pulse: the supervisor's hand in Redis for everything that must not wait for a handler.

1. A heartbeat per queue, with the position of each worker; the answers tell of queues and places that are gone.
2. Recovery of workers whose process has ended (the supervisor asks until Redis has taken it), and again shortly after:
   a BLMOVE that was under way may still be served to a connection that is already dead.
3. Rescue: while some worker holds a batch, it looks at the scoreboard and gives back what is stuck behind a slow job.
4. The same for workers whose process does not answer (unread.py).
5. Timers: it hears when the next scheduled job or tick of a queue is due, and makes it waiting, or fires it, on time.
6. Helpers: it tells the supervisor how many suspects wait, and that fail jobs wait for a busy retry process.
7. It tells when Redis is back, or has lost its functions: clients may not be allowed to load those that they use.
8. It finds queues that release and are not served here: with each heartbeat, and when it hears that one was made; and
   queues that somebody has left half made or half deleted (halves.py).
9. When the supervisor dies, it kills the children that cannot do so themselves.
"""

import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from forq import exits
from forq.broker.keys import due_channels, fail_queue, main_queue, queue_of_channel
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.broker.recovery import Heartbeat, Outcome, Position, QueueGone, WorkerRecovery
from forq.broker.registry import Registry
from forq.broker.replies import Fate, headline
from forq.errors import Fenced, ForqError, RedisUnavailable
from forq.output.format import FIFO_NAME, Line, pack_line
from forq.procs.cgroups import Cgroup
from forq.procs.context import Context
from forq.procs.loop import Loop
from forq.procs.scoreboard import Role, State, age_ms
from forq.procs.treekill import kill_tree
from forq.redis_url import database_of
from forq.services.rpc import RpcServer
from forq.services.unread import Unread

log = logging.getLogger("forq")

# Nobody who is still at it takes so long.
LEFT_SECONDS = 30.0
LOOK_SECONDS = 30.0
LOOKED_AT_AT_ONCE = 200


class Halves:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._after = ""
        # Name -> its entry in the registry, and when it was first found like that.
        self._since: dict[str, tuple[str, float]] = {}

    def look(self, now: float) -> list[str]:
        """The names of those that have been like that for long, some at a time; of each again, until it is mended."""
        names = self._registry.names()
        found = self._registry.halves({name: names[name] for name in self._next(sorted(names)) if name in names})
        known = self._since
        self._since = {name: known[name] for name in known if name in names and name not in self._looked_at}
        for name, entry in found.items():
            before = known.get(name)
            self._since[name] = before if before is not None and before[0] == entry else (entry, now)
        return [name for name in found if now - self._since[name][1] >= LEFT_SECONDS]

    def _next(self, names: list[str]) -> set[str]:
        """In rotation, and those that are known to be halves."""
        later = [name for name in names if name > self._after] or names
        some = later[:LOOKED_AT_AT_ONCE]
        self._after = some[-1] if some else ""
        self._looked_at = {*some, *self._since}
        return self._looked_at


def tell_loss(
    directory: str | None, queue: str, job: str, fate: Fate, *, outcome: Outcome, cause: str, micros: int | None
) -> None:
    """`directory`: of the queue's log; None, or without its FIFO: the line goes to our own log."""
    of_fail_handler = main_queue(queue) != queue
    if of_fail_handler:
        queue, job = main_queue(queue), job.rpartition(":")[0]
    text = headline(queue, job, fate, _happened(outcome, cause, micros), of_fail_handler=of_fail_handler)
    level = logging.ERROR if fate.final else logging.INFO if outcome == "interrupted" else logging.WARNING
    if not log.isEnabledFor(level):
        # As set by log_level, which holds for the lines of a queue's own processes, too.
        return
    if directory is None or not _write(directory, job, logging.getLevelName(level), text):
        log.log(level, "%s queue=%s job=%s", text, queue, job)


def _happened(outcome: Outcome, cause: str, micros: int | None) -> str:
    if outcome == "timed_out":
        return "timed out" if micros is None else f"timed out after {micros / 1e6:.3g} s"
    if outcome == "interrupted":
        return "interrupted, since its process was stopped"
    # As the supervisor has made it one word.
    end = cause.replace("_", " ")
    return f"lost with its process ({end})" if outcome == "stalled" else f"lost with others of its process ({end})"


def _write(directory: str, job: str, level: str, text: str) -> bool:
    """Not with open_fifo, which would make the FIFO of a queue that was deleted."""
    line = Line("log", level, int(time.time() * 1000), os.getpid(), threading.get_ident(), job, "forq", False, text)
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(f"{directory}/{FIFO_NAME}", flags)
    except OSError:
        return False
    try:
        for data in pack_line(line):
            os.write(fd, data)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


CALL_TIMEOUT_SECONDS = 3.0
# The second look at the list of a worker that was taken out, and the third.
DRAIN_AGAIN_SECONDS = (0.1, 1.0)
WATCH_SECONDS = 0.02
RESCUE_AFTER_MS = 20.0
RESCUES_LOG_SECONDS = 60.0
# Looks without any batch in sight before pulse stops looking.
QUIET_LOOKS = 50
# Further ahead than this nothing is planned: heartbeats tell of the next job again and again.
LONGEST_TIMER_MS = 3_600_000
PROMOTE_AGAIN_MS = 250
# What is heard in place of a time when a queue that releases was made.
MADE = "new"
# And when jobs were given to a worker that had waited for them: its name and the number of its turn. Every client may
# publish: what is heard is checked.
_LOOK = re.compile(r"look (\S{1,100}) ([0-9]{1,16})")
_MILLISECONDS = re.compile(r"[0-9]{1,16}")
# And when a fail job was stored; how long an idle retry process may take to claim it.
FAIL_JOB = "fail"
TAKEN_SECONDS = 0.05
# How long Redis may take for its first answer before that is told: less than the time between two tries to reach it.
FIRST_ANSWER_SECONDS = 0.5
TRY_AGAIN_SECONDS = 1.0
# A subscription that broke is made again after this, and every queue is looked at then.
LISTEN_AGAIN_SECONDS = 0.1
# How long children get to end by themselves when the supervisor is gone.
OWN_END_SECONDS = 0.3
# How long what they have left behind is looked for and killed.
LAST_KILL_SECONDS = 5.0


def run_pulse(context: Context, leash: socket.socket) -> int:
    return Pulse(context, leash).run()


class Pulse:
    def __init__(self, context: Context, leash: socket.socket, now: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._board = context.scoreboard
        link = self._link = Link(context.url, name="forq-pulse", timeout_seconds=CALL_TIMEOUT_SECONDS)
        self._recovery = WorkerRecovery(link, context.prefix, context.processor)
        self._registry = Registry(link, context.prefix)
        self._halves = Halves(self._registry)
        verbs = {
            "serve": self._serve,
            "serve_also": self._serve_also,
            "beat": self._beat_now,
            "recover": self._recover,
            "evict": self._evict,
            "look": self._look_for_unread,
        }
        self._loop = Loop(now, poller=select.poll(), on_error=_could_not_finish)
        self._later = self._loop.call_later
        # At once: a timer that is due may wait for a Redis that is gone as well.
        self._rpc = RpcServer(self._loop, leash, verbs, self._end_with_supervisor)
        self._unread = Unread(
            self._recovery,
            context.scoreboard,
            later=self._later,
            challenge=lambda slots, unread: self._rpc.notify("silent", slots=slots, unread=unread),
        )
        self._queues: list[str] = []
        self._redis_ok: bool | None = None
        self._patient_until = time.monotonic() + FIRST_ANSWER_SECONDS
        self._quiet_looks = 0
        self._rescued: dict[int, int] = {}
        # Jobs rescued since the last line about it, of queues that have had one within the last minute.
        self._rescued_jobs: dict[str, int] = {}
        self._subscription = Subscription(
            context.url, due_channels(context.prefix, database_of(context.url)), name="forq-pulse-subscription"
        )
        self._due: dict[str, float] = {}
        # Queues that release, made a moment ago: the supervisor is about to serve them.
        self._made: set[str] = set()
        self._looks: set[str] = set()

    def run(self) -> int:
        self._loop.add_reader(self._context.watch_fd, self._start_watching)
        self._later(0, self._beat)
        self._later(LOOK_SECONDS, self._find_halves)
        # A predecessor that died while it was watching has left the flag up: workers would not ring any more.
        self._board.watching = 1
        self._later(0, self._look)
        self._loop.run()
        return exits.STOPPED

    def _serve(self, params: dict[str, Any]) -> object:
        """Which queues this processor serves from now on."""
        served = [*params["queues"], *map(fail_queue, params["with_fail_queue"])]
        new = set(served) - set(self._queues)
        self._queues = served
        self._made -= new
        self._listen_to(sorted(new))
        return {}

    def _serve_also(self, params: dict[str, Any]) -> object:
        """One queue more. Whoever has made it is answered after this, so that the times of its first jobs are heard."""
        queue = params["queue"]
        new = [queue, fail_queue(queue)] if params["with_fail_queue"] else [queue]
        self._queues = [name for name in self._queues if name not in new] + new
        self._listen_to(new)
        return {}

    def _beat_now(self, params: dict[str, Any]) -> object:
        """A child says that this processor was evicted: Redis has the last word."""
        self._heartbeats(params["queues"])
        return {}

    def _recover(self, params: dict[str, Any]) -> object:
        at = Position(params["worker"], params["turn"], params["index"], params["running"])
        queue, processor = params["queue"], params["processor"]

        # A worker of the retry child works on the fail queue too; its position belongs to the one it took its turn in.
        queues = [queue, fail_queue(queue)] if params["with_fail_queue"] else [queue]

        def drain_again() -> None:
            nowhere = Position(at.worker, -1, 0, False)
            for each in queues:
                self._recovery.recover(each, processor, nowhere, outcome="interrupted", cause="late")

        for each in queues:
            recovered = self._recovery.recover(
                *(each, processor, at),
                outcome=params["outcome"],
                cause=params["cause"],
                micros=params["micros"],
                stack=params["stack"],
                peak_bytes=params["peak_bytes"],
            )
            if recovered.job is not None and recovered.fate is not None:
                how = {"outcome": params["outcome"], "cause": params["cause"], "micros": params["micros"]}
                tell_loss(params["output"], each, recovered.job, recovered.fate, **how)
        for seconds in DRAIN_AGAIN_SECONDS:
            self._later(seconds, drain_again)
        if at.running:
            # It, and those of other workers of that process, may be suspects now.
            self._look_soon(queue, 0.0)
        return {}

    def _look_for_unread(self, params: dict[str, Any]) -> object:
        """A process of this queue does not answer: its workers may hold jobs that they have not begun."""
        self._unread.look(params["queue"])
        return {}

    def _evict(self, params: dict[str, Any]) -> object:
        """An earlier run of this supervisor is proven gone: nobody has to wait for its expiry."""
        for queue in params["queues"]:
            for each in (queue, fail_queue(queue)):
                tell = partial(_tell_eviction, each, params["cause"])
                self._recovery.evict(each, params["processor"], params["cause"], tell)
        return {}

    def _hear(self) -> None:
        """Somebody has scheduled a job that is due before all others of its queue, or has made a queue."""
        fd = self._subscription.fileno()
        try:
            heard = self._subscription.receive()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("lost timer subscription; subscribing again error=%s", exc)
            self._later(LISTEN_AGAIN_SECONDS, self._listen_again)
            return
        for channel, delay_ms in heard:
            queue = queue_of_channel(channel)
            if delay_ms == MADE:
                self._made.add(queue)
                self._later(0, self._find_queues)
            elif look := _LOOK.fullmatch(delay_ms):
                self._unread.told(queue, look[1], int(look[2]))
            elif _MILLISECONDS.fullmatch(delay_ms) and (queue in self._queues or queue in self._made):
                self._promote_in(queue, min(int(delay_ms), LONGEST_TIMER_MS))
            elif delay_ms == FAIL_JOB:
                self._fail_job_waits(queue)

    def _promote_in(self, queue: str, delay_ms: int | None) -> None:
        """Keeps one timer per queue, for its next job or tick."""
        if delay_ms is None:
            return
        at = time.monotonic() + delay_ms / 1000
        if at < self._due.get(queue, float("inf")):
            self._due[queue] = at
            self._later(delay_ms / 1000, lambda: self._promote(queue, at))

    def _promote(self, queue: str, at: float) -> None:
        if self._due.get(queue) == at:
            del self._due[queue]
            try:
                self._promote_in(queue, self._recovery.promote(queue))
                if queue != main_queue(queue):
                    self._fail_job_waits(main_queue(queue))
            except RedisUnavailable:
                # What is due stays due; heartbeats say that Redis is gone.
                self._promote_in(queue, PROMOTE_AGAIN_MS)

    def _fail_job_waits(self, queue: str) -> None:
        """An idle retry process has taken it long before this look, which is one for all that die until then."""
        self._look_soon(fail_queue(queue), TAKEN_SECONDS)

    def _retry_is_busy(self, queue: str) -> bool:
        slots = map(self._board.slot, range(self._board.highest))
        return any(slot.state != State.PARKED and slot.role == Role.RETRY and slot.queue == queue for slot in slots)

    def _look_soon(self, queue: str, seconds: float) -> None:
        """One heartbeat for all that happens until then: its answer tells how many jobs need helpers."""
        if queue not in self._looks:
            self._looks.add(queue)
            self._later(seconds, partial(self._look_at, queue))

    def _look_at(self, queue: str) -> None:
        self._looks.discard(queue)
        of = main_queue(queue)
        if queue in self._queues and (queue == of or self._retry_is_busy(of)):
            self._heartbeats([queue])

    def _listen_to(self, queues: list[str]) -> None:
        """Hears of the times of these queues from now on, and looks at those that they have."""
        was_deaf = not self._subscription.connected
        try:
            if was_deaf:
                self._subscription.connect()
                self._loop.add_reader(self._subscription.fileno(), self._hear)
                self._rpc.notify("redis_back")
        except RedisUnavailable as exc:
            self._note_redis(exc)
        # What was published while nobody heard it is lost, of every queue.
        self._heartbeats(self._queues if was_deaf and self._subscription.connected else queues)

    def _listen_again(self) -> None:
        if not self._subscription.connected:
            self._listen_to([])
        if not self._subscription.connected:
            self._later(TRY_AGAIN_SECONDS, self._listen_again)

    def _beat(self) -> None:
        self._listen_to(self._queues)
        self._made.clear()
        self._later(0, self._find_queues)
        seconds = self._context.heartbeat_seconds
        self._later(seconds if self._redis_ok else min(seconds, TRY_AGAIN_SECONDS), self._beat)

    def _find_queues(self) -> None:
        """Tells of queues that every supervisor serves and this one does not; of each again, until it does."""
        if self._queues and self._redis_ok is False:
            return  # this round's heartbeats have tried
        try:
            unserved = self._registry.unserved(set(self._queues))
            self._note_redis(None)
        except RedisUnavailable as exc:
            self._note_redis(exc)
            return
        for name, mode in unserved.items():
            self._rpc.notify("queue_found", queue=name, mode=mode)

    def _find_halves(self) -> None:
        self._later(LOOK_SECONDS, self._find_halves)
        if self._redis_ok:
            for name in self._halves.look(time.monotonic()):
                self._rpc.notify("queue_half", queue=name)

    def _heartbeats(self, queues: list[str]) -> None:
        away: RedisUnavailable | None = None
        missed = self._link.missed()
        wanted: set[tuple[str, int]] = set()
        for queue, beat in self._recovery.heartbeats(queues, self._context.expiry_ms, self._positions()):
            if isinstance(beat, RedisUnavailable):
                away = beat
            elif isinstance(beat, Fenced):
                self._rpc.notify("evicted", queue=queue)
                return
            else:
                self._hear_beat(queue, beat)
                if isinstance(beat, Heartbeat):
                    wanted |= _wanted(queue, beat)
        self._unread.ask_resting(wanted)
        if queues:
            self._note_redis(away)
        if self._link.missed() != missed:
            self._rpc.notify("redis_back")

    def _hear_beat(self, queue: str, beat: Heartbeat | ForqError) -> None:
        if isinstance(beat, QueueGone):
            self._rpc.notify("queue_gone", queue=main_queue(queue), deleted=beat.deleted)
        elif isinstance(beat, ForqError):
            log.error("heartbeat refused queue=%s error=%s", queue, beat)
        else:
            self._promote_in(queue, beat.due_ms)
            self._unread.lags(queue, beat.unread)
            if beat.more:
                self._later(0, partial(self._heartbeats, [queue]))
            if beat.helpers_wanted and queue == main_queue(queue):
                self._rpc.notify("suspects", queue=queue, waiting=beat.helpers_wanted)
            elif beat.helpers_wanted:
                self._rpc.notify("fail_jobs", queue=main_queue(queue))
            if beat.evicted:
                log.warning("took over from silent processors queue=%s processors=%s", queue, beat.evicted)
            for job, fate in beat.lost:
                _tell_eviction(queue, "host_lost", job, fate)

    def _positions(self) -> dict[str, list[Position]]:
        found: dict[str, list[Position]] = {}
        for number in range(self._board.highest):
            slot = self._board.slot(number)
            if slot.state not in (State.EMPTY, State.STARTING):
                at = slot.read_position()
                position = Position(slot.worker, at.turn, at.index, at.running)
                found.setdefault(slot.queue, []).append(position)
                if Role(slot.role).runs_fail_jobs:
                    found.setdefault(fail_queue(slot.queue), []).append(position)
        return found

    def _note_redis(self, exc: RedisUnavailable | None) -> None:
        ok = exc is None
        if not ok and self._redis_ok is None and time.monotonic() < self._patient_until:
            # An embedded server is just being started; if it is not that, the next beat tells.
            return
        if ok != self._redis_ok:
            self._redis_ok = ok
            self._rpc.notify("redis", ok=ok, error=None if exc is None else str(exc))
            log.info("redis is reachable") if ok else log.warning("redis is gone error=%s", exc)

    def _start_watching(self) -> None:
        os.eventfd_read(self._context.watch_fd)
        if not self._board.watching:
            self._board.watching = 1
            self._quiet_looks = 0
            self._later(WATCH_SECONDS, self._look)

    def _look(self) -> None:
        """One look at every batch; goes on as long as there are any."""
        self._quiet_looks = 0 if self._rescue_stuck() else self._quiet_looks + 1
        if self._quiet_looks >= QUIET_LOOKS:
            self._board.watching = 0
            # A batch that began just before the flag fell has told nobody.
            if not self._rescue_stuck():
                return
            self._board.watching = 1
            self._quiet_looks = 0
        self._later(WATCH_SECONDS, self._look)

    def _rescue_stuck(self) -> bool:
        """Gives back what is stuck behind slow jobs; True if any worker holds a batch."""
        now = time.monotonic_ns()
        batches = False
        for number in range(self._board.highest):
            slot = self._board.slot(number)
            raw = slot.position
            if slot.held < 2 or self._rescued.get(number) == raw:
                continue
            batches = True
            at = slot.read_position(raw)
            position = Position(slot.worker, at.turn, at.index, True)
            if at.running and age_ms(raw, now) > RESCUE_AFTER_MS and self._rescue(slot.queue, position):
                self._rescued[number] = raw
        return batches

    def _rescue(self, queue: str, at: Position) -> bool:
        """False if it is to be tried again at the next look."""
        try:
            rescued = self._recovery.rescue(queue, at)
        except ForqError as exc:
            log.warning("rescue failed queue=%s error=%s", queue, exc)
            return False
        if rescued:
            self._note_rescued(queue, rescued)
        return True

    def _note_rescued(self, queue: str, jobs: int) -> None:
        """A busy queue may need several rescues a second: the first is logged at once, the others once a minute."""
        if queue in self._rescued_jobs:
            self._rescued_jobs[queue] += jobs
        else:
            self._log_rescued(queue, jobs)

    def _log_rescued(self, queue: str, jobs: int) -> None:
        log.info("rescued jobs that were stuck behind a slow one queue=%s jobs=%s", queue, jobs)
        self._rescued_jobs[queue] = 0
        self._later(RESCUES_LOG_SECONDS, partial(self._log_more_rescued, queue))

    def _log_more_rescued(self, queue: str) -> None:
        more = self._rescued_jobs.pop(queue)
        if more:
            self._log_rescued(queue, more)

    def _end_with_supervisor(self) -> None:
        """Each child kills what is below it and ends; one whose interpreter is stuck is killed from here."""
        if self._context.cgroups is not None:
            Cgroup(self._context.cgroups.path).kill()
            self._context.cgroups.remove()
        pids = {self._board.slot(number).pid for number in range(self._board.highest)} - {0}
        deadline = time.monotonic() + OWN_END_SECONDS
        while (pids := {pid for pid in pids if _is_ours(pid)}) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in pids:
            kill_tree(pid)
        # What was left by children that died at the same moment as the supervisor, which would have adopted it.
        mark = self._context.tree_mark
        killed, left = (set(), set()) if mark is None else mark.kill(mark.find, LAST_KILL_SECONDS)
        if killed or left:
            log.warning("killed what dead children had left behind pids=%s survivors=%s", sorted(killed), sorted(left))


def _could_not_finish(exc: Exception) -> None:
    """Redis is away, say: it is due again later. Anything else is a fault, and ends this process."""
    if not isinstance(exc, ForqError):
        raise exc
    log.warning("pulse could not finish what was due error=%s", exc)


def _wanted(queue: str, beat: Heartbeat) -> set[tuple[str, int]]:
    """The queue and role of processes whose workers should not rest. Fail jobs are the retry child's."""
    main, retry = (main_queue(queue), int(Role.MAIN)), (main_queue(queue), int(Role.RETRY))
    if queue != main_queue(queue):
        return {retry} if beat.main_wanted else set()
    return {role for role, wanted in ((main, beat.main_wanted), (retry, beat.retry_wanted)) if wanted}


def _is_ours(pid: int) -> bool:
    """Whether this pid still is a child of ours, and not another process that got its number."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return cmdline.read(6) == b"forq: "
    except OSError:
        return False


def _tell_eviction(queue: str, cause: str, job: str, fate: Fate) -> None:
    """A job was running in a supervisor that is gone."""
    tell_loss(None, queue, job, fate, outcome="stalled", cause=cause, micros=None)
