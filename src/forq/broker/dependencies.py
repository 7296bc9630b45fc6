"""What a new job waits for: checks `after=` and packs it for enqueue.lua (lua/flows.lua)."""

from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

from forq.api_types import When
from forq.errors import UsageError
from forq.values import check_job_id, shown

MAX_DEPENDENCIES = 1000

# How a job uses the results of the jobs that it waits for.
NOT_USED, READ, AS_ARGUMENT, AS_LIST = 0, 1, 2, 3


class After(NamedTuple):
    """Checked dependencies of a new job, in order. `words`: as enqueue.lua reads them (flows.read_after). `are_kept`:
    their tasks keep their results."""

    words: tuple[str, ...]
    when: str = "done"
    use: int = NOT_USED
    are_kept: bool = False

    def pack(self) -> str:
        """As enqueue.lua reads it; '' for no dependencies."""
        use = f"{self.use}k" if self.are_kept and self.use else f"{self.use}"
        return f"{self.when} {use} {' '.join(self.words)}" if self.words else ""


def check_after(after: Any, when: object = "done", *, use: int = NOT_USED, queue: str | None = None) -> After:
    """Checks dependencies as a user gives them: an id or a ref, or several. A ref must be of the same queue."""
    check_when(when)
    # A ref may be a named tuple.
    several = isinstance(after, Iterable) and not isinstance(after, str) and not hasattr(after, "queue")
    given = list(after) if several else [after]
    words = tuple(dict.fromkeys(_word_of(each, queue) for each in given))
    if len(words) > MAX_DEPENDENCIES:
        raise UsageError(
            f"after: {len(words)} jobs are too many for one job to wait for: at most {MAX_DEPENDENCIES}; "
            "let jobs in between wait for groups of them, or use a batch"
        )
    if use != NOT_USED and any(getattr(each, "is_batch", False) for each in given):
        raise UsageError(
            "after: a batch has no result of its own: leave with_results out, and read those of its members with "
            "client.find_batch(queue, id).results()"
        )
    are_kept = use != NOT_USED and all(getattr(each, "keeps_result", False) is True for each in given)
    return After(words, str(when), use, are_kept)


def check_when(when: object) -> None:
    if when not in get_args(When):
        raise UsageError(f"when {shown(when)} is not allowed: {', '.join(map(repr, get_args(When)))}")


def pack_after(after: Any, when: object = "done", with_results: bool = False, *, queue: str | None = None) -> str:
    """The same, packed; '' for no dependencies."""
    packed = check_after(after, when, use=READ if with_results else NOT_USED, queue=queue).pack()
    if with_results and not packed:
        raise UsageError("with_results needs `after`: the jobs whose results are wanted")
    return packed


def _word_of(given: Any, queue: str | None) -> str:
    if isinstance(given, str):
        return f"j{check_job_id(given, 'after: job id')}"
    if not isinstance(job_id := getattr(given, "id", None), str) or not hasattr(given, "queue"):
        raise UsageError(f"after: {shown(given)} is not allowed: ids of jobs of the same queue, or their refs")
    if queue is not None and given.queue != queue:
        raise UsageError(
            f"after: job {job_id!r} is in queue {given.queue!r}, but a job of queue {queue!r} can wait for jobs of its "
            "own queue only; a batch has jobs of any queues"
        )
    kind = "b" if getattr(given, "is_batch", False) else "j"
    return f"{kind}{check_job_id(job_id, 'after: job id')}"
