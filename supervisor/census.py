"""Reads the definitions of an app in a child process (workers/census.py), because the supervisor imports no user code.

The child has a session, a process tree and a control group of its own. Of the supervisor's descriptors it inherits the
tree lock, a file for stack dumps, and a private socket for one line of JSON.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import orjson

from forq.app_spec import AppSpec, Definitions, QueueOverride, check_definitions
from forq.errors import CannotImport, ForqError, InvalidData
from forq.procs.loop import Timer
from forq.procs.stacks import STACK_FILE, stack_of_import
from forq.supervisor.child import Child, ChildTable, Exit
from forq.supervisor.stacks import Stacks
from forq.values import shown

log = logging.getLogger("forq")

CENSUS_SECONDS = 60.0
MAX_LINE_BYTES = 4 * 1024 * 1024
# The definitions are checked for this long in each pass of the loop.
SLICE_SECONDS = 0.005
MAX_REASON = 4000
MAX_TRACEBACK = 6000
MAX_FILES = 10_000
# How long the child may take to exit after its report.
EXIT_SECONDS = 1.0
_REPORT_KEYS = ("definitions", "hash", "files", "error", "traceback")


@dataclass(frozen=True)
class CensusResult:
    """`definitions`, or the `error` why there are none. `files`: of the modules that the app has imported."""

    definitions: Definitions | None
    error: CannotImport | None
    files: frozenset[str]


class Census:
    """One reading of an app.

    1. Forks the child. After `seconds`, kills it with its whole tree; the error then shows where its import hangs.
    2. Takes the first line of the child as its report. The end of the child, and its exit code, mean nothing after
       that.
    3. Checks the report in slices and calls `done` once, when the tree of the child is gone.

    The constructor raises OSError if the system is out of processes or descriptors.
    """

    def __init__(
        self,
        children: ChildTable,
        app: AppSpec,
        overrides: Mapping[str, QueueOverride],
        main: Callable[[AppSpec, int], Callable[[socket.socket], int]],
        tree_lock_fd: int,
        done: Callable[[CensusResult], None],
        *,
        seconds: float = CENSUS_SECONDS,
    ) -> None:
        self.app = app
        self._overrides = overrides
        self._loop = children.loop
        self._seconds = seconds
        self._done = done
        self._line: bytes | None = None
        self._failure: CannotImport | None = None
        self._files: frozenset[str] = frozenset()
        stack_fd = os.memfd_create(STACK_FILE, os.MFD_CLOEXEC)
        try:
            self._child = Child(
                children,
                f"app {app.output_name} reading",
                main(app, stack_fd),
                runs_user_code=True,
                only_fds=(tree_lock_fd, stack_fd),
                max_line_bytes=MAX_LINE_BYTES,
                on_line=self._on_line,
                on_invalid=self._on_invalid,
                on_end=self._on_end,
            )
        finally:
            os.close(stack_fd)
        self._stacks = Stacks(self._loop, self._child)
        self._stacks.fd = stack_fd
        self._timer: Timer | None = self._loop.call_later(seconds, self._timed_out)

    @property
    def pid(self) -> int:
        return self._child.pid

    def cancel(self, reason: str) -> None:
        """Kills the child; `done` gets an error."""
        self._fail(reason)
        self._child.kill()

    def _fail(self, reason: str, traceback: str | None = None) -> None:
        """The first failure counts."""
        if self._failure is None and self._line is None:
            self._failure = CannotImport(f"app {self.app.label!r} cannot be read: {reason}"[:MAX_REASON], traceback)

    def _on_line(self, line: bytes) -> None:
        if self._line is None and self._failure is None:
            self._line = line
            self._stop_timer()
            self._timer = self._loop.call_later(EXIT_SECONDS, self._child.kill)

    def _on_invalid(self, cause: str) -> None:
        if cause == "leash_closed":
            self._fail("its import closed a descriptor of forq")
        else:
            self._fail(f"its import wrote more than {MAX_LINE_BYTES} bytes to a descriptor of forq")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _timed_out(self) -> None:
        self._stop_timer()

        def dumped(dump: str) -> None:
            stack = stack_of_import(dump)
            trace = f"Stack (most recent call first):\n{stack}" if stack else None
            killed = f"its import took longer than {self._seconds:g} s; process {self.pid} was killed"
            self._fail(killed, trace)
            self._child.kill()

        self._stacks.take(dumped)

    def _on_end(self, end: Exit) -> None:
        self._stop_timer()
        if self._line is None:
            self._fail(
                f"its process ended with {end.text} before it reported anything; "
                "a module must not exit or daemonize when it is imported"
            )
            self._finish(None)
            return
        try:
            self._check_report(self._line)
        except (InvalidData, ValueError) as exc:
            self._line = None
            self._fail(f"invalid report of its process: {exc}")
            self._finish(None)

    def _check_report(self, line: bytes) -> None:
        """Raises InvalidData or ValueError if it does not have the form that workers/census.py writes."""
        report = orjson.loads(line)
        if not isinstance(report, dict):
            raise InvalidData("not a JSON object")
        if unknown := [key for key in report if key not in _REPORT_KEYS]:
            raise InvalidData(f"unknown key {shown(unknown[0])}")
        files = report.get("files")
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise InvalidData("`files` is not a list of paths")
        self._files = frozenset(files[:MAX_FILES])
        if "error" not in report:
            self._check_slice(
                check_definitions(self.app, report.get("definitions"), report.get("hash"), self._overrides)
            )
            return
        error, trace = report["error"], report.get("traceback")
        if not isinstance(error, str) or not isinstance(trace, str | None):
            raise InvalidData("`error` and `traceback` must be text")
        self._failure = CannotImport(error[:MAX_REASON], None if trace is None else trace[-MAX_TRACEBACK:])
        self._finish(None)

    def _check_slice(self, steps: Generator[None, None, Definitions]) -> None:
        until = time.monotonic() + SLICE_SECONDS
        try:
            while time.monotonic() < until:
                next(steps)
        except StopIteration as end:
            self._finish(end.value)
        except ForqError as exc:
            self._failure = CannotImport(str(exc)[:MAX_REASON])
            self._finish(None)
        else:
            self._loop.call_later(0.0, lambda: self._check_slice(steps))

    def _finish(self, definitions: Definitions | None) -> None:
        self._done(CensusResult(definitions, None if definitions else self._failure, self._files))
