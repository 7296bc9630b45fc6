"""What stands for sys.stdout, sys.stderr and the root logger's handler in a queue's process."""

import io
import logging
import threading

from forq.output.writer import Output

_MESSAGE_ALONE = logging.Formatter("%(message)s")


class LineWriter(io.TextIOBase):
    """sys.stdout or sys.stderr. `fileno` is what subprocesses inherit."""

    errors = "backslashreplace"
    line_buffering = True

    def __init__(self, output: Output, stream: str, fd: int) -> None:
        self._output = output
        self._stream = stream
        self._fd = fd
        self.buffer = _Bytes(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def name(self) -> str:
        return f"<{self._stream}>"

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output.write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        self._output.flush(self._stream)

    def close(self) -> None:
        """The next job prints, too."""
        self.flush()

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def reconfigure(self, **settings: object) -> None:
        """As of the stream that it stands for; there is nothing to change."""


class _Bytes(io.RawIOBase):
    """sys.stdout.buffer."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def write(self, data: object) -> int:
        text = bytes(data).decode(errors="backslashreplace")  # type: ignore[call-overload]
        self._writer.write(text)
        return memoryview(data).nbytes  # type: ignore[arg-type]

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self.flush()

    def fileno(self) -> int:
        return self._writer.fileno()

    def writable(self) -> bool:
        return True


class RootHandler(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output
        # Otherwise it would get one that repeats level and logger.
        self.setFormatter(_MESSAGE_ALONE)
        self._thread = threading.local()

    def lines(self) -> int:
        """How many lines of the calling thread it has passed on."""
        return getattr(self._thread, "lines", 0)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = _without_columns(self.format(record), record)
        except Exception:  # a message whose arguments do not fit it, say
            if _is_about_a_job(record):
                # Whoever tells of it knows how to do so without the exception's own methods.
                raise
            self.handleError(record)
            return
        self._output.tell("log", record.levelname, message, job=self._output.current_job(), logger=record.name)
        self._thread.lines = self.lines() + 1


def _without_columns(message: str, record: logging.LogRecord) -> str:
    """A line of the queue's log begins with queue and job: what forq says of a job need not name them again."""
    if not _is_about_a_job(record):
        return message
    told = record.__dict__
    return message.replace(f" queue={told.get('queue')} job={told['job_id']}", "", 1)


def _is_about_a_job(record: logging.LogRecord) -> bool:
    """Whether it is a line of job_log.py."""
    return record.name == "forq" and "job_id" in record.__dict__
