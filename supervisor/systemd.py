"""What systemd and the supervisor tell each other.

1. Down: variables in the environment, and the control socket if systemd listens there. They are meant for this process
   alone, so they are taken out of the environment before anything is started.
2. Up: datagrams to NOTIFY_SOCKET with readiness, state and a line for `systemctl status`.
3. The watchdog is fed by passes of the loop and by nothing else: a loop that hangs in a callback must not look alive.

Nothing here waits, and without systemd nothing here does anything.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Protocol

from forq.errors import ConfigError

FIRST_FD = 3
# What FileDescriptorName= of forq.socket says.
CONTROL_NAME = "control"
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# How often the status line is made anew while the loop has much to do, and while it has nothing to do.
LOOK_SECONDS = 2.0
IDLE_LOOK_SECONDS = 5.0
# When a datagram could not be sent.
AGAIN_SECONDS = 0.2

log = logging.getLogger("forq")


@dataclass(frozen=True)
class SystemdInput:
    """What systemd gave this process: `fds` are its listening sockets, as (descriptor, name)."""

    notify_socket: str | None
    watchdog_seconds: float | None
    fds: tuple[tuple[int, str], ...]


class NotifySource(Protocol):
    """What is told of: the supervisor."""

    @property
    def ready(self) -> bool: ...

    @property
    def stopping(self) -> bool: ...

    def stop_seconds(self) -> float:
        """How long its stop may take."""
        ...

    def summary(self) -> str:
        """One line for people."""
        ...


def take(environ: MutableMapping[str, str], pid: int) -> SystemdInput:
    """Takes systemd's variables out of the environment. Those that name another process are not for us."""
    given = {name: environ.pop(name, "") for name in VARIABLES}
    for_us = given["LISTEN_PID"] == str(pid)
    usec = _number("WATCHDOG_USEC", given["WATCHDOG_USEC"]) if given["WATCHDOG_PID"] in ("", str(pid)) else 0
    return SystemdInput(
        notify_socket=given["NOTIFY_SOCKET"] or None,
        watchdog_seconds=usec / 1e6 if usec else None,
        fds=_fds(_number("LISTEN_FDS", given["LISTEN_FDS"]), given["LISTEN_FDNAMES"]) if for_us else (),
    )


def control_listener(systemd_input: SystemdInput) -> socket.socket | None:
    """The listening socket for control, if systemd has one for us: the one of that name, or the only one."""
    named = [fd for fd, name in systemd_input.fds if name == CONTROL_NAME]
    wanted = named or [fd for fd, _ in systemd_input.fds]
    if not wanted:
        return None
    if len(wanted) > 1:
        raise ConfigError(
            f"systemd passed {len(wanted)} sockets, and forq takes one: name it with FileDescriptorName={CONTROL_NAME}"
        )
    try:
        listener = socket.socket(fileno=wanted[0])
    except OSError as exc:
        raise ConfigError(f"systemd passed descriptor {wanted[0]}, which is no socket: {exc.strerror}") from exc
    path = listener.getsockname() if listener.family == socket.AF_UNIX else ""
    listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    # An abstract address (bytes) has no file whose mode could keep others out.
    if listener.type != socket.SOCK_STREAM or not listening or not isinstance(path, str) or not path.startswith("/"):
        raise ConfigError("the socket that systemd passed cannot be used: ListenStream= must be the path of a socket")
    listener.setblocking(False)
    listener.set_inheritable(False)
    return listener


class Notifier:
    def __init__(
        self, systemd_input: SystemdInput, subject: NotifySource, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = _address(systemd_input.notify_socket)
        self._feed_seconds = (
            systemd_input.watchdog_seconds / 2 if systemd_input.watchdog_seconds and self._address else None
        )
        self._subject = subject
        self._now = now
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # What systemd has yet to be told; a later value replaces one that could not be sent.
        self._unsent: dict[str, str] = {}
        self._sent_ready = self._sent_stopping = False
        self._sent_summary = ""
        self._next_feed = self._next_look = now()
        self._complained = False

    def after_pass(self) -> float | None:
        """To be called after every full pass of the loop, which is what feeds the watchdog. Returns in how many seconds
        at most the next pass has to be over."""
        if self._address is None:
            return None
        now = self._now()
        if self._feed_seconds is not None and now >= self._next_feed:
            self._unsent["WATCHDOG"] = "1"
            self._next_feed = now + self._feed_seconds
        self._note_state()
        if now >= self._next_look:
            self._note_summary()
            self._next_look = now + LOOK_SECONDS
        if self._unsent and not self._send(self._address):
            return AGAIN_SECONDS
        return IDLE_LOOK_SECONDS if self._feed_seconds is None else min(IDLE_LOOK_SECONDS, self._next_feed - now)

    def _note_state(self) -> None:
        """A change of state is told with its own line, at once."""
        if self._subject.stopping and not self._sent_stopping:
            self._sent_stopping = True
            # A queue's stop_grace may be longer than the unit's TimeoutStopSec.
            extend_usec = round(self._subject.stop_seconds() * 1e6)
            self._unsent |= {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": str(extend_usec)}
        elif not self._sent_ready and not self._sent_stopping and self._subject.ready:
            self._sent_ready = True
            self._unsent["READY"] = "1"
        else:
            return
        self._note_summary()

    def _note_summary(self) -> None:
        summary = " ".join(self._subject.summary().split())
        if summary != self._sent_summary:
            self._sent_summary = self._unsent["STATUS"] = summary

    def _send(self, address: str) -> bool:
        datagram = "\n".join(f"{name}={value}" for name, value in self._unsent.items())
        try:
            self._socket.sendto(datagram.encode("utf-8", "replace"), address)
        except OSError as exc:
            # systemd is busy, or is being replaced: what is to be told is kept until it hears again.
            if not self._complained and not isinstance(exc, BlockingIOError):
                log.warning("cannot tell systemd socket=%r error=%s", address, exc)
                self._complained = True
            return False
        self._unsent.clear()
        self._complained = False
        return True


def _address(notify_socket: str | None) -> str | None:
    if not notify_socket:
        return None
    if notify_socket[0] not in "/@":
        log.warning("systemd's socket is of a kind that forq does not know NOTIFY_SOCKET=%r", notify_socket)
        return None
    return "\0" + notify_socket[1:] if notify_socket[0] == "@" else notify_socket


def _number(name: str, value: str) -> int:
    if value and not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{name}={value!r} in the environment is not a number")
    return int(value or 0)


def _fds(count: int, names: str) -> tuple[tuple[int, str], ...]:
    given = names.split(":") if names else []
    for fd in range(FIRST_FD, FIRST_FD + count):
        try:
            os.set_inheritable(fd, False)
        except OSError as exc:
            raise ConfigError(f"LISTEN_FDS={count}, but descriptor {fd} is not open: {exc.strerror}") from exc
    return tuple((FIRST_FD + at, given[at] if at < len(given) else "") for at in range(count))
