"""Tells of attempts that ended with their process: nobody is left there to do so. The line goes to the queue's log, as
those of its processes do, and from there to stderr."""

import logging
import os
import threading
import time

from forq.broker.keys import main_queue
from forq.broker.recovery import Outcome
from forq.broker.replies import Fate, headline
from forq.output.format import NAME, Line, pack_line

log = logging.getLogger("forq")


def tell_loss(
    directory: str | None, queue: str, job: str, fate: Fate, *, outcome: Outcome, cause: str, micros: int | None
) -> None:
    """`directory`: of the queue's log; None, or without its FIFO: the line goes to our own log."""
    of_fail_handler = main_queue(queue) != queue
    if of_fail_handler:
        queue, job = main_queue(queue), job.rpartition(":")[0]
    text = headline(queue, job, fate, _happened(outcome, cause, micros), of_fail_handler=of_fail_handler)
    level = logging.ERROR if fate.final else logging.INFO if outcome == "interrupted" else logging.WARNING
    if not log.isEnabledFor(level):
        # As set by log_level, which holds for the lines of a queue's own processes, too.
        return
    if directory is None or not _write(directory, job, logging.getLevelName(level), text):
        log.log(level, "%s queue=%s job=%s", text, queue, job)


def _happened(outcome: Outcome, cause: str, micros: int | None) -> str:
    if outcome == "timed_out":
        return "timed out" if micros is None else f"timed out after {micros / 1e6:.3g} s"
    if outcome == "interrupted":
        return "interrupted, since its process was stopped"
    # As the supervisor has made it one word.
    end = cause.replace("_", " ")
    return f"lost with its process ({end})" if outcome == "stalled" else f"lost with others of its process ({end})"


def _write(directory: str, job: str, level: str, text: str) -> bool:
    """Not with open_pipe, which would make the FIFO of a queue that was deleted."""
    line = Line("log", level, int(time.time() * 1000), os.getpid(), threading.get_ident(), job, "forq", False, text)
    try:
        fd = os.open(f"{directory}/{NAME}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return False
    try:
        for data in pack_line(line):
            os.write(fd, data)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
