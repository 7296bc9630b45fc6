"""One queue as the supervisor serves it: its permanent processes (main and retry), its helpers and its successors.

A restart (rollout) replaces the processes step by step: first main process 1 and the retry process, then each other
main process. In each step the new processes import their code and join the queue while the old ones keep working; then
the old ones stop after their jobs. The restart is over when no old process begins jobs.

When a process dies: its tree is cleaned up (child.py) → pulse recovers its jobs → its slots are given back → a new
process starts, at once or after a delay (pacing.py).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forq.errors import CannotImport, ExitCode, ForqError, QueueExists
from forq.procs.cgroups import process_count
from forq.procs.loop import Timer
from forq.procs.scoreboard import Role, Slot
from forq.queue_spec import QueueSpec
from forq.settings import EXTERNAL, ON_REQUEST, Value
from forq.supervisor.child import Exit
from forq.supervisor.extra_processes import HelperProcesses, Successors
from forq.supervisor.pacing import SETTLED_SECONDS, Respawn
from forq.supervisor.process import Member, ProcessDeps, ProcessOwner, QueueProcess, describe_process

log = logging.getLogger("forq")

# If this many retiring processes of a queue still run jobs, the next successor waits.
MAX_RETIRING = 32
# A restart waits this long for old processes to say that they begin no more jobs.
STOPPING_SECONDS = 2.0


class _ProcessEntry:
    """A permanent process of the queue: the current OS process, if any, and the restarts so far."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.role = member.role
        self.process: QueueProcess | None = None
        self.restarts = 0
        self.respawn = Respawn()
        self.timer: Timer | None = None


# Called when a restart is over, with the reason if it failed.
Done = Callable[[ForqError | None], None]


@dataclass(frozen=True)
class Change:
    """A new definition for the queue. `accept` stores it in Redis, and calls back with the reason if Redis refuses."""

    spec: QueueSpec
    options: Mapping[str, Value]
    accept: Callable[[Done], None]


@dataclass
class _Rollout:
    """A restart under way. `steps`: entries that are still to be replaced; `change`: until Redis has accepted it;
    `helpers`: those with the old code; `stopped`: processes that were told to stop."""

    seconds: float
    done: Done
    change: Change | None
    steps: list[list[_ProcessEntry]]
    helpers: list[QueueProcess]
    step: list[_ProcessEntry] = field(default_factory=list)
    replaced: int = 0
    stopped: list[QueueProcess] = field(default_factory=list)


class ServedQueue:
    """The processes of one queue.

    1. Starts and stops them.
    2. Respawns those that die, and gives up only if the handler cannot be imported.
    3. Restarts them with new code, in a rollout.
    4. Starts helpers when suspects or fail jobs wait.

    `found`: another supervisor created the queue; its options are not known here.
    """

    def __init__(
        self, spec: QueueSpec, options: Mapping[str, Value], deps: ProcessDeps, *, found: bool = False
    ) -> None:
        self.spec = spec
        self.options = options
        self.found = found
        self.draining = False
        self.config_error: str | None = None
        # Traceback of config_error.
        self.traceback: str | None = None
        self._restart_error: dict[str, Any] | None = None
        # The process that could not import its code while others serve the queue; the reason is in _restart_error.
        self._stale: _ProcessEntry | None = None
        self._survivors: set[int] = set()
        self._deps = deps
        self._entries = [_ProcessEntry(Member(Role.MAIN, number)) for number in range(1, process_count(options) + 1)]
        # Clients take the items of these modes: a retry process would have no work.
        if spec.mode not in (ON_REQUEST, EXTERNAL):
            self._entries.append(_ProcessEntry(Member(Role.RETRY)))
        # Retiring processes that already have a successor and still run jobs.
        self._retiring: list[QueueProcess] = []
        self._helpers = HelperProcesses(
            spec.name, deps, make=self._process, wanted=lambda: self._wanted, gone=self._finish_if_stopped
        )
        self._wanted = False
        self._when_stopped: list[Callable[[], None]] = []
        self._successors: Successors | None = None
        self._rollout: _Rollout | None = None
        # Restarts requested during a restart: seconds for the import, callback.
        self._next_restarts: list[tuple[float, Done]] = []
        # The definition before a change that Redis has accepted, until all processes have the new one.
        self._before: QueueSpec | None = None
        self._opened = False
        self._when_opened: list[tuple[Callable[[], None], Callable[[], None] | None]] = []
        self._last_end = "no death yet"

    @property
    def state(self) -> str:
        if self.config_error is not None:
            return "config_error"
        if not self._wanted:
            # During a restart, "stopped" while the old processes are ending.
            return "stopped" if self._successors is None or self._processes() else "starting"
        if any(self._flapping(entry) for entry in self._entries):
            return "flapping"
        if self.draining:
            return "draining"
        return "running" if self._main_is_ready() else "starting"

    @property
    def restart_error(self) -> dict[str, Any] | None:
        """The reason of the last failed restart; the old processes keep working."""
        stale = self._stale
        if stale is not None and (stale not in self._entries or _has_imported(stale)):
            # Its code can be imported again.
            self._restart_error, self._stale = None, None
        return self._restart_error

    def trouble(self) -> str | None:
        """The reason why its main processes claim no jobs now, as a sentence; None if one does."""
        entry = self._entries[0]
        flapping = [each for each in self._entries if self._flapping(each)]
        mains = [each for each in self._entries if each.role == Role.MAIN]
        if self._wanted and not self._main_is_ready() and (error := self.restart_error) and self._stale:
            return f"its queue has no process: {error['message']}"
        # The retry process alone may flap, too.
        if self._wanted and flapping and (all(each in flapping for each in mains) or not self._main_is_ready()):
            restarts = max(each.restarts for each in flapping)
            deaths = f"its processes keep dying before they settle a job ({restarts} restarts, {self._last_end})"
            return f"its queue is flapping: {deaths}; `forqctl logs {self.spec.name}` shows what they wrote"
        if not self._wanted or self._main_is_ready():
            return None
        if entry.process is None:
            return f"its queue has no process at the moment: the last one ended with {self._last_end}"
        seconds = entry.process.child.uptime_seconds()
        return (
            f"its queue is starting: process {entry.process.pid} has been importing the handler for {seconds:.1f} s; "
            f"`forqctl stack {self.spec.name}` shows where it is"
        )

    def _main_is_ready(self) -> bool:
        return any(process.ready for process in self._processes() if process.role == Role.MAIN)

    def _flapping(self, entry: _ProcessEntry) -> bool:
        """It died repeatedly, and the current process has neither settled a job nor lived long."""
        if not entry.respawn.flapping:
            return False
        process = entry.process
        return process is None or not (process.done() or process.child.uptime_seconds() > SETTLED_SECONDS)

    @property
    def survivors(self) -> set[int]:
        """Pids started by its processes that could not be killed."""
        return self._survivors | self._helpers.survivors | (self._successors.survivors if self._successors else set())

    @property
    def definition(self) -> QueueSpec:
        """The definition that all its processes have."""
        return self._before or self.spec

    @property
    def stopping(self) -> bool:
        """Whether someone waits until its processes are gone."""
        return bool(self._when_stopped)

    @property
    def wanted(self) -> bool:
        """Whether its processes run or will be started."""
        return self._wanted

    @property
    def has_successors(self) -> bool:
        """Whether new processes are importing their code, wait to be taken over, or join."""
        return self._successors is not None or self._rollout is not None

    @property
    def successors_ending(self) -> bool:
        return self._successors is not None and self._successors.ending

    @property
    def opening(self) -> bool:
        """Whether the queue is not yet created or joined in Redis."""
        return not self._opened and self.config_error is None

    @property
    def refused(self) -> bool:
        """Whether Redis has an incompatible queue of this name, so that this one must not be served."""
        return not self._opened and self.config_error is not None

    def when_opened(self, call: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        """Calls `call` when the queue is in Redis, or `otherwise` if it will not be opened."""
        self._when_opened.append((call, otherwise))

    def abandon(self) -> None:
        """The queue will not be opened: it was replaced, deleted or refused."""
        waiting, self._when_opened = self._when_opened, []
        for _, otherwise in waiting:
            if otherwise is not None:
                otherwise()

    def start(self) -> None:
        if not self._wanted:
            # All its processes start anew.
            self._before = None
        again = self._wanted
        self._wanted = self._opened = True
        waiting, self._when_opened = self._when_opened, []
        for call, _ in waiting:
            call()
        self.config_error = self.traceback = self._restart_error = None
        self._stale = None
        successors: Successors | None = None
        if not again and self._successors is not None and self._successors.imported:
            successors, self._successors = self._successors, None
        for entry in self._entries:
            if entry.process is not None:
                continue
            entry.process = None if successors is None else successors.take(entry.member, self)
            if entry.process is None:
                self._spawn(entry)
            else:
                entry.timer = None
        if successors is not None:
            self._survivors |= successors.survivors
            if successors.processes:
                # Of a member that this definition does not have.
                self._successors = successors
                successors.end(ForqError("the queue has no such process"))
        self._restart_again()

    def stop(
        self, then: Callable[[], None] | None = None, *, now: bool = False, reason: ForqError | None = None
    ) -> None:
        """Ends its processes within the grace period, or at once. `then` is called when they are gone. Restarts under
        way fail with `reason`."""
        error = reason or ForqError(f"the processes of queue {self.spec.name!r} were stopped in the meantime")
        if then is not None:
            self._when_stopped.append(then)
        waiting, self._next_restarts = self._next_restarts, []
        self._end_restart(error)
        for _, answer in waiting:
            answer(error)
        if self._successors is not None:
            self._successors.end(error)
        self._end_entries(now=now)

    def _end_entries(self, *, now: bool) -> None:
        self._wanted = False
        for entry in self._entries:
            if entry.timer is not None:
                entry.timer.cancel()
        for process in self._processes():
            if now:
                process.child.kill()
            else:
                process.child.stop(float(self.options["stop_grace"]))
        self._finish_if_stopped()

    def restart(self, seconds: float, then: Done, change: Change | None = None) -> None:
        """Replaces the processes by new ones with the current code of the handler, or with a changed definition. Each
        step ends within `seconds` or fails, and the old processes stay. Requests during a restart are served by another
        one afterwards, since the code may have changed again."""
        if self.has_successors or self._too_many_retire():
            if change is None:
                self._next_restarts.append((seconds, then))
            else:
                then(QueueExists(f"queue {self.spec.name!r} is being restarted or changed; try again"))
            return
        first = [entry for entry in self._entries if entry.member.number == 1]
        others = [[entry] for entry in self._entries if entry.member.number > 1]
        self._rollout = _Rollout(seconds, then, change, [first, *others], list(self._helpers.processes))
        self._next_step(self._rollout)

    def _next_step(self, rollout: _Rollout) -> None:
        rollout.step = []
        while rollout.steps and not rollout.step:
            # Fewer processes may be wanted by now.
            rollout.step = [entry for entry in rollout.steps.pop(0) if entry in self._entries]
        if not rollout.step:
            self._restart_error = self._stale = self._before = None
            self._deps.children.loop.call_later(STOPPING_SECONDS, lambda: self._finish_rollout(rollout, late=True))
            self._finish_rollout(rollout)
            return
        spec, options = self.spec, self.options
        if rollout.change is not None:
            spec, options = rollout.change.spec, rollout.change.options
        members = [entry.member for entry in rollout.step]
        self.start_successors(spec, options, rollout.seconds, lambda error: self._imported(rollout, error), members)

    def _finish_rollout(self, rollout: _Rollout, *, late: bool = False) -> None:
        """Ends the restart when no old process begins jobs: jobs that are enqueued from now on run the new code."""
        begins = [each for each in rollout.stopped if not each.begins_no_jobs and not each.child.ended]
        if rollout is self._rollout and not rollout.step and (late or not begins):
            self._end_restart(None)
            self._restart_again()

    def _imported(self, rollout: _Rollout, error: ForqError | None) -> None:
        if rollout is not self._rollout:
            return
        if error is not None:
            self._end_restart(error)
        elif rollout.change is not None:
            rollout.change.accept(lambda refused: self._accepted(rollout, refused))
        else:
            self._join(rollout)

    def _accepted(self, rollout: _Rollout, error: ForqError | None) -> None:
        if rollout is not self._rollout or rollout.change is None or self._successors is None:
            return
        if error is not None:
            self._successors.end(error)
            self._end_restart(error)
            return
        self._before = self.definition
        self.spec, self.options, self.found = rollout.change.spec, rollout.change.options, False
        rollout.change = None
        # `forqctl set` may have started others meanwhile, with the old definition.
        known = [*rollout.step, *(entry for step in rollout.steps for entry in step)]
        rollout.steps += [[entry] for entry in self._entries if entry not in known]
        self._join(rollout)
        self.options_changed()

    def _join(self, rollout: _Rollout) -> None:
        assert self._successors is not None
        if self._wanted:
            if len(self._successors.processes) < len(rollout.step):
                # One died while Redis was asked.
                error = ForqError("a new process died before it joined the queue")
                self._successors.end(error)
                self._end_restart(error)
                return
            self._successors.join(lambda error: self._joined(rollout, error))
            return
        # Its processes could not import their code. Those that still end keep no new one from starting.
        for entry in self._entries:
            if entry.process is not None:
                self._retiring.append(entry.process)
                entry.process = None
            entry.respawn.forget()
        rollout.steps = []
        self.start()
        self._next_step(rollout)

    def _joined(self, rollout: _Rollout, error: ForqError | None) -> None:
        if rollout is not self._rollout:
            return
        if error is not None:
            self._end_restart(error)
            self._restart_again()
            return
        assert self._successors is not None
        successors, self._successors = self._successors, None
        old = [entry.process for entry in rollout.step if entry.process is not None]
        for entry in rollout.step:
            self._exchange(entry, successors.take(entry.member, self))
        self._survivors |= successors.survivors
        for helper in rollout.helpers:
            helper.child.stop(float(self.options["stop_grace"]))
        rollout.stopped += old + rollout.helpers
        rollout.helpers = []
        rollout.replaced += sum(entry.role == Role.MAIN for entry in rollout.step)
        self._next_step(rollout)

    def _exchange(self, entry: _ProcessEntry, process: QueueProcess | None) -> None:
        """Puts a process that has joined in the place of the old one, which stops after its jobs."""
        if process is not None and (process.retiring or entry not in self._entries):
            # It was replaced while others joined, or fewer processes are wanted by now.
            self._retiring.append(process)
            process.retire()
            process = None
        if entry not in self._entries:
            return
        old, entry.process = entry.process, process
        entry.respawn.forget()
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        if old is not None:
            self._retiring.append(old)
            old.child.stop(float(self.options["stop_grace"]))
        if process is None:
            self._spawn(entry)

    def options_changed(self) -> None:
        """Starts main processes, or lets some retire after their jobs, if their number has changed."""
        count = process_count(self.options)
        for entry in [each for each in self._entries if each.member.number > count]:
            self._entries.remove(entry)
            if entry.timer is not None:
                entry.timer.cancel()
            if entry.process is not None:
                self._retiring.append(entry.process)
                entry.process.retire()
        mains = sum(entry.role == Role.MAIN for entry in self._entries)
        for number in range(mains + 1, count + 1):
            entry = _ProcessEntry(Member(Role.MAIN, number))
            self._entries.insert(number - 1, entry)
            if self._wanted:
                self._spawn(entry)
        for entry in self._entries:
            if entry.process is not None:
                entry.process.set_count(count)
        self._deps.changed()

    def start_successors(
        self,
        spec: QueueSpec,
        options: Mapping[str, Value],
        seconds: float,
        then: Done,
        members: Sequence[Member] = (Member(Role.MAIN), Member(Role.RETRY)),
    ) -> None:
        """Starts processes for this definition that import its handlers and wait; `then` gets the reason if they fail.
        They take over with the next start of this queue, or of the one they are handed to."""
        members = [member for member in members if member in [entry.member for entry in self._entries]]

        def done(error: ForqError | None) -> None:
            if isinstance(error, CannotImport):
                self._note_import_error(error)
            then(error)
            if error is not None:
                self._restart_again()

        self._successors = Successors(
            spec.name,
            self._deps,
            members,
            seconds=seconds,
            make=lambda member, owner: QueueProcess(spec, options, member, self._deps, owner, held=True),
            done=done,
            gone=self._successors_gone,
        )

    def hand_successors_to(self, successor: "ServedQueue") -> None:
        """Passes the new processes to the ServedQueue with the new definition."""
        successors, self._successors = self._successors, None
        if successors is not None:
            successors.hand_over(successor._successors_gone)
            successor._successors = successors
        successor._next_restarts, self._next_restarts = self._next_restarts, []

    def main_pid(self) -> int | None:
        """Pid of the main process that claims jobs now, if any."""
        ready = [process for process in self._processes() if process.role == Role.MAIN and process.ready]
        return ready[0].pid if ready else None

    def _note_import_error(self, error: CannotImport) -> None:
        self._stale = None
        if self.config_error is not None and self._opened:
            self.config_error, self.traceback = str(error), error.traceback
        else:
            self._restart_error = {"at": round(time.time(), 3), "message": str(error), "traceback": error.traceback}

    def _end_restart(self, error: ForqError | None) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout is None:
            return
        if error is not None and rollout.replaced:
            some = f"{rollout.replaced} of its {process_count(self.options)} main processes run the new code already"
            error = type(error)(f"{error}; {some}", *([error.traceback] if isinstance(error, CannotImport) else []))
        rollout.done(error)

    def _restart_again(self) -> None:
        """One restart for all requests that came during the last one."""
        if not self._next_restarts or self.has_successors or self._too_many_retire():
            return
        waiting, self._next_restarts = self._next_restarts, []

        def answer_all(error: ForqError | None) -> None:
            for _, answer in waiting:
                answer(error)

        self.restart(max(seconds for seconds, _ in waiting), answer_all)

    def _successors_gone(self) -> None:
        if self._successors is not None:
            self._survivors |= self._successors.survivors
        self._successors = None
        self._finish_if_stopped()
        self._restart_again()

    def process_imported(self, process: QueueProcess) -> None:
        """Never called: only successors are held."""

    def process_ready(self, process: QueueProcess) -> None:
        """Nothing depends on it: status reads the state of the process."""

    def process_stopping(self, process: QueueProcess) -> None:
        if self._rollout is not None:
            self._finish_rollout(self._rollout)

    def describe_children(self) -> list[dict[str, Any]]:
        permanent = [
            describe_process(entry.member, entry.process, self._state(entry), entry.restarts) for entry in self._entries
        ]
        others = (*self._retiring, *self._helpers.processes, *self._successor_processes())
        return permanent + [describe_process(process.member, process, process.state(), 0) for process in others]

    def _state(self, entry: _ProcessEntry) -> str:
        if entry.process is not None:
            return entry.process.state()
        return "backoff" if entry.timer is not None and self._wanted else "stopped"

    def running_job(self, job_id: str) -> tuple[QueueProcess, Slot, int] | None:
        """The process and slot that run this job now, and its position."""
        for process in self._processes():
            for slot in process.busy():
                running = slot.running_since_ns()
                if (
                    running is not None
                    and slot.job.decode("utf-8", "replace") == job_id
                    and slot.position == running[0]
                ):
                    return process, slot, running[0]
        return None

    def running_jobs(self) -> int:
        return sum(len(process.busy()) for process in self._processes())

    def busy_processes(self) -> list[QueueProcess]:
        importing = [process for process in self._successor_processes() if process.held and not process.imported]
        return [*(process for process in self._processes() if process.busy() or process.importing), *importing]

    def replace_process(self, process: QueueProcess, reason: str) -> None:
        """Lets the process exit after its jobs, and starts its successor at once."""
        log.info("replacing process queue=%s pid=%s reason=%s", self.spec.name, process.pid, reason)
        process.retire()
        for entry in self._entries:
            if entry.process is process:
                entry.process = None
                self._retiring.append(process)
                self._fill(entry)

    def may_replace_process(self, process: QueueProcess) -> bool:
        """Whether a successor may start while this process still runs jobs. Not if retiring processes already run as
        many jobs as the queue has workers."""
        return sum(each.running() for each in (process, *self._retiring)) < self._workers()

    def unresponsive_workers(self) -> dict[str, int]:
        """Pids of the idle workers in unresponsive processes, by worker."""
        unresponsive = [process for process in self._processes() if process.watch.unresponsive]
        return {worker: process.pid for process in unresponsive for worker in process.idle_workers()}

    def probe(self, numbers: set[int], *, unread: bool) -> None:
        """Checks whether the processes of these slots respond. `unread`: they have jobs that they do not read."""
        for process in self._processes():
            if process.ready and numbers & set(process.slots):
                process.watch.probe(unread=unread)

    def process_ended(self, process: QueueProcess, end: Exit) -> None:
        entry = next((entry for entry in self._entries if entry.process is process), None)
        if entry is None:
            self._retiring.remove(process)
        else:
            entry.process = None
        self._deps.changed()
        self._survivors |= process.child.survivors
        done, began, code = process.done(), process.began(), process.announced_code(end)
        process.recover(end)
        if self._rollout is not None:
            self._finish_rollout(self._rollout)
        if entry is None or not self._wanted:
            self._finish_if_stopped()
            for waiting in self._entries:
                self._fill(waiting)
            self._restart_again()
            return
        entry.restarts += 1
        if process.was_condemned:
            self._spawn(entry)
        else:
            self._after_death(entry, process, end, code, progressed=done > 0, began=began)

    def _fill(self, entry: _ProcessEntry) -> None:
        """Starts a process if there is none, unless too many predecessors still run: a handler that keeps requesting
        a new process must not use up the processes of the machine."""
        if self._wanted and entry.process is None and entry.timer is None:
            if not self._too_many_retire():
                self._spawn(entry)
            else:
                log.warning(
                    "too many retiring processes; successor waits queue=%s retiring=%s",
                    *(self.spec.name, len(self._retiring)),
                )

    def _too_many_retire(self) -> bool:
        """Not counted: those that `processes` no longer wants, and as many as a restart replaces."""
        count = process_count(self.options)
        return sum(process.member.number <= count for process in self._retiring) >= MAX_RETIRING + count - 1

    def suspects_wait(self, number: int) -> None:
        """`number` suspects wait. An idle retry process takes one; the others need helpers."""
        if not self._wanted:
            return
        size, retry = int(self.options["size"]), self._retry_process()
        if retry is not None and retry.state() == "parked":
            number -= 1
        promised = self._helpers.about_to_claim(Role.SUSPECT) * size
        room = (self._deps.grants.unused_units() - promised) // size
        self._helpers.want(Role.SUSPECT, number, most=self._workers(), room=room)

    def fail_jobs_wait(self) -> None:
        """Fail jobs wait and none runs. They get a helper if the retry process is busy with another job."""
        retry = self._retry_process()
        if self._wanted and self.spec.fail_handler is not None and retry is not None and retry.busy():
            self._helpers.want(Role.FAIL, 1, most=1, room=1)

    def _workers(self) -> int:
        return process_count(self.options) * int(self.options.get("concurrency", 1))

    def _retry_process(self) -> QueueProcess | None:
        return next((entry.process for entry in self._entries if entry.role == Role.RETRY), None)

    def _process(self, member: Member, owner: ProcessOwner) -> QueueProcess:
        return QueueProcess(self.spec, self.options, member, self._deps, owner)

    def _processes(self) -> list[QueueProcess]:
        permanent = [entry.process for entry in self._entries if entry.process is not None]
        joining = [process for process in self._successor_processes() if not process.held]
        return [*permanent, *self._retiring, *self._helpers.processes, *joining]

    def _successor_processes(self) -> list[QueueProcess]:
        return [] if self._successors is None else self._successors.processes

    def _spawn(self, entry: _ProcessEntry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer = None
        self._deps.changed()
        try:
            entry.process = self._process(entry.member, self)
        except (OSError, ForqError) as exc:
            # Out of processes, descriptors or slots. Usually temporary.
            delay = entry.respawn.delay_after_death(0.0)
            log.error("failed to start child queue=%s error=%s retry_in=%.2fs", self.spec.name, exc, delay)
            entry.timer = self._deps.children.loop.call_later(delay, lambda: self._spawn(entry))

    def _after_death(
        self, entry: _ProcessEntry, process: QueueProcess, end: Exit, code: int | None, *, progressed: bool, began: bool
    ) -> None:
        """Respawns or gives up after an unexpected death. `code`: the announced exit code, if any."""
        name, role = self.spec.name, entry.role.name.lower()
        joining = self._successors is not None and self._successors.imported
        if code == ExitCode.CONFIG and (process.stale or joining or self._main_is_ready()):
            # Others run older code, or newer code that can be imported. A restart, or the old files, end this.
            delay = entry.respawn.delay_after_death(0.0)
            log.error(
                "cannot start child queue=%s child=%s retry_in=%.2fs reason=%s",
                *(name, role, delay, process.exit_reason),
            )
            trace = process.traceback
            self._restart_error = {"at": round(time.time(), 3), "message": process.exit_reason, "traceback": trace}
            self._stale = entry
            self._last_end = end.text
            entry.timer = self._deps.children.loop.call_later(delay, lambda: self._spawn(entry))
        elif code in (ExitCode.CONFIG, ExitCode.INCOMPATIBLE):
            log.error("cannot serve queue queue=%s reason=%s", name, process.exit_reason)
            reason = process.exit_reason or end.text
            if code == ExitCode.CONFIG and self._successors is not None and not self._successors.ending:
                # They were started later, so they may import code that has been mended.
                self._end_entries(now=False)
            else:
                self.stop(reason=CannotImport(reason, process.traceback))
            self.config_error, self.traceback = reason, process.traceback
        elif code == ExitCode.QUEUE_GONE:
            self._deps.queue_gone(name)
        else:
            if code == ExitCode.FENCED:
                # If this processor was evicted, all queues start anew. Pulse verifies it: one process may be wrong.
                self._deps.heartbeat(name)
            lived = process.child.uptime_seconds()
            delay = entry.respawn.delay_after_death(lived, progressed=progressed, began=began)
            self._last_end = end.text
            if code == ExitCode.FAILED and process.exit_reason:
                # A lifespan failed, or forq itself.
                self._last_end += f", {process.exit_reason}"
            log.warning("child died queue=%s child=%s end=%s restart_in=%.2fs", name, role, self._last_end, delay)
            entry.timer = self._deps.children.loop.call_later(delay, lambda: self._spawn(entry))

    def _finish_if_stopped(self) -> None:
        if self._wanted or self._processes():
            return
        if self._successors is None:
            waiting, self._when_stopped = self._when_stopped, []
            for then in waiting:
                then()


def _has_imported(entry: _ProcessEntry) -> bool:
    """A retry process is ready before it has imported its code."""
    process = entry.process
    return process is not None and process.ready and (entry.role != Role.RETRY or process.imported)
