"""What a queue's process may take of the machine: the part that it sets for itself, and for all that it starts."""

import os
import resource
from collections.abc import Mapping
from contextlib import suppress

from forq.errors import ConfigError
from forq.settings import Value
from forq.values import show_size

# In thousandths of the machine's memory, added to what the process uses. The kernel ends what seems to use most, so one
# that uses more than half of the memory beside a small handler still goes first, whoever it belongs to.
OOM_SCORE = 500
OOM_FILE = "/proc/self/oom_score_adj"


def restrain(options: Mapping[str, Value]) -> None:
    """Raises ConfigError if the system grants less than is asked for. Programs that handlers start inherit it all."""
    _go_first_when_memory_runs_out()
    open_files, address = int(options.get("open_files_limit", 0)), int(options.get("address_limit", 0))
    if open_files:
        _set(resource.RLIMIT_NOFILE, open_files, f"open_files_limit = {open_files}")
    if address:
        _set(resource.RLIMIT_AS, address, f"address_limit = {show_size(address)}")
    if nicer := int(options.get("nice", 0)):
        os.nice(nicer)


def _go_first_when_memory_runs_out() -> None:
    """Its job runs again. If the supervisor or the embedded server went instead, every job would."""
    # Where /proc is hidden or not to be written, the kernel chooses by size alone.
    with suppress(OSError, ValueError):
        # Anybody may raise his own, and only root may lower it.
        # Without text files: what those touch is memory that each of many processes would have for itself (0.2 MB).
        fd = os.open(OOM_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if int(os.read(fd, 32)) < OOM_SCORE:
                os.pwrite(fd, f"{OOM_SCORE}\n".encode(), 0)
        finally:
            os.close(fd)


def _set(which: int, wanted: int, said: str) -> None:
    """Soft and hard: a handler cannot raise it again, unless it runs as root."""
    _, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (wanted, wanted))
    except (ValueError, OSError) as exc:
        raise ConfigError(f"{said} is not allowed here: at most {hard}, which is what the supervisor may have") from exc
