"""forq's own log: what its processes say through `logging`, in the one format, on stderr."""

import logging
import os
import re
import sys
from collections.abc import Sequence

from forq.log_format import LogFormat, choose, iso_time
from forq.redaction import Redaction

_ABOUT = re.compile(r"(?:^|\s)(queue|job)=(\S+)")


class Lines(logging.Formatter):
    def __init__(self, log_format: LogFormat, redact: Redaction | None = None) -> None:
        super().__init__("%(message)s")
        self._format = log_format
        self._redact = redact or Redaction()

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {"time": iso_time(record.created), "level": record.levelname}
        if self._format.json:
            # What the message says of queue and job first: an error's text, behind that, may hold anything.
            told |= dict(reversed(_ABOUT.findall(record.getMessage())))
        told |= {"pid": record.process, "logger": record.name, "message": self._redact(super().format(record))}
        return self._format.render(told)


def configure(setting: str = "auto", level: str = "info", redact: Sequence[str] = ()) -> LogFormat:
    """Every message of this process, and of those it forks, goes to stderr in this format from now on."""
    log_format = choose(setting, 2, os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(log_format, Redaction(redact)))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return log_format
