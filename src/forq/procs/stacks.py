"""Stack dumps of children: the signal that requests one, and how the supervisor reads it."""

import re
import signal

# A real-time signal: handlers may use SIGUSR1 and SIGUSR2.
STACK_SIGNAL = signal.SIGRTMIN + 5
STACK_FILE = "forq-stack"
MAX_STACK = 8000

# Frames from here outwards belong to forq.
_ATTEMPT = re.compile(r"^  File \"[^\"\n]*workers/attempt\.py\", line \d+ in run$", re.MULTILINE)
_STEP = re.compile(r"^  File \"[^\"\n]*workers/event_loop\.py\", line \d+ in (?:send|throw)$", re.MULTILINE)
_IMPORT = re.compile(r"^  File \"[^\"\n]*workers/handlers\.py\", line \d+ in load_handler$", re.MULTILINE)
_IMPORTLIB = re.compile(r"^  File \"(?:<frozen importlib|[^\"\n]*/importlib/__init__\.py\")")
_HEAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n", re.MULTILINE)


def stack_of_thread(dump: str, thread: int) -> str:
    """The handler's frames of one thread, innermost first; the whole dump if the thread is not in it."""
    heads = list(_HEAD.finditer(dump))
    ends = [head.start() for head in heads[1:]] + [len(dump)]
    for head, end in zip(heads, ends, strict=False):
        if int(head[1], 16) == thread:
            frames = dump[head.end() : end]
            return _ATTEMPT.split(frames)[0].rstrip()[:MAX_STACK]
    return dump.strip()[:MAX_STACK]


def stack_of_event_loop(dump: str) -> str:
    """The frames of the coroutine that the event loop executes, innermost first; empty if it executes none."""
    for thread in _HEAD.split(dump)[2::2]:
        frames = _STEP.split(thread)
        if len(frames) > 1:
            return frames[0].rstrip()[:MAX_STACK]
    return ""


def stack_of_import(dump: str) -> str:
    """The frames of a handler's import, innermost first, without importlib's; empty if there is none."""
    for thread in _HEAD.split(dump)[2::2]:
        frames = _IMPORT.split(thread)
        if len(frames) > 1:
            return "\n".join(line for line in frames[0].splitlines() if not _IMPORTLIB.match(line))[:MAX_STACK]
    return ""
