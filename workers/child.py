"""The process of a queue: applies its limits, loads its handlers, and runs its workers beside the minder."""

import faulthandler
import fcntl
import logging
import os
import resource
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import orjson
from setproctitle import setproctitle

from forq.broker.claim import Consumer, Limits
from forq.broker.keys import fail_queue, queue_base
from forq.errors import CannotImport, ConfigError, ExitCode, Fenced, ForqError, IncompatibleProtocol, UnknownQueue
from forq.job import OFF, new_id
from forq.output.streams import install
from forq.procs.context import Context
from forq.procs.scoreboard import Role, Slot, State
from forq.procs.stacks import STACK_FILE, STACK_SIGNAL
from forq.queue_spec import QueueSpec
from forq.settings import Value
from forq.values import show_size
from forq.workers.attempt import AttemptRunner, FailAttemptRunner
from forq.workers.event_loop import EventLoop
from forq.workers.grant import Grant
from forq.workers.handlers import (
    CodeChanged,
    Handlers,
    describe_exception,
    load_fail_handler,
    load_handlers,
    safe_text,
)
from forq.workers.job_log import JobLog
from forq.workers.lifespan import LifespanFailed, Lifespans
from forq.workers.loop import MAX_BATCH, TurnNumbers, WorkerLoop
from forq.workers.minder import Minder
from forq.workers.other_loops import HelperLoop, IdleLoop, ReleaseLoop, RetryLoop
from forq.workers.progress import ProgressSender
from forq.workers.recycling import Recycling
from forq.workers.tracing import Tracing

log = logging.getLogger("forq")
# The supervisor rejects messages with a much longer line.
MAX_REASON = 4000
# The kernel adds this (in thousandths of the machine's memory) to the process's memory when it chooses one to kill.
OOM_SCORE = 500
OOM_FILE = "/proc/self/oom_score_adj"
Loop = WorkerLoop | RetryLoop | ReleaseLoop | IdleLoop
# Fail jobs have a queue of their own.
_LANES = {Role.MAIN: "main", Role.RETRY: "retry", Role.SUSPECT: "suspects", Role.FAIL: "retry"}


@dataclass(frozen=True)
class ChildSettings:
    """Passed from the supervisor to a queue's process at the fork."""

    context: Context
    # Queue and role: for the process title and log lines.
    name: str
    spec: QueueSpec
    options: Mapping[str, Value]
    role: Role
    slots: tuple[int, ...]
    # Directory of the output FIFO; None: writes to the supervisor's stdout and stderr.
    output: str | None
    # The process imports its handlers, then waits for `begin`.
    held: bool


def run_child(settings: ChildSettings, leash: socket.socket) -> int:
    """The main function of a queue's process. Returns the exit code."""
    context = settings.context
    if context.tree_mark is not None:
        context.tree_mark.apply()
    _redirect_output(settings)
    base = queue_base(context.prefix, settings.spec.name)
    minder = Minder(name=settings.name, url=context.url, base=base, leash=leash, titles=context.titles)
    minder.start()
    send_to_supervisor(leash, {"stack_fd": enable_stack_dumps()})
    if settings.held:
        setproctitle(f"forq: {settings.name} (next) importing")
    application = Application(settings, leash)
    try:
        apply_resource_limits(settings.options)
        # A retry process imports it when it has work.
        if settings.role != Role.RETRY:
            application.load()
    except ConfigError as exc:
        return _announce_failure(leash, exc)
    if settings.held:
        setproctitle(f"forq: {settings.name} (next) imported, waiting")
        send_to_supervisor(leash, {"imported": True})
        if not minder.wait_to_begin():
            application.leave()
            send_to_supervisor(leash, {"exiting": ExitCode.STOPPED, "reason": ""})
            return ExitCode.STOPPED
    return _WorkerPool(settings, leash, minder, application).run()


class Application:
    """The code that the jobs of a process run: its handlers, and the lifespans of its apps."""

    def __init__(self, settings: ChildSettings, leash: socket.socket) -> None:
        self._settings = settings
        self._leash = leash
        self.handlers = Handlers({})
        self.fail_handler: Handlers | None = None
        self.event_loop = EventLoop()
        self.lifespans: Lifespans | None = None

    def load(self) -> None:
        """Imports the handlers and enters the lifespans. Raises ConfigError."""
        inherited = (self._settings.context.tree_lock_fd,)
        self.handlers = load_handlers(self._settings.spec, inherited)
        self.fail_handler = load_fail_handler(self._settings.spec, self.handlers.apps, inherited)
        if found := [each for app in self.handlers.apps for each in app.lifespans]:
            lifespans = Lifespans(found, self.event_loop, self._give_up)
            lifespans.enter()
            self.lifespans = lifespans

    def leave(self) -> None:
        if self.lifespans is not None:
            self.lifespans.leave()

    def _give_up(self, failed: LifespanFailed) -> None:
        os._exit(_announce_failure(self._leash, failed))


def _announce_failure(leash: socket.socket, exc: ConfigError) -> int:
    """Tells the supervisor why the process exits; returns the exit code."""
    code = ExitCode.FAILED if isinstance(exc, LifespanFailed) else ExitCode.CONFIG
    trace = exc.traceback if isinstance(exc, CannotImport) else None
    if isinstance(exc, LifespanFailed):
        log.error("%s\n%s", exc, trace or "")
    reason = safe_text(exc.__str__)[:MAX_REASON]
    stale = isinstance(exc, CodeChanged)
    send_to_supervisor(leash, {"exiting": code, "reason": reason, "traceback": trace, "stale": stale})
    return code


def _redirect_output(settings: ChildSettings) -> None:
    if settings.output is None:
        return
    try:
        slots = [settings.context.scoreboard.slot(number) for number in settings.slots]
        install(settings.output, slots, settings.context.log_level)
    except (ForqError, OSError) as exc:
        log.error("failed to open the output FIFO; output is not captured queue=%s error=%s", settings.spec.name, exc)


def _start_tracing(settings: ChildSettings) -> Tracing | None:
    tracing = settings.context.tracing
    if tracing == OFF:
        return None
    try:
        return Tracing(tracing)
    except Exception as exc:  # a file that cannot be opened, invalid OTEL_* variables: jobs run without spans
        log.error(
            "failed to start tracing; jobs run without spans queue=%s tracing=%s error=%s",
            settings.spec.name,
            tracing,
            exc,
        )
        return None


class _WorkerPool:
    """The workers of one process. A single worker runs in the main thread, where its handlers may use signals."""

    def __init__(
        self,
        settings: ChildSettings,
        leash: socket.socket,
        minder: Minder,
        application: Application,
    ) -> None:
        self._settings = settings
        self._leash = leash
        self._minder = minder
        self._slots = [self._slot(number) for number in settings.slots]
        self._grants = {slot.number: Grant(self._send, slot.number) for slot in self._slots}
        self._recycling = Recycling(settings.options, self._slots, self._request_replacement)
        self._progress = ProgressSender(settings.context.url, settings.context.prefix)
        self._tracing = _start_tracing(settings)
        self._job_log = JobLog()
        self._application = application
        # The application could not be loaded; the supervisor knows the reason.
        self._cannot_load = False
        # Slots of the workers that have not ended.
        self._serving = set(settings.slots)
        self._loops: list[Loop] = []
        self._last_to_leave = 0
        self._code = ExitCode.STOPPED
        self._reason = ""
        self._ready = 0
        self._lock = threading.Lock()

    def run(self) -> int:
        name, mode = self._settings.spec.name, self._settings.spec.mode
        handlers, fail_handler = self._application.handlers, self._application.fail_handler
        if mode == "auto_release":
            self._loops = [self._release_loop(self._slots[0])]
        elif mode in ("on_request", "external"):
            self._loops = [IdleLoop(self._slots[0], name, mode)]
        elif self._settings.role == Role.MAIN:
            self._loops = [self._worker_loop(slot, self._attempt_runner(slot, handlers)) for slot in self._slots]
        elif self._settings.role == Role.SUSPECT:
            slot = self._slots[0]
            self._loops = [self._worker_loop(slot, self._attempt_runner(slot, handlers), kind=HelperLoop)]
        elif self._settings.role == Role.FAIL:
            assert fail_handler is not None
            self._loops = [self._fail_loop(self._slots[0], fail_handler, kind=HelperLoop)]
        else:
            self._loops = [self._retry_loop(self._slots[0])]
        self._minder.watch(self._loops, self._grants, self._recycling, self._send)
        if len(self._loops) == 1:
            self._run_loop(self._loops[0])
        else:
            threads = [threading.Thread(target=self._run_loop, args=(loop,), daemon=True) for loop in self._loops]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._application.lifespans is not None:
            self._application.leave()
            self._send({"left": self._last_to_leave})
        self._application.event_loop.close()
        self._job_log.close()
        if self._tracing is not None:
            self._tracing.close()
        # Last. A handler may exit with the same code, so the supervisor trusts only this message.
        if not self._cannot_load:
            self._send({"exiting": self._code, "reason": self._reason})
        return self._code

    def _run_loop(self, loop: Loop) -> None:
        loop.slot.thread = threading.get_ident()
        try:
            loop.run(self._on_worker_ready)
        except UnknownQueue:
            self._fail(ExitCode.QUEUE_GONE, None)
        except Fenced as exc:
            self._fail(ExitCode.FENCED, exc)
        except IncompatibleProtocol as exc:
            self._fail(ExitCode.INCOMPATIBLE, exc)
        except ConfigError as exc:
            self._cannot_load = True
            self._fail(_announce_failure(self._leash, exc), exc)
        except BaseException as exc:  # a bug in forq, or an exception that a handler's thread raised in this one
            log.exception("worker failed queue=%s", loop.queue)
            self._fail(ExitCode.FAILED, exc)
        finally:
            self._grants[loop.slot.number].give_back()
            self._worker_left(loop.slot.number)
            self._close(loop)

    def _worker_left(self, number: int) -> None:
        with self._lock:
            self._serving.discard(number)
            last = not self._serving
        if last and self._application.lifespans is not None:
            # The supervisor kills the process a few seconds after all have left. So the last one is reported when the
            # lifespans have ended.
            self._last_to_leave = number
        else:
            self._send({"left": number})

    def _close(self, loop: Loop) -> None:
        try:
            loop.close()
        except Exception:  # raised by code that a handler left running; the process ends anyway
            log.exception("failed to close a worker queue=%s", loop.queue)

    def _on_worker_ready(self) -> None:
        with self._lock:
            self._ready += 1
            if self._ready == len(self._loops):
                self._send({"ready": True})
                self._minder.update_title()

    def _request_replacement(self, reason: str) -> None:
        """The supervisor starts a successor; this process ends after its running jobs."""
        self._send({"replace": reason})
        self._stop()

    def _fail(self, code: int, exc: BaseException | None) -> None:
        """A worker cannot continue: stops all workers. The process reports the first reason when it exits."""
        with self._lock:
            if not self._code:
                self._code, self._reason = code, "" if exc is None else describe_exception(exc)
        self._stop()

    def _stop(self) -> None:
        for loop in self._loops:
            loop.stop()
        # The minder unblocks workers that are blocked in Redis.
        self._minder.wake()

    def _send(self, message: dict[str, object]) -> None:
        send_to_supervisor(self._leash, message)

    def _slot(self, number: int) -> Slot:
        slot = self._settings.context.scoreboard.slot(number)
        # Long enough that WORKER:FENCE, the value of a running job in the hash `active`, exceeds 64 bytes. Redis stores
        # a hash with such values as a table. It would store shorter ones as a list, and scan that list for each job.
        slot.worker = new_id() + self._settings.context.processor[-16:]
        slot.queue = self._settings.spec.name
        slot.role = self._settings.role
        slot.pid = os.getpid()
        slot.state = State.STARTING
        return slot

    def _worker_loop(
        self,
        slot: Slot,
        attempts: AttemptRunner,
        *,
        numbers: TurnNumbers | None = None,
        queue: str | None = None,
        kind: type[WorkerLoop] = WorkerLoop,
    ) -> WorkerLoop:
        settings, context = self._settings, self._settings.context
        scoreboard, watch_fd = context.scoreboard, context.watch_fd

        def on_batch(count: int) -> None:
            self._minder.wake()
            if count > 1 and not scoreboard.watching:
                os.eventfd_write(watch_fd, 1)

        consumer_args = (context.url, context.prefix, queue or settings.spec.name, context.processor, slot.worker)
        main = settings.role == Role.MAIN
        size = settings.options["fail_size" if queue else "size"]
        # Fail jobs are not the queue's own jobs, so they are not counted.
        stats = context.stats.of_slot(slot.number) if context.stats is not None and queue is None else None
        return kind(
            Consumer(*consumer_args, lane=_LANES[settings.role]),
            attempts,
            slot,
            expiry_ms=context.expiry_ms,
            # Replaced by the first turn.
            limits=Limits(0, int(size), int(settings.options["priority"])),
            grant=self._grants[slot.number],
            recycling=self._recycling,
            on_batch=on_batch,
            on_unguarded=lambda: self._send({"unguarded": slot.number}),
            numbers=numbers,
            # Jobs of other lanes are rare and may be slow: no prefetching.
            max_batch=MAX_BATCH if main else 1,
            # A retry process waits for two queues, and cannot know which one gets a job first.
            claims_ahead=main,
            idle_state=State.IDLE if main else State.PARKED,
            stats=stats,
            job_log=self._job_log,
        )

    def _attempt_runner(self, slot: Slot, handlers: Handlers) -> AttemptRunner:
        name = self._settings.spec.name
        return AttemptRunner(
            name, handlers, slot, self._progress.reporter(slot, name), self._tracing, self._application.event_loop
        )

    def _fail_loop(
        self, slot: Slot, fail: Handlers, numbers: TurnNumbers | None = None, kind: type[WorkerLoop] = WorkerLoop
    ) -> WorkerLoop:
        attempts = self._fail_attempt_runner(slot, fail)
        return self._worker_loop(slot, attempts, numbers=numbers, queue=fail_queue(self._settings.spec.name), kind=kind)

    def _fail_attempt_runner(self, slot: Slot, fail: Handlers) -> FailAttemptRunner:
        name = self._settings.spec.name
        reporter = self._progress.reporter(slot, fail_queue(name))
        return FailAttemptRunner(name, fail, slot, reporter, self._tracing, self._application.event_loop)

    def _retry_loop(self, slot: Slot) -> RetryLoop:
        numbers, none = TurnNumbers(), Handlers({})
        lane = self._worker_loop(slot, self._attempt_runner(slot, none), numbers=numbers)
        has_fails = self._settings.spec.fail_handler is not None
        fails = self._fail_loop(slot, none, numbers) if has_fails else None

        def import_handlers() -> None:
            self._application.load()
            self._send({"imported": True})
            lane.use(self._attempt_runner(slot, self._application.handlers))
            if fails is not None:
                assert self._application.fail_handler is not None
                fails.use(self._fail_attempt_runner(slot, self._application.fail_handler))

        return RetryLoop(lane, fails, import_handlers)

    def _release_loop(self, slot: Slot) -> ReleaseLoop:
        settings, context = self._settings, self._settings.context
        main = settings.role == Role.MAIN
        consumer_args = (context.url, context.prefix, settings.spec.name, context.processor, slot.worker)
        return ReleaseLoop(
            Consumer(*consumer_args, lane=_LANES[settings.role]),
            slot,
            expiry_ms=context.expiry_ms,
            idle_state=State.IDLE if main else State.PARKED,
            on_try=self._minder.wake,
        )


# The workers of a process share the leash: their lines must not mix.
_sending = threading.Lock()


def send_to_supervisor(leash: socket.socket, message: dict[str, object]) -> None:
    """Sends one line of JSON. Only logs a failure: this process exits when the supervisor is gone."""
    try:
        with _sending:
            leash.sendall(orjson.dumps(message) + b"\n")
    except OSError as exc:
        log.warning("failed to send to the supervisor error=%s", exc)


def apply_resource_limits(options: Mapping[str, Value]) -> None:
    """Applies to programs that handlers start, too. Raises ConfigError if the system allows less."""
    _raise_oom_score()
    open_files, address = int(options.get("open_files_limit", 0)), int(options.get("address_limit", 0))
    if open_files:
        _set_rlimit(resource.RLIMIT_NOFILE, open_files, f"open_files_limit = {open_files}")
    if address:
        _set_rlimit(resource.RLIMIT_AS, address, f"address_limit = {show_size(address)}")
    if niceness := int(options.get("nice", 0)):
        os.nice(niceness)


def _raise_oom_score() -> None:
    """Lets the kernel kill this process rather than the supervisor or Redis, which would interrupt every job."""
    # If /proc is hidden or read-only, the kernel chooses by size alone.
    with suppress(OSError, ValueError):
        # Any process may raise its score; only root may lower it.
        # Not a text file: that would cost 0.2 MB of private memory in each of many processes.
        fd = os.open(OOM_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if int(os.read(fd, 32)) < OOM_SCORE:
                os.pwrite(fd, f"{OOM_SCORE}\n".encode(), 0)
        finally:
            os.close(fd)


def _set_rlimit(which: int, wanted: int, setting: str) -> None:
    """Sets soft and hard limit, so a handler cannot raise it again, unless it runs as root."""
    _, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (wanted, wanted))
    except (ValueError, OSError) as exc:
        raise ConfigError(
            f"{setting} is not allowed: the supervisor's own limit is {hard}; raise that, or set at most {hard}"
        ) from exc


def enable_stack_dumps() -> int:
    """On a signal the process writes the stacks of its threads to a memory file, even while C code holds the
    interpreter. Returns its descriptor; the supervisor reads the file through /proc."""
    fd = os.memfd_create(STACK_FILE, os.MFD_CLOEXEC)
    # Appending: the reader truncates the file.
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    return fd
