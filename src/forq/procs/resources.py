"""What the processes of a queue may take of the machine while jobs run: the part that ends them when they take more."""

from collections.abc import Mapping
from dataclasses import dataclass

from forq.settings import Value

# Causes of an attempt that took more.
OUT_OF_MEMORY, TOO_MANY_TASKS = "oom", "pids"


@dataclass(frozen=True)
class Resources:
    """For one process and all below it: bytes of memory, and processes and threads together. 0: any."""

    memory_bytes: int = 0
    tasks: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Value]) -> "Resources":
        return cls(int(options.get("memory_limit", 0)), int(options.get("pids_limit", 0)))

    def __bool__(self) -> bool:
        return bool(self.memory_bytes or self.tasks)


@dataclass(frozen=True)
class Exceeded:
    """How a process took more than it may: the cause, and the most memory that it was seen with (None: unknown)."""

    cause: str
    peak_bytes: int | None
