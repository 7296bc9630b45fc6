"""One queue as the supervisor runs it: its main process and its retry process, their deaths and their state; and for a
while processes that help them (helper_processes.py), or that are to follow them (trial.py).

A death takes this way: its tree is gone (child.py) → what it held goes to pulse for recovery → its slots are given back
once that is done → another process is started, at once or after a pause (respawn.py).
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from forq import exits
from forq.errors import CannotImport, ForqError
from forq.procs.loop import Timer
from forq.procs.scoreboard import Role, Slot
from forq.queue_spec import QueueSpec
from forq.settings import EXTERNAL, ON_REQUEST, Value
from forq.supervisor.child import Exit
from forq.supervisor.extra_processes import HelperProcesses, Successors
from forq.supervisor.pacing import SETTLED_SECONDS, Respawn
from forq.supervisor.process import ProcessDeps, ProcessOwner, QueueProcess

log = logging.getLogger("forq")

# So many processes of a queue may be on their way out, each with a job that takes long, before a successor has to wait.
MOST_LEAVING = 32


class _ProcessEntry:
    """The place of one process of the queue: who sits there now, and the deaths so far."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.process: QueueProcess | None = None
        self.restarts = 0
        self.respawn = Respawn()
        self.timer: Timer | None = None


# Called when a restart is over, with the reason if it has changed nothing.
Answer = Callable[[ForqError | None], None]


class ServedQueue:
    """`found`: somebody else made the queue, and nothing is known of its options here."""

    def __init__(
        self, spec: QueueSpec, options: Mapping[str, Value], deps: ProcessDeps, *, found: bool = False
    ) -> None:
        self.spec = spec
        self.options = options
        self.found = found
        self.draining = False
        self.config_error: str | None = None
        # Where its handler could not be imported: when it started, or, while it works on, when it was last restarted.
        self.traceback: str | None = None
        self.restart_error: dict[str, Any] | None = None
        self._survivors: set[int] = set()
        self._deps = deps
        # A queue whose items others take has nothing that a retry process could do.
        serves = spec.mode not in (ON_REQUEST, EXTERNAL)
        self._entries = [_ProcessEntry(role) for role in ((Role.MAIN, Role.RETRY) if serves else (Role.MAIN,))]
        # Processes that have a successor already and still run jobs.
        self._leaving: list[QueueProcess] = []
        self._helpers = HelperProcesses(
            spec.name, deps, make=self._process, wanted=lambda: self._wanted, gone=self._finish_if_stopped
        )
        self._wanted = False
        self._then: list[Callable[[], None]] = []
        self._successors: Successors | None = None
        # The new processes have imported their code and wait for the old ones to end.
        self._start_again = False
        self._restart: Answer | None = None
        self._next_restarts: list[tuple[float, Answer]] = []
        self._opened = False
        self._when_opened: list[tuple[Callable[[], None], Callable[[], None] | None]] = []
        self._last_end = "no death yet"

    @property
    def state(self) -> str:
        if self.config_error is not None:
            return "config_error"
        if not self._wanted:
            # While the old processes of a restart end, it is what they are.
            return "stopped" if self._successors is None or self._processes() else "starting"
        if any(self._flapping(entry) for entry in self._entries):
            return "flapping"
        if self.draining:
            return "draining"
        return "running" if self._main_is_ready() else "starting"

    def trouble(self) -> str | None:
        """Why its main process does not take jobs now, in a sentence; None if it does."""
        entry = self._entries[0]
        flapping = [each for each in self._entries if self._flapping(each)]
        # The retry process may be the first of two that keep dying: then the state says so already.
        if self._wanted and (entry in flapping or (flapping and not self._main_is_ready())):
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
        """It died again and again; the one that runs now has not shown yet that it does better."""
        if not entry.respawn.flapping:
            return False
        process = entry.process
        return process is None or not (process.done() or process.child.uptime_seconds() > SETTLED_SECONDS)

    @property
    def survivors(self) -> set[int]:
        """Pids of what its processes had started and nobody could kill."""
        return self._survivors | self._helpers.survivors | (self._successors.survivors if self._successors else set())

    @property
    def wanted(self) -> bool:
        """Whether its children run, or are about to."""
        return self._wanted or self._start_again

    @property
    def has_successors(self) -> bool:
        """Whether new processes of it import their code, or wait to take over."""
        return self._successors is not None

    @property
    def opening(self) -> bool:
        """Whether the queue has yet to be made in Redis for the first time."""
        return not self._opened and self.config_error is None

    @property
    def refused(self) -> bool:
        """Whether Redis has a queue of that name that does not fit: it must not be served before that has changed."""
        return not self._opened and self.config_error is not None

    def when_opened(self, call: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        """Calls back when the queue is in Redis; `otherwise` is called if it will not be opened."""
        self._when_opened.append((call, otherwise))

    def abandon(self) -> None:
        """It will not be opened: another one takes its place, somebody has deleted it, or Redis refuses it."""
        waiting, self._when_opened = self._when_opened, []
        for _, otherwise in waiting:
            if otherwise is not None:
                otherwise()

    def start(self) -> None:
        self._wanted = self._opened = True
        waiting, self._when_opened = self._when_opened, []
        for call, _ in waiting:
            call()
        self.config_error = self.traceback = self.restart_error = None
        successors: Successors | None = None
        if self._successors is not None and self._successors.passed:
            successors, self._successors = self._successors, None
        for entry in self._entries:
            if entry.process is not None:
                continue
            entry.process = None if successors is None else successors.take(entry.role, self)
            if entry.process is None:
                self._spawn(entry)
            else:
                entry.timer = None
        self._restart_again()

    def stop(
        self, then: Callable[[], None] | None = None, *, now: bool = False, reason: ForqError | None = None
    ) -> None:
        """Ends its processes: in order within the grace period, or at once. `then` is called when they are gone.
        `reason`: what those are told who wait for a restart."""
        error = reason or ForqError(f"the processes of queue {self.spec.name!r} were ended meanwhile")
        if then is not None:
            self._then.append(then)
        self._start_again = False
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

    def restart(self, seconds: float, then: Answer) -> None:
        """New children, with the handler's code as it is now. Those that run go on until the new ones have imported it;
        if they cannot within so many seconds, nothing changes. One at a time: what another one should import may be
        newer than what this one has imported."""
        if self._successors is not None or self._start_again:
            self._next_restarts.append((seconds, then))
            return
        self._restart = then
        self.start_successors(self.spec, self.options, seconds, self._tried)

    def start_successors(self, spec: QueueSpec, options: Mapping[str, Value], seconds: float, then: Answer) -> None:
        """Starts processes for this definition that import its handlers and wait; `then` gets the reason if they
        cannot. Otherwise they begin with the next start, of this unit or of the one that they are systemd_input to."""

        def tried(error: ForqError | None) -> None:
            if isinstance(error, CannotImport):
                self._note_failure(error)
            then(error)
            if error is not None:
                self._restart_again()

        self._successors = Successors(
            spec.name,
            self._deps,
            [entry.role for entry in self._entries],
            seconds=seconds,
            make=lambda role, owner: QueueProcess(spec, options, role, self._deps, owner, held=True),
            told=tried,
            gone=self._successors_gone,
        )

    def hand_successors_to(self, successor: "ServedQueue") -> None:
        """What has imported the code of another definition of this queue becomes the processes of that one."""
        trial, self._successors = self._successors, None
        if trial is not None:
            trial.hand_over(None, successor._successors_gone)
            successor._successors = trial
        successor._next_restarts, self._next_restarts = self._next_restarts, []

    def main_pid(self) -> int | None:
        """The process that takes jobs now, if there is one."""
        ready = [process for process in self._processes() if process.role == Role.MAIN and process.ready]
        return ready[0].pid if ready else None

    def _tried(self, error: ForqError | None) -> None:
        if error is not None:
            self._end_restart(error)
        else:
            self._start_again = True
            self._end_entries(now=False)

    def _note_failure(self, error: CannotImport) -> None:
        if self.config_error is not None and self._opened:
            self.config_error, self.traceback = str(error), error.traceback
        else:
            self.restart_error = {"at": round(time.time(), 3), "message": str(error), "traceback": error.traceback}

    def _end_restart(self, error: ForqError | None) -> None:
        answer, self._restart = self._restart, None
        if answer is not None:
            answer(error)

    def _restart_again(self) -> None:
        """For all who have asked for it meanwhile: whatever they have changed is there by now."""
        waiting, self._next_restarts = self._next_restarts, []
        if not waiting:
            return

        def answer_all(error: ForqError | None) -> None:
            for _, answer in waiting:
                answer(error)

        self.restart(max(seconds for seconds, _ in waiting), answer_all)

    def _successors_gone(self) -> None:
        if self._successors is not None:
            self._survivors |= self._successors.survivors
        self._successors = None
        self._finish_if_stopped()

    def process_imported(self, process: QueueProcess) -> None:
        """Of those in its seats none is held."""

    def describe_children(self) -> list[dict[str, Any]]:
        seated = [_describe(entry.role, entry.process, self._state(entry), entry.restarts) for entry in self._entries]
        others = (*self._leaving, *self._helpers.processes, *self._successor_processes())
        return seated + [_describe(process.role, process, process.state(), 0) for process in others]

    def _state(self, entry: _ProcessEntry) -> str:
        if entry.process is not None:
            return entry.process.state()
        return "backoff" if entry.timer is not None and self._wanted else "stopped"

    def running_job(self, job_id: str) -> tuple[QueueProcess, Slot, int] | None:
        """Who runs this job now, and its position."""
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
        importing = [process for process in self._successor_processes() if not process.imported]
        return [*(process for process in self._processes() if process.busy() or not process.ready), *importing]

    def replace_process(self, process: QueueProcess, reason: str) -> None:
        """The process takes no more jobs; its successor starts at once."""
        log.info("replacing process queue=%s pid=%s reason=%s", self.spec.name, process.pid, reason)
        process.retire()
        for entry in self._entries:
            if entry.process is process:
                entry.process = None
                self._leaving.append(process)
                self._fill(entry)

    def may_replace_process(self, process: QueueProcess) -> bool:
        """Whether a successor may start although this one runs on: not if as many jobs as the queue may run at once are
        left in processes that take no more."""
        return sum(each.running() for each in (process, *self._leaving)) < int(self.options.get("concurrency", 1))

    def unresponsive_workers(self) -> dict[str, int]:
        """The workers that run nothing in processes that do not answer, with their pids."""
        silent = [process for process in self._processes() if process.watch.unresponsive]
        return {worker: process.pid for process in silent for worker in process.resting_workers()}

    def probe(self, numbers: set[int], *, unread: bool) -> None:
        """Asks the processes of these workers whether they answer. `unread`: they were given jobs that they do not
        read."""
        for process in self._processes():
            if process.ready and numbers & set(process.slots):
                process.watch.probe(unread=unread)

    def process_ended(self, process: QueueProcess, how: Exit) -> None:
        entry = next((entry for entry in self._entries if entry.process is process), None)
        if entry is None:
            self._leaving.remove(process)
        else:
            entry.process = None
        self._deps.changed()
        self._survivors |= process.child.survivors
        done, began, code = process.done(), process.began(), process.announced_code(how)
        process.recover(how)
        if entry is None or not self._wanted:
            self._finish_if_stopped()
            for waiting in self._entries:
                self._fill(waiting)
            return
        entry.restarts += 1
        if process.was_condemned:
            self._spawn(entry)
        else:
            self._decide(entry, process, how, code, progressed=done > 0, began=began)

    def _fill(self, entry: _ProcessEntry) -> None:
        """At once, unless too many of its predecessors still run: a handler that asks for successors without end must
        not take the processes that other queues need."""
        if self._wanted and entry.process is None and entry.timer is None:
            if len(self._leaving) < MOST_LEAVING:
                self._spawn(entry)
            else:
                log.warning(
                    "successor waits until a process leaves queue=%s leaving=%s", self.spec.name, len(self._leaving)
                )

    def suspects_wait(self, number: int) -> None:
        """So many suspects wait. The retry process takes one if it is idle; the others need processes of their own."""
        if not self._wanted:
            return
        size, retry = int(self.options["size"]), self._retry_process()
        if retry is not None and retry.state() == "parked":
            number -= 1
        promised = self._helpers.about_to_claim(Role.SUSPECT) * size
        room = (self._deps.grants.unused_units() - promised) // size
        self._helpers.want(Role.SUSPECT, number, most=int(self.options["concurrency"]), room=room)

    def fail_jobs_wait(self) -> None:
        """Fail jobs wait, and none runs. If the retry process is busy with something else, they do not wait for it."""
        retry = self._retry_process()
        if self._wanted and self.spec.fail_handler is not None and retry is not None and retry.busy():
            self._helpers.want(Role.FAIL, 1, most=1, room=1)

    def _retry_process(self) -> QueueProcess | None:
        return next((entry.process for entry in self._entries if entry.role == Role.RETRY), None)

    def _process(self, role: Role, owner: ProcessOwner) -> QueueProcess:
        return QueueProcess(self.spec, self.options, role, self._deps, owner)

    def _processes(self) -> list[QueueProcess]:
        seated = [entry.process for entry in self._entries if entry.process is not None]
        return [*seated, *self._leaving, *self._helpers.processes]

    def _successor_processes(self) -> list[QueueProcess]:
        return [] if self._successors is None else self._successors.processes

    def _spawn(self, entry: _ProcessEntry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer = None
        self._deps.changed()
        try:
            entry.process = self._process(entry.role, self)
        except (OSError, ForqError) as exc:
            # No process, descriptor or slot to be had now: that may pass.
            delay = entry.respawn.delay_after_death(0.0)
            log.error("cannot start child queue=%s error=%s again_in=%.2fs", self.spec.name, exc, delay)
            entry.timer = self._deps.children.loop.call_later(delay, lambda: self._spawn(entry))

    def _decide(
        self, entry: _ProcessEntry, process: QueueProcess, how: Exit, code: int | None, *, progressed: bool, began: bool
    ) -> None:
        """What follows a death that nobody asked for. `code`: its exit code, if it meant something by it."""
        name, role = self.spec.name, entry.role.name.lower()
        if code in (exits.CONFIG, exits.INCOMPATIBLE):
            log.error("queue cannot be served queue=%s reason=%s", name, process.exit_reason)
            reason = process.exit_reason or how.text
            self.stop(reason=CannotImport(reason, process.traceback))
            self.config_error, self.traceback = reason, process.traceback
        elif code == exits.QUEUE_GONE:
            self._deps.queue_gone(name)
        else:
            if code == exits.FENCED:
                # If that is so, all queues begin anew. One process may be mistaken, so pulse has to find it, too.
                self._deps.check_evicted(name)
            lived = process.child.uptime_seconds()
            delay = entry.respawn.delay_after_death(lived, progressed=progressed, began=began)
            log.warning("child died queue=%s child=%s end=%s again_in=%.2fs", name, role, how.text, delay)
            self._last_end = how.text
            entry.timer = self._deps.children.loop.call_later(delay, lambda: self._spawn(entry))

    def _finish_if_stopped(self) -> None:
        if self._wanted or self._processes():
            return
        if self._start_again:
            self._start_again = False
            for entry in self._entries:
                entry.respawn.forget()
            answer, self._restart = self._restart, None
            self.start()
            if answer is not None:
                answer(None)
        elif self._successors is None:
            waiting, self._then = self._then, []
            for then in waiting:
                then()


def _describe(role: Role, process: QueueProcess | None, state: str, restarts: int) -> dict[str, Any]:
    busy = process.busy() if process is not None else []
    now_ns = time.monotonic_ns()
    ages = [round((now_ns - slot.started_ns) / 1e9, 3) for slot in busy]
    return {
        "role": role.name.lower(),
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
