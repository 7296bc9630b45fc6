"""Temporary processes of a queue: successors that import new code before they take over, and helpers for suspects and
fail jobs."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from forq.errors import CannotImport, ExitCode, ForqError
from forq.procs.loop import Timer
from forq.procs.scoreboard import Role
from forq.procs.stacks import stack_of_import
from forq.supervisor.child import Exit
from forq.supervisor.pacing import Respawn
from forq.supervisor.process import Member, ProcessDeps, ProcessOwner, QueueProcess

log = logging.getLogger("forq")


class Successors:
    """New processes of a queue that import its handlers, and join it, while the old ones keep working.

    1. Starts a held process for each member with `make`, which may raise OSError or ForqError.
    2. `done` is called once: with None when all have imported, or with the reason if one fails, dies or takes longer
       than `seconds`. Then all are gone, and nothing has changed for the queue.
    3. Where old processes serve the queue, `join` lets the new ones join beside them, with the same rules.
    4. `take` passes one to the queue, and lets it join if it has not joined yet.

    `gone` is called before `done`, when no process is left after `end`.
    """

    def __init__(
        self,
        queue: str,
        deps: ProcessDeps,
        members: Sequence[Member],
        *,
        seconds: float,
        make: Callable[[Member, ProcessOwner], QueueProcess],
        done: Callable[[ForqError | None], None],
        gone: Callable[[], None],
    ) -> None:
        self.imported = False
        self.survivors: set[int] = set()
        self.processes: list[QueueProcess] = []
        self._queue = queue
        self._deps = deps
        self._members = members
        self._seconds = seconds
        self._make = make
        self._done: Callable[[ForqError | None], None] | None = done
        self._gone = gone
        self._error: ForqError | None = None
        self._timer: Timer | None = None
        # Many queues may restart at once.
        deps.admission.submit(self._start)

    @property
    def ending(self) -> bool:
        """Whether its processes are being ended."""
        return self._error is not None

    def hand_over(self, gone: Callable[[], None]) -> None:
        """Another ServedQueue takes these processes; the old one gets no more callbacks."""
        self._done, self._gone = None, gone

    def join(self, done: Callable[[ForqError | None], None]) -> None:
        """Lets all processes join the queue. `done` is called as after the import."""
        self._done = done
        self._timer = self._deps.children.loop.call_later(self._seconds, self._join_timed_out)
        for process in self.processes:
            process.begin()
        self._finish_join()

    def take(self, member: Member, owner: ProcessOwner) -> QueueProcess | None:
        """Passes the process of this member to its owner; None if it died while it waited."""
        process = next((each for each in self.processes if each.member == member), None)
        if process is not None:
            self.processes.remove(process)
            process.owner = owner
            if process.held:
                process.begin()
        return process

    def end(self, error: ForqError) -> None:
        """Ends all processes. `done` gets this error, unless it was called before."""
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        for process in self.processes:
            if process.ready or process.busy():
                # It may run jobs already.
                process.retire()
            else:
                process.child.kill()
        self._settle()

    def process_imported(self, process: QueueProcess) -> None:
        if self._error is None and all(each.imported for each in self.processes):
            self.imported = True
            self._succeed()

    def process_ready(self, process: QueueProcess) -> None:
        self._finish_join()

    def process_stopping(self, process: QueueProcess) -> None:
        """Nothing waits for it."""

    def process_ended(self, process: QueueProcess, end: Exit) -> None:
        self.processes.remove(process)
        self.survivors |= process.child.survivors
        code = process.announced_code(end)
        process.recover(end)
        self._deps.changed()
        if self._error is not None:
            self._settle()
        elif process.ready or (self.imported and self._done is None):
            # It has joined, and a job may have killed it; or it waits for the queue to be opened. The queue starts
            # another one.
            log.warning(
                "process died before it took over queue=%s child=%s end=%s", self._queue, process.name, end.text
            )
            if process.ready:
                self._finish_join()
        else:
            if code == ExitCode.QUEUE_GONE:
                self._deps.queue_gone(self._queue)
            elif code == ExitCode.FENCED:
                self._deps.heartbeat(self._queue)
            self.end(_reason(process, end, code))

    def replace_process(self, process: QueueProcess, reason: str) -> None:
        """Lets it exit after its jobs. The queue starts another one when it takes over."""
        process.retire()

    def may_replace_process(self, process: QueueProcess) -> bool:
        return False

    def _start(self) -> None:
        if self._error is not None:
            return
        self._timer = self._deps.children.loop.call_later(self._seconds, self._import_timed_out)
        try:
            for member in self._members:
                self.processes.append(self._make(member, self))
        except (OSError, ForqError) as exc:
            self.end(ForqError(f"cannot start a process for it: {exc}"))
        self._deps.changed()

    def _import_timed_out(self) -> None:
        """Fails with the stack of the first process that has not imported: it shows where the import hangs."""
        process = next(each for each in self.processes if not each.imported)

        def dumped(dump: str) -> None:
            if self.imported:
                return
            killed = f"process {process.pid} was killed"
            reason = f"its handler is not imported after {self._seconds:g} s (--wait allows more); {killed}"
            stack = stack_of_import(dump)
            self.end(CannotImport(reason, f"Stack (most recent call first):\n{stack}" if stack else None))

        process.stacks.take(dumped)

    def _join_timed_out(self) -> None:
        self.end(ForqError(f"its new processes have not joined the queue in Redis after {self._seconds:g} s"))

    def _finish_join(self) -> None:
        joining = self.imported and self._error is None and not any(each.held for each in self.processes)
        if joining and all(each.ready for each in self.processes):
            self._succeed()

    def _succeed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._deps.changed()
        self._call_done(None)

    def _settle(self) -> None:
        if not self.processes:
            self._gone()
        if all(each.retiring for each in self.processes):
            self._call_done(self._error)

    def _call_done(self, error: ForqError | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            if error is not None:
                log.error("new processes failed; keeping the old ones queue=%s reason=%s", self._queue, error)
            done(error)


def _reason(process: QueueProcess, end: Exit, code: int | None) -> ForqError:
    # FAILED: a lifespan of its app failed.
    if code in (ExitCode.CONFIG, ExitCode.FAILED) and process.exit_reason:
        return CannotImport(process.exit_reason, process.traceback)
    if process.imported:
        return ForqError(f"process {process.pid} ended with {end.text} before it joined the queue")
    return CannotImport(f"process {process.pid} ended with {end.text} while importing its handler")


class HelperProcesses:
    """Helpers of one queue: each runs one job at a time and exits when it finds no more.

    1. For suspects: each suspect runs alone in its process, several at the same time. Up to one process per worker of
       the queue, as far as the capacity allows.
    2. One for fail jobs, while the retry process is busy with a suspect or a job of the retry lane.

    Pulse reports the number of waiting jobs after a recovery and with each heartbeat; it is not remembered in between.
    When a helper that has run a job ends, the number is requested again: jobs may still wait.

    `make` starts a process, or raises OSError or ForqError; `wanted` returns whether the queue is served now; `gone` is
    called after the end of each helper.
    """

    def __init__(
        self,
        queue: str,
        deps: ProcessDeps,
        *,
        make: Callable[[Member, ProcessOwner], QueueProcess],
        wanted: Callable[[], bool],
        gone: Callable[[], None],
    ) -> None:
        self.processes: list[QueueProcess] = []
        # Pids started by its processes that could not be killed.
        self.survivors: set[int] = set()
        self._queue = queue
        self._deps = deps
        self._make = make
        self._wanted = wanted
        self._gone = gone
        # Helpers that wait for admission.
        self._starting: Counter[Role] = Counter()
        # Only deaths before a job began delay the next start: crashes during a job are counted for the job.
        self._respawn = Respawn()
        self._not_before = 0.0

    def want(self, role: Role, jobs: int, *, most: int, room: int) -> None:
        """`jobs` wait for helpers of this role. Starts at most `room`, and has at most `most` of them in all."""
        if self._deps.children.loop.now() < self._not_before:
            return
        there = [process for process in self.processes if process.role == role]
        number = min(jobs - self.about_to_claim(role), most - len(there) - self._starting[role], room)
        for _ in range(number):
            self._starting[role] += 1
            self._deps.admission.submit(partial(self._start, role))

    def about_to_claim(self, role: Role) -> int:
        """Number of helpers that wait for admission, are starting, or wait for capacity."""
        ready = sum(process.role == role and process.state() in ("starting", "parked") for process in self.processes)
        return self._starting[role] + ready

    def replace_process(self, process: QueueProcess, reason: str) -> None:
        """Lets it exit after its job. Remaining jobs are found when it has ended."""
        log.info("replacing process queue=%s pid=%s reason=%s", self._queue, process.pid, reason)
        process.retire()

    def may_replace_process(self, process: QueueProcess) -> bool:
        """No: other jobs get helpers of their own."""
        return False

    def process_imported(self, process: QueueProcess) -> None:
        """Never called: helpers are not held."""

    def process_ready(self, process: QueueProcess) -> None:
        """It claims its job by itself."""

    def process_stopping(self, process: QueueProcess) -> None:
        """Nothing waits for it."""

    def process_ended(self, process: QueueProcess, end: Exit) -> None:
        self.processes.remove(process)
        self.survivors |= process.child.survivors
        self._deps.changed()
        done, began, code = process.done(), process.began(), process.announced_code(end)
        process.recover(end)
        if self._wanted():
            self._after_death(process, end, code, progressed=done > 0, began=began)
        self._gone()

    def _after_death(
        self, process: QueueProcess, end: Exit, code: int | None, *, progressed: bool, began: bool
    ) -> None:
        if progressed:
            self._respawn.forget()
        if code == ExitCode.QUEUE_GONE:
            self._deps.queue_gone(self._queue)
        elif code == ExitCode.FENCED:
            self._deps.heartbeat(self._queue)
        elif code == ExitCode.STOPPED:
            if progressed:
                self._deps.heartbeat(self._queue)
        else:
            role, delay = process.role.name.lower(), 0.0
            if not progressed and not began:
                delay = self._respawn.delay_after_death(0.0)
                self._not_before = self._deps.children.loop.now() + delay
            log.warning("child died queue=%s child=%s end=%s restart_in=%.2fs", *(self._queue, role, end.text, delay))

    def _start(self, role: Role) -> None:
        self._starting[role] -= 1
        if not self._wanted():
            return
        try:
            self.processes.append(self._make(Member(role), self))
        except (OSError, ForqError) as exc:
            # Out of processes, descriptors or slots. The retry process continues, and the next heartbeat tries again.
            log.error("failed to start child queue=%s child=%s error=%s", self._queue, role.name.lower(), exc)
        self._deps.changed()
