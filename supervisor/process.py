"""The deadlines of the jobs that one process runs, read from the scoreboard: they hold also for code that keeps the
interpreter to itself and ignores every signal.

Nothing is looked at while no job runs. A worker that begins to run jobs sees in its slot whether it is guarded; if not,
it says so, and from then on there is a timer for the earliest moment at which one of its jobs may be overdue.

Reading the stacks of a child: a signal makes it write them to its memory file (workers/child.py).

One process of a queue from its start to its burial: its workers, their deadlines, and what becomes of their jobs.

A job that has to be ended (it is overdue, or somebody kills it) is *condemned*. Its process is killed at once if it
runs nothing else. Otherwise it takes no new jobs, its successor starts, and it is killed when only condemned jobs are
left in it; or at once, if C code keeps the interpreter to itself so that the others cannot go on either.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from forq.errors import ForqError, InvalidData
from forq.procs import jsonrpc
from forq.procs.cgroups import Exceeded, Resources
from forq.procs.loop import Loop, Timer
from forq.procs.scoreboard import AttemptStats, Role, Scoreboard, Slot, State
from forq.procs.stacks import STACK_FILE, STACK_SIGNAL, stack_of_thread
from forq.queue_spec import QueueSpec
from forq.settings import OPTIONS, Value
from forq.supervisor.capacity import Grants
from forq.supervisor.child import Child, ChildTable, Exit
from forq.supervisor.pacing import Admission
from forq.supervisor.service import WardenClient
from forq.supervisor.unresponsive import ProcessWatch

log = logging.getLogger("forq")

NS_PER_MS = 1_000_000
# A job that is just beginning: its start is not written yet.
BEGINNING_NS = NS_PER_MS


class Deadlines:
    """Calls `overdue` once for each job that runs past its time, with its slot and its position word."""

    def __init__(
        self,
        loop: Loop,
        slots: Sequence[Slot],
        overdue: Callable[[Slot, int], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._loop = loop
        self._slots = slots
        self._overdue = overdue
        self._now_ns = now_ns
        self._told: dict[int, int] = {}
        self._timer: Timer | None = None

    def guard(self, number: int) -> None:
        """The worker in this slot has begun to run jobs."""
        for slot in self._slots:
            if slot.number == number:
                slot.guarded = 1
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _look(self) -> None:
        self.stop()
        now = self._now_ns()
        due = [at for slot in self._slots if (at := self._next(slot, now)) is not None]
        if due:
            self._timer = self._loop.call_later(max(0, min(due) - now) / 1e9, self._look)

    def _next(self, slot: Slot, now: int) -> int | None:
        """When this slot is to be looked at again; None: when its worker says so."""
        if not slot.guarded or not self._still_busy(slot):
            return None
        allowed = slot.timeout_ms * NS_PER_MS
        running = slot.running_since_ns()
        if running is None:
            return now + (BEGINNING_NS if slot.position & 1 else allowed)
        word, started = running
        due = started + allowed + slot.lenience_ms * NS_PER_MS
        if due > now:
            return due
        if self._told.get(slot.number) != word:
            self._told[slot.number] = word
            self._overdue(slot, word)
        # It may still end by itself; the job after it is not overdue before this.
        return now + allowed

    def _still_busy(self, slot: Slot) -> bool:
        if slot.state == State.BUSY and slot.timeout_ms:
            return True
        slot.guarded = 0
        # It may have begun again before it could see that.
        if slot.state == State.BUSY and slot.timeout_ms:
            slot.guarded = 1
            return True
        return False


LOOK_SECONDS = 0.003
# The dump is there when it has stopped growing; a child that does not answer for 0.2 s has none to give. Less would be
# enough on an idle machine.
STILL_LOOKS = 2
MAX_LOOKS = 66
MAX_DUMP_BYTES = 256 * 1024


class Stacks:
    """The stacks of one child; whoever asks while a dump is under way gets the same one."""

    def __init__(self, loop: Loop, child: Child) -> None:
        self._loop = loop
        self._child = child
        self._waiting: list[Callable[[str], None]] = []
        self._file = -1
        self._size = self._looks = self._still = 0
        self.fd: int | None = None

    def take(self, then: Callable[[str], None]) -> None:
        """Calls `then` with the dump, soon; with nothing if there is none to be had."""
        self._waiting.append(then)
        if len(self._waiting) > 1:
            return
        self._size = self._looks = self._still = 0
        try:
            self._file = self._open()
        except OSError:
            # It is just ending.
            self._file = -1
        if self._file < 0 or not self._child.signal(STACK_SIGNAL):
            self._loop.call_later(0, self._finish)
        else:
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _open(self) -> int:
        """The file, emptied; -1 if there is none, as in a process that has become another program."""
        path = f"/proc/{self._child.pid}/fd/{self.fd}"
        if self.fd is None or not os.readlink(path).startswith(f"/memfd:{STACK_FILE}"):
            return -1
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(file, 0)
        return file

    def _look(self) -> None:
        size = os.fstat(self._file).st_size
        self._looks += 1
        self._still = self._still + 1 if size and size == self._size else 0
        self._size = size
        if self._still >= STILL_LOOKS or self._looks >= MAX_LOOKS:
            self._finish()
        else:
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _finish(self) -> None:
        dump = os.pread(self._file, MAX_DUMP_BYTES, 0).decode("utf-8", "replace") if self._file >= 0 else ""
        self._close()
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(dump)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


# How long the second thread of a process gets to answer a TERM before its interpreter counts as stuck.
ANSWER_SECONDS = 0.5
# How long a process whose workers have all left gets to end.
LAST_SECONDS = 5.0
# All that its own code says is far shorter; a handler that has found the leash may write anything.
MAX_LINE_BYTES = 64 * 1024
# A process that says much and reads nothing.
MAX_UNSENT_BYTES = 256 * 1024
MAX_REASON = 4000
MAX_TRACEBACK = 6000

OVERDUE = "timeout"
UNRESPONSIVE = "unresponsive"

_ROLES = {int(role): role.name.lower() for role in Role}


@dataclass(frozen=True)
class ProcessDeps:
    """What a queue's processes need of the supervisor."""

    children: ChildTable
    scoreboard: Scoreboard
    grants: Grants
    admission: Admission
    child_main: Callable[
        [str, QueueSpec, Mapping[str, Value], Role, tuple[int, ...], bool], Callable[[socket.socket], int]
    ]
    recover: Callable[[dict[str, Any], Callable[[], None]], None]
    queue_gone: Callable[[str], None]
    check_evicted: Callable[[str], None]
    # Asks pulse for a heartbeat of this queue: how many jobs wait for helpers.
    check_waiting: Callable[[str], None]
    changed: Callable[[], None]
    processor: Callable[[], str]
    # Tells pulse to look for jobs that this queue's workers were given and do not begin.
    check_unread: Callable[[str], None]
    warden: WardenClient
    # None: nobody wants to know.
    stats: AttemptStats | None = None


class ProcessOwner(Protocol):
    """The unit that a process belongs to."""

    def process_ended(self, process: "QueueProcess", how: Exit) -> None: ...

    def replace_process(self, process: "QueueProcess", reason: str) -> None: ...

    def may_replace_process(self, process: "QueueProcess") -> bool: ...

    def process_imported(self, process: "QueueProcess") -> None:
        """One that is held has imported its handlers, and waits."""


@dataclass
class Condemned:
    """A running job that has to be ended: its position, and what is said of its attempt."""

    word: int
    outcome: str
    cause: str
    stack: str | None = None


class QueueProcess:
    """Making one raises OSError or ForqError when the system has no process, descriptor or slot to give. One that is
    `held` imports its handlers and waits: it joins the queue when it is told to begin."""

    def __init__(
        self,
        spec: QueueSpec,
        options: Mapping[str, Value],
        role: Role,
        deps: ProcessDeps,
        owner: ProcessOwner,
        *,
        held: bool = False,
    ) -> None:
        self.spec = spec
        self.role = role
        self.processor = deps.processor()
        self.held = held
        self.imported = False
        self.ready = False
        self.retiring = False
        self.exit_reason: str | None = None
        self.traceback: str | None = None
        self._announced_exit: int | None = None
        self.resources = Resources.of(options)
        self.slots: tuple[int, ...] = ()
        self._deps = deps
        self._owner = owner
        self._left: set[int] = set()
        self._counting: list[int] = []
        self._condemned: dict[int, Condemned] = {}
        self._exceeded: Exceeded | None = None
        self._stuck = False
        board = deps.scoreboard
        taken: list[int] = []
        try:
            # Only a queue that works has this option.
            while len(taken) < (int(options.get("concurrency", 1)) if role == Role.MAIN else 1):
                taken.append(board.take())
            self.slots = tuple(taken)
            self._take_tallies()
            self.child = self._child(options)
        except BaseException:
            self._give_tallies_back()
            for number in taken:
                board.give_back(number)
            raise
        for slot in self._slots():
            # So that pulse finds it even before it has come to life.
            slot.pid = self.child.pid
        self._deadlines = Deadlines(deps.children.loop, self._slots(), self._overdue)
        self.stacks = Stacks(deps.children.loop, self.child)
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
        if not self.child.kernel_keeps:
            deps.warden.add(self)
        deps.admission.started(self)

    @property
    def name(self) -> str:
        return f"{self.spec.name} {_ROLES[self.role]}"

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def was_condemned(self) -> bool:
        """Whether it was to be killed because of a job, or since it did not answer."""
        return bool(self._condemned) or self._exceeded is not None or self._stuck

    def done(self) -> int:
        return sum(slot.done for slot in self._slots())

    def began(self) -> bool:
        return any(slot.started_ns for slot in self._slots())

    def busy(self) -> list[Slot]:
        return [slot for slot in self._slots() if slot.state == State.BUSY]

    def running(self) -> int:
        """How many jobs run in it, not only held by a worker."""
        return sum(slot.position & 1 for slot in self._slots())

    def resting_workers(self) -> list[str]:
        """Those that run no job."""
        return [slot.worker for slot in self._slots() if slot.worker and not slot.position & 1]

    def state(self) -> str:
        # One that has ended is there until nothing is left of what it started.
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

    def begin(self, owner: ProcessOwner) -> None:
        """It joins the queue, as a process of that owner."""
        self._owner = owner
        self.held = False
        self.send({"begin": 0})

    def send(self, message: dict[str, Any]) -> None:
        self.child.send(jsonrpc.encode(message) + b"\n")
        if self.child.unsent_bytes > MAX_UNSENT_BYTES and not self.child.stopping:
            log.error("child does not read its leash; killing it child=%s", self.name)
            self.child.kill_and_ignore("leash_unread")

    def announced_code(self, how: Exit) -> int | None:
        """The exit code, if the process's own code has announced it and no job was running; None for any other end.

        A handler can end its process with any code: that is a crash of its job, whatever the number.
        """
        running = any(slot.position & 1 and slot.state == State.BUSY for slot in self._slots())
        return None if running or how.code != self._announced_exit else how.code

    def retire(self) -> None:
        """It takes no more jobs and ends after those that it runs, however long they take."""
        if not self.retiring:
            self.retiring = True
            self.child.signal(signal.SIGTERM)

    def condemn(self, slot: Slot, word: int, outcome: str, cause: str) -> None:
        """The job at this position is to be ended."""
        known = self._condemned.get(slot.number)
        if known is not None and known.word == word:
            # Whoever kills a job that is being ended already has the last word on what becomes of it.
            if cause != OVERDUE:
                known.outcome, known.cause = outcome, cause
            return
        job = slot.job.decode(errors="replace")
        log.warning("ending a job queue=%s job=%s cause=%s pid=%s", self.spec.name, job, cause, self.child.pid)
        self._condemned[slot.number] = Condemned(word, outcome, cause)
        since_ns = time.monotonic_ns()
        if len(self.slots) > 1:
            self._deps.children.loop.call_later(ANSWER_SECONDS, lambda: self._end_if_stuck(since_ns))
            if not self.retiring:
                self._owner.replace_process(self, cause)
        self.stacks.take(lambda dump: self._on_dump(slot, dump))

    def exceed(self, how: Exceeded) -> None:
        """It takes more of the machine than it may: it is killed at once, whatever else it runs."""
        if self.child.ended or self._exceeded is not None:
            return
        jobs = [slot.job.decode("utf-8", "replace") for slot in self.busy()]
        log.warning(
            "ending a process queue=%s jobs=%s cause=%s memory=%s pid=%s",
            *(self.spec.name, jobs, how.cause, how.peak_bytes, self.child.pid),
        )
        self._exceeded = how
        self.child.kill()

    def _take_tallies(self) -> None:
        if self._deps.stats is not None:
            for number in self.slots:
                self._deps.stats.take(number, self.spec.name)
                self._counting.append(number)

    def _give_tallies_back(self) -> None:
        """What its workers have counted stays; their successors go on in it."""
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
        )

    def _on_line(self, line: bytes) -> None:
        """Only its own code speaks on the leash; if something else does, nothing that it says can be relied on."""
        message = jsonrpc.decode(line)
        if not isinstance(message, dict):
            raise InvalidData("a message is a JSON object")
        try:
            numbers = [message[key] for key in ("want", "done", "unguarded", "left") if key in message]
            if any(number not in self.slots for number in numbers):
                raise InvalidData(f"there is no worker {numbers}")
            self._handle(message)
        except InvalidData:
            raise
        except (ForqError, LookupError, TypeError) as exc:
            raise InvalidData(f"not understood: {type(exc).__name__}: {exc}") from exc

    def _invalid_leash(self, cause: str) -> None:
        """It is about to be killed for what was done to its leash: the job that runs there did it."""
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
        elif "replace" in message:
            if not self.retiring:
                self._owner.replace_process(self, str(message["replace"])[:MAX_REASON])
        elif "stack_fd" in message:
            self.stacks.fd = _checked(message, "stack_fd", 0, 2**31 - 1)
        elif "exiting" in message:
            self._announced_exit = _checked(message, "exiting", 0, 255)
            self.exit_reason = str(message["reason"])[:MAX_REASON]
            if message.get("traceback") is not None:
                self.traceback = str(message["traceback"])[-MAX_TRACEBACK:]
        elif "imported" in message:
            self._deps.admission.finished(self)
            if self.held and not self.imported:
                self.imported = True
                self._owner.process_imported(self)
        elif "ready" in message:
            self.ready = True
            self._deps.admission.finished(self)
        else:
            raise InvalidData("no such message")

    def _worker_left(self, number: int) -> None:
        if number in self._left:
            return
        self._left.add(number)
        self._end_if_only_condemned()
        if self._left >= set(self.slots):
            # Nothing is left to do in it but to end.
            self._deps.children.loop.call_later(LAST_SECONDS, self.child.kill)

    def _overdue(self, slot: Slot, word: int) -> None:
        self.condemn(slot, word, "timed_out", OVERDUE)

    def _on_dump(self, slot: Slot, dump: str) -> None:
        condemned = self._condemned.get(slot.number)
        if condemned is not None and dump:
            condemned.stack = stack_of_thread(dump, slot.thread)
        self._end_if_only_condemned()

    def _end_if_only_condemned(self) -> None:
        if self.child.ended:
            return
        for slot in self._slots():
            condemned = self._condemned.get(slot.number)
            if condemned is not None and slot.position != condemned.word:
                # It has ended by itself at the last moment.
                del self._condemned[slot.number]
        if self._condemned and all(number in self._condemned or number in self._left for number in self.slots):
            self.child.kill()

    def _end_if_stuck(self, since_ns: int) -> None:
        if self._condemned and not self.child.ended and any(slot.beat_ns < since_ns for slot in self._slots()):
            log.warning("the interpreter is stuck, ending the process queue=%s pid=%s", self.spec.name, self.child.pid)
            self.child.kill()

    def _end_unresponsive(self) -> None:
        self._stuck = True
        self.child.kill()

    def _replace_unresponsive(self) -> None:
        """Its job may keep the interpreter until its timeout; what others of its workers were given runs elsewhere."""
        if self.role == Role.MAIN and not self.retiring and self._owner.may_replace_process(self):
            self._owner.replace_process(self, UNRESPONSIVE)

    def _on_end(self, how: Exit) -> None:
        self._deadlines.stop()
        self.watch.stop()
        self._deps.admission.finished(self)
        self._deps.grants.remove(self)
        self._deps.warden.remove(self)
        self._give_tallies_back()
        self._owner.process_ended(self, how)

    def recover(self, how: Exit) -> None:
        """Hands what the workers of the dead process held to pulse; a slot is used again only when that is done."""
        # In the order of their jobs' starts: suspects that were enqueued in the same ms run in this order.
        slots = sorted(self._slots(), key=lambda slot: slot.started_ns)
        running = sum(slot.position & 1 for slot in slots)
        for slot in slots:
            give_back = partial(self._deps.scoreboard.give_back, slot.number)
            params = self._last_position(slot, how, running)
            # Reading on: from here on nobody takes this slot for a living worker.
            slot.state, slot.held, slot.pid = State.EMPTY, 0, 0
            if slot.worker:
                self._deps.recover(params, give_back)
            else:
                give_back()

    def _last_position(self, slot: Slot, how: Exit, running: int) -> dict[str, Any]:
        at = slot.read_position()
        since = slot.running_since_ns()
        condemned = self._condemned.get(slot.number)
        over = self._exceeded_limit(how)
        stack: str | None = None
        if condemned is not None and condemned.word == slot.position:
            outcome, cause, stack = condemned.outcome, condemned.cause, condemned.stack
        elif over is None and self.child.stopping:
            outcome, cause = "interrupted", UNRESPONSIVE if self._stuck else "interrupted"
        else:
            # With several jobs running nobody knows which of them did it: each is run again alone.
            outcome = "stalled" if running == 1 else "suspect"
            cause = how.text.replace(" ", "_") if over is None else over.cause
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

    def _exceeded_limit(self, how: Exit) -> Exceeded | None:
        """How it took more than it may, if that is what ended it."""
        if self._exceeded is not None:
            return self._exceeded
        return self.child.killed_by_kernel if how.signal == signal.SIGKILL else None


def _checked_units(message: dict[str, Any]) -> dict[str, Any]:
    """What a worker wants of the capacity, within what its options can say: others share it."""
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
        raise InvalidData(f"{key} is a whole number from {lowest} to {highest}")
    return value
