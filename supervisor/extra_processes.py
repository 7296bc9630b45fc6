"""New processes of a queue on trial: they import its handlers and wait, while those that serve the queue work on.

1. All of them are started, and each says when it has imported everything.
2. If one cannot, dies or takes too long, all of them are killed with everything below them: the queue is as it was.
3. Otherwise each takes the seat of its predecessor once that has ended, and only then joins the queue.

Processes that a queue has for a while: each runs one job at a time and ends when it finds no more.

1. For suspects: each runs alone in its process, but several of them at the same time. Up to as many processes as the
   queue has workers, and as the capacity has room for.
2. One for fail jobs, while the retry process is busy with a suspect or a job of the retry lane.

Pulse says how many jobs wait, after a recovery and with each heartbeat; nobody is remembered in between. A process that
has run something is followed by another look, since it may have ended for another reason than that nothing waits.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from forq import exits
from forq.errors import CannotImport, ForqError
from forq.procs.loop import Timer
from forq.procs.scoreboard import Role
from forq.procs.stacks import stack_of_import
from forq.supervisor.child import Exit
from forq.supervisor.pacing import Respawn
from forq.supervisor.process import ProcessDeps, ProcessOwner, QueueProcess

log = logging.getLogger("forq")


class Successors:
    """`make` starts a process that is held, or raises OSError or ForqError; it has to have imported its handlers within
    `seconds`. `told` is called once: with None when all have, else with the reason when all are gone. `gone` is called
    when none is left of a trial that was ended, before that."""

    def __init__(
        self,
        queue: str,
        deps: ProcessDeps,
        roles: Sequence[Role],
        *,
        seconds: float,
        make: Callable[[Role, ProcessOwner], QueueProcess],
        told: Callable[[ForqError | None], None],
        gone: Callable[[], None],
    ) -> None:
        self.passed = False
        self.survivors: set[int] = set()
        self._queue = queue
        self._deps = deps
        self._roles = roles
        self._seconds = seconds
        self._make = make
        self._told: Callable[[ForqError | None], None] | None = told
        self._gone = gone
        self._processes: dict[Role, QueueProcess] = {}
        self._error: ForqError | None = None
        self._timer: Timer | None = None
        # Many queues may be restarted at once.
        deps.admission.submit(self._start)

    @property
    def processes(self) -> list[QueueProcess]:
        return list(self._processes.values())

    def hand_over(self, told: Callable[[ForqError | None], None] | None, gone: Callable[[], None]) -> None:
        """Others want to know from now on."""
        self._told, self._gone = told, gone

    def take(self, role: Role, owner: ProcessOwner) -> QueueProcess | None:
        """Its process of this role, which joins the queue now; None if that has died while it waited."""
        process = self._processes.pop(role, None)
        if process is not None:
            process.begin(owner)
        return process

    def end(self, error: ForqError) -> None:
        """Kills what is left of it. `error`: what is said if nobody has been told anything yet."""
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        for process in self.processes:
            process.child.kill()
        self._settle()

    def process_imported(self, process: QueueProcess) -> None:
        if self._error is None and all(each.imported for each in self.processes):
            assert self._timer is not None
            self._timer.cancel()
            self.passed = True
            self._deps.changed()
            self._tell(None)

    def process_ended(self, process: QueueProcess, how: Exit) -> None:
        self._processes.pop(process.role, None)
        self.survivors |= process.child.survivors
        code = process.announced_code(how)
        process.recover(how)
        self._deps.changed()
        if self._error is not None:
            self._settle()
        elif self.passed:
            log.warning("process died before it began queue=%s child=%s end=%s", self._queue, process.name, how.text)
        else:
            self.end(_reason(process, how, code))

    def replace_process(self, process: QueueProcess, reason: str) -> None:
        """It has not begun: there is nothing to replace."""

    def may_replace_process(self, process: QueueProcess) -> bool:
        return False

    def _start(self) -> None:
        if self._error is not None:
            return
        self._timer = self._deps.children.loop.call_later(self._seconds, self._late)
        try:
            for role in self._roles:
                self._processes[role] = self._make(role, self)
        except (OSError, ForqError) as exc:
            self.end(ForqError(f"no process can be started for it: {exc}"))
        self._deps.changed()

    def _late(self) -> None:
        """With the stack of the first that has not come through: it shows where the import hangs."""
        process = next(each for each in self.processes if not each.imported)

        def dumped(dump: str) -> None:
            if self.passed:
                return
            killed = f"process {process.pid} was killed"
            reason = f"its handler is not imported after {self._seconds:g} s (--wait allows more); {killed}"
            stack = stack_of_import(dump)
            self.end(CannotImport(reason, f"Stack (most recent call first):\n{stack}" if stack else None))

        process.stacks.take(dumped)

    def _settle(self) -> None:
        if not self._processes:
            self._gone()
            self._tell(self._error)

    def _tell(self, error: ForqError | None) -> None:
        if error is not None and self._told is not None:
            log.error("new processes are not used queue=%s reason=%s", self._queue, error)
        told, self._told = self._told, None
        if told is not None:
            told(error)


def _reason(process: QueueProcess, how: Exit, code: int | None) -> CannotImport:
    if code == exits.CONFIG and process.exit_reason:
        return CannotImport(process.exit_reason, process.traceback)
    return CannotImport(f"process {process.pid} ended with {how.text} while it imported its handler")


class HelperProcesses:
    """Those of one queue. `make` starts a process, or raises OSError or ForqError; `wanted` says whether the queue is
    served now; `gone` is called after the end of each."""

    def __init__(
        self,
        queue: str,
        deps: ProcessDeps,
        *,
        make: Callable[[Role, ProcessOwner], QueueProcess],
        wanted: Callable[[], bool],
        gone: Callable[[], None],
    ) -> None:
        self.processes: list[QueueProcess] = []
        # What its processes had started and nobody could kill.
        self.survivors: set[int] = set()
        self._queue = queue
        self._deps = deps
        self._make = make
        self._wanted = wanted
        self._gone = gone
        # Starts that have been asked for and have not happened yet.
        self._asked: Counter[Role] = Counter()
        # Only deaths before a job was begun make the next start wait: a job that kills its process is counted itself.
        self._respawn = Respawn()
        self._not_before = 0.0

    def want(self, role: Role, jobs: int, *, most: int, room: int) -> None:
        """So many jobs wait for such a process. `most`: how many there may be, `room`: how many may be added."""
        if self._deps.children.loop.now() < self._not_before:
            return
        there = [process for process in self.processes if process.role == role]
        number = min(jobs - self.about_to_claim(role), most - len(there) - self._asked[role], room)
        for _ in range(number):
            self._asked[role] += 1
            self._deps.admission.submit(partial(self._start, role))

    def about_to_claim(self, role: Role) -> int:
        """How many have been asked for, are starting, or wait for capacity."""
        ready = sum(process.role == role and process.state() in ("starting", "parked") for process in self.processes)
        return self._asked[role] + ready

    def replace_process(self, process: QueueProcess, reason: str) -> None:
        """It takes no more jobs. What is left is found by the look that follows its end."""
        log.info("replacing process queue=%s pid=%s reason=%s", self._queue, process.pid, reason)
        process.retire()

    def may_replace_process(self, process: QueueProcess) -> bool:
        """Its one job keeps nobody waiting: others get processes of their own."""
        return False

    def process_imported(self, process: QueueProcess) -> None:
        """None of them is held."""

    def process_ended(self, process: QueueProcess, how: Exit) -> None:
        self.processes.remove(process)
        self.survivors |= process.child.survivors
        self._deps.changed()
        done, began, code = process.done(), process.began(), process.announced_code(how)
        process.recover(how)
        if self._wanted():
            self._decide(process, how, code, progressed=done > 0, began=began)
        self._gone()

    def _decide(self, process: QueueProcess, how: Exit, code: int | None, *, progressed: bool, began: bool) -> None:
        if progressed:
            self._respawn.forget()
        if code == exits.QUEUE_GONE:
            self._deps.queue_gone(self._queue)
        elif code == exits.FENCED:
            self._deps.check_evicted(self._queue)
        elif code == exits.STOPPED:
            if progressed:
                self._deps.check_waiting(self._queue)
        else:
            role, delay = process.role.name.lower(), 0.0
            if not progressed and not began:
                delay = self._respawn.delay_after_death(0.0)
                self._not_before = self._deps.children.loop.now() + delay
            log.warning("child died queue=%s child=%s end=%s again_in=%.2fs", *(self._queue, role, how.text, delay))

    def _start(self, role: Role) -> None:
        self._asked[role] -= 1
        if not self._wanted():
            return
        try:
            self.processes.append(self._make(role, self))
        except (OSError, ForqError) as exc:
            # No process, descriptor or slot to be had now; the retry process goes on, and heartbeats tell again.
            log.error("cannot start child queue=%s child=%s error=%s", self._queue, role.name.lower(), exc)
        self._deps.changed()
