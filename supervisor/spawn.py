"""How the supervisor makes a process, signals it and learns how it ended.

Children are named by pidfd, so that a pid used again is never signalled. They get no parent-death signal: they outlive
a killed supervisor for the moment they need to kill their own descendants, which a lifeline pipe tells them to do. A
program that is exec'd cannot watch a pipe and may have one.

Signals are blocked from before the fork until the child is ready for them, or they would be lost or reach a handler of
the parent's. In the child all have their default action (SIGPIPE and SIGXFSZ stay ignored, as Python expects) and are
unblocked right before `run`, except those in `handled`: they stay blocked until `run` has installed its handlers and
unblocks them itself, so that a TERM that comes at once waits for its handler.
"""

import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from setproctitle import setproctitle

from forq.output.forwarding import Forwarder
from forq.procs.cgroups import Cgroup
from forq.procs.loop import Loop
from forq.procs.treekill import become_subreaper, set_parent_death_signal

CANNOT_EXEC = 127
_IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
_FIXED = frozenset({signal.SIGKILL, signal.SIGSTOP})
_ALL = frozenset(map(int, signal.valid_signals()))
_RESET = tuple(_ALL - _FIXED - _IGNORED_BY_PYTHON)


@dataclass(frozen=True)
class Spawned:
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
) -> Spawned:
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
) -> Spawned:
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


def reap(spawned: Spawned) -> Exit | None:
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


def signal_child(spawned: Spawned, signum: int) -> bool:
    """False when the child has been reaped."""
    try:
        signal.pidfd_send_signal(spawned.pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def _fork(child: Callable[[], int]) -> Spawned:
    _flush_stdio()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        pid = os.fork()
        if pid == 0:
            _call_and_exit(child)
        try:
            return Spawned(pid, os.pidfd_open(pid))
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
