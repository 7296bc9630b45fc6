"""The descriptors 0, 1 and 2, which whoever starts a program may have closed."""

import os
import sys


def open_missing_streams() -> None:
    """Those that are closed become /dev/null. Otherwise the next file that is opened would get such a number, and what
    is printed later would be written into it."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        if not _is_open(fd):
            # It gets this number: the lowest that is free, and those below are open by now.
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
