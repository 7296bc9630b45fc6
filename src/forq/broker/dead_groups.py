"""Groups of dead jobs: those of one type that died of the same error, apart from numbers and ids in its message."""

from dataclasses import dataclass, replace

from forq.broker.filters import FoundJob, group_key, pattern_of, texts_of
from forq.broker.link import Link
from forq.broker.search import CHUNK, Allowance, JobSearch, chunked, read_dead_cursor

MAX_MESSAGE = 500


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead jobs that died of one error. `key` is the same in every answer, so that pages can be added up.

    `pattern`: the beginning of the message, with '#' for numbers and ids. `sample`: the newest of them, as id@fence.
    """

    key: str
    error: str | None
    type: str | None
    pattern: str
    count: int
    newest_died_at: float
    sample: str
    message: str


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """`next`: where the next request continues, with older jobs (None: these were all)."""

    groups: list[DeadGroup]
    next: str | None
    scanned: int


def dead_groups(link: Link, prefix: str, name: str, after: str | None = None) -> DeadGroups:
    """Groups the next dead jobs, newest first: as many as one request may scan. The largest groups come first."""
    search = JobSearch(link, prefix, name)
    search.dead.check_exists()
    groups: dict[str, DeadGroup] = {}
    allowance, cursor = Allowance(), None
    walk = search.dead.walk(read_dead_cursor(after), newest_first=True)
    for part in chunked(walk, CHUNK):
        for (died_ms, member), job in zip(part, search.read_dead(part), strict=True):
            allowance.count(0 if job is None else job.size)
            if job is not None:
                group = _group_of(job, member.decode(errors="replace"))
                known = groups.get(group.key)
                groups[group.key] = group if known is None else replace(known, count=known.count + 1)
            if allowance.is_spent:
                cursor = f"{died_ms}/{member.decode(errors='replace')}"
                break
        if cursor is not None:
            break
    return DeadGroups(sorted(groups.values(), key=lambda group: -group.count), cursor, allowance.scanned)


def _group_of(job: FoundJob, member: str) -> DeadGroup:
    error, message = texts_of(job)
    return DeadGroup(
        key=group_key(job),
        error=error,
        type=job.details.get("type"),
        pattern=pattern_of(message or ""),
        count=1,
        newest_died_at=job.details["died_at"],
        sample=member,
        message=(message or "")[:MAX_MESSAGE],
    )
