"""One process of a queue from start to recovery (QueueProcess).

A running job that has to be ended (it is overdue, or a user kills it) is *condemned*. If its process runs nothing else,
the process is killed at once. Otherwise the process claims no more jobs, a successor starts, and the process is killed
when only condemned jobs are left in it; or at once, if C code blocks the interpreter so that no other job can continue.
"""

import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from forq.errors import ForqError, InvalidData
from forq.procs import jsonrpc
from forq.procs.cgroups import Exceeded, Resources, process_count
from forq.procs.scoreboard import AttemptStats, Role, Scoreboard, Slot, State
from forq.procs.stacks import MAX_STACK, stack_of_event_loop, stack_of_thread
from forq.queue_spec import QueueSpec
from forq.settings import OPTIONS, Value
from forq.supervisor.capacity import Grants
from forq.supervisor.child import Child, ChildTable, Exit
from forq.supervisor.deadlines import Deadlines
from forq.supervisor.pacing import Admission
from forq.supervisor.service import WardenClient
from forq.supervisor.stacks import Stacks
from forq.supervisor.unresponsive import ProcessWatch

log = logging.getLogger("forq")

# If the minder does not beat within this time after a job is condemned, the interpreter counts as stuck.
BEAT_SECONDS = 0.5
# A job whose code runs on the event loop for this long blocks it.
BLOCKED_NS = 500_000_000
# How long a process may take to exit after all its workers have left.
EXIT_SECONDS = 5.0
# Our own messages are far shorter, but a handler that finds the leash may write anything to it.
MAX_LINE_BYTES = 64 * 1024
# A process with more unread input than this is killed.
MAX_UNSENT_BYTES = 256 * 1024
MAX_REASON = 4000
MAX_TRACEBACK = 6000

OVERDUE = "timeout"
UNRESPONSIVE = "unresponsive"

_ROLES = {int(role): role.name.lower() for role in Role}


class Member(NamedTuple):
    """Which process of a queue it is: its role, and its number among the main processes."""

    role: Role
    number: int = 1


@dataclass(frozen=True)
class ProcessDeps:
    """The parts of the supervisor that processes of queues use."""

    children: ChildTable
    scoreboard: Scoreboard
    grants: Grants
    admission: Admission
    child_main: Callable[
        [str, QueueSpec, Mapping[str, Value], Role, tuple[int, ...], bool], Callable[[socket.socket], int]
    ]
    recover: Callable[[dict[str, Any], Callable[[], None]], None]
    queue_gone: Callable[[str], None]
    # Requests a heartbeat of this queue. Pulse then reports an eviction, and how many jobs wait for helpers.
    heartbeat: Callable[[str], None]
    changed: Callable[[], None]
    processor: Callable[[], str]
    # Requests a search for jobs that this queue's workers hold but do not read.
    check_unread: Callable[[str], None]
    warden: WardenClient
    # None if no metrics are served.
    stats: AttemptStats | None = None


class ProcessOwner(Protocol):
    """Manages a process: ServedQueue, HelperProcesses or Successors."""

    def process_ended(self, process: "QueueProcess", end: Exit) -> None: ...

    def replace_process(self, process: "QueueProcess", reason: str) -> None: ...

    def may_replace_process(self, process: "QueueProcess") -> bool: ...

    def process_imported(self, process: "QueueProcess") -> None:
        """A held process has imported its handlers and waits for `begin`."""

    def process_ready(self, process: "QueueProcess") -> None:
        """All its workers have joined the queue."""

    def process_stopping(self, process: "QueueProcess") -> None:
        """It begins no more jobs."""


@dataclass
class Condemned:
    """A running job that has to be ended: its position, and the outcome to record for its attempt."""

    position: int
    outcome: str
    cause: str
    stack: str | None = None
    # Its stack was requested, and read if there is one.
    dumped: bool = False


class QueueProcess:
    """One process of a queue: main, retry or helper.

    1. Takes scoreboard slots for its workers and forks the child.
    2. Handles the messages of the child: capacity, deadlines, readiness, exit reason.
    3. Ends condemned jobs, and the whole process if it is stuck or exceeds its resources.
    4. After its end, hands the jobs of its workers to pulse for recovery.

    A `held` process imports its handlers and waits; `begin` makes it join the queue. The constructor raises OSError or
    ForqError if the system is out of processes, descriptors or slots.
    """

    def __init__(
        self,
        spec: QueueSpec,
        options: Mapping[str, Value],
        member: Member,
        deps: ProcessDeps,
        owner: ProcessOwner,
        *,
        held: bool = False,
    ) -> None:
        self.spec = spec
        self.member = member
        self.role = member.role
        self.owner = owner
        # Of the main processes of the queue.
        self._count = process_count(options)
        self.processor = deps.processor()
        self.held = held
        self.imported = False
        self.ready = False
        self.retiring = False
        self.begins_no_jobs = False
        self.exit_reason: str | None = None
        self.traceback: str | None = None
        # Whether it exits because the code of its app has changed since the app was read.
        self.stale = False
        self._announced_exit: int | None = None
        self.resources = Resources.of(options)
        self.slots: tuple[int, ...] = ()
        self._deps = deps
        self._left: set[int] = set()
        self._counting: list[int] = []
        self._condemned: dict[int, Condemned] = {}
        # Jobs that a user killed and whose coroutines are being cancelled.
        self._cancelling: dict[int, Condemned] = {}
        self._exceeded: Exceeded | None = None
        self._stuck = False
        board = deps.scoreboard
        taken: list[int] = []
        try:
            # Only queues of mode work have this option.
            while len(taken) < (int(options.get("concurrency", 1)) if self.role == Role.MAIN else 1):
                taken.append(board.take())
            self.slots = tuple(taken)
            self._take_stats()
            self.child = self._child(options)
        except BaseException:
            self._give_stats_back()
            for number in taken:
                board.give_back(number)
            raise
        for slot in self._slots():
            # Lets pulse find the process before the child itself has written anything.
            slot.pid = self.child.pid
        self._deadlines = Deadlines(deps.children.loop, self._slots(), self._overdue)
        self.stacks = Stacks(deps.children.loop, self.child, self._request_coroutine_stacks)
        self.watch = ProcessWatch(
            deps.children.loop,
            self.child,
            self._slots(),
            ping=lambda: self.send({"ping": 0}),
            on_unresponsive=lambda: deps.check_unread(spec.name),
            on_stuck=self._end_unresponsive,
            replace=self._replace_unresponsive,
        )
        deps.grants.add(self)
        if not self.child.kernel_limits:
            deps.warden.add(self)
        deps.admission.started(self)

    @property
    def name(self) -> str:
        name = f"{self.spec.name} {_ROLES[self.role]}"
        return f"{name} {self.member.number}/{self._count}" if self.role == Role.MAIN and self._count > 1 else name

    @property
    def main_of(self) -> str | None:
        return self.spec.name if self.role == Role.MAIN else None

    def set_count(self, count: int) -> None:
        """The queue has this many main processes now; the title shows it."""
        if count != self._count:
            self._count = count
            self.send({"name": self.name})

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def was_condemned(self) -> bool:
        """Whether the supervisor ended it on purpose: for a job, its resources, or because it was stuck."""
        return bool(self._condemned) or self._exceeded is not None or self._stuck

    def done(self) -> int:
        return sum(slot.done for slot in self._slots())

    def began(self) -> bool:
        return any(slot.started_ns for slot in self._slots())

    def busy(self) -> list[Slot]:
        return [slot for slot in self._slots() if slot.state == State.BUSY]

    def running(self) -> int:
        """Number of running jobs; jobs that a worker holds but has not started do not count."""
        return sum(slot.position & 1 for slot in self._slots())

    def idle_workers(self) -> list[str]:
        return [slot.worker for slot in self._slots() if slot.worker and not slot.position & 1]

    def state(self) -> str:
        # A process that has ended stays listed until its tree is gone.
        if self.child.stopping or self.child.ended or self.retiring:
            return "stopping"
        if self.held:
            return "imported" if self.imported else "importing"
        if not self.ready:
            return "starting"
        if self.watch.unresponsive:
            return UNRESPONSIVE
        states = [State(slot.state) for slot in self._slots()]
        return "busy" if State.BUSY in states or State.SETTLING in states else states[0].name.lower()

    @property
    def importing(self) -> bool:
        """A retry process imports its handlers after it has joined."""
        return not self.ready or any(slot.state == State.STARTING for slot in self._slots())

    def begin(self) -> None:
        """Lets a held process join the queue."""
        self.held = False
        self.send({"begin": 0})

    def send(self, message: dict[str, Any]) -> None:
        self.child.send(jsonrpc.encode(message) + b"\n")
        if self.child.unsent_bytes > MAX_UNSENT_BYTES and not self.child.stopping:
            log.error("child does not read its leash; killing it child=%s", self.name)
            self.child.kill_and_ignore("leash_unread")

    def announced_code(self, end: Exit) -> int | None:
        """The exit code, if forq's own code announced it and no job was running; else None.

        A handler can end its process with any code. That is always a crash of its job.
        """
        running = any(slot.position & 1 and slot.state == State.BUSY for slot in self._slots())
        return None if running or end.code != self._announced_exit else end.code

    def retire(self) -> None:
        """Makes it claim no more jobs, and exit when its running jobs have ended, however long they take."""
        if not self.retiring:
            self.retiring = True
            self.child.signal(signal.SIGTERM)

    def kill_job(self, slot: Slot, position: int, outcome: str, cause: str) -> None:
        """Ends the job at this position at the request of a user. A coroutine is cancelled; the job is condemned only
        if that does not end it in time."""
        lenience_ms = slot.lenience_ms
        if not lenience_ms or slot.number in self._condemned:
            self.condemn(slot, position, outcome, cause)
            return
        job = slot.job.decode(errors="replace")
        log.warning("cancelling a job queue=%s job=%s cause=%s pid=%s", self.spec.name, job, cause, self.child.pid)
        self._cancelling[slot.number] = Condemned(position, outcome, cause)
        self._send_cancel(slot, self._cancelling[slot.number])

        def condemn_if_running() -> None:
            # While it is settled, it keeps its position.
            if not self.child.ended and slot.position == position and slot.state == State.BUSY:
                self.condemn(slot, position, outcome, cause)

        self._deps.children.loop.call_later(lenience_ms / 1000, condemn_if_running)

    def condemn(self, slot: Slot, position: int, outcome: str, cause: str) -> None:
        """Ends the job at this position."""
        known = self._condemned.get(slot.number)
        if known is not None and known.position == position:
            # A kill by a user overrides the outcome of a timeout.
            if cause != OVERDUE:
                known.outcome, known.cause = outcome, cause
            return
        job = slot.job.decode(errors="replace")
        log.warning("killing a job queue=%s job=%s cause=%s pid=%s", self.spec.name, job, cause, self.child.pid)
        self._condemned[slot.number] = Condemned(position, outcome, cause)
        since_ns = time.monotonic_ns()
        # Before the idle workers are told to leave: a dump beside threads that end can crash the interpreter.
        self.stacks.take(lambda dump: self._on_dump(slot, dump))
        if len(self.slots) > 1:
            self._deps.children.loop.call_later(BEAT_SECONDS, lambda: self._end_if_stuck(since_ns))
            if not self.retiring:
                self.owner.replace_process(self, cause)
            if cause != OVERDUE:
                # Sets Job.should_stop: the job may end on its own while the others finish.
                self._send_cancel(slot, self._condemned[slot.number])

    def _send_cancel(self, slot: Slot, job: Condemned) -> None:
        self.send({"cancel": slot.number, "position": job.position, "outcome": job.outcome, "cause": job.cause})

    def exceed(self, limit: Exceeded) -> None:
        """Kills the process at once, with all its jobs, because it exceeds its resources."""
        if self.child.ended or self._exceeded is not None:
            return
        jobs = [slot.job.decode("utf-8", "replace") for slot in self.busy()]
        log.warning(
            "killing a process queue=%s jobs=%s cause=%s memory=%s pid=%s",
            *(self.spec.name, jobs, limit.cause, limit.peak_bytes, self.child.pid),
        )
        self._exceeded = limit
        self.child.kill()

    def _take_stats(self) -> None:
        if self._deps.stats is not None:
            for number in self.slots:
                self._deps.stats.take(number, self.spec.name)
                self._counting.append(number)

    def _give_stats_back(self) -> None:
        """The counts stay; successors continue them."""
        for number in self._counting:
            assert self._deps.stats is not None
            self._deps.stats.give_back(number)
        self._counting = []

    def _slots(self) -> list[Slot]:
        return [self._deps.scoreboard.slot(number) for number in self.slots]

    def _child(self, options: Mapping[str, Value]) -> Child:
        return Child(
            self._deps.children,
            self.name,
            self._deps.child_main(self.name, self.spec, options, self.role, self.slots, self.held),
            handled=(signal.SIGTERM,),
            runs_user_code=True,
            resources=self.resources,
            max_line_bytes=MAX_LINE_BYTES,
            on_line=self._on_line,
            on_invalid=self._invalid_leash,
            on_end=self._on_end,
            on_stop=lambda: self.watch.stopped_or_continued(),
            on_grace_end=self._cancel_coroutines,
        )

    def _on_line(self, line: bytes) -> None:
        """Raises InvalidData for a message that forq does not send: user code wrote it, so no later line is trusted."""
        message = jsonrpc.decode(line)
        if not isinstance(message, dict):
            raise InvalidData("a message must be a JSON object")
        try:
            numbers = [message[key] for key in ("want", "done", "unguarded", "left", "coroutine") if key in message]
            if any(number not in self.slots for number in numbers):
                raise InvalidData(f"no such worker: {numbers}")
            self._handle(message)
        except InvalidData:
            raise
        except (ForqError, LookupError, TypeError) as exc:
            raise InvalidData(f"unexpected content: {type(exc).__name__}: {exc}") from exc

    def _invalid_leash(self, cause: str) -> None:
        """Called before the process is killed for invalid input on its leash: counts that against its running jobs."""
        running = [slot for slot in self._slots() if slot.position & 1]
        outcome = "stalled" if len(running) == 1 else "suspect"
        for slot in running:
            self._condemned[slot.number] = Condemned(slot.position, outcome, cause)

    def _handle(self, message: dict[str, Any]) -> None:
        if "want" in message or "done" in message:
            self._deps.grants.handle(_checked_units(message))
        elif "unguarded" in message:
            self._deadlines.guard(message["unguarded"])
        elif "left" in message:
            self._worker_left(message["left"])
        elif "coroutine" in message:
            self.stacks.coroutines[message["coroutine"]] = str(message["stack"])[:MAX_STACK]
        elif "coroutines" in message:
            self.stacks.coroutines_received()
        elif "replace" in message:
            if not self.retiring:
                self.owner.replace_process(self, str(message["replace"])[:MAX_REASON])
        elif "stack_fd" in message:
            self.stacks.fd = _checked(message, "stack_fd", 0, 2**31 - 1)
        elif "exiting" in message:
            self._announced_exit = _checked(message, "exiting", 0, 255)
            self.exit_reason = str(message["reason"])[:MAX_REASON]
            self.stale = message.get("stale") is True
            if message.get("traceback") is not None:
                self.traceback = str(message["traceback"])[-MAX_TRACEBACK:]
        elif "imported" in message:
            self._deps.admission.finished(self)
            first, self.imported = not self.imported, True
            if self.held and first:
                self.owner.process_imported(self)
        elif "ready" in message:
            self._deps.admission.finished(self)
            if not self.ready:
                self.ready = True
                self.owner.process_ready(self)
        elif "stopping" in message:
            self.begins_no_jobs = True
            self.owner.process_stopping(self)
        else:
            raise InvalidData("unknown message")

    def _worker_left(self, number: int) -> None:
        if number in self._left:
            return
        self._left.add(number)
        self._end_if_only_condemned()
        if self._left >= set(self.slots):
            self._deps.children.loop.call_later(EXIT_SECONDS, self.child.kill)

    def _overdue(self, slot: Slot, position: int) -> None:
        blocker = self._loop_blocker(slot)
        if blocker is None:
            self.condemn(slot, position, "timed_out", OVERDUE)
            return
        # No coroutine of this process can continue. Only the one that blocks the event loop counts.
        self.condemn(blocker, blocker.position, "timed_out", OVERDUE)
        for each in self._slots():
            if each.lenience_ms and each.position & 1 and each.number not in self._condemned:
                self.condemn(each, each.position, "interrupted", "interrupted")

    def _loop_blocker(self, overdue: Slot) -> Slot | None:
        """The worker whose job blocks the event loop on which the overdue coroutine waits; None if none does."""
        if not overdue.lenience_ms:
            return None
        before_ns = time.monotonic_ns() - BLOCKED_NS
        return next(
            (each for each in self._slots() if each.number != overdue.number and 0 < each.step_ns < before_ns), None
        )

    def _cancel_coroutines(self) -> None:
        """At the end of the grace period: they can end in order before the kill."""
        if any(slot.lenience_ms for slot in self._slots()):
            self.send({"cancel": None})

    def _on_dump(self, slot: Slot, dump: str) -> None:
        condemned = self._condemned.get(slot.number)
        if condemned is not None:
            condemned.dumped = True
            if dump:
                condemned.stack = self.stack_of(slot, dump)
        self._end_if_only_condemned()

    def stack_of(self, slot: Slot, dump: str) -> str:
        """The stack of the job that this worker runs. `dump`: of the threads of the process."""
        if not slot.lenience_ms:
            return stack_of_thread(dump, slot.thread)
        if slot.number in self.stacks.coroutines:
            return self.stacks.coroutines[slot.number]
        # The interpreter is stuck. The dump shows the coroutine that runs, but not those that wait.
        return stack_of_event_loop(dump) if slot.step_ns else ""

    def _request_coroutine_stacks(self) -> bool:
        """False if no coroutine runs."""
        if not any(slot.lenience_ms for slot in self._slots()):
            return False
        self.send({"stacks": 0})
        return True

    def _end_if_only_condemned(self) -> None:
        if self.child.ended:
            return
        for slot in self._slots():
            condemned = self._condemned.get(slot.number)
            if condemned is not None and slot.position != condemned.position:
                # The job ended on its own in the meantime.
                del self._condemned[slot.number]
        if not self._condemned or not all(number in self._condemned or number in self._left for number in self.slots):
            return
        # Idle workers leave within milliseconds: the process must not die before its stacks are read.
        if all(condemned.dumped for condemned in self._condemned.values()):
            self.child.kill()

    def _end_if_stuck(self, since_ns: int) -> None:
        if self._condemned and not self.child.ended and any(slot.beat_ns < since_ns for slot in self._slots()):
            log.warning("interpreter is stuck; killing the process queue=%s pid=%s", self.spec.name, self.child.pid)
            self.child.kill()

    def _end_unresponsive(self) -> None:
        self._stuck = True
        self.child.kill()

    def _replace_unresponsive(self) -> None:
        """A job may block the interpreter until its timeout; the rescued jobs of the other workers run elsewhere."""
        if self.role == Role.MAIN and not self.retiring and self.owner.may_replace_process(self):
            self.owner.replace_process(self, UNRESPONSIVE)

    def _on_end(self, end: Exit) -> None:
        self._deadlines.stop()
        self.watch.stop()
        self._deps.admission.finished(self)
        self._deps.grants.remove(self)
        self._deps.warden.remove(self)
        self._give_stats_back()
        self.owner.process_ended(self, end)

    def recover(self, end: Exit) -> None:
        """Hands the jobs of the dead process's workers to pulse. A slot is reused only after its recovery."""
        # In order of job start: suspects that were enqueued in the same ms run in this order.
        slots = sorted(self._slots(), key=lambda slot: slot.started_ns)
        running = sum(slot.position & 1 for slot in slots)
        for slot in slots:
            give_back = partial(self._deps.scoreboard.give_back, slot.number)
            params = self._last_position(slot, end, running)
            # From now on no reader mistakes this slot for a live worker.
            slot.state, slot.held, slot.pid = State.EMPTY, 0, 0
            if slot.worker:
                self._deps.recover(params, give_back)
            else:
                give_back()

    def _last_position(self, slot: Slot, end: Exit, running: int) -> dict[str, Any]:
        at = slot.read_position()
        since = slot.running_since_ns()
        condemned = self._condemned.get(slot.number) or self._cancelling.get(slot.number)
        over = self._exceeded_limit(end)
        stack: str | None = None
        if condemned is not None and condemned.position == slot.position:
            outcome, cause, stack = condemned.outcome, condemned.cause, condemned.stack
        elif over is None and self.child.stopping:
            outcome, cause = "interrupted", UNRESPONSIVE if self._stuck else "interrupted"
        else:
            # With several jobs running, any of them may have crashed the process: each is retried alone.
            outcome = "stalled" if running == 1 else "suspect"
            cause = end.text.replace(" ", "_") if over is None else over.cause
        return {
            "queue": self.spec.name,
            "processor": self.processor,
            "with_fail_queue": self.role.runs_fail_jobs and self.spec.fail_handler is not None,
            "worker": slot.worker,
            "turn": at.turn,
            "index": at.index,
            "running": at.running,
            "outcome": outcome,
            "cause": cause,
            "micros": None if since is None else (time.monotonic_ns() - since[1]) // 1000,
            "stack": stack,
            "peak_bytes": None if over is None else over.peak_bytes,
        }

    def _exceeded_limit(self, end: Exit) -> Exceeded | None:
        """The resource limit that ended it, if one did."""
        if self._exceeded is not None:
            return self._exceeded
        return self.child.killed_by_kernel if end.signal == signal.SIGKILL else None


def describe_process(member: Member, process: QueueProcess | None, state: str, restarts: int) -> dict[str, Any]:
    """For `status`. `process`: None if there is none at the moment."""
    busy = process.busy() if process is not None else []
    now_ns = time.monotonic_ns()
    ages = [round((now_ns - slot.started_ns) / 1e9, 3) for slot in busy]
    return {
        "role": member.role.name.lower(),
        "number": member.number,
        "pid": process.pid if process is not None else None,
        "state": state,
        "job": _text(busy[0].job) if busy else None,
        "jobs": [_text(slot.job) for slot in busy],
        "progress": _progress(busy[0]) if busy else None,
        "jobs_progress": [_progress(slot) for slot in busy],
        "job_seconds": ages[0] if ages else None,
        "jobs_seconds": ages,
        "done": process.done() if process is not None else 0,
        "uptime_seconds": round(process.child.uptime_seconds(), 3) if process is not None else None,
        "restarts": restarts,
    }


def _progress(slot: Slot) -> dict[str, Any] | None:
    progress = slot.progress()
    return None if progress is None else {"fraction": progress[0], "text": progress[1]}


def _text(job_id: bytes) -> str:
    return job_id.decode("utf-8", "replace")


def _checked_units(message: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidData if a request for capacity is out of range: all queues share the units."""
    if "want" in message:
        _checked(message, "units", *_limits_of("size"))
        _checked(message, "priority", *_limits_of("priority"))
    return message


def _limits_of(option: str) -> tuple[int, int]:
    row = OPTIONS[option]
    return int(row.lowest), int(row.highest)


def _checked(message: dict[str, Any], key: str, lowest: int, highest: int) -> int:
    value = message[key]
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidData(f"{key} must be a whole number from {lowest} to {highest}")
    return value
