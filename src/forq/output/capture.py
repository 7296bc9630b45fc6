"""The output of a queue's process: right after the fork the FIFO becomes descriptor 1 and 2, and sys.stdout, sys.stderr
and the root logger write lines that name their job. In a process where that was not done the functions here do nothing.
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence

from forq.output.pipe import open_pipe
from forq.output.streams import LineWriter, RootHandler
from forq.output.writer import CURRENT_JOB, Output
from forq.procs.scoreboard import Slot

log = logging.getLogger("forq")

_LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}

_installed: Output | None = None
# Made before the fork: to make these writes to many pages that a process could go on to share.
_prepared = Output()
_stdout = LineWriter(_prepared, "stdout", 1)
_stderr = LineWriter(_prepared, "stderr", 2)
_root_handler = RootHandler(_prepared)
# What was there before is kept: to drop it would write to its pages.
_replaced: list[object] = []


def install(directory: str, slots: Sequence[Slot], level: str) -> None:
    """From now on all output of this process goes to the FIFO in this directory. Raises ForqError if it cannot."""
    global _installed
    fd = open_pipe(directory)
    blocking = open_pipe(directory, blocking=True)
    for number in (1, 2):
        os.dup2(blocking, number)
    os.close(blocking)
    _prepared.begin(fd, slots)
    _installed = _prepared
    _replaced.extend((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, logging.root.handlers))
    sys.stdout = sys.__stdout__ = _stdout  # type: ignore[assignment,misc]
    sys.stderr = sys.__stderr__ = _stderr  # type: ignore[assignment,misc]
    # By hand: logging.basicConfig would close what the supervisor logs to, and so copy the pages of it.
    logging.root.handlers = [_root_handler]
    if logging.root.level != _LEVELS.get(level):
        logging.root.setLevel(level.upper())
    os.register_at_fork(before=_note_job, after_in_child=_keep_job)


_forking = threading.local()


def _note_job() -> None:
    _forking.job = None if _installed is None else _installed.current_job()


def _keep_job() -> None:
    """In a process that a handler forks: it belongs to that job, whatever its worker runs later."""
    CURRENT_JOB.set(_forking.job)


def end_output() -> None:
    """Whatever the jobs that have ended in this thread have begun to say."""
    if _installed is not None and _installed.unsettled:
        _installed.end()


def mark_end(job: str) -> None:
    if _installed is not None:
        _installed.mark_end(job)


def tell_past_logging(level: str, job: str, text: str) -> None:
    """A line of forq's own that `logging` did not take."""
    if _installed is not None:
        _installed.tell("log", level, text, job=job, logger="forq")


def lines_of_logging() -> int:
    """How many lines this thread has logged that are in the queue's log."""
    return _root_handler.lines()


def tell_program(queue: str, job: str | None, text: str) -> None:
    """A line that a program has written."""
    if _installed is not None:
        _installed.tell("stderr", "INFO", text, job=job)
    elif job is None:
        log.info("program wrote queue=%s text=%s", queue, text)
    else:
        log.info("program wrote queue=%s job=%s text=%s", queue, job, text)
