"""Opens standard streams that the caller of a program has closed."""

import os
import sys


def open_missing_streams() -> None:
    """Closed streams become /dev/null. Otherwise the next file would be opened as descriptor 1 or 2, and prints
    would go into it."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        if not _is_open(fd):
            # Gets this number, the lowest free one, since those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), True)
        stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
