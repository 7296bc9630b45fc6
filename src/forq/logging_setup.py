"""forq's own log: what its processes say through `logging`, in the one format, on stderr."""

import logging
import os
import re
import sys

from forq.log_format import LogFormat, choose, iso_time

_ABOUT = re.compile(r"(?:^|\s)(queue|job)=(\S+)")


class Lines(logging.Formatter):
    def __init__(self, log_format: LogFormat) -> None:
        super().__init__("%(message)s")
        self._format = log_format

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {"time": iso_time(record.created), "level": record.levelname}
        if self._format.json:
            # What the message says of queue and job first: an error's text, behind that, may hold anything.
            told |= dict(reversed(_ABOUT.findall(record.getMessage())))
        told |= {"pid": record.process, "logger": record.name, "message": super().format(record)}
        return self._format.render(told)


def configure(setting: str = "auto", level: str = "info") -> LogFormat:
    """Every message of this process, and of those it forks, goes to stderr in this format from now on."""
    log_format = choose(setting, 2, os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return log_format
