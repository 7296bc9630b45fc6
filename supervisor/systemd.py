"""The interface to systemd. Never blocks, and does nothing without systemd.

1. Takes systemd's variables out of the environment before any process is started, and the control socket if systemd
   listens there.
2. Sends readiness, state and a status line as datagrams to NOTIFY_SOCKET.
3. Feeds the watchdog from passes of the loop only: a loop that hangs in a callback must not look alive.
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
# FileDescriptorName= in forq.socket.
CONTROL_NAME = "control"
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# Intervals of the status line while the loop is busy and while it is idle.
STATUS_SECONDS = 2.0
IDLE_STATUS_SECONDS = 5.0
# Delay before a datagram that could not be sent is sent again.
RETRY_SECONDS = 0.2

log = logging.getLogger("forq")


@dataclass(frozen=True)
class SystemdInput:
    """Variables and sockets from systemd. `fds`: listening sockets, as (descriptor, name)."""

    notify_socket: str | None
    watchdog_seconds: float | None
    fds: tuple[tuple[int, str], ...]


class NotifySource(Protocol):
    """The parts of the supervisor that systemd is notified about."""

    @property
    def ready(self) -> bool: ...

    @property
    def stopping(self) -> bool: ...

    def stop_seconds(self) -> float: ...

    def summary(self) -> str: ...


def take(environ: MutableMapping[str, str], pid: int) -> SystemdInput:
    """Takes systemd's variables out of the environment. Ignores those that name another pid."""
    given = {name: environ.pop(name, "") for name in VARIABLES}
    for_us = given["LISTEN_PID"] == str(pid)
    usec = _number("WATCHDOG_USEC", given["WATCHDOG_USEC"]) if given["WATCHDOG_PID"] in ("", str(pid)) else 0
    return SystemdInput(
        notify_socket=given["NOTIFY_SOCKET"] or None,
        watchdog_seconds=usec / 1e6 if usec else None,
        fds=_fds(_number("LISTEN_FDS", given["LISTEN_FDS"]), given["LISTEN_FDNAMES"]) if for_us else (),
    )


def control_listener(systemd_input: SystemdInput) -> socket.socket | None:
    """The control socket, if systemd passed it: the socket named CONTROL_NAME, or the only one."""
    named = [fd for fd, name in systemd_input.fds if name == CONTROL_NAME]
    wanted = named or [fd for fd, _ in systemd_input.fds]
    if not wanted:
        return None
    if len(wanted) > 1:
        raise ConfigError(
            f"systemd passed {len(wanted)} sockets, but forq takes one: name it with FileDescriptorName={CONTROL_NAME}"
        )
    try:
        listener = socket.socket(fileno=wanted[0])
    except OSError as exc:
        raise ConfigError(f"systemd passed descriptor {wanted[0]}, which is not a socket: {exc.strerror}") from exc
    path = listener.getsockname() if listener.family == socket.AF_UNIX else ""
    listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    # An abstract address (bytes) has no file mode to restrict access.
    if listener.type != socket.SOCK_STREAM or not listening or not isinstance(path, str) or not path.startswith("/"):
        raise ConfigError("the socket that systemd passed cannot be used: ListenStream= must be the path of a socket")
    listener.setblocking(False)
    listener.set_inheritable(False)
    return listener


class Notifier:
    """Sends state, status line and watchdog signals to systemd after each pass of the loop."""

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
        # Variables to send; a later value replaces one that could not be sent.
        self._unsent: dict[str, str] = {}
        self._sent_ready = self._sent_stopping = False
        self._sent_summary = ""
        self._next_feed = self._next_status = now()
        self._failure_logged = False

    def after_pass(self) -> float | None:
        """Call after every full pass of the loop. Returns the seconds within which the next pass must end."""
        if self._address is None:
            return None
        now = self._now()
        if self._feed_seconds is not None and now >= self._next_feed:
            self._unsent["WATCHDOG"] = "1"
            self._next_feed = now + self._feed_seconds
        self._note_state()
        if now >= self._next_status:
            self._note_summary()
            self._next_status = now + STATUS_SECONDS
        if self._unsent and not self._send(self._address):
            return RETRY_SECONDS
        return IDLE_STATUS_SECONDS if self._feed_seconds is None else min(IDLE_STATUS_SECONDS, self._next_feed - now)

    def _note_state(self) -> None:
        """A change of state is sent at once, with a new status line."""
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
            # systemd is busy or restarting: _unsent is kept until it receives again.
            if not self._failure_logged and not isinstance(exc, BlockingIOError):
                log.warning("cannot notify systemd; retrying socket=%r error=%s", address, exc)
                self._failure_logged = True
            return False
        self._unsent.clear()
        self._failure_logged = False
        return True


def _address(notify_socket: str | None) -> str | None:
    if not notify_socket:
        return None
    if notify_socket[0] not in "/@":
        log.warning("not notifying systemd: unsupported NOTIFY_SOCKET=%r", notify_socket)
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
