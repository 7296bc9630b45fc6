"""New processes of a queue on trial: they import its handlers and wait, while those that serve the queue work on.

1. All of them are started, and each says when it has imported everything.
2. If one cannot, dies or takes too long, all of them are killed with everything below them: the queue is as it was.
3. Otherwise each takes the seat of its predecessor once that has ended, and only then joins the queue.
"""

import logging
from collections.abc import Callable, Sequence

from forq import exits
from forq.errors import CannotImport, ForqError
from forq.procs.loop import Timer
from forq.procs.process import stack_of_import
from forq.procs.scoreboard import Role
from forq.supervisor.queue_process import Owner, QueueProcess, Surroundings
from forq.supervisor.spawn import Exit

log = logging.getLogger("forq")


class Trial:
    """`make` starts a process that is held, or raises OSError or ForqError; it has to have imported its handlers within
    `seconds`. `told` is called once: with None when all have, else with the reason when all are gone. `gone` is called
    when none is left of a trial that was ended, before that."""

    def __init__(
        self,
        queue: str,
        around: Surroundings,
        roles: Sequence[Role],
        *,
        seconds: float,
        make: Callable[[Role, Owner], QueueProcess],
        told: Callable[[ForqError | None], None],
        gone: Callable[[], None],
    ) -> None:
        self.passed = False
        self.survivors: set[int] = set()
        self._queue = queue
        self._around = around
        self._roles = roles
        self._seconds = seconds
        self._make = make
        self._told: Callable[[ForqError | None], None] | None = told
        self._gone = gone
        self._processes: dict[Role, QueueProcess] = {}
        self._error: ForqError | None = None
        self._timer: Timer | None = None
        # Many queues may be restarted at once.
        around.admission.ask(self._start)

    @property
    def processes(self) -> list[QueueProcess]:
        return list(self._processes.values())

    def hand_over(self, told: Callable[[ForqError | None], None] | None, gone: Callable[[], None]) -> None:
        """Others want to know from now on."""
        self._told, self._gone = told, gone

    def take(self, role: Role, owner: Owner) -> QueueProcess | None:
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

    def imported(self, process: QueueProcess) -> None:
        if self._error is None and all(each.imported for each in self.processes):
            assert self._timer is not None
            self._timer.cancel()
            self.passed = True
            self._around.changed()
            self._tell(None)

    def ended(self, process: QueueProcess, how: Exit) -> None:
        self._processes.pop(process.role, None)
        self.survivors |= process.child.survivors
        code = process.meant(how)
        process.recover(how)
        self._around.changed()
        if self._error is not None:
            self._settle()
        elif self.passed:
            log.warning("process died before it began queue=%s child=%s end=%s", self._queue, process.name, how.text)
        else:
            self.end(_reason(process, how, code))

    def replace(self, process: QueueProcess, reason: str) -> None:
        """It has not begun: there is nothing to replace."""

    def may_replace(self, process: QueueProcess) -> bool:
        return False

    def _start(self) -> None:
        if self._error is not None:
            return
        self._timer = self._around.nursery.loop.call_later(self._seconds, self._late)
        try:
            for role in self._roles:
                self._processes[role] = self._make(role, self)
        except (OSError, ForqError) as exc:
            self.end(ForqError(f"no process can be started for it: {exc}"))
        self._around.changed()

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
    if code == exits.CONFIG and process.last_words:
        return CannotImport(process.last_words, process.traceback)
    return CannotImport(f"process {process.pid} ended with {how.text} while it imported its handler")
