"""Zombies that this process adopted as a subreaper: daemons that a handler left behind and that have ended.

They must be reaped, but never one that a handler may still wait for (its `subprocess.run` would lose the exit status).
The kernel does not tell adopted children from own ones, so only a zombie that was already there when no job was running
one look ago, and still is, is reaped: nobody waits for it. The programs of exec handlers are waited for by their own.

The second thread of a queue's child: it minds what the workers cannot while they run handlers or block.

1. The leash: what the supervisor says about capacity goes to the worker it concerns; when the supervisor dies,
   everything below this process is killed, then the process itself.
2. SIGTERM: the workers are told to stop; one that is blocked in Redis is unblocked.
3. The process title and the beat in the scoreboard, once a second while something runs. It sleeps while nothing does.
"""

import _thread
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import orjson
from setproctitle import setproctitle

from forq import exits
from forq.broker.link import Link
from forq.errors import ForqError
from forq.procs.backoff import Backoff
from forq.procs.lines import LineBuffer
from forq.procs.scoreboard import Slot, State
from forq.procs.treekill import children_of, kill_descendants, read_stat
from forq.progress import show_progress
from forq.workers.exec_handlers import running_programs
from forq.workers.grant import Grant
from forq.workers.recycling import Recycling

log = logging.getLogger("forq")


class ZombieReaper:
    def __init__(self) -> None:
        self._seen: set[int] = set()

    def reap(self, *, idle: bool) -> None:
        """Call now and then; `idle` says that no handler is running."""
        if not idle:
            self._seen.clear()
            return
        zombies = _find_zombies() - running_programs()
        for pid in zombies & self._seen:
            with suppress(ChildProcessError):  # a thread of the handler's was quicker
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies - self._seen


def _find_zombies() -> set[int]:
    """Ended children, left as they are; waitid shows only one of them, so the others are found in /proc."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:
        return set()
    children = (read_stat(pid) for pid in children_of(os.getpid()))
    return {child.pid for child in children if child is not None and not child.alive}


BEAT_SECONDS = 1.0
# Soon the first time; then less and less often, for if it takes so long, thousands may be stopping at the same time.
UNBLOCK_FIRST_SECONDS = 0.05
UNBLOCK_LONGEST_SECONDS = 1.0
UNBLOCK_TIMEOUT_SECONDS = 0.2
# The title and the beat go on for so many beats after the last job, then the thread sleeps until it is roused.
IDLE_BEATS = 2
# Titles that tell nothing of jobs: every user of the machine can read them.
PLAIN = "plain"

# Plain numbers and texts: an enum's own are found by calls.
_STATE_NAMES = {int(state): state.name.lower() for state in State}


class MindedLoop(Protocol):
    """A worker, as its minder knows it. `doing`: what the title says of it, if it has its own words."""

    @property
    def slot(self) -> Slot: ...

    @property
    def stopping(self) -> bool: ...

    def stop(self) -> None: ...

    def blocked_client_id(self) -> int | None: ...

    def title_text(self) -> str | None: ...


class Minder:
    def __init__(self, *, name: str, url: str, base: str, leash: socket.socket, titles: str = "full") -> None:
        self._name = name
        self._url = url
        self._base = base
        self._loops: Sequence[MindedLoop] = ()
        self._stop_requested = False
        # Released when it may begin. An Event has more to it, in each of many processes.
        self._begin_lock = _thread.allocate_lock()
        self._begin_lock.acquire()
        self._unblocking = Backoff(UNBLOCK_FIRST_SECONDS, UNBLOCK_LONGEST_SECONDS)
        self._leash = leash
        self._titles = titles
        self._lines = LineBuffer()
        self._grants: dict[int, Grant] = {}
        self._recycling: Recycling | None = None
        self._signals_fd, self._signals_to = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = False
        self._idle_beats = 0
        self._zombies = ZombieReaper()
        self._thread = 0

    def start(self) -> None:
        """From the main thread: installs the signal handler and starts the thread."""
        os.register_at_fork(before=_block_term, after_in_parent=_restore_signal_mask, after_in_child=_reset_signals)
        signal.set_wakeup_fd(self._signals_to, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _do_nothing)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Not a threading.Thread: nobody joins it, and the objects around one are pages in each of many processes.
        _thread.start_new_thread(self._run, ())

    def watch(self, loops: Sequence[MindedLoop], grants: dict[int, Grant], recycling: Recycling) -> None:
        """These are the workers from now on; a TERM that came before them reaches them now."""
        self._grants = grants
        self._recycling = recycling
        for loop in loops:
            # From now on it answers pings.
            loop.slot.minder = self._thread
        self._loops = loops
        if self._stop_requested:
            self._stop()

    def wait_to_begin(self) -> bool:
        """From the main thread, before there are workers. False: it is to end instead."""
        self._begin_lock.acquire()
        return not self._stop_requested

    def _allow_begin(self) -> None:
        if self._begin_lock.locked():
            self._begin_lock.release()

    def wake(self) -> None:
        """From a worker that begins to run jobs; costs nothing while the minder is awake."""
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)

    def update_title(self) -> None:
        setproctitle(self.title())

    def title(self) -> str:
        own_words = self._loops[0].title_text()
        if own_words is not None:
            return f"forq: {self._name} {own_words}"
        slots = [loop.slot for loop in self._loops]
        busy = [slot for slot in slots if slot.state == State.BUSY]
        done = sum(slot.done for slot in slots)
        if len(slots) > 1:
            doing = f"{len(busy)}/{len(slots)} busy"
        elif busy:
            age = (time.monotonic_ns() - busy[0].started_ns) / 1e9
            if self._titles == PLAIN:
                doing = f"busy {age:.1f}s"
            else:
                doing = f"busy {busy[0].job.decode(errors='replace')} {age:.1f}s"
                if (progress := busy[0].progress()) is not None:
                    doing += f" {show_progress(*progress)},"
        else:
            doing = _STATE_NAMES[slots[0].state]
        return f"forq: {self._name} {doing} {done:,} done"

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
                self._beat()
            except Exception:  # out of descriptors, say: without this thread nothing could stop the process any more
                log.exception("minder failed name=%s", self._name)

    def _handle_event(self, fd: int) -> None:
        if fd == self._leash.fileno():
            self._read_leash()
        elif fd == self._signals_fd and signal.SIGTERM in os.read(fd, 512):
            self._stop()
        elif fd == self._wake_fd:
            os.eventfd_read(fd)
            self._idle_beats = 0

    def _poll_timeout_ms(self) -> float | None:
        if self._stopping:
            return self._unblocking.pause_after(1 + self._unblocking.failures) * 1000
        return None if self._asleep else BEAT_SECONDS * 1000

    @property
    def _stopping(self) -> bool:
        return bool(self._loops) and self._loops[0].stopping

    def _read_leash(self) -> None:
        """One line per worker that is spoken to: {"go" | "wait" | "yield": number of its slot}; or `begin` to all of
        them. The beat that follows answers a ping."""
        try:
            received = self._leash.recv(4096)
        except OSError:
            received = b""
        if not received:
            self._exit_with_supervisor()
        self._lines.push(received)
        while (line := self._lines.pop()) is not None:
            ((word, number),) = orjson.loads(line).items()
            if word == "begin":
                self._allow_begin()
            elif word != "ping":
                self._grants[number].receive(word)

    def _exit_with_supervisor(self) -> None:
        kill_descendants(os.getpid())
        os._exit(exits.FAILED)

    def _stop(self) -> None:
        self._stop_requested = True
        self._allow_begin()
        for loop in self._loops:
            loop.stop()

    def _beat(self) -> None:
        if not self._loops:
            return
        now = time.monotonic_ns()
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
        self._asleep = self._idle_beats > IDLE_BEATS
        if self._asleep and any(loop.slot.state == State.BUSY for loop in self._loops):
            self._asleep = False

    def _unblock(self) -> None:
        """A worker may be about to block at this moment, so this is repeated until none is blocked."""
        blocked = [number for loop in self._loops if (number := loop.blocked_client_id()) is not None]
        if not blocked:
            return
        self._unblocking.fail()
        # The supervisor takes a minder that does not answer for half a second for one whose interpreter is stuck.
        link = Link(self._url, name="forq-minder", timeout_seconds=UNBLOCK_TIMEOUT_SECONDS)
        try:
            for client_id in blocked:
                link.call("CLIENT", "UNBLOCK", client_id, at=self._base)
        except ForqError as exc:
            log.warning("cannot unblock a worker name=%s error=%s", self._name, exc)
        finally:
            link.close()


def _do_nothing(signum: int, frame: object) -> None:
    """The minder reads the signal from its pipe."""


_before_fork = threading.local()


def _block_term() -> None:
    """A TERM that reaches a forked process before it has forgotten our handler would be swallowed by it, and taken by
    this minder for its own: it has to wait until then."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _restore_signal_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _reset_signals() -> None:
    """In a process that a handler forks: TERM ends it as it ends any other."""
    signal.set_wakeup_fd(-1)
    # Only the main thread may set a handler, which the thread that forked is now.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _restore_signal_mask()
