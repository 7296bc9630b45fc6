"""Where a handler is, told from outside: a signal makes the process write the stack of each of its threads to a memory
file, also while C code holds the interpreter. The supervisor reads it through /proc.
"""

import faulthandler
import fcntl
import os

from forq.procs.process import STACK_FILE, STACK_SIGNAL


def offer_stack() -> int:
    """The descriptor that stacks are written to from now on."""
    fd = os.memfd_create(STACK_FILE, os.MFD_CLOEXEC)
    # So that whoever reads it may also empty it.
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    return fd
