"""A program beside pytest: runs a command, and ends it and removes its directory when pytest is gone, however it ended.

    python leash.py DIRECTORY COMMAND …

pytest holds the other end of its standard input. At its end, or at a byte from there, the command gets SIGTERM (a
second one makes a supervisor kill running jobs), then SIGKILL. DIRECTORY receives `log`, the output of the command, and
`ended`, its exit status. It imports little, because every session of tests waits for it.
"""

import ctypes
import os
import select
import shutil
import signal
import sys

PR_SET_PDEATHSIG = 1
# A supervisor without jobs needs a fraction of the first.
STOP_SECONDS = (0.7, 10.0)


def main() -> int:
    directory, *command = sys.argv[1:]
    pid = _start(command, f"{directory}/log")
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(process, select.POLLIN)
    if process in [fd for fd, _ in poll.poll()]:
        _note_end(pid, directory)
        # The directory stays until pytest has read the log.
        os.read(0, 1)
    else:
        for seconds in STOP_SECONDS:
            os.kill(pid, signal.SIGTERM)
            if select.select([process], [], [], seconds)[0]:
                break
        else:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def _start(command: list[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        # If this program is killed, too.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        output = os.open(log, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"cannot run {command[0]}: {exc}\n".encode())
    finally:
        os._exit(127)


def _note_end(pid: int, directory: str) -> None:
    _, status = os.waitpid(pid, 0)
    # Renamed, so that nobody reads it before it is written.
    with open(f"{directory}/ended.new", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
    os.rename(f"{directory}/ended.new", f"{directory}/ended")


if __name__ == "__main__":
    sys.exit(main())
