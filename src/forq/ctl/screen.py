"""forqctl top on a terminal.

1. NonBlockingClient requests the status once per interval; each answer updates the pages.
2. Terminal reads keys and signals.
3. Screen handles both and redraws; an unchanged screen is not written.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from forq.ctl.client import ControlClient, connect
from forq.ctl.output import printable, short_duration
from forq.ctl.pages import OverviewPage, QueuePage
from forq.ctl.top import QueueRow, QueueStats
from forq.errors import ForqError, PermissionRefused, SupervisorUnreachable, TimedOut

if TYPE_CHECKING:
    from argparse import Namespace

ENTER = b"\x1b[?1049h\x1b[?25l\x1b[2J"
LEAVE = b"\x1b[?25h\x1b[?1049l"
# The bytes of one key arrive within this time, even over a slow line.
ESCAPE_SECONDS = 0.05
SIGNALS = (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT)
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
DEFAULT_SIZE = os.terminal_size((80, 24))
_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page_up",
    b"\x1b[6~": "page_down",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1bOH": "home",
    b"\x1b[F": "end",
    b"\x1b[4~": "end",
    b"\x1bOF": "end",
}
_SINGLE_BYTES = {b"\r": "enter", b"\n": "enter", b"k": "up", b"j": "down", b"g": "home", b"G": "end"}
RECONNECT_SECONDS = 0.5
Callback = Callable[[Any], None]
# An answer later than this is reported on the screen.
LATE_SECONDS = 2.0
QUEUE_KEYS = {"p": ("queue.pause", "paused"), "r": ("queue.resume", "resumed")}


def run_screen(args: Namespace) -> int:
    client = NonBlockingClient(lambda: connect(args))
    try:
        with Terminal() as terminal:
            return Screen(client, args.interval_seconds).run(terminal)
    finally:
        client.close()


class Screen:
    def __init__(self, client: NonBlockingClient, interval_seconds: float) -> None:
        self._client = client
        self._interval_seconds = interval_seconds
        self._stats = QueueStats()
        self._overview = OverviewPage()
        self._queue: QueuePage | None = None
        self._status: dict[str, Any] | None = None
        self._rows: list[QueueRow] = []
        self._message = ""
        self._next_request = 0.0
        self._requested_at: float | None = None
        self._console = Console(highlight=False, markup=False, emoji=False, width=10_000)
        self._finished = False

    def run(self, terminal: Terminal) -> int:
        while not self._finished:
            self.tick(time.monotonic())
            size = terminal.size()
            terminal.draw([self._render(line) for line in self.lines(size.columns, size.lines)])
            events = terminal.wait(self._client.fileno(), self._wait_seconds(time.monotonic()))
            if events.readable:
                self._client.read()
            for key in events.keys:
                self.press(key)
            if events.hung_up or any(number in EXIT_SIGNALS for number in events.signals):
                return 128 + next((number for number in events.signals if number in EXIT_SIGNALS), signal.SIGHUP)
            if signal.SIGTSTP in events.signals:
                terminal.suspend()
        return 0

    def tick(self, now: float) -> None:
        if self._client.open(now) and now >= self._next_request and self._requested_at is None:
            self._next_request = max(self._next_request + self._interval_seconds, now)
            if self._client.request("status", {}, self._on_status):
                self._requested_at = now
            if self._queue is not None:
                self._queue.request(self._client)

    def press(self, key: str) -> None:
        self._message = "" if key else self._message
        if key in QUEUE_KEYS:
            self._send_command(*QUEUE_KEYS[key])
        elif key in ("q", "escape"):
            self._finished, self._queue = self._queue is None, None
        elif self._queue is not None:
            self._queue.press(key)
        elif key == "enter" and self._overview.selected is not None:
            self._queue = QueuePage(self._overview.selected)
            self._queue.update(self._rows)
            self._queue.request(self._client)
        else:
            self._overview.press(key)

    def lines(self, width: int, height: int) -> list[Text]:
        """All lines of the screen: the page, a message line, the help line."""
        page = self._queue or self._overview
        room = max(1, height - 2)
        body = [Text("waiting for the supervisor …")] if self._status is None else page.lines(self._status, width, room)
        message = self._message_line(page, time.monotonic())
        blank = [Text("")] * (room - len(body))
        lines = [*body[:room], *blank, message, Text(page.help(), style="dim")][:height]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines

    def _message_line(self, page: OverviewPage | QueuePage, now: float) -> Text:
        if self._client.error is not None:
            return Text(f"unreachable, retrying: {printable(self._client.error)}", style="bold red")
        if self._requested_at is not None and now - self._requested_at > LATE_SECONDS:
            return Text(
                f"no answer from the supervisor for {short_duration(now - self._requested_at)}", style="bold yellow"
            )
        return Text(self._message or page.reason() or "", style="bold")

    def _send_command(self, method: str, done: str) -> None:
        name = self._queue.name if self._queue is not None else self._overview.selected
        if name is None:
            return

        def answered(answer: Any) -> None:
            refused = isinstance(answer, ForqError)
            self._message = printable(f"{name}: {answer}" if refused else f"{done} {name}")

        if not self._client.request(method, {"name": name}, answered):
            self._message = "no connection to the supervisor"

    def _on_status(self, status: Any) -> None:
        self._requested_at = None
        if isinstance(status, ForqError):
            self._message = "" if self._client.error else printable(str(status))
            return
        self._status = status
        self._rows = self._stats.read(status, time.monotonic())
        self._overview.update(self._rows)
        if self._queue is not None:
            self._queue.update(self._rows)

    def _wait_seconds(self, now: float) -> float:
        if self._client.fileno() is None:
            return RECONNECT_SECONDS
        # The age of a late answer is shown, so redraw.
        return max(0.0, self._next_request - now) if self._requested_at is None else LATE_SECONDS / 2

    def _render(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="ignore", crop=False)
        return captured.get()


class NonBlockingClient:
    """Sends requests without waiting for answers, and reconnects when the connection breaks. Each request has a
    callback for its answer, which gets an error if the connection breaks first. `error`: why there is no
    connection, or None."""

    def __init__(self, connect: Callable[[], ControlClient]) -> None:
        self.error: str | None = None
        self._connect = connect
        self._client: ControlClient | None = None
        self._pending: dict[int, Callback] = {}
        self._next_attempt = 0.0

    def fileno(self) -> int | None:
        return None if self._client is None else self._client.fileno()

    def open(self, now: float) -> bool:
        """Whether there is a connection. Tries to connect at most once per RECONNECT_SECONDS."""
        if self._client is None and now >= self._next_attempt:
            self._next_attempt = now + RECONNECT_SECONDS
            try:
                self._client = self._connect()
            except (SupervisorUnreachable, TimedOut) as exc:
                self.error = str(exc)
        return self._client is not None

    def request(self, method: str, params: dict[str, Any], callback: Callback) -> bool:
        """`callback` gets the result or the error. False if there is no connection."""
        if self._client is None:
            return False
        try:
            self._pending[self._client.send(method, params)] = callback
        except TimedOut as exc:
            self._disconnect(exc)
            return False
        return True

    def read(self) -> None:
        """Calls the callbacks of the answers that have arrived."""
        while self._client is not None:
            try:
                answered, value = self._client.receive(time.monotonic())
            except TimedOut:
                return
            except PermissionRefused:
                raise
            except ForqError as exc:
                self._disconnect(exc)
                return
            self.error = None
            callback = self._pending.pop(answered, None) if isinstance(answered, int) else None
            if callback is not None:
                callback(value)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _disconnect(self, why: ForqError) -> None:
        self.error = str(why)
        self.close()
        unanswered, self._pending = list(self._pending.values()), {}
        for callback in unanswered:
            callback(why)


class Events(NamedTuple):
    keys: list[str]
    signals: list[int]
    readable: bool
    hung_up: bool


class Terminal:
    """The terminal in full-screen mode; restored at the end. Signal numbers arrive through a pipe, like keys."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._keys = KeyDecoder()
        self._drawn = b""

    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(self._in)
        self._signal_reader, self._signal_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_fd = signal.set_wakeup_fd(self._signal_writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda signum, frame: None) for number in SIGNALS}
        self._acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._release()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._signal_reader)
        os.close(self._signal_writer)

    def size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            return DEFAULT_SIZE
        # Some terminals report a size of 0.
        return size if size.columns and size.lines else DEFAULT_SIZE

    def draw(self, lines: list[str]) -> None:
        """Writes the whole screen, unless it is unchanged."""
        shown = b"\x1b[H" + b"\r\n".join(line.encode("utf-8", "replace") + b"\x1b[K" for line in lines) + b"\x1b[J"
        if shown != self._drawn:
            self._drawn = shown
            self._write(shown)

    def wait(self, fd: int | None, seconds: float) -> Events:
        """Waits for a key, a signal, input at `fd`, or the timeout."""
        until = time.monotonic() + max(0.0, seconds)
        watched = [self._in, self._signal_reader, *([] if fd is None else [fd])]
        patience = ESCAPE_SECONDS if self._keys.incomplete else max(0.0, until - time.monotonic())
        ready = select.select(watched, [], [], patience)[0]
        keys, hung_up = self._read_keys(self._in in ready)
        signals = list(os.read(self._signal_reader, 256)) if self._signal_reader in ready else []
        if signal.SIGWINCH in signals or signal.SIGCONT in signals:
            self._drawn = b""
        return Events(keys, signals, fd is not None and fd in ready, hung_up)

    def suspend(self) -> None:
        """Ctrl-Z: restores the terminal and stops until SIGCONT."""
        self._release()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._acquire()

    def _read_keys(self, ready: bool) -> tuple[list[str], bool]:
        if not ready:
            return self._keys.flush(), False
        try:
            data = os.read(self._in, 1024)
        except OSError:
            return [], True
        return self._keys.feed(data), not data

    def _acquire(self) -> None:
        tty.setcbreak(self._in)
        self._drawn = b""
        self._write(ENTER)

    def _release(self) -> None:
        try:
            self._write(LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)
        except (OSError, termios.error) as exc:
            # There is no terminal left to restore.
            sys.stderr.write(f"forqctl: the terminal is gone: {exc}\n")

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._out, data) :]


class KeyDecoder:
    """Decodes keys from terminal input. Escape may be a key or the start of a sequence, so incomplete input is kept
    until more arrives or `flush` is called."""

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def incomplete(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[str]:
        """The decoded keys; an unknown key is ""."""
        self._buffer += data
        keys = []
        while self._buffer:
            length = _key_length(self._buffer)
            if length is None:
                break
            piece, self._buffer = self._buffer[:length], self._buffer[length:]
            keys.append(_key_name(piece))
        return keys

    def flush(self) -> list[str]:
        alone, self._buffer = self._buffer == b"\x1b", b""
        return ["escape"] if alone else []


def _key_length(data: bytes) -> int | None:
    """The number of bytes of the first key; None if more input is needed."""
    if data[:1] != b"\x1b":
        return 1
    if len(data) == 1:
        return None
    if data[1:2] == b"O":
        return 3 if len(data) >= 3 else None
    if data[1:2] != b"[":
        # Escape, followed by another key.
        return 1
    for position in range(2, len(data)):
        if 0x40 <= data[position] <= 0x7E:
            return position + 1
    return None


def _key_name(piece: bytes) -> str:
    if piece == b"\x1b":
        return "escape"
    if len(piece) == 1:
        return _SINGLE_BYTES.get(piece) or piece.decode("ascii", "ignore")
    return _SEQUENCES.get(piece, "")
