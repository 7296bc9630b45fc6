"""The minder: the second thread of a queue's process. It does the work that workers cannot do while they run jobs or
block.

1. Reads the leash: passes capacity messages to the grant of the worker they name. When the supervisor dies, kills
   everything below this process, then exits.
2. On SIGTERM stops the workers, and unblocks those that are blocked in Redis.
3. Updates the process title and the beat in the scoreboard once a second while a job runs; sleeps while none does.
4. Reaps adopted zombies and checks recycling, with each beat.
"""

import _thread
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import orjson
from setproctitle import setproctitle

from forq.broker.link import Link
from forq.errors import ExitCode, ForqError
from forq.procs.backoff import Backoff
from forq.procs.lines import LineBuffer
from forq.procs.scoreboard import Slot, State
from forq.procs.stacks import MAX_STACK
from forq.procs.treekill import children_of, kill_descendants, read_stat
from forq.values import show_progress
from forq.workers.event_loop import Cancelled
from forq.workers.exec_handlers import running_programs
from forq.workers.grant import Grant
from forq.workers.recycling import Recycling

log = logging.getLogger("forq")

BEAT_SECONDS = 1.0
# Retried less and less often: if unblocking is slow, thousands of workers may be stopping at the same time.
UNBLOCK_FIRST_SECONDS = 0.05
UNBLOCK_LONGEST_SECONDS = 1.0
UNBLOCK_TIMEOUT_SECONDS = 0.2
# Beats after the last job before the thread sleeps until it is woken.
IDLE_BEATS = 2
# Titles without job ids: every user of the machine can read titles.
PLAIN = "plain"
# Cheaper than the attributes of an enum.
_STATE_NAMES = {int(state): state.name.lower() for state in State}


class MindedLoop(Protocol):
    """The methods of a loop that the minder uses. `title_text` replaces the state in the process title."""

    @property
    def slot(self) -> Slot: ...

    @property
    def stopping(self) -> bool: ...

    def stop(self) -> None: ...

    def cancel(self, position: int | None, outcome: Cancelled, cause: str) -> None: ...

    def coroutine_stack(self) -> str | None: ...

    def blocked_client_id(self) -> int | None: ...

    def title_text(self) -> str | None: ...


class Minder:
    def __init__(
        self,
        *,
        name: str,
        url: str,
        base: str,
        leash: socket.socket,
        titles: str = "full",
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._name = name
        self._url = url
        self._base = base
        self._loops: Sequence[MindedLoop] = ()
        self._stop_requested = False
        # Released when the process may begin. An Event takes more memory, in each of many processes.
        self._begin_lock = _thread.allocate_lock()
        self._begin_lock.acquire()
        self._unblocking = Backoff(UNBLOCK_FIRST_SECONDS, UNBLOCK_LONGEST_SECONDS)
        self._leash = leash
        self._now = clock_ns
        self._titles = titles
        self._lines = LineBuffer()
        self._grants: dict[int, Grant] = {}
        self._send: Callable[[dict[str, object]], None] = lambda message: None
        self._recycling: Recycling | None = None
        self._signals_fd, self._signals_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = False
        self._idle_beats = 0
        self._zombies = ZombieReaper()
        self._thread = 0

    def start(self) -> None:
        """Called by the main thread. Installs the signal handler and starts the minder's thread."""
        os.register_at_fork(before=_block_term, after_in_parent=_restore_signal_mask, after_in_child=_reset_signals)
        signal.set_wakeup_fd(self._signals_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _do_nothing)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Not a threading.Thread, which takes more memory, in each of many processes. This thread is never joined.
        _thread.start_new_thread(self._run, ())

    def wait_to_begin(self) -> bool:
        """Called by the main thread. Blocks until the supervisor sends `begin`; False if stopped first."""
        self._begin_lock.acquire()
        return not self._stop_requested

    def watch(
        self,
        loops: Sequence[MindedLoop],
        grants: dict[int, Grant],
        recycling: Recycling,
        send: Callable[[dict[str, object]], None] = lambda message: None,
    ) -> None:
        """Sets the loops to mind. A SIGTERM that came before stops them now. `send` sends to the supervisor."""
        self._send = send
        self._grants = grants
        self._recycling = recycling
        for loop in loops:
            # From now on the supervisor may expect a beat after a ping.
            loop.slot.minder = self._thread
        self._loops = loops
        if self._stop_requested:
            self._stop()

    def wake(self) -> None:
        """Called by a worker that starts a batch; costs nothing while the minder is awake."""
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        self._thread = _thread.get_native_id()
        poll = select.poll()
        for fd in (self._leash.fileno(), self._signals_fd, self._wake_fd):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(self._poll_timeout_ms())]
            try:
                for fd in ready:
                    self._handle_event(fd)
                self.tick()
            except Exception:  # for example, no descriptor is free; without this thread nothing could stop the process
                log.exception("minder failed name=%s", self._name)

    def _poll_timeout_ms(self) -> float | None:
        if self._stopping:
            return self._unblocking.pause_after(1 + self._unblocking.failures) * 1000
        return None if self._asleep else BEAT_SECONDS * 1000

    def _handle_event(self, fd: int) -> None:
        if fd == self._leash.fileno():
            self._read_leash()
        elif fd == self._signals_fd and signal.SIGTERM in os.read(fd, 512):
            self._stop()
        elif fd == self._wake_fd:
            os.eventfd_read(fd)
            self._idle_beats = 0

    def _read_leash(self) -> None:
        """One message per line: {"go" | "wait" | "yield": slot number}, `begin`, `ping` (the next beat answers),
        `cancel` (a slot number with position, outcome and cause; null: every coroutine, at the end of the grace
        period), `stacks` (answered with the stacks of coroutines), or `name` (the new one, for the title)."""
        try:
            received = self._leash.recv(4096)
        except OSError:
            received = b""
        if not received:
            self._exit_with_supervisor()
        self._lines.push(received)
        while (line := self._lines.pop()) is not None:
            message = orjson.loads(line)
            kind, number = next(iter(message.items()))
            if kind == "begin":
                self._allow_begin()
            elif kind == "cancel":
                self._cancel(number, message)
            elif kind == "stacks":
                self._send_coroutine_stacks()
            elif kind == "name":
                self._name = number
            elif kind != "ping":
                self._grants[number].receive(kind)

    def _cancel(self, number: int | None, message: dict[str, Any]) -> None:
        outcome = Cancelled(message.get("outcome", Cancelled.RETURNED))
        cause = message.get("cause", "interrupted")
        for loop in self._loops:
            if number is None or loop.slot.number == number:
                loop.cancel(message.get("position"), outcome, cause)

    def _send_coroutine_stacks(self) -> None:
        for loop in self._loops:
            if (stack := loop.coroutine_stack()) is not None:
                self._send({"coroutine": loop.slot.number, "stack": stack[:MAX_STACK]})
        self._send({"coroutines": 0})

    def _exit_with_supervisor(self) -> None:
        kill_descendants(os.getpid())
        os._exit(ExitCode.FAILED)

    def _stop(self) -> None:
        self._stop_requested = True
        self._allow_begin()
        for loop in self._loops:
            loop.stop()
        if self._loops:
            self._send({"stopping": True})

    def _allow_begin(self) -> None:
        if self._begin_lock.locked():
            self._begin_lock.release()

    def tick(self) -> None:
        """One beat."""
        if not self._loops:
            return
        now = self._now()
        busy = False
        for loop in self._loops:
            loop.slot.minder = self._thread
            loop.slot.beat_ns = now
            busy = busy or loop.slot.state == State.BUSY
        self.update_title()
        self._zombies.reap(idle=not busy)
        if busy and self._recycling is not None:
            self._recycling.check()
        if self._stopping:
            self._unblock()
        self._idle_beats = 0 if busy else self._idle_beats + 1
        self._asleep = self._idle_beats > IDLE_BEATS and not self._zombies.pending
        # A worker that became busy before `_asleep` was set has not sent a wake-up.
        if self._asleep and any(loop.slot.state == State.BUSY for loop in self._loops):
            self._asleep = False

    @property
    def _stopping(self) -> bool:
        return bool(self._loops) and self._loops[0].stopping

    def _unblock(self) -> None:
        """Repeated until no worker is blocked: one may be about to block right now."""
        blocked = [number for loop in self._loops if (number := loop.blocked_client_id()) is not None]
        if not blocked:
            return
        self._unblocking.fail()
        # Short: the supervisor treats a minder that does not answer for half a second as a stuck interpreter.
        link = Link(self._url, name="forq-minder", timeout_seconds=UNBLOCK_TIMEOUT_SECONDS)
        try:
            for client_id in blocked:
                link.call("CLIENT", "UNBLOCK", client_id, at=self._base)
        except ForqError as exc:
            log.warning("failed to unblock a worker; retrying name=%s error=%s", self._name, exc)
        finally:
            link.close()

    def update_title(self) -> None:
        setproctitle(self.title())

    def title(self) -> str:
        text = self._loops[0].title_text()
        if text is not None:
            return f"forq: {self._name} {text}"
        slots = [loop.slot for loop in self._loops]
        busy = [slot for slot in slots if slot.state == State.BUSY]
        done = sum(slot.done for slot in slots)
        if len(slots) > 1:
            doing = f"{len(busy)}/{len(slots)} busy"
        elif busy:
            age = (self._now() - busy[0].started_ns) / 1e9
            if self._titles == PLAIN:
                doing = f"busy {age:.1f}s"
            else:
                doing = f"busy {busy[0].job.decode(errors='replace')} {age:.1f}s"
                if (progress := busy[0].progress()) is not None:
                    doing += f" {show_progress(*progress)},"
        else:
            doing = _STATE_NAMES[slots[0].state]
        return f"forq: {self._name} {doing} {done:,} done"


class ZombieReaper:
    """Reaps zombies that this process adopted as a subreaper: daemons that a handler left behind.

    A zombie that a handler may still wait for must not be reaped: its `subprocess.run` would lose the exit status. The
    kernel does not distinguish adopted children from own ones. So a zombie is reaped only if it is seen twice in a row
    while no job runs. Programs of exec handlers are reaped by their owners.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether it has seen a zombie that the next beat may reap."""
        return bool(self._seen)

    def reap(self, *, idle: bool) -> None:
        """Called with each beat. `idle`: no handler is running."""
        if not idle:
            self._seen.clear()
            return
        zombies = _find_zombies() - running_programs()
        for pid in zombies & self._seen:
            with suppress(ChildProcessError):  # a thread of a handler reaped it first
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies - self._seen


def _find_zombies() -> set[int]:
    """Does not reap. waitid shows only one of them, so the others are read from /proc."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:
        return set()
    children = (read_stat(pid) for pid in children_of(os.getpid()))
    return {child.pid for child in children if child is not None and not child.alive}


def _do_nothing(signum: int, frame: object) -> None:
    """The minder reads the signal from its pipe."""


_before_fork = threading.local()


def _block_term() -> None:
    """Before a handler forks. A SIGTERM that reached the new process before `_reset_signals` would be lost there and
    stop this process instead."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _restore_signal_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _reset_signals() -> None:
    """In a process that a handler forked: SIGTERM ends it, as usual."""
    signal.set_wakeup_fd(-1)
    # Only the main thread may set a handler; the thread that forked is the main thread of the new process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _restore_signal_mask()
