"""Pulse: the service that does everything in Redis that must not wait for a handler."""

import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from forq.broker.keys import (
    control_base,
    due_channels,
    fail_queue,
    main_queue,
    queue_of_channel,
    requests_channel,
)
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.broker.recovery import Heartbeat, Outcome, Position, QueueGone, WorkerRecovery
from forq.broker.registry import Registry
from forq.broker.scripts import Fate, headline
from forq.errors import ExitCode, Fenced, ForqError, RedisUnavailable
from forq.output.format import FIFO_NAME, Line, pack_line
from forq.procs.cgroups import Cgroup
from forq.procs.context import Context
from forq.procs.loop import Loop
from forq.procs.scoreboard import Role, State
from forq.procs.treekill import kill_tree
from forq.redis_url import database_of
from forq.services.remote_requests import RemoteRequests
from forq.services.rescue import BatchRescue, UnreadClaims
from forq.services.rpc import RpcServer

log = logging.getLogger("forq")

CALL_TIMEOUT_SECONDS = 3.0
# When the list of a recovered worker is drained again.
DRAIN_AGAIN_SECONDS = (0.1, 1.0)
# Timers are not set further ahead: every heartbeat reports the next due job again.
LONGEST_TIMER_MS = 3_600_000
PROMOTE_AGAIN_MS = 250

# Messages on a queue's `due` channel besides a delay in ms. Every client may publish there, so they are validated.
QUEUE_CREATED = "new"
FAIL_JOB_STORED = "fail"
REPORT_STORED = "report"
_CLAIM = re.compile(r"look (\S{1,100}) ([0-9]{1,16})")
_MILLISECONDS = re.compile(r"[0-9]{1,16}")
# How long an idle retry process may take to claim a fail job.
FAIL_JOB_CLAIM_SECONDS = 0.05

# Failures of Redis right after the start are not reported for this long; shorter than the retry pause.
STARTUP_GRACE_SECONDS = 0.5
REDIS_RETRY_SECONDS = 1.0
RESUBSCRIBE_SECONDS = 0.1

# After the supervisor died: time for children to exit, and then for finding and killing their orphans.
CHILD_EXIT_SECONDS = 0.3
LEFTOVER_KILL_SECONDS = 5.0

# Creating or deleting a queue never takes this long.
ABANDONED_SECONDS = 30.0
INCOMPLETE_CHECK_SECONDS = 30.0
QUEUES_PER_CHECK = 200


def run_pulse(context: Context, leash: socket.socket) -> int:
    return Pulse(context, leash).run()


class Pulse:
    """
    1. Sends a heartbeat per queue, with the position of each worker, and acts on the replies.
    2. Recovers workers whose process has ended. The supervisor repeats the request until Redis has accepted it. Their
       lists are drained again shortly after: Redis may still serve a pending BLMOVE to a dead connection.
    3. Rescues unstarted jobs of live workers (rescue.py).
    4. Keeps a timer per queue for its next scheduled job or tick, and promotes or fires it on time. Delivers ends of
       jobs to the queues that wait for them.
    5. Notifies the supervisor of suspects, and of fail jobs that wait for a busy retry process.
    6. Notifies the supervisor when Redis comes back or has lost its functions: clients may lack the right to load them.
    7. Finds queues of release modes that are not served here, and queues that were left incomplete.
    8. Announces this supervisor, and forwards requests that come through Redis to it (remote_requests.py).
    9. Kills the children that cannot exit on their own after the supervisor has died.
    """

    def __init__(self, context: Context, leash: socket.socket, now: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._board = context.scoreboard
        link = self._link = Link(context.url, name="forq-pulse", timeout_seconds=CALL_TIMEOUT_SECONDS)
        self._recovery = WorkerRecovery(link, context.prefix, context.processor)
        self._registry = Registry(link, context.prefix)
        self._incomplete = IncompleteQueues(self._registry)
        verbs = {
            "serve": self._serve,
            "serve_also": self._serve_also,
            "heartbeat": self._heartbeat,
            "recover": self._recover,
            "evict": self._evict,
            "check_unread": self._check_unread,
            "remote_answer": self._remote_answer,
        }
        self._now = now
        self._loop = Loop(now, poller=select.poll(), on_error=_log_or_raise)
        self._later = self._loop.call_later
        # The end of the leash is handled before due timers: a timer may block on a Redis that is gone, too.
        self._rpc = RpcServer(self._loop, leash, verbs, self._end_with_supervisor)
        self._batches = BatchRescue(self._recovery, context.scoreboard, later=self._later)
        self._unread = UnreadClaims(
            self._recovery,
            context.scoreboard,
            later=self._later,
            probe=lambda slots, unread: self._rpc.notify("probe", slots=slots, unread=unread),
            now=now,
        )
        self._remote = RemoteRequests(
            link,
            context,
            later=self._later,
            forward=lambda request: self._rpc.notify("remote_request", request=request),
        )
        database = database_of(context.url)
        self._requests_channel = requests_channel(control_base(context.prefix), database, context.processor)
        self._subscription = Subscription(
            context.url,
            due_channels(context.prefix, database),
            self._requests_channel,
            name="forq-pulse-subscription",
        )
        self._queues: list[str] = []
        # Queues of a release mode, just created: the supervisor is about to serve them.
        self._created: set[str] = set()
        # Queue -> when its timer fires.
        self._due: dict[str, float] = {}
        # Queues with an extra heartbeat pending.
        self._heartbeats_soon: set[str] = set()
        self._redis_ok: bool | None = None
        self._grace_until = now() + STARTUP_GRACE_SECONDS

    def run(self) -> int:
        self.start()
        self._loop.run()
        return ExitCode.STOPPED

    def start(self) -> None:
        self._loop.add_reader(self._context.watch_fd, self._batch_started)
        self._later(0, self._beat)
        self._later(INCOMPLETE_CHECK_SECONDS, self._find_incomplete)
        self._batches.start()

    def _serve(self, params: dict[str, Any]) -> object:
        """Replaces the set of served queues."""
        served = [*params["queues"], *map(fail_queue, params["with_fail_queue"])]
        new = set(served) - set(self._queues)
        self._queues = served
        self._created -= new
        self._subscribe_and_beat(sorted(new))
        self._later(0, self._announce)
        return {}

    def _serve_also(self, params: dict[str, Any]) -> object:
        """Adds a queue. Its creator gets the reply only after this one, so no timer of its first jobs is missed."""
        queue = params["queue"]
        new = [queue, fail_queue(queue)] if params["with_fail_queue"] else [queue]
        self._queues = [name for name in self._queues if name not in new] + new
        self._subscribe_and_beat(new)
        self._later(0, self._announce)
        return {}

    def _heartbeat(self, params: dict[str, Any]) -> object:
        """A child reports that this processor was evicted; the heartbeat verifies it."""
        self._send_heartbeats(params["queues"])
        return {}

    def _recover(self, params: dict[str, Any]) -> object:
        at = Position(params["worker"], params["turn"], params["index"], params["running"])
        queue, processor = params["queue"], params["processor"]
        # A worker of the retry process serves the fail queue too; its position belongs to the queue of its last turn.
        queues = [queue, fail_queue(queue)] if params["with_fail_queue"] else [queue]
        how = {"outcome": params["outcome"], "cause": params["cause"], "micros": params["micros"]}

        def drain_again() -> None:
            no_position = Position(at.worker, -1, 0, False)
            for each in queues:
                self._recovery.recover(each, processor, no_position, outcome="interrupted", cause="late")

        for each in queues:
            recovered = self._recovery.recover(
                *(each, processor, at), **how, stack=params["stack"], peak_bytes=params["peak_bytes"]
            )
            if recovered.job is not None and recovered.fate is not None:
                log_lost_attempt(params["output"], each, recovered.job, recovered.fate, **how)
        for seconds in DRAIN_AGAIN_SECONDS:
            self._later(seconds, drain_again)
        if at.running:
            # Jobs of this process may be suspects now.
            self._heartbeat_soon(queue, 0.0)
        return {}

    def _check_unread(self, params: dict[str, Any]) -> object:
        """A process of this queue does not respond: its workers may hold jobs that they have not started."""
        self._unread.check(params["queue"])
        return {}

    def _evict(self, params: dict[str, Any]) -> object:
        """An earlier run of this supervisor is known to be dead: no need to wait for its expiry."""
        for queue in params["queues"]:
            for each in (queue, fail_queue(queue)):
                log_loss = partial(_log_evicted_attempt, each, params["cause"])
                self._recovery.evict(each, params["processor"], params["cause"], log_loss)
        self._remote.withdraw(params["processor"])
        return {}

    def _remote_answer(self, params: dict[str, Any]) -> object:
        """The supervisor has carried out a request that came through Redis."""
        self._remote.answer(params["processor"], params["id"], params["line"])
        return {}

    def _announce(self) -> None:
        """A failure of Redis is reported by the heartbeats."""
        with suppress(RedisUnavailable):
            self._remote.announce([queue for queue in self._queues if queue == main_queue(queue)])

    def _beat(self) -> None:
        self._subscribe_and_beat(self._queues)
        self._created.clear()
        self._later(0, self._announce)
        self._later(0, self._find_queues)
        seconds = self._context.heartbeat_seconds
        self._later(seconds if self._redis_ok else min(seconds, REDIS_RETRY_SECONDS), self._beat)

    def _send_heartbeats(self, queues: list[str]) -> None:
        failure: RedisUnavailable | None = None
        reloads_before = self._link.library_reloads()
        wanted: set[tuple[str, int]] = set()
        for queue, beat in self._recovery.heartbeats(queues, self._context.expiry_ms, self._positions()):
            if isinstance(beat, RedisUnavailable):
                failure = beat
            elif isinstance(beat, Fenced):
                self._rpc.notify("evicted", queue=queue)
                return
            else:
                self._handle_beat(queue, beat)
                if isinstance(beat, Heartbeat):
                    wanted |= _wanted_roles(queue, beat)
        self._unread.probe_resting(wanted)
        if queues:
            self._note_redis(failure)
        if self._link.library_reloads() != reloads_before:
            self._rpc.notify("redis_back")

    def _handle_beat(self, queue: str, beat: Heartbeat | ForqError) -> None:
        if isinstance(beat, QueueGone):
            self._rpc.notify("queue_gone", queue=main_queue(queue), deleted=beat.deleted)
        elif isinstance(beat, ForqError):
            log.error("heartbeat refused queue=%s error=%s", queue, beat)
        else:
            self._set_timer(queue, beat.due_ms)
            self._unread.suspect(queue, beat.unread)
            if beat.has_reports:
                self._later(0, partial(self._deliver, queue))
            if beat.more:
                self._later(0, partial(self._send_heartbeats, [queue]))
            if beat.helpers_wanted and queue == main_queue(queue):
                self._rpc.notify("suspects", queue=queue, waiting=beat.helpers_wanted)
            elif beat.helpers_wanted:
                self._rpc.notify("fail_jobs", queue=main_queue(queue))
            if beat.evicted:
                log.warning("evicted processors without heartbeats queue=%s processors=%s", queue, beat.evicted)
            for job, fate in beat.lost:
                _log_evicted_attempt(queue, "host_lost", job, fate)

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
        if not ok and self._redis_ok is None and self._now() < self._grace_until:
            # An embedded server may still be starting. If not, the next heartbeat reports the failure.
            return
        if ok != self._redis_ok:
            self._redis_ok = ok
            self._rpc.notify("redis", ok=ok, error=None if exc is None else str(exc))
            log.info("redis is reachable") if ok else log.warning("redis is unreachable error=%s", exc)

    def _heartbeat_soon(self, queue: str, seconds: float) -> None:
        """Schedules one heartbeat for all requests until then. Its reply has the number of jobs that need helpers."""
        if queue not in self._heartbeats_soon:
            self._heartbeats_soon.add(queue)
            self._later(seconds, partial(self._send_pending_heartbeat, queue))

    def _send_pending_heartbeat(self, queue: str) -> None:
        self._heartbeats_soon.discard(queue)
        main = main_queue(queue)
        if queue in self._queues and (queue == main or self._retry_is_busy(main)):
            self._send_heartbeats([queue])

    def _retry_is_busy(self, queue: str) -> bool:
        slots = map(self._board.slot, range(self._board.highest))
        return any(slot.state != State.PARKED and slot.role == Role.RETRY and slot.queue == queue for slot in slots)

    def _subscribe_and_beat(self, queues: list[str]) -> None:
        """Subscribes if there is no subscription, and sends a heartbeat for these queues."""
        was_connected = self._subscription.connected
        try:
            if not was_connected:
                self._subscription.connect()
                self._loop.add_reader(self._subscription.fileno(), self._receive)
                self._rpc.notify("redis_back")
        except RedisUnavailable as exc:
            self._note_redis(exc)
        # Messages of every queue were lost while there was no subscription.
        self._send_heartbeats(self._queues if not was_connected and self._subscription.connected else queues)

    def _resubscribe(self) -> None:
        if not self._subscription.connected:
            self._subscribe_and_beat([])
        if not self._subscription.connected:
            self._later(REDIS_RETRY_SECONDS, self._resubscribe)

    def _receive(self) -> None:
        fd = self._subscription.fileno()
        try:
            messages = self._subscription.receive()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("lost timer subscription; subscribing again error=%s", exc)
            self._later(RESUBSCRIBE_SECONDS, self._resubscribe)
            return
        for channel, message in messages:
            if channel == self._requests_channel:
                self._remote.take_soon()
                continue
            queue = queue_of_channel(channel)
            if message == QUEUE_CREATED:
                self._created.add(queue)
                self._later(0, self._find_queues)
            elif claim := _CLAIM.fullmatch(message):
                self._unread.on_claim(queue, claim[1], int(claim[2]))
            elif _MILLISECONDS.fullmatch(message) and (queue in self._queues or queue in self._created):
                self._set_timer(queue, min(int(message), LONGEST_TIMER_MS))
            elif message == FAIL_JOB_STORED:
                self._fail_job_stored(queue)
            elif message == REPORT_STORED and queue in self._queues:
                self._later(0, partial(self._deliver, queue))

    def _set_timer(self, queue: str, delay_ms: int | None) -> None:
        """Keeps one timer per queue, the earliest."""
        if delay_ms is None:
            return
        at = self._now() + delay_ms / 1000
        if at < self._due.get(queue, float("inf")):
            self._due[queue] = at
            self._later(delay_ms / 1000, lambda: self._promote(queue, at))

    def _promote(self, queue: str, at: float) -> None:
        if self._due.get(queue) == at:
            del self._due[queue]
            try:
                self._set_timer(queue, self._recovery.promote(queue))
                if queue != main_queue(queue):
                    self._fail_job_stored(main_queue(queue))
            except RedisUnavailable:
                # Due jobs stay due; heartbeats report the failure.
                self._set_timer(queue, PROMOTE_AGAIN_MS)

    def _deliver(self, queue: str) -> None:
        """Ends of jobs go to the queues that wait for them. After a failure of Redis the next heartbeat repeats it."""
        with suppress(RedisUnavailable):
            if self._recovery.deliver(queue):
                self._later(0, partial(self._deliver, queue))

    def _fail_job_stored(self, queue: str) -> None:
        """Schedules a heartbeat, late enough that an idle retry process has claimed the job by then."""
        self._heartbeat_soon(fail_queue(queue), FAIL_JOB_CLAIM_SECONDS)

    def _find_queues(self) -> None:
        """Reports queues that every supervisor serves and this one does not, until it serves them."""
        if self._queues and self._redis_ok is False:
            return  # the heartbeats of this round have failed
        try:
            unserved = self._registry.unserved(set(self._queues))
            self._note_redis(None)
        except RedisUnavailable as exc:
            self._note_redis(exc)
            return
        for name, mode in unserved.items():
            self._rpc.notify("queue_found", queue=name, mode=mode)

    def _find_incomplete(self) -> None:
        self._later(INCOMPLETE_CHECK_SECONDS, self._find_incomplete)
        if self._redis_ok:
            for name in self._incomplete.find(self._now()):
                self._rpc.notify("queue_incomplete", queue=name)

    def _batch_started(self) -> None:
        os.eventfd_read(self._context.watch_fd)
        self._batches.wake()

    def _end_with_supervisor(self) -> None:
        """Each child kills its own descendants and exits. Children whose interpreter is blocked are killed here."""
        if self._context.cgroups is not None:
            Cgroup(self._context.cgroups.path).kill()
            self._context.cgroups.remove()
        pids = {self._board.slot(number).pid for number in range(self._board.highest)} - {0}
        deadline = time.monotonic() + CHILD_EXIT_SECONDS
        while (pids := {pid for pid in pids if _is_ours(pid)}) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in pids:
            kill_tree(pid)
        # Children that died together with the supervisor have left orphans that it could not adopt.
        mark = self._context.tree_mark
        killed, left = (set(), set()) if mark is None else mark.kill(mark.find, LEFTOVER_KILL_SECONDS)
        if killed or left:
            log.warning("killed orphans of dead children pids=%s survivors=%s", sorted(killed), sorted(left))


def _log_or_raise(exc: Exception) -> None:
    """After a ForqError, such as an unreachable Redis, timers retry; anything else is a bug and ends pulse."""
    if not isinstance(exc, ForqError):
        raise exc
    log.warning("pulse failed; retrying later error=%s", exc)


def _wanted_roles(queue: str, beat: Heartbeat) -> set[tuple[str, int]]:
    """Queue and role of processes whose workers should not rest. Fail jobs belong to the retry process."""
    main, retry = (main_queue(queue), int(Role.MAIN)), (main_queue(queue), int(Role.RETRY))
    if queue != main_queue(queue):
        return {retry} if beat.main_wanted else set()
    return {role for role, wanted in ((main, beat.main_wanted), (retry, beat.retry_wanted)) if wanted}


def _is_ours(pid: int) -> bool:
    """False if the pid belongs to another process by now."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return cmdline.read(6) == b"forq: "
    except OSError:
        return False


class IncompleteQueues:
    """Finds queues that a client has left half created or half deleted."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._after = ""
        # Name -> its entry in the registry, and when it was first found incomplete.
        self._since: dict[str, tuple[str, float]] = {}

    def find(self, now: float) -> list[str]:
        """Names of queues that have been incomplete for long, in each call until they are complete."""
        names = self._registry.names()
        checked = self._next(sorted(names))
        found = self._registry.incomplete({name: names[name] for name in checked if name in names})
        known = self._since
        self._since = {name: known[name] for name in known if name in names and name not in checked}
        for name, entry in found.items():
            before = known.get(name)
            self._since[name] = before if before is not None and before[0] == entry else (entry, now)
        return [name for name in found if now - self._since[name][1] >= ABANDONED_SECONDS]

    def _next(self, names: list[str]) -> set[str]:
        """The next names in rotation, and those known to be incomplete."""
        later = [name for name in names if name > self._after] or names
        some = later[:QUEUES_PER_CHECK]
        self._after = some[-1] if some else ""
        return {*some, *self._since}


def log_lost_attempt(
    directory: str | None, queue: str, job: str, fate: Fate, *, outcome: Outcome, cause: str, micros: int | None
) -> None:
    """Logs an attempt that ended with its process: to the queue's log in `directory`, like the lines of that process.
    Without a directory or its FIFO, the line goes to pulse's own log."""
    of_fail_handler = main_queue(queue) != queue
    if of_fail_handler:
        queue, job = main_queue(queue), job.rpartition(":")[0]
    text = headline(queue, job, fate, _describe_end(outcome, cause, micros), of_fail_handler=of_fail_handler)
    level = logging.ERROR if fate.final else logging.INFO if outcome == "interrupted" else logging.WARNING
    if not log.isEnabledFor(level):
        # log_level applies to the log of a queue, too.
        return
    if directory is None or not _write_to_fifo(directory, job, logging.getLevelName(level), text):
        log.log(level, "%s queue=%s job=%s", text, queue, job)


def _log_evicted_attempt(queue: str, cause: str, job: str, fate: Fate) -> None:
    log_lost_attempt(None, queue, job, fate, outcome="stalled", cause=cause, micros=None)


def _describe_end(outcome: Outcome, cause: str, micros: int | None) -> str:
    if outcome == "timed_out":
        return "timed out" if micros is None else f"timed out after {micros / 1e6:.3g} s"
    if outcome == "interrupted":
        return "interrupted, since its process was stopped"
    # The supervisor replaced the blanks: in Redis a cause is one word.
    end = cause.replace("_", " ")
    return f"lost with its process ({end})" if outcome == "stalled" else f"lost with others of its process ({end})"


def _write_to_fifo(directory: str, job: str, level: str, text: str) -> bool:
    """Does not use open_fifo, which would create the FIFO of a deleted queue."""
    line = Line("log", level, int(time.time() * 1000), os.getpid(), threading.get_ident(), job, "forq", False, text)
    try:
        fd = os.open(
            f"{directory}/{FIFO_NAME}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
        )
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
