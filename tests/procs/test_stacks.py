"""Stack dumps: parsing one, and taking one from a child that holds the interpreter lock."""

import os
import signal
import subprocess
import sys
from typing import Any

from forq.procs.loop import Loop
from forq.procs.stacks import MAX_STACK, STACK_SIGNAL, stack_of_event_loop, stack_of_thread
from forq.supervisor.stacks import Stacks

DUMP = """Thread 0x00007f5a2b7fe6c0 (most recent call first):
  File "minder.py", line 9 in poll

Current thread 0x00007f5a2bb5f040 (most recent call first):
  File "mine.py", line 3 in deep
  File "mine.py", line 8 in handle
  File "/x/forq/workers/attempt.py", line 60 in run
  File "/x/forq/workers/loop.py", line 250 in _run_one
"""


def test_only_frames_of_the_handler_are_kept() -> None:
    expected = '  File "mine.py", line 3 in deep\n  File "mine.py", line 8 in handle'
    assert stack_of_thread(DUMP, 0x7F5A2BB5F040) == expected
    assert stack_of_thread(DUMP, 0x7F5A2B7FE6C0) == '  File "minder.py", line 9 in poll'


def test_a_dump_without_the_worker_thread_is_kept_unchanged() -> None:
    assert stack_of_thread(DUMP, 1) == DUMP.strip()
    assert len(stack_of_thread("x" * 20_000, 1)) == MAX_STACK


def test_the_coroutine_that_the_event_loop_executes_is_found() -> None:
    loop = """Thread 0x00007f5a2b7fe6c0 (most recent call first):
  File "mine.py", line 3 in deep
  File "mine.py", line 8 in handle
  File "/x/forq/workers/event_loop.py", line 260 in send
  File "/x/forq/workers/event_loop.py", line 220 in _run
"""
    expected = '  File "mine.py", line 3 in deep\n  File "mine.py", line 8 in handle'
    assert stack_of_event_loop(loop + DUMP) == expected
    assert stack_of_event_loop(DUMP) == ""


class Program:
    """A process with the two members that a dump needs of a child."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.fd = int(self.process.stdout.readline())
        self.pid = self.process.pid

    def signal(self, signum: int) -> bool:
        if self.process.poll() is not None:
            return False
        os.kill(self.pid, signum)
        return True

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def dump_of(program: Program, fd: int | None) -> str:
    loop = Loop()
    child: Any = program
    stacks = Stacks(loop, child)
    stacks.fd = fd
    dumps: list[str] = []
    stacks.take(dumps.append)
    stacks.take(dumps.append)
    while len(dumps) < 2:
        loop.tick(1.0)
    loop.close()
    assert dumps[0] == dumps[1], "a second request gets the same dump"
    return dumps[0]


OFFER = "from forq.workers.child import enable_stack_dumps; fd = enable_stack_dumps()\n"
TELL = "print(fd, flush=True)\n"


def test_a_process_stuck_in_c_code_still_dumps_its_stack() -> None:
    program = Program(OFFER + "def stuck():\n    " + TELL + "    sum(range(10**12))\nstuck()")
    try:
        assert "in stuck" in dump_of(program, program.fd)
        assert dump_of(program, program.fd).count("in stuck") == 1, "each dump starts with an empty file"
    finally:
        program.end()


def test_a_process_that_ignores_the_signal_has_no_dump_and_blocks_nothing() -> None:
    ignore = f"import signal; signal.signal({int(STACK_SIGNAL)}, signal.SIG_IGN)\n"
    program = Program(OFFER + ignore + TELL + "sum(range(10**12))")
    try:
        assert dump_of(program, program.fd) == ""
    finally:
        program.end()


def test_a_process_without_a_dump_file_or_that_has_exited_has_no_dump() -> None:
    program = Program("print(0, flush=True); import time; time.sleep(100)")
    try:
        assert dump_of(program, None) == ""
        os.kill(program.pid, signal.SIGKILL)
        program.process.wait()
        assert dump_of(program, 5) == ""
    finally:
        program.end()
