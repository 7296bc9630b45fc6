"""What stands for sys.stdout, sys.stderr and the root logger's handler in a queue's process."""

import io
import logging

from forq.workers.output_writer import Output

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

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
        except Exception:  # a message whose arguments do not fit it, say
            self.handleError(record)
            return
        self._output.tell("log", record.levelname, message, job=self._output.current_job(), logger=record.name)
