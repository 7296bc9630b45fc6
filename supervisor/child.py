"""How the supervisor makes a process, signals it and learns how it ended.

Children are named by pidfd, so that a pid used again is never signalled. They get no parent-death signal: they outlive
a killed supervisor for the moment they need to kill their own descendants, which a lifeline pipe tells them to do. A
program that is exec'd cannot watch a pipe and may have one.

Signals are blocked from before the fork until the child is ready for them, or they would be lost or reach a handler of
the parent's. In the child all have their default action (SIGPIPE and SIGXFSZ stay ignored, as Python expects) and are
unblocked right before `run`, except those in `handled`: they stay blocked until `run` has installed its handlers and
unblocks them itself, so that a TERM that comes at once waits for its handler.

One child process from fork to burial: its leash, its stop, the end of its whole tree.
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
    """A child. Its pidfd stays open, and safe to signal, until close."""

    pid: int
    pidfd: int

    def close(self) -> None:
        """After the reap, once; take the pidfd out of the loop before."""
        os.close(self.pidfd)


@dataclass(frozen=True)
class Exit:
    """How a process ended; neither code nor signal is known when someone else has reaped it."""

    code: int | None
    signal: int | None

    @property
    def text(self) -> str:
        if self.code is not None:
            return f"exit {self.code}"
        if self.signal is None:
            return "unknown (reaped elsewhere)"
        names = {int(known): known.name for known in signal.Signals}
        # Of the real-time signals only the first and the last have names.
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
    """Fork a child that calls `run` and exits with what it returns, in a session of its own.

    Of the parent's descriptors it has 0, 1, 2 and keep_fds. The parent's own ends are the caller's to close.
    """

    def child() -> int:
        _enter(loop, cgroup, subreaper)
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
    cgroup: Cgroup | None = None,
) -> ProcessHandle:
    """Fork a child that becomes the program argv[0], a path; it exits with 127 when that fails.

    It inherits keep_fds, and is sent death_signal when the thread that called this ends.
    """
    parent = os.getpid()

    def child() -> int:
        _enter(loop, cgroup, subreaper=False)
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
    """How the child ended, or None while it runs."""
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
    """The child never returns to the parent's stack, whatever happens: that would be a second supervisor."""
    code = 1
    # Else a collection here would write to whatever the parent has made since it froze its own, and so copy it.
    gc.freeze()
    try:
        code = _as_exit_code(child())
    except SystemExit as exc:
        code = _as_exit_code(exc.code)
    except BaseException:
        _complain(traceback.format_exc())
    finally:
        _flush_stdio()
        os._exit(code)


def _as_exit_code(value: object) -> int:
    """What the interpreter makes of it: None is 0, a text is printed and is 1. Nothing that is not 0 becomes 0."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value if 0 <= value <= 255 else value & 0xFF or 1
    _complain(f"{value}\n")
    return 1


def _enter(loop: Loop | None, cgroup: Cgroup | None, subreaper: bool) -> None:
    if cgroup is not None:
        cgroup.join(0)
    if loop is not None:
        loop.close_in_child()
    signal.set_wakeup_fd(-1)
    # Else it counts as enabled in the child, where its handlers are gone, and to enable it there would do nothing.
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
        _complain(f"forq: cannot run {argv[0]}: {exc.strerror}\n")
    return CANNOT_EXEC


def _complain(text: str) -> None:
    """To the descriptor itself: the stream may have been replaced, or its descriptor closed. A process that ends must
    not wait for somebody to read why."""
    with suppress(OSError):
        forwarder = Forwarder(2)
        forwarder.send(text.encode("utf-8", "backslashreplace"))
        forwarder.flush()


def _flush_stdio() -> None:
    """What is buffered would be written twice; a stream that is closed or broken has nothing to lose."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue


TERM_GROUP_SECONDS = 2.0
MAX_LINE_BYTES = 64 * 1024 * 1024
# Then the others have their turn, so that no child can keep the loop to itself.
LINES_PER_PASS = 64
STOPS_PER_PASS = 64
SHOWN_BYTES = 200
# A process whose leash has ended gets this long to end, too.
LEASH_CLOSED_SECONDS = 2.0
# Of the last words of a dead child. More does not fit into a leash, unless something still writes to it.
MAX_DRAIN_BYTES = 1024 * 1024

# Verb, params, and what to do with the answer or error.
RequestWarden = Callable[[str, dict[str, Any], Callable[[Any], None]], bool]
TreeGone = Callable[[frozenset[int]], None]

_NO_LIMITS = Resources()


@dataclass
class ChildTable:
    """What all children have in common: the loop, the descriptors they inherit, and which pids are children."""

    loop: Loop
    keep_fds: tuple[int, ...]
    cgroups: Cgroups | None
    pids: ChildPids = field(default_factory=ChildPids)
    # Who wants to know that a child was stopped by a signal, or goes on.
    stops: dict[int, Callable[[bool], None]] = field(default_factory=dict)
    named: int = 0
    # None: nothing below a queue's process is marked.
    tree_mark: TreeMark | None = None
    # Asks the warden, which looks at /proc and kills so that this loop need not wait; False: there is none.
    request_warden: RequestWarden | None = None
    # Orphans that could not be killed and still run.
    survivors: set[int] = field(default_factory=set)
    _dead: list[tuple[Cgroup | None, TreeGone]] = field(default_factory=list)
    _cleaning: bool = False

    def cgroup(self, name: str) -> Cgroup | None:
        if self.cgroups is None:
            return None
        self.named += 1
        return self.cgroups.add(f"{name}-{self.named}")

    def watch_stops(self) -> None:
        """From now on children learn when a signal stops or continues them."""
        self.loop.on_signal(signal.SIGCHLD, self._check_stops)

    def _check_stops(self) -> None:
        """Those that have ended are left to their pidfds."""
        for _ in range(STOPS_PER_PASS):
            try:
                found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:
                return
            if found is None:
                return
            if (tell := self.stops.get(found.si_pid)) is not None:
                tell(found.si_code != os.CLD_CONTINUED)
        # No signal may tell of those that are left.
        self.loop.call_later(0.0, self._check_stops)

    def delegate(
        self, verb: str, params: dict[str, Any], here: Callable[[], object], then: Callable[[Any], None]
    ) -> None:
        """Has the warden do it, and calls back with its answer. Without one, and if it dies over it, `here` does it:
        the machine may have no process left to give, and that may be what has to be ended. None: that failed, too."""

        def do_here() -> None:
            result: object = None
            try:
                result = here()
            except Exception:  # whatever could not be cleared away: who waits for it has to be told
                log.exception("cannot %s what belongs to a child", verb)
            then(result)

        def answered(answer: Any) -> None:
            if isinstance(answer, ForqError):
                log.warning("the warden failed, doing it here verb=%s error=%s", verb, answer)
                do_here()
            else:
                then(answer)

        if self.request_warden is None or not self.request_warden(verb, params, answered):
            do_here()

    def clean_up(self, cgroup: Cgroup | None, then: TreeGone) -> None:
        """Calls back when nothing is left of what a dead child had started, with the pids of those that cannot be
        killed. To look for that takes a time that grows with the number of children, so those that have died together,
        or during a burial, share the next one."""
        self._dead.append((cgroup, then))
        if not self._cleaning:
            self._cleaning = True
            self.loop.call_later(0.0, self._clean_up_dead)

    def _clean_up_dead(self) -> None:
        dead, self._dead = self._dead, []
        paths = [str(cgroup.path) for cgroup, _ in dead if cgroup is not None]

        def here() -> dict[str, Any]:
            return asdict(orphans.clean_up(self.pids, self.survivors, paths, self.tree_mark))

        def buried(answer: dict[str, Any] | None) -> None:
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
                except Exception:  # the others have to be told, too
                    log.exception("the end of a child could not be dealt with")

        self._kill_survivors()
        self.delegate("clean_up", {"groups": paths, "survivors": sorted(self.survivors)}, here, buried)

    def _reap_remains(self, report: OrphanReport) -> frozenset[int]:
        """Whatever the supervisor adopted belonged to a child that is dead; of those that died together nobody knows
        whose a survivor was: it counts as each one's."""
        for pid in report.zombies:
            # One that the warden told of twice may be somebody else by now.
            if pid not in self.pids:
                with suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        self.survivors.update(report.survivors)
        if report.survivors:
            log.error("%s", cannot_kill(report.survivors))
        if report.killed:
            log.warning("killed processes that a dead child had left behind pids=%s", report.killed)
        return frozenset(report.survivors)

    def _kill_survivors(self) -> None:
        """Those that could not be killed are children of this process until they end, so their pids stay theirs."""
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
    return f"processes that a dead child has left behind cannot be killed: pids {listed}; as root: kill -9 {listed}"


class Child:
    """A forked child. `on_line` gets what it says on its leash, `on_end` how it ended, once its tree is gone.
    A line above `max_line_bytes`, and one for which `on_line` raises InvalidData, is its last: it is killed.
    `on_invalid` is called right before that, with the cause.
    `keep_fds`: descriptors that it inherits besides those that all do. `resources`: what it may take of the machine;
    `kernel_keeps` says whether the kernel sees to that. `stopped`: a signal has stopped it; `resumed`: how often it
    went on after that; `on_stop` is called when they change.

    Making one raises OSError when the system has no process, descriptor or control group left to give.
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
        resources: Resources | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
        on_line: Callable[[bytes], None],
        on_invalid: Callable[[str], None] | None = None,
        on_end: Callable[[Exit], None],
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.started = time.monotonic()
        self.stopping = False
        self.ended = False
        self.stopped = False
        self.resumed = 0
        self._on_stop = on_stop
        self._children = children
        self._on_line = on_line
        self._on_invalid = on_invalid
        self._on_end = on_end
        self._ignoring = False
        self._gone = False
        self._timer: Timer | None = None
        self._runs_user_code = runs_user_code
        # How much the warden has yet to do to it; until then it is not reaped, so that its pid stays its own.
        self._delegated = 0
        self._cgroup = children.cgroup(name.replace(" ", "-")) if runs_user_code else None
        limits = resources or _NO_LIMITS
        self.kernel_keeps = not limits or (self._cgroup is not None and limit(self._cgroup, limits))
        self.killed_by_kernel: Exceeded | None = None
        self.survivors: frozenset[int] = frozenset()
        ours, theirs = socket.socketpair()
        try:
            with children.pids.forking():
                self._spawned = self._fork(theirs, run, handled, keep_fds)
                children.pids.add(self.pid)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._leash = LineConnection(children.loop, ours, self._on_readable, lines=LineBuffer(max_line_bytes))
        children.stops[self.pid] = self._stopped_or_continued
        children.loop.watch_child(self._spawned.pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self._spawned.pid

    def uptime_seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def unsent_bytes(self) -> int:
        return self._leash.unsent_bytes

    def send(self, line: bytes) -> None:
        """When it is dying this does nothing: its end is on the way, and whoever asked is told then."""
        self._leash.send(line)

    def signal(self, signum: int) -> bool:
        """False when it has ended."""
        return not self.ended and signal_child(self._spawned, signum)

    def frozen(self) -> bool:
        """Whether somebody has frozen its control group."""
        return self._cgroup is not None and self._cgroup.frozen()

    def stop(self, grace_seconds: float) -> None:
        """TERM; after the grace period TERM to its group and all below it; then its whole tree is killed."""
        if self.stopping or self.ended:
            return
        self.stopping = True
        signal_child(self._spawned, signal.SIGTERM)
        self._timer = self._children.loop.call_later(grace_seconds, self._term_group)

    def kill(self) -> None:
        """Kills the whole tree; on_end follows when nothing is left of it."""
        self.stopping = True
        if self.ended:
            return
        if self._runs_user_code and self._cgroup is None:
            self._delegate("kill", lambda: kill_tree(self.pid))
            return
        if self._cgroup is not None:
            # Without waiting: its burial does.
            self._cgroup.kill(0.0)
        # Just forked, it may not have entered its group yet. One of ours has nothing below it.
        signal_child(self._spawned, signal.SIGKILL)

    def _delegate(self, verb: str, here: Callable[[], object]) -> None:
        self._delegated += 1
        self._children.delegate(verb, {"pid": self.pid}, here, self._delegation_done)

    def _delegation_done(self, answer: object) -> None:
        self._delegated -= 1
        if self._gone and not self._delegated:
            self._ended()

    def kill_and_ignore(self, cause: str = "garbage_on_leash") -> None:
        """Kills it; nothing that it has said or is still saying is read any more."""
        if self._on_invalid is not None:
            self._on_invalid(cause)
        self._ignoring = True
        self._leash.lines.clear()
        self._leash.read(False)
        self.kill()

    def _fork(
        self,
        theirs: socket.socket,
        run: Callable[[socket.socket], int],
        handled: tuple[int, ...],
        keep_fds: tuple[int, ...],
    ) -> ProcessHandle:
        return spawn(
            lambda: run(theirs),
            loop=self._children.loop,
            keep_fds=(*self._children.keep_fds, *keep_fds, theirs.fileno()),
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
        # The programs of exec handlers have groups of their own.
        self._delegate("term", lambda: signal_descendants(self.pid, signal.SIGTERM))
        self._timer = self._children.loop.call_later(TERM_GROUP_SECONDS, self.kill)

    def _on_readable(self) -> None:
        if not self._leash.ended:
            self._handle_lines()
        elif not self.ended:
            # One that is reset ended before it had read all that it was told: an end like any other.
            if self._leash.error is not None and not isinstance(self._leash.error, ConnectionResetError):
                log.warning("leash broke child=%s error=%s", self.name, self._leash.error)
            self._children.loop.call_later(LEASH_CLOSED_SECONDS, self._kill_if_alive)

    def _kill_if_alive(self) -> None:
        """Usually its leash ends because it does. One that lives on can say nothing any more, not even that a job of it
        needs a deadline."""
        if not self.ended and not self.stopping:
            log.error("child has closed its leash; killing it child=%s", self.name)
            self.kill_and_ignore("leash_closed")

    def _handle_lines(self) -> None:
        """Passes on what it has said, a part in each pass of the loop; reads on only when all of it is dealt with."""
        if self._handle_some_lines() and not self.ended:
            self._leash.read(False)
            self._children.loop.call_later(0.0, self._resume_handling)

    def _resume_handling(self) -> None:
        if self.ended or self._ignoring:
            # What is left is dealt with at its burial, or by nobody.
            return
        self._leash.read(True)
        self._handle_lines()

    def _handle_some_lines(self) -> bool:
        """True if there may be more."""
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
            begins = (self._leash.lines.peek(SHOWN_BYTES) if line is None else line)[:SHOWN_BYTES]
            log.error("invalid message from child; killing it child=%s line=%r error=%s", self.name, begins, exc)
            self.kill_and_ignore()
            return False
        return True

    def _ended(self) -> None:
        self._gone = True
        if self._delegated:
            return
        ended = reap(self._spawned)
        if ended is None:
            raise ForqError(f"child {self.name} was reported dead but is not")
        if self._timer is not None:
            self._timer.cancel()
        self.ended = True
        self._children.pids.discard(self.pid)
        self._children.stops.pop(self.pid, None)
        if not self._runs_user_code:
            self._tree_gone(ended, frozenset())
            return
        try:
            if self._cgroup is not None:
                self.killed_by_kernel = exceeded(self._cgroup)
        finally:
            self._children.clean_up(self._cgroup, lambda survivors: self._tree_gone(ended, survivors))

    def _tree_gone(self, ended: Exit, survivors: frozenset[int]) -> None:
        """Nothing is left of what it had started, or nothing that can be killed."""
        self.survivors = survivors
        self._leash.read(False)
        self._drain_leash(ended, 0)

    def _drain_leash(self, ended: Exit, heard_bytes: int) -> None:
        """All of them, a part in each pass of the loop; then it is over."""
        more = False
        try:
            more = self._handle_some_lines()
            if not more and not self._ignoring and heard_bytes < MAX_DRAIN_BYTES and (count := self._leash.receive()):
                more, heard_bytes = True, heard_bytes + count
        except Exception:  # the supervisor must learn that the child is gone
            log.exception("last words of a child could not be used child=%s", self.name)
        if more:
            self._children.loop.call_later(0.0, lambda: self._drain_leash(ended, heard_bytes))
            return
        self._leash.close()
        self._spawned.close()
        self._on_end(ended)
