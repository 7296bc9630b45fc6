"""What follows an attempt that failed or was lost, in the words that every log line about it uses."""

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple


class Fate(NamedTuple):
    """As the scripts say it (broker/lua/failures.lua). `of`: how many attempts there are if all end like this one."""

    how: str
    wait_ms: int
    attempt: int
    of: int

    @property
    def final(self) -> bool:
        return self.how == "dead"

    def __str__(self) -> str:
        match self.how:
            case "dead":
                return f"attempt {self.attempt} of {self.of}, failed for good"
            case "retried" | "returned":
                return f"attempt {self.attempt} of {self.of}, again {_wait(self.wait_ms)}"
            case "lane":
                return f"attempt {self.attempt} of {self.of}, again {_wait(self.wait_ms)} once nothing else waits"
            case "suspect":
                return f"attempt {self.attempt}, not counted, again {_wait(self.wait_ms)} alone in its process"
            case "interrupted":
                return f"attempt {self.attempt}, not counted, again {_wait(self.wait_ms)}"
            case "removed":
                return "not tried again, since it was removed while it ran"
            case _:
                return "nothing follows, since the job had been taken from this worker"


def read_fates(values: Sequence[Any]) -> tuple[Fate, ...]:
    """Four values each, as a script answers."""
    return tuple(Fate(values[at].decode(), *values[at + 1 : at + 4]) for at in range(0, len(values), 4))


def headline(queue: str, job: str, follows: Fate | str, happened: str, *, of_fail_handler: bool) -> str:
    """What happened to a job and what follows; if that is the end, with the command that says more."""
    what = "fail handler" if of_fail_handler else "job"
    final = isinstance(follows, Fate) and follows.final
    see = f" (see: forqctl why {queue} {shlex.quote(job)})" if final else ""
    return f"{what} {happened}: {follows}{see}"


def _wait(wait_ms: int) -> str:
    """Rounded: a jitter of some ms interests nobody."""
    if wait_ms <= 0:
        return "at once"
    if wait_ms < 1000:
        return f"in {wait_ms} ms"
    seconds = wait_ms / 1000
    if seconds < 120:
        return f"in {seconds:.3g} s"
    if seconds < 2 * 3600:
        return f"in {seconds / 60:.3g} min"
    return f"in {seconds / 3600:.3g} h" if seconds < 2 * 86400 else f"in {seconds / 86400:.3g} d"
