"""Filters of jobs: what a client may ask for, and whether a job matches."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from forq.api_types import JobDetails
from forq.errors import UsageError
from forq.values import shown

MAX_TEXT = 1024
# Far beyond the year 9999. Redis reads neither nan nor larger whole numbers.
MAX_SECONDS = 1e12
MAX_PATTERN = 120
# Ids of all kinds: UUIDs; and words of at least eight characters with a digit in them.
_ID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b(?=[A-Za-z_]*\d)\w{8,}\b|\d+")
# The others have no error: the last attempt of a waiting job was not its own fault.
STATES_WITH_ERRORS = ("dead", "scheduled", "retry")


class FoundJob(NamedTuple):
    """A job that was read. `time`: what since and until refer to. `errors`: name and message of its last error, if a
    filter needs them. `enqueued_us` identifies a live job among those of its id. `size`: bytes read."""

    details: JobDetails
    time: float | None
    errors: tuple[object, ...] = ()
    enqueued_us: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs are wanted; None: any. Parts of texts are compared without case."""

    id: str | None = None
    type: str | None = None
    identifier: str | None = None  # a part of it
    error: str | None = None  # a part of the error's name or message
    group: str | None = None  # of dead jobs: the key of a group of dead.groups
    text: str | None = None  # a part of the id, the identifier or the type
    # Epoch seconds: when the job was enqueued, or died, or was done.
    since: float | None = None
    until: float | None = None

    @classmethod
    def from_mapping(cls, given: object, state: object) -> "JobFilter":
        """Checks a filter as a client gives it."""
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise UsageError(f"filter {shown(given)} is not allowed: an object with any of {', '.join(names)}")
        if state is None:
            raise UsageError("a filter needs a state")
        for name, value in given.items():
            if name in ("since", "until"):
                if value is not None and not _is_time(value):
                    raise UsageError(f"{name} {shown(value)} of the filter is not allowed: seconds since 1970")
            elif value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT):
                raise UsageError(f"{name} {shown(value)} of the filter is not allowed: 1 to {MAX_TEXT} characters")
        if given.get("group") is not None and state != "dead":
            raise UsageError("a filter by group needs the state dead")
        if given.get("error") is not None and state not in STATES_WITH_ERRORS:
            raise UsageError(f"a filter by error needs one of the states {', '.join(STATES_WITH_ERRORS)}")
        return cls(**given)

    def for_any_id(self) -> "JobFilter":
        return replace(self, id=None)

    def matches(self, job: FoundJob) -> bool:
        id, identifier, type = job.details["id"], job.details["identifier"], job.details.get("type")
        return (
            self.id in (None, id)
            and self.type in (None, type)
            and _has_part(self.identifier, (identifier,))
            and _has_part(self.text, (id, identifier, type))
            and _has_part(self.error, job.errors)
            and (self.group is None or self.group == group_key(job))
            and (self.since is None or (job.time is not None and job.time >= self.since))
            and (self.until is None or (job.time is not None and job.time <= self.until))
        )


def group_key(job: FoundJob) -> str:
    """Names the group of dead jobs that this one belongs to: its error, its type, and the pattern of its message."""
    error, message = texts_of(job)
    parts = (error or "", job.details.get("type") or "", pattern_of(message or ""))
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()[:16]


def texts_of(job: FoundJob) -> tuple[str | None, str | None]:
    """Name and message of the last error, if they are texts."""
    error, message = (part if isinstance(part, str) else None for part in job.errors or (None, None))
    return error, message


def pattern_of(message: str) -> str:
    """The beginning of a message, with '#' for numbers and ids."""
    # Much longer than the pattern, because ids are replaced by one character.
    return _ID.sub("#", message[: 10 * MAX_PATTERN])[:MAX_PATTERN]


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SECONDS


def _has_part(part: str | None, texts: Iterable[object]) -> bool:
    if part is None:
        return True
    wanted = part.casefold()
    return any(wanted in text.casefold() for text in texts if isinstance(text, str))
