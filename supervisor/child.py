"""Child processes: fork, signals and reaping (spawn, exec_program, reap), then Child and ChildTable, which add the
leash, the stop, and the clean-up of the whole tree.

Children are signalled through a pidfd, so that a reused pid is never hit. They get no parent-death signal: when the
supervisor is killed, the closed leash makes them kill their own descendants first. An exec'd program cannot watch the
leash and may get a parent-death signal.

Signals are blocked from before the fork until the child is ready for them; otherwise they would be lost or run a
handler of the parent. The child resets all to the default action (SIGPIPE and SIGXFSZ stay ignored, as Python expects)
and unblocks them right before `run`, except those in `handled`: `run` unblocks them itself after installing its
handlers, so that an early TERM is not lost.
"""

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from setproctitle import setproctitle

from forq.errors import ForqError, InvalidData
from forq.output.forwarding import Forwarder
from forq.procs import orphans
from forq.procs.cgroups import Cgroup, Cgroups, Exceeded, Resources, exceeded, limit
from forq.procs.lines import LineBuffer, LineConnection
from forq.procs.loop import Loop, Timer
from forq.procs.orphans import ChildPids, OrphanReport, TreeMark
from forq.procs.treekill import become_subreaper, kill_tree, set_parent_death_signal, signal_descendants

log = logging.getLogger("forq")

CANNOT_EXEC = 127
_IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
_FIXED = frozenset({signal.SIGKILL, signal.SIGSTOP})
_ALL = frozenset(map(int, signal.valid_signals()))
_RESET = tuple(_ALL - _FIXED - _IGNORED_BY_PYTHON)


@dataclass(frozen=True)
class ProcessHandle:
    """A forked process. Its pidfd stays open, and safe to signal, until close."""

    pid: int
    pidfd: int

    def close(self) -> None:
        """Call once, after the reap; remove the pidfd from the loop first."""
        os.close(self.pidfd)


@dataclass(frozen=True)
class Exit:
    """How a process ended. Code and signal are both None if another process has reaped it."""

    code: int | None
    signal: int | None

    @property
    def text(self) -> str:
        if self.code is not None:
            return f"exit {self.code}"
        if self.signal is None:
            return "unknown (reaped elsewhere)"
        names = {int(known): known.name for known in signal.Signals}
        # Most real-time signals have no name.
        return f"signal {self.signal} ({names.get(self.signal, '?')})"


def spawn(
    run: Callable[[], int],
    *,
    loop: Loop | None,
    keep_fds: Collection[int],
    title: str,
    subreaper: bool = True,
    cgroup: Cgroup | None = None,
    handled: Collection[int] = (),
) -> ProcessHandle:
    """Forks a child that calls `run` in a session of its own and exits with the returned code.

    It inherits only the descriptors 0, 1, 2 and keep_fds. The caller closes the parent's copies.
    """

    def child() -> int:
        _prepare_child(loop, cgroup, subreaper)
        _close_all_except(keep_fds)
        signal.pthread_sigmask(signal.SIG_SETMASK, handled)
        setproctitle(title)
        return run()

    return _fork(child)


def exec_program(
    argv: list[str],
    *,
    loop: Loop | None,
    keep_fds: Collection[int],
    env: Mapping[str, str],
    death_signal: int | None = None,
    stdout_fd: int | None = None,
    stderr_fd: int | None = None,
) -> ProcessHandle:
    """Forks a child that executes the program argv[0], a path; it exits with 127 if that fails.

    It inherits keep_fds and receives death_signal when the calling thread ends.
    """
    parent = os.getpid()

    def child() -> int:
        _prepare_child(loop, None, subreaper=False)
        _redirect(stdout_fd, 1)
        _redirect(stderr_fd, 2)
        _close_all_except(keep_fds)
        for fd in keep_fds:
            os.set_inheritable(fd, True)
        for signum in _IGNORED_BY_PYTHON:
            signal.signal(signum, signal.SIG_DFL)
        if death_signal is not None:
            set_parent_death_signal(death_signal)
            if os.getppid() != parent:
                return CANNOT_EXEC
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return _exec(argv, env)

    return _fork(child)


def reap(spawned: ProcessHandle) -> Exit | None:
    """Reaps the child; None while it runs."""
    try:
        result = os.waitid(os.P_PIDFD, spawned.pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return Exit(None, None)
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return Exit(result.si_status, None)
    return Exit(None, result.si_status)


def signal_child(spawned: ProcessHandle, signum: int) -> bool:
    """False when the child has been reaped."""
    try:
        signal.pidfd_send_signal(spawned.pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def _fork(child: Callable[[], int]) -> ProcessHandle:
    _flush_stdio()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        pid = os.fork()
        if pid == 0:
            _call_and_exit(child)
        try:
            return ProcessHandle(pid, os.pidfd_open(pid))
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _call_and_exit(child: Callable[[], int]) -> NoReturn:
    """Never returns to the parent's stack: that would be a second supervisor."""
    code = 1
    # Otherwise a collection would write to objects of the parent, and so copy their pages.
    gc.freeze()
    try:
        code = _as_exit_code(child())
    except SystemExit as exc:
        code = _as_exit_code(exc.code)
    except BaseException:
        _write_stderr(traceback.format_exc())
    finally:
        _flush_stdio()
        os._exit(code)


def _as_exit_code(value: object) -> int:
    """Like the interpreter: None becomes 0, text is printed and becomes 1. No other value becomes 0."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value if 0 <= value <= 255 else value & 0xFF or 1
    _write_stderr(f"{value}\n")
    return 1


def _prepare_child(loop: Loop | None, cgroup: Cgroup | None, subreaper: bool) -> None:
    if cgroup is not None:
        cgroup.join(0)
    if loop is not None:
        loop.close_in_child()
    signal.set_wakeup_fd(-1)
    # Otherwise it counts as enabled in the child although its handlers are gone, and enabling it again does nothing.
    faulthandler.disable()
    for signum in _RESET:
        signal.signal(signum, signal.SIG_DFL)
    os.setsid()
    if subreaper:
        become_subreaper()


def _close_all_except(keep_fds: Collection[int]) -> None:
    low = 3
    for fd in sorted(keep_fds):
        if fd >= low:
            os.closerange(low, fd)
            low = fd + 1
    os.closerange(low, max(low, os.sysconf("SC_OPEN_MAX")))


def _redirect(fd: int | None, to: int) -> None:
    if fd is not None and fd != to:
        os.dup2(fd, to)


def _exec(argv: list[str], env: Mapping[str, str]) -> int:
    try:
        os.execve(argv[0], argv, env)
    except OSError as exc:
        _write_stderr(f"forq: cannot run {argv[0]}: {exc.strerror}\n")
    return CANNOT_EXEC


def _write_stderr(text: str) -> None:
    """Writes to descriptor 2 without blocking: the stream may be replaced or closed, and an exiting process must not
    wait for a reader."""
    with suppress(OSError):
        forwarder = Forwarder(2)
        forwarder.send(text.encode("utf-8", "backslashreplace"))
        forwarder.flush()


def _flush_stdio() -> None:
    """Buffered text would be written twice, by parent and child. Closed and broken streams are skipped."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue


TERM_GROUP_SECONDS = 2.0
MAX_LINE_BYTES = 64 * 1024 * 1024
# Limits per pass of the loop, so that no child can monopolize it.
LINES_PER_PASS = 64
STOPS_PER_PASS = 64
LOGGED_BYTES = 200
# A process that has closed its leash must end within this time.
LEASH_CLOSED_SECONDS = 2.0
# Limit of bytes read from the leash of a dead child. It holds no more, unless another process still writes to it.
MAX_DRAIN_BYTES = 1024 * 1024

# Verb, params, callback with the answer or error; False if there is no warden.
RequestWarden = Callable[[str, dict[str, Any], Callable[[Any], None]], bool]
# Called with the pids that could not be killed.
TreeGone = Callable[[frozenset[int]], None]

_NO_LIMITS = Resources()


@dataclass
class ChildTable:
    """All children of the supervisor.

    1. Holds their shared resources: the loop, inherited descriptors, control groups, the set of child pids.
    2. Reports to a child that a signal stopped or continued it.
    3. Cleans up the process trees of dead children, through the warden if there is one.
    """

    loop: Loop
    keep_fds: tuple[int, ...]
    cgroups: Cgroups | None
    pids: ChildPids = field(default_factory=ChildPids)
    # By pid; called with True when a signal stopped the child, with False when it continued.
    on_stop: dict[int, Callable[[bool], None]] = field(default_factory=dict)
    cgroups_made: int = 0
    tree_mark: TreeMark | None = None
    # The warden reads /proc and kills, so that this loop does not block.
    request_warden: RequestWarden | None = None
    # Orphans that could not be killed and still run.
    survivors: set[int] = field(default_factory=set)
    _dead: list[tuple[Cgroup | None, TreeGone]] = field(default_factory=list)
    _cleaning: bool = False

    def cgroup(self, name: str) -> Cgroup | None:
        if self.cgroups is None:
            return None
        self.cgroups_made += 1
        return self.cgroups.add(f"{name}-{self.cgroups_made}")

    def watch_stops(self) -> None:
        self.loop.on_signal(signal.SIGCHLD, self._check_stops)

    def _check_stops(self) -> None:
        """Does not reap: an ended child is reported by its pidfd."""
        for _ in range(STOPS_PER_PASS):
            try:
                found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:
                return
            if found is None:
                return
            if (callback := self.on_stop.get(found.si_pid)) is not None:
                callback(found.si_code != os.CLD_CONTINUED)
        # SIGCHLD is not repeated for the remaining ones.
        self.loop.call_later(0.0, self._check_stops)

    def delegate(
        self, verb: str, params: dict[str, Any], here: Callable[[], object], then: Callable[[Any], None]
    ) -> None:
        """Sends the request to the warden and calls `then` with its answer. Without a warden, or if it dies, calls
        `here` instead, in this process: the machine may be out of processes, and only this kill frees some. `then`
        gets None if that fails, too."""

        def do_here() -> None:
            result: object = None
            try:
                result = here()
            except Exception:  # `then` must be called in any case
                log.exception("failed to clean up after a child verb=%s", verb)
            then(result)

        def answered(answer: Any) -> None:
            if isinstance(answer, ForqError):
                log.warning("warden failed; doing its work in the supervisor verb=%s error=%s", verb, answer)
                do_here()
            else:
                then(answer)

        if self.request_warden is None or not self.request_warden(verb, params, answered):
            do_here()

    def clean_up(self, cgroup: Cgroup | None, then: TreeGone) -> None:
        """Kills everything a dead child has started and calls `then`. The time grows with the number of children, so
        children that died together, or during a clean-up, share the next one."""
        self._dead.append((cgroup, then))
        if not self._cleaning:
            self._cleaning = True
            self.loop.call_later(0.0, self._clean_up_dead)

    def _clean_up_dead(self) -> None:
        dead, self._dead = self._dead, []
        paths = [str(cgroup.path) for cgroup, _ in dead if cgroup is not None]

        def here() -> dict[str, Any]:
            return asdict(orphans.clean_up(self.pids, self.survivors, paths, self.tree_mark))

        def cleaned_up(answer: dict[str, Any] | None) -> None:
            report = OrphanReport(**(answer or {}))
            survivors = self._reap_remains(report)
            self._cleaning = bool(self._dead)
            if self._cleaning:
                self.loop.call_later(0.0, self._clean_up_dead)
            for cgroup, then in dead:
                in_group = [] if cgroup is None else report.groups.get(str(cgroup.path), [])
                if in_group:
                    log.error("%s", cannot_kill(in_group))
                try:
                    then(survivors | frozenset(in_group))
                except Exception:  # the callbacks of the other children must run, too
                    log.exception("callback for a dead child failed")

        self._kill_survivors()
        self.delegate("clean_up", {"groups": paths, "survivors": sorted(self.survivors)}, here, cleaned_up)

    def _reap_remains(self, report: OrphanReport) -> frozenset[int]:
        """Adopted processes belonged to dead children. If several children died together, a survivor counts for each
        of them: its origin is unknown."""
        for pid in report.zombies:
            # The warden may report a pid twice; by then it may be a child of ours.
            if pid not in self.pids:
                with suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        self.survivors.update(report.survivors)
        if report.survivors:
            log.error("%s", cannot_kill(report.survivors))
        if report.killed:
            log.warning("killed processes left by a dead child pids=%s", report.killed)
        return frozenset(report.survivors)

    def _kill_survivors(self) -> None:
        """Survivors are children of this process until they are reaped here, so their pids are not reused."""
        for pid in list(self.survivors):
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
            except ChildProcessError:
                ended = True
            if ended:
                self.survivors.discard(pid)
            else:
                with suppress(PermissionError, ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def cannot_kill(pids: Collection[int]) -> str:
    listed = " ".join(map(str, sorted(pids)))
    return f"cannot kill processes left by a dead child: pids {listed}; as root: kill -9 {listed}"


class Child:
    """A forked child with its leash.

    1. Passes each line from the leash to `on_line`. Kills the child if a line is longer than `max_line_bytes` or
       `on_line` raises InvalidData; calls `on_invalid` with the cause right before that.
    2. Stops the child: TERM, then TERM to its group, then a kill of its whole tree.
    3. Calls `on_end` once, when the child is reaped and its tree is gone.

    `keep_fds` are inherited in addition to those of the ChildTable; with `only_fds`, these and no others, besides the
    leash. `kernel_limits`: whether the kernel enforces `resources`. `stopped` and `resumed` (a counter) follow stop
    signals; `on_stop` is called when they change. `on_grace_end` is called when the grace period of `stop` is over.

    The constructor raises OSError if the system is out of processes, descriptors or control groups.
    """

    def __init__(
        self,
        children: ChildTable,
        name: str,
        run: Callable[[socket.socket], int],
        *,
        handled: tuple[int, ...] = (),
        runs_user_code: bool = False,
        keep_fds: tuple[int, ...] = (),
        only_fds: tuple[int, ...] | None = None,
        resources: Resources | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
        on_line: Callable[[bytes], None],
        on_invalid: Callable[[str], None] | None = None,
        on_end: Callable[[Exit], None],
        on_stop: Callable[[], None] | None = None,
        on_grace_end: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.started = time.monotonic()
        self.stopping = False
        self.ended = False
        self.stopped = False
        self.resumed = 0
        self._on_stop = on_stop
        self._on_grace_end = on_grace_end
        self._children = children
        self._on_line = on_line
        self._on_invalid = on_invalid
        self._on_end = on_end
        self._ignoring = False
        self._gone = False
        self._timer: Timer | None = None
        self._runs_user_code = runs_user_code
        # Requests to the warden under way. Until they are done the child is not reaped, so that its pid is not reused.
        self._delegations = 0
        self._cgroup = children.cgroup(name.replace(" ", "-").replace("/", "-")) if runs_user_code else None
        limits = resources or _NO_LIMITS
        self.kernel_limits = not limits or (self._cgroup is not None and limit(self._cgroup, limits))
        self.killed_by_kernel: Exceeded | None = None
        self.survivors: frozenset[int] = frozenset()
        ours, theirs = socket.socketpair()
        try:
            with children.pids.forking():
                inherited = (*children.keep_fds, *keep_fds) if only_fds is None else only_fds
                self._handle = self._fork(theirs, run, handled, inherited)
                children.pids.add(self.pid)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._leash = LineConnection(children.loop, ours, self._on_readable, lines=LineBuffer(max_line_bytes))
        children.on_stop[self.pid] = self._stopped_or_continued
        children.loop.watch_child(self._handle.pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self._handle.pid

    def uptime_seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def unsent_bytes(self) -> int:
        return self._leash.unsent_bytes

    def send(self, line: bytes) -> None:
        """Does nothing if the child is dying: `on_end` follows."""
        self._leash.send(line)

    def signal(self, signum: int) -> bool:
        """False if the child has ended."""
        return not self.ended and signal_child(self._handle, signum)

    def frozen(self) -> bool:
        return self._cgroup is not None and self._cgroup.frozen()

    def stop(self, grace_seconds: float) -> None:
        """TERM; after the grace period TERM to its group and all descendants; then a kill of the whole tree."""
        if self.stopping or self.ended:
            return
        self.stopping = True
        signal_child(self._handle, signal.SIGTERM)
        self._timer = self._children.loop.call_later(grace_seconds, self._term_group)

    def kill(self) -> None:
        """Kills the whole tree; `on_end` follows when it is gone."""
        self.stopping = True
        if self.ended:
            return
        if self._runs_user_code and self._cgroup is None:
            self._delegate("kill", lambda: kill_tree(self.pid))
            return
        if self._cgroup is not None:
            # Does not wait until it is empty: the clean-up does.
            self._cgroup.kill(0.0)
        # A child just forked may not have joined its cgroup yet. A service has no descendants.
        signal_child(self._handle, signal.SIGKILL)

    def _delegate(self, verb: str, here: Callable[[], object]) -> None:
        self._delegations += 1
        self._children.delegate(verb, {"pid": self.pid}, here, self._delegation_done)

    def _delegation_done(self, answer: object) -> None:
        self._delegations -= 1
        if self._gone and not self._delegations:
            self._ended()

    def kill_and_ignore(self, cause: str = "garbage_on_leash") -> None:
        """Kills the child and discards all further input from it."""
        if self._on_invalid is not None:
            self._on_invalid(cause)
        self._ignoring = True
        self._leash.lines.clear()
        self._leash.set_reading(False)
        self.kill()

    def _fork(
        self,
        theirs: socket.socket,
        run: Callable[[socket.socket], int],
        handled: tuple[int, ...],
        inherited_fds: tuple[int, ...],
    ) -> ProcessHandle:
        return spawn(
            lambda: run(theirs),
            loop=self._children.loop,
            keep_fds=(*inherited_fds, theirs.fileno()),
            title=f"forq: {self.name}",
            cgroup=self._cgroup,
            handled=handled,
        )

    def _stopped_or_continued(self, stopped: bool) -> None:
        self.stopped = stopped
        self.resumed += not stopped
        if self._on_stop is not None:
            self._on_stop()

    def _term_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        if self._on_grace_end is not None:
            self._on_grace_end()
        # Programs of exec handlers have their own process groups.
        self._delegate("term", lambda: signal_descendants(self.pid, signal.SIGTERM))
        self._timer = self._children.loop.call_later(TERM_GROUP_SECONDS, self.kill)

    def _on_readable(self) -> None:
        if not self._leash.ended:
            self._handle_lines()
        elif not self.ended:
            # A reset means that the child ended with unread input: a normal end.
            if self._leash.error is not None and not isinstance(self._leash.error, ConnectionResetError):
                log.warning("leash broke child=%s error=%s", self.name, self._leash.error)
            self._children.loop.call_later(LEASH_CLOSED_SECONDS, self._kill_if_alive)

    def _kill_if_alive(self) -> None:
        """A leash usually closes because the child ends. A child without one could not request deadlines for its
        jobs."""
        if not self.ended and not self.stopping:
            log.error("child closed its leash; killing it child=%s", self.name)
            self.kill_and_ignore("leash_closed")

    def _handle_lines(self) -> None:
        """Handles the received lines, a part in each pass of the loop; reads more only when all are handled."""
        if self._handle_some_lines() and not self.ended:
            self._leash.set_reading(False)
            self._children.loop.call_later(0.0, self._resume_handling)

    def _resume_handling(self) -> None:
        if self.ended or self._ignoring:
            # The rest is handled by _drain_leash, or discarded.
            return
        self._leash.set_reading(True)
        self._handle_lines()

    def _handle_some_lines(self) -> bool:
        """True if more lines may be waiting."""
        line: bytes | None = None
        try:
            for _ in range(LINES_PER_PASS):
                line = None
                line = self._leash.lines.pop()
                if line is None:
                    return False
                self._on_line(line)
                if self._ignoring:
                    return False
        except InvalidData as exc:
            start = (self._leash.lines.peek(LOGGED_BYTES) if line is None else line)[:LOGGED_BYTES]
            log.error("invalid message from child; killing it child=%s line=%r error=%s", self.name, start, exc)
            self.kill_and_ignore()
            return False
        return True

    def _ended(self) -> None:
        self._gone = True
        if self._delegations:
            return
        ended = reap(self._handle)
        if ended is None:
            raise ForqError(f"child {self.name} was reported dead but is not")
        if self._timer is not None:
            self._timer.cancel()
        self.ended = True
        self._children.pids.discard(self.pid)
        self._children.on_stop.pop(self.pid, None)
        if not self._runs_user_code:
            self._tree_gone(ended, frozenset())
            return
        try:
            if self._cgroup is not None:
                self.killed_by_kernel = exceeded(self._cgroup)
        finally:
            self._children.clean_up(self._cgroup, lambda survivors: self._tree_gone(ended, survivors))

    def _tree_gone(self, ended: Exit, survivors: frozenset[int]) -> None:
        self.survivors = survivors
        self._leash.set_reading(False)
        self._drain_leash(ended, 0)

    def _drain_leash(self, ended: Exit, drained_bytes: int) -> None:
        """Handles the last messages, a part in each pass of the loop; then calls `on_end`."""
        more = False
        try:
            more = self._handle_some_lines()
            if not more and not self._ignoring and drained_bytes < MAX_DRAIN_BYTES and (count := self._leash.receive()):
                more, drained_bytes = True, drained_bytes + count
        except Exception:  # `on_end` must be called in any case
            log.exception("failed to handle the last messages of a child child=%s", self.name)
        if more:
            self._children.loop.call_later(0.0, lambda: self._drain_leash(ended, drained_bytes))
            return
        self._leash.close()
        self._handle.close()
        self._on_end(ended)
