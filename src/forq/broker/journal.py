"""The journal's schema and its reader. lua/journal.lua writes it.

Each script call writes one stream entry with one field. Its name, `v4`, is the schema's version; its value is

    EPOCH SEQUENCE TIME ACTOR HASH '\\n' EVENTS

SEQUENCE counts from 1 in each epoch of the queue, without gaps. TIME is the server's, in µs. ACTOR is a worker, a
processor or '-'. HASH includes the hash of the entry before (`entry_hash`). EVENTS has one event per line. If numbers
are missing, the entries were trimmed, refused by the server, or never written because the journal was off.

An event is a verb, a fence (0 where none applies) and its subjects. The last verb about a job gives its state:

    enqueued 0 ID ID …                ready: waiting, unless `scheduled` follows in the same entry
    updated 0 ID                      the same
    scheduled 0 ID DUE_MS             ready, until then
    promoted 0 ID ID …                ready, waiting: its time has come, or a user runs it now
    blocked 0 ID                      (an enqueue of it waits behind the active job; several are combined)
    unblocked 0 ID ID …               ready: the blocked enqueue is now a job (the other has ended)
    merged 0 ID                       (the blocked enqueue has updated the active job; `retried` or `returned` follows)
    withdrawn 0 ID                    (the blocked enqueue was cancelled)
    held 0 ID WHEN ID ID …            it waits for the jobs that follow; after `enqueued`, and again after `updated`.
                                      'WHEN+': also for others than jobs of this queue
    batch_opened 0 BATCH    batch_ended 0 BATCH HOW MEMBERS
    met 0 ID                          ready: what it waited for has ended as required
    unmet 0 ID ID HOW                 that job ended as HOW, so it can never run: `claimed` and `dead` follow
    options 0 ID OPTIONS              (the job's own options are now these, '-' for none: job_options.py). In the entry
                                      of what sets them: before `updated` and `merged`, else after
    claimed FENCE ATTEMPT ID ID …     active; ATTEMPT: retries + stalls + timeouts of its record, and 1
    marked FENCE ID                   active, and forgotten if it does not succeed (a user removed it)
    done FENCE ID MICROS ID MICROS …  gone (MICROS '-': unknown)
    released FENCE ID MICROS          gone: its awaiter has acknowledged it; MICROS since it was leased
    retried FENCE ID MICROS CAUSE     ready
    snoozed FENCE ID MICROS           ready; not counted as an attempt
    stalled | timed_out | suspected | interrupted FENCE ID CAUSE [MICROS]   still active; `returned` follows
    returned 0 ID ID …                ready
    cancelled FENCE ID ID …           gone; FENCE 0: it was ready, else it was active
    dead FENCE ID MICROS FLAG CAUSE   gone, archived as ID@FENCE; FLAG 1: it has a fail handler, `failing` follows
    failing FENCE ID                  (fail job ID:FENCE is in the fail queue, whose journal has no `enqueued` of it)
    revived FENCE ID                  ready, and the archived ID@FENCE is gone
    discarded FENCE ID                the archived ID@FENCE is gone: a user discarded it
    forgotten FENCE ID                the archived ID@FENCE is gone: removed by dead_ttl or dead_max
    dropped 0 ID                      a hint without a record ('?': without an id); if the job was ready, it was lost
    created 0 EPOCH    deleted 0 JOBS    paused 0    resumed 0

CAUSE is one word of printable ASCII ('_' for other characters, '-' for none): the name of the exception (`retried`,
`dead`; at most 64 characters), or for a loss a signal or another cause code.

Events can be applied one by one in their order. `claimed` followed by `dead` or `retried` of the same id in one entry
means that no worker got the job: it had expired, had stalled or timed out too often, or had no awaiter. An event that
"follows" is in the same entry.

Each consumer stores in `journal:watermarks` the last entry that it has read and saved. Heartbeats trim the entries that
all consumers have read.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from forq.errors import InvalidData

SCHEMA = 4
_FIELD = b"v4"


class Summary(NamedTuple):
    """What every call to a queue reads (lua/summary.lua). `options`: their epoch and version. `hash`: '' for none."""

    options: str
    sequence: int
    hash: str
    bytes: int
    fence: str
    other_hints: int
    lane: int
    suspects: int
    first_due_ms: int
    may_be_stale: bool
    may_be_rare: bool


def read_summary(packed: bytes | None) -> Summary:
    """`packed`: the key `summary` of a queue; None if the queue is absent."""
    words = (packed or b"0 0 0 - 0 0 0 0 0 1 1 1").decode().split(" ")
    epoch, version, sequence, hash_, size, fence, other, lane, suspects, due_ms, stale, rare = words
    return Summary(
        options=f"{epoch} {version}",
        sequence=int(sequence),
        hash="" if hash_ == "-" else hash_,
        bytes=int(size),
        fence=fence,
        other_hints=int(other),
        lane=int(lane),
        suspects=int(suspects),
        first_due_ms=int(due_ms),
        may_be_stale=stale == "1",
        may_be_rare=rare == "1",
    )


class Entry(NamedTuple):
    """One stream entry; `text` has its events."""

    epoch: int
    sequence: int
    time_us: int
    actor: str
    hash: str
    text: str


class Event(NamedTuple):
    """One event about one subject, identified by (queue, epoch, sequence, position)."""

    queue: str
    epoch: int
    sequence: int
    position: int  # in its entry, over all lines and subjects
    time_us: int
    verb: str
    job: str | None
    fence: int
    attempt: int | None
    actor: str
    micros: int | None
    # For `deleted` the number of jobs, for `created` the epoch, for `held` and `unmet` what follows the job.
    cause: str | None
    fail_job: bool | None  # for `dead`: whether there is a fail job
    due_us: int | None
    entry: str | None  # the text of the entry, at position 0
    hash: str | None  # of the entry, at position 0


# The fields that differ between the subjects of a line: job, attempt, micros, cause, fail_job, due_us.
_Subject = tuple[str | None, int | None, int | None, str | None, bool | None, int | None]

_NUMBER = r"[0-9]{1,18}"
_MICROS = rf"(?:{_NUMBER}|-)"
_ID = r"[!-~]+"
_NAME = r"[!-~]{1,64}"


def entry_hash(previous: str, epoch: int, sequence: int, time_us: int, actor: str, text: str) -> str:
    """The hash of an entry; `previous` is the hash of the entry before, '' for the first."""
    chained = f"{previous}\n{epoch} {sequence} {time_us} {actor}\n{text}"
    return hashlib.sha1(chained.encode(), usedforsecurity=False).hexdigest()


def read_entry(fields: Mapping[bytes, bytes], queue: str = "") -> Iterator[Event]:
    """The events of one stream entry, in order; InvalidData if it does not match the schema.

    Called for millions of events, so it builds the tuples without calling Event.
    """
    epoch, number, time, actor, hashed, text = unpack_entry(fields)
    new, row = tuple.__new__, Event
    events: list[Event] = []
    for line in text.split("\n"):
        verb, fence, subjects = _read_line(line, number)
        events += [
            new(
                row,
                (queue, epoch, number, at, time, verb, job, fence, tries, actor, micros, cause, flag, due, None, None),
            )
            for at, (job, tries, micros, cause, flag, due) in enumerate(subjects, len(events))
        ]
    events[0] = new(row, (*events[0][:-2], text, hashed))
    return iter(events)


def unpack_entry(fields: Mapping[bytes, bytes]) -> Entry:
    """The values of a stream entry; InvalidData if it does not match the schema."""
    value = fields.get(_FIELD)
    if value is None:
        names = b" ".join(fields).decode(errors="replace")
        raise InvalidData(f"a journal entry has another schema (fields {names!r}); this release reads {SCHEMA}")
    try:
        head, _, text = value.decode("ascii").partition("\n")
        epoch, sequence, time_us, actor, hashed = head.split(" ")
    except ValueError as exc:
        raise InvalidData(f"a journal entry cannot be read: {exc!r}") from exc
    digits = epoch.isdigit() and sequence.isdigit() and time_us.isdigit()
    if not digits or len(epoch) > 18 or len(sequence) > 18 or len(time_us) > 18 or len(hashed) != 40:
        raise InvalidData(f"a journal entry cannot be read: {epoch!r} {sequence!r} {time_us!r} {hashed!r}")
    return Entry(int(epoch), int(sequence), int(time_us), actor, hashed, text)


def pack_entry(entry: Entry) -> dict[bytes, bytes]:
    """The field of a stream entry, as scripts write it."""
    return {_FIELD: f"{entry.epoch} {entry.sequence} {entry.time_us} {entry.actor} {entry.hash}\n{entry.text}".encode()}


def _read_line(line: str, sequence: int) -> tuple[str, int, Iterator[_Subject] | list[_Subject]]:
    verb = line.partition(" ")[0]
    shape = _SHAPES.get(verb)
    matched = shape and shape[0].fullmatch(line)
    if not shape or not matched:
        raise InvalidData(f"journal entry {sequence} has an unknown line: {line[:200]!r}")
    fence, rest = matched.groups()
    return verb, int(fence), shape[1](rest)


def _ids(rest: str) -> list[_Subject]:
    return [(job, None, None, None, None, None) for job in rest.split(" ")]


def _claimed(rest: str) -> list[_Subject]:
    number, *ids = rest.split(" ")
    attempt = int(number)
    return [(job, attempt, None, None, None, None) for job in ids]


def _timed(rest: str) -> list[_Subject]:
    parts = rest.split(" ")
    return [
        (job, None, None if micros == "-" else int(micros), None, None, None)
        for job, micros in zip(parts[::2], parts[1::2], strict=True)
    ]


def _lost(rest: str) -> list[_Subject]:
    job, cause, *micros = rest.split(" ")
    return [(job, None, int(micros[0]) if micros and micros[0] != "-" else None, cause, None, None)]


def _retried(rest: str) -> list[_Subject]:
    job, micros, cause = rest.split(" ")
    return [(job, None, None if micros == "-" else int(micros), cause, None, None)]


def _dead(rest: str) -> list[_Subject]:
    job, micros, flag, cause = rest.split(" ")
    return [(job, None, None if micros == "-" else int(micros), cause, flag == "1", None)]


def _scheduled(rest: str) -> list[_Subject]:
    job, due_ms = rest.split(" ")
    return [(job, None, None, None, None, int(due_ms) * 1000)]


def _held(rest: str) -> list[_Subject]:
    job, _, about = rest.partition(" ")
    return [(job, None, None, about, None, None)]


def _of_queue(rest: str | None) -> list[_Subject]:
    return [(None, None, None, rest, None, None)]


def _shapes() -> dict[str, tuple[re.Pattern[str], Callable[[str], list[_Subject]]]]:
    """Per verb: the pattern of its line (groups: fence, subjects), and the function that reads the subjects."""
    ids, one = rf"({_ID}(?: {_ID})*)", rf"({_ID})"
    kinds = {
        "enqueued promoted unblocked returned": (r"(0)", ids, _ids),
        "cancelled": (rf"({_NUMBER})", ids, _ids),
        "updated blocked merged withdrawn met dropped": (r"(0)", one, _ids),
        "marked failing revived discarded forgotten": (rf"({_NUMBER})", one, _ids),
        "scheduled": (r"(0)", rf"({_ID} [0-9]{{1,15}})", _scheduled),
        "held": (r"(0)", rf"({_ID} (?:(?:done|ended|dead)(?: {_ID})+|(?:done|ended|dead)\+(?: {_ID})*))", _held),
        "batch_opened": (r"(0)", rf"({_ID})", _of_queue),
        "batch_ended": (r"(0)", rf"({_ID} [a-z]+ {_NUMBER})", _of_queue),
        "unmet": (r"(0)", rf"({_ID} {_ID} [a-z]+)", _held),
        "claimed": (rf"({_NUMBER})", rf"([0-9]{{1,9}}(?: {_ID})+)", _claimed),
        "done": (rf"({_NUMBER})", rf"({_ID} {_MICROS}(?: {_ID} {_MICROS})*)", _timed),
        "released snoozed": (rf"({_NUMBER})", rf"({_ID} {_MICROS})", _timed),
        "options": (r"(0)", rf"({_ID} {_ID})", _lost),
        "retried": (rf"({_NUMBER})", rf"({_ID} {_MICROS} {_NAME})", _retried),
        "dead": (rf"({_NUMBER})", rf"({_ID} {_MICROS} [01] {_NAME})", _dead),
        "stalled timed_out suspected interrupted": (rf"({_NUMBER})", rf"({_ID} {_ID}(?: {_MICROS})?)", _lost),
        "created deleted": (r"(0)", rf"({_NUMBER})", _of_queue),
    }
    shapes: dict[str, tuple[re.Pattern[str], Callable[[str], list[_Subject]]]] = {
        verb: (re.compile(f"{verb} {fence} {subjects}"), read)
        for verbs, (fence, subjects, read) in kinds.items()
        for verb in verbs.split(" ")
    }
    for verb in ("paused", "resumed"):
        shapes[verb] = (re.compile(rf"{verb} (0)()"), lambda _: _of_queue(None))
    return shapes


_SHAPES = _shapes()
VERBS = frozenset(_SHAPES)
# Verbs that end the life of a job.
ENDS = ("done", "released", "cancelled", "dead", "dropped")
