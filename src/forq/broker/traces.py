"""What became of a job that a queue does not have any more, as far as its journal tells."""

from dataclasses import dataclass
from typing import Any

from forq.broker.codes import NO_QUEUE, error_for
from forq.broker.journal import Event, read_entry
from forq.broker.keys import queue_base
from forq.broker.link import READ_BYTES, Link
from forq.errors import InvalidData, UnknownJob
from forq.names import check_job_id, check_queue_name
from forq.settings import EXTERNAL, WORK
from forq.values import show_duration, show_time

# How much of the journal is read, the newest first: at most about 0.3 s of the caller, 2 ms of the server per call.
LOOKED_AT_BYTES, LOOKED_AT_ENTRIES = 16 << 20, 20_000
FIRST_ENTRIES, MOST_ENTRIES = 16, 1000

_FORGOTTEN = ("discarded", "forgotten")


@dataclass(frozen=True, slots=True)
class Trace:
    """`end`: the last event about the job; `later`: what became of it when it was dead. `whole`: whether all was seen
    that ever happened in the queue, else what happened since `since_us`."""

    end: Event | None
    later: Event | None
    whole: bool
    since_us: int | None


def unknown_job(link: Link, prefix: str, name: str, job_id: str) -> UnknownJob:
    """The error about a job that the queue does not have: with what the journal knows of it."""
    base = queue_base(prefix, check_queue_name(name))
    options = link.call("HMGET", f"{base}:options", "epoch", "mode", "journal", "keep_done_ms", "done_max")
    if options[0] is None:
        return error_for(name, [NO_QUEUE])  # type: ignore[return-value]
    epoch, mode, journal, keep_ms, most = ((option or b"").decode() for option in options)
    trace = last_trace(link, base, check_job_id(job_id), int(epoch), journal_on=journal == "1")
    advice = _advice(name, int(keep_ms or 0), most) if mode in (WORK, EXTERNAL) else ""
    if trace.end is None and trace.later is None:
        return UnknownJob(f"queue {name!r} {_not_found(trace, job_id, advice, name, journal_on=journal == '1')}")
    return UnknownJob(f"queue {name!r} has no job {job_id!r} any more: {_what_became(trace, advice)}")


def last_trace(link: Link, base: str, job_id: str, epoch: int, *, journal_on: bool) -> Trace:
    """Looks through the journal, from its end back."""
    needle = job_id.encode()
    later: Event | None = None
    expected, since_us = int(link.call("HGET", f"{base}:counts", "journal_sequence") or 0), None
    first, gaps, before, count, looked_at, seen = None, False, "+", FIRST_ENTRIES, 0, 0
    while looked_at < LOOKED_AT_BYTES and seen < LOOKED_AT_ENTRIES:
        entries = link.call("XREVRANGE", f"{base}:events", before, "-", "COUNT", count)
        read = 0
        for _, flat in entries:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            if int(fields.get(b"q", 0)) != epoch:
                return Trace(None, later, first == 1 and not gaps and journal_on, since_us)
            number, since_us = int(fields[b"s"]), int(fields[b"t"])
            # Others go on writing: the newest may be newer than what was counted before.
            gaps = gaps or (number < expected if first is None else number != first - 1)
            first = number
            text = fields[b"e"]
            read += len(text)
            if needle in text:
                for event in reversed(_events_of(fields, job_id)):
                    if event.verb in _FORGOTTEN:
                        later = later or event
                    else:
                        return Trace(event, _of_the_same(later, event), False, since_us)
        if len(entries) < count:
            return Trace(None, later, first == 1 and not gaps and journal_on, since_us)
        before, looked_at, seen = f"({entries[-1][0].decode()}", looked_at + read, seen + count
        count = max(1, min(MOST_ENTRIES, 4 * count, count * (READ_BYTES // 4) // max(read, 1)))
    return Trace(None, later, False, since_us)


def _events_of(fields: dict[bytes, bytes], job_id: str) -> list[Event]:
    try:
        return [event for event in read_entry(fields) if event.job == job_id]
    except InvalidData:
        return []


def _of_the_same(later: Event | None, end: Event) -> Event | None:
    """An earlier job of the id may have been forgotten after the end of the last one."""
    return later if later is not None and later.fence == end.fence else None


def _not_found(trace: Trace, job_id: str, advice: str, name: str, *, journal_on: bool) -> str:
    if trace.whole:
        return f"has never had a job {job_id!r}; `forqctl jobs {name}` lists those that it has"
    if not journal_on:
        known = "its journal is off"
    elif trace.since_us is None:
        known = "its journal is empty"
    else:
        known = f"its journal, as far as it was read (back to {show_time(trace.since_us / 1e6)}), does not mention it"
    return f"has no job {job_id!r}: it never had, or the job has ended{advice}; {known}"


def _what_became(trace: Trace, advice: str) -> str:
    end, later = trace.end, trace.later
    forgotten = later and _forgotten(later)
    if end is None:
        return f"it failed for good, and {forgotten}"
    when = show_time(end.time_us / 1e6)
    match end.verb:
        case "done":
            return f"it was done at {when}{_took(end)}{advice}"
        case "released":
            return f"it was released at {when}"
        case "cancelled" if end.fence:
            return f"it was removed or killed while it ran, and ended at {when}"
        case "cancelled":
            return f"it was cancelled at {when}"
        case "dead" | "failing":
            return f"it failed for good at {when}, and {forgotten or 'is not kept any more (dead_ttl, dead_max)'}"
        case _:
            return f"the last that its journal says of it is {end.verb!r}, at {when}, and there is no record of it now"


def _forgotten(later: Event) -> str:
    how = "was discarded" if later.verb == "discarded" else "is not kept any more (dead_ttl, dead_max)"
    return f"{how} since {show_time(later.time_us / 1e6)}"


def _took(end: Event) -> str:
    if end.micros is None:
        return ""
    milliseconds = end.micros / 1000
    return f" (it ran for {f'{milliseconds:.1f} ms' if milliseconds < 1000 else f'{milliseconds / 1000:.1f} s'})"


def _advice(name: str, keep_ms: int, most: Any) -> str:
    if keep_ms:
        return f" and is not kept any more (keep_done = {show_duration(keep_ms / 1000)}, done_max = {most})"
    return f" and is not kept (`forqctl set {name} keep_done=1h` keeps jobs that end from then on, with results)"
