"""Explanations in one sentence: why a job is not running, and how a job that the queue no longer has ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forq.broker.inspect import Counts, Inspector
from forq.broker.journal import Entry, Event, read_entry, read_summary, unpack_entry
from forq.broker.keys import pending_key, queue_base, suspects_key, swept_key
from forq.broker.link import READ_BYTES, Link
from forq.broker.registry import now_ms
from forq.broker.scripts import NO_QUEUE, error_for
from forq.errors import InvalidData, UnknownJob
from forq.job_options import show_own_options
from forq.settings import EXTERNAL, RELEASE_MODES, WORK
from forq.values import check_job_id, check_queue_name, show_duration, show_progress, show_time

# The position of a waiting job is searched up to this depth.
MAX_POSITION = 10_000
# How much of the journal is read, newest first: at most about 0.3 s of the caller, and 2 ms of the server per call.
MAX_JOURNAL_BYTES, MAX_JOURNAL_ENTRIES = 16 << 20, 20_000
# Entries per call: at first, and at most.
FIRST_ENTRIES, MOST_ENTRIES = 16, 1000

# A sentence names at most these many jobs that a held one waits for.
SHOWN_DEPENDENCIES = 10

_FORGOTTEN = ("discarded", "forgotten")


def why(
    link: Link,
    prefix: str,
    name: str,
    job_id: str,
    *,
    messages: bool = True,
    unresponsive: Mapping[str, int] | None = None,
) -> tuple[str, str]:
    """The job's state and the reason; UnknownJob if the queue has no job with that id.

    Without `messages` only the names of errors are shown, because messages may quote the job's data. `unresponsive`:
    workers that run nothing and whose process does not respond, with its pid.
    """
    inspector = Inspector(link, prefix, name)
    job = inspector.job(job_id)
    if not messages:
        _drop_messages(job)
    pid = (unresponsive or {}).get(str(job.get("worker")))
    if job["state"] == "active" and pid is not None:
        return job["state"], (
            f"worker {job['worker']} has claimed it but not started it: its process {pid} is unresponsive; "
            "the job returns to the queue, uncounted, and the process is replaced"
        )
    return job["state"], _reason(link, prefix, inspector, job) + _own_options(job) + _next_command(name, job)


def _reason(link: Link, prefix: str, inspector: Inspector, job: dict[str, Any]) -> str:
    name, job_id, state = inspector.name, job["id"], job["state"]
    counts = inspector.counts()
    if state == "active" and counts.mode in RELEASE_MODES:
        return f"it is leased to awaiter {job['worker']}, which has not acknowledged it yet"
    if state == "active" and counts.mode == EXTERNAL:
        return _external_reason(link, queue_base(prefix, name), job)
    if state == "active":
        marked = ", and will be forgotten when it ends" if job["removed"] else ""
        progress = job["progress"] and show_progress(job["progress"]["fraction"], job["progress"]["text"])
        return f"it is running now (worker {job['worker']}){f': {progress}' if progress else ''}{marked}"
    if state == "done":
        return f"it was done at {show_time(job['ended_at'])}"
    if state == "dead" and _never_ready(job["error"]):
        return (
            f"it could not run: {job['error'].get('message')}; `forqctl dead retry {name} {job_id}` runs it without "
            "waiting"
        )
    if state == "held":
        return _held_reason(name, job, counts)
    if state == "dead":
        return f"it failed for good: {_error(job['error'])}; `forqctl dead retry {name} {job_id}` runs it again"
    if counts.paused:
        return f"its queue is paused; `forqctl resume {name}` resumes it"
    if state == "scheduled":
        return f"it is scheduled for {show_time(job['run_at'])}{_last_attempt(name, job)}"
    if state == "retry":
        return (
            f"it has used up its retries and waits in the retry lane until no other job waits ({counts.waiting} wait)"
        )
    return _waiting_reason(link, prefix, name, job, counts)


def _never_ready(error: Any) -> bool:
    """Whether a job is dead because one that it waited for did not end as required."""
    return isinstance(error, dict) and error.get("kind") == "dependency"


_UNTIL = {
    "done": "{} to be done",
    "ended": "{} to end",
    "dead": "{} to die (it is cancelled if none does)",
}
_STATES = {
    "active": "is running",
    "retry": "is in the retry lane",
    "blocked": "is blocked behind an active job of its id",
    "held": "is held",
    "waiting": "is waiting",
    "gone": "is unknown",
}


def _held_reason(name: str, job: dict[str, Any], counts: Counts) -> str:
    shown_ones, count = job["waits_for"][:SHOWN_DEPENDENCIES], job["waits_for_count"]
    ids = [f"{each['id']} of queue {each['queue']}" if "queue" in each else str(each["id"]) for each in shown_ones]
    more = f" and {count - len(ids)} more" if count > len(ids) else ""
    joined = ", ".join(ids) + more if more or len(ids) < 2 else f"{', '.join(ids[:-1])} and {ids[-1]}"
    batches = all(dependency["kind"] == "batch" for dependency in shown_ones)
    kind = ("batch" if batches else "job") + ("" if count == 1 else "es" if batches else "s")
    text = "it waits for " + _UNTIL[job["when"]].format(f"{kind} {joined}")
    if states := [_state_of(dependency) for dependency in shown_ones if dependency["state"] is not None]:
        text += ": " + ", ".join(states)
    if job["waited_for"]:
        text += f"; {job['waited_for']} {'other has' if job['waited_for'] == 1 else 'others have'} ended"
    if job["run_at"] is not None:
        text += f"; it is scheduled for {show_time(job['run_at'])}"
    if counts.paused:
        text += f"; its queue is paused; `forqctl resume {name}` resumes it"
    return text


def _next_command(name: str, job: dict[str, Any]) -> str:
    """The command that explains the first job that a held one waits for, unless that runs."""
    waits_for = job["waits_for"] if job["state"] == "held" else ()
    first = next((each["id"] for each in waits_for if each["state"] not in (None, "active")), None)
    return "" if first is None else f"; see: forqctl why {name} {first}"


def _state_of(dependency: dict[str, Any]) -> str:
    state = dependency["state"]
    if state == "scheduled":
        return f"{dependency['id']} is scheduled for {show_time(dependency['run_at'])}"
    return f"{dependency['id']} {_STATES.get(state, f'has ended ({state})')}"


def _own_options(job: dict[str, Any]) -> str:
    """The options that a job has instead of its queue's."""
    if job["state"] in ("done", "dead"):
        return ""
    text = f"; it has its own {show_own_options(job['options'])}" if job.get("options") else ""
    if job.get("expires_at") is not None and job["state"] != "active":
        text += f"; it expires at {show_time(job['expires_at'])}"
    return text


def _waiting_reason(link: Link, prefix: str, name: str, job: dict[str, Any], counts: Counts) -> str:
    base = queue_base(prefix, name)
    if counts.mode != EXTERNAL and not link.call("ZCOUNT", f"{base}:processors", now_ms(link, base), "+inf"):
        return f"no supervisor serves its queue; `forqctl status {name}` says what to do"
    if job.get("suspect"):
        return _suspect_reason(link, base, job)
    priority = job["priority"]
    own = pending_key(base, priority)
    first = [pending_key(base, before) for before in range(priority)]
    lists = [("LLEN", each) for key in first for each in (key, swept_key(key))]
    positions = [("LPOS", each, job["id"], "MAXLEN", MAX_POSITION) for each in (swept_key(own), own)]
    *lengths, swept, ahead, behind = link.pipeline([*lists, ("LLEN", swept_key(own)), *positions])
    if ahead is None and behind is not None:
        ahead = swept + behind
    before = sum(lengths) + (MAX_POSITION if ahead is None else ahead)
    at_least = "" if ahead is not None else "at least "
    if counts.mode == EXTERNAL:
        idle = "1 worker is idle" if counts.awaiters == 1 else f"{counts.awaiters} workers are idle"
        return f"it waits for a worker: {at_least}{before} jobs before it, {idle}"
    if counts.mode in RELEASE_MODES:
        awaiters = "1 awaiter" if counts.awaiters == 1 else f"{counts.awaiters} awaiters"
        return f"it waits to be released: {at_least}{before} items before it, {awaiters}"
    limit = _reached_limit(counts)
    if before == 0:
        return f"it is next; its queue runs {counts.active} jobs now{limit}"
    jobs = "1 job" if before == 1 else f"{before} jobs"
    return f"it waits: {at_least}{jobs} before it, {counts.active} running now{limit}"


def _reached_limit(counts: Counts) -> str:
    if counts.limits is None or counts.limits["may_begin"] > 0:
        return ""
    if 0 < counts.limits["max_active"] <= counts.active:
        return f", which is the limit (max_active = {counts.limits['max_active']})"
    return f", and no more may start now (rate = {counts.limits['rate']})"


def _external_reason(link: Link, base: str, job: dict[str, Any]) -> str:
    marked = ", and will be forgotten when it ends" if job["removed"] else ""
    if link.call("ZSCORE", f"{base}:accepted", job["id"]) is None:
        return f"it was assigned to worker {job['worker']}, which has not accepted it yet{marked}"
    return f"worker {job['worker']} runs it now{marked}"


def _suspect_reason(link: Link, base: str, job: dict[str, Any]) -> str:
    ahead = link.call("ZRANK", suspects_key(base), job["id"])
    others = {0: "it is next", 1: "1 suspect before it", None: "it is about to start"}
    before = others.get(ahead, f"{ahead} suspects before it")
    return f"suspect: its process crashed with several jobs running; it will be retried alone; {before}"


def _last_attempt(name: str, job: dict[str, Any]) -> str:
    if not job["attempts"]:
        why = f"; it was snoozed: `forqctl logs {name} --job {job['id']}` shows why"
        return why if job.get("snooze_count") else ""
    last = job["attempts"][-1]
    return f", after attempt {job['retry_count']} {last['outcome']}: {_error(last['error']) or last['cause']}"


def _drop_messages(job: dict[str, Any]) -> None:
    for fields in (job, *(attempt for attempt in job.get("attempts", ()) if isinstance(attempt, dict))):
        if isinstance(error := fields.get("error"), dict) and not _never_ready(error):
            fields["error"] = {"name": error.get("name")}


def _error(error: Any) -> str:
    if not isinstance(error, dict):
        return ""
    return f"{error.get('name')}: {error['message']}" if "message" in error else str(error.get("name"))


@dataclass(frozen=True, slots=True)
class JournalSearch:
    """The last events about a job in the journal.

    `end`: the last event about it; `later`: what happened to it after its death. `whole`: the journal was complete;
    otherwise it was read back to `since_us`.
    """

    end: Event | None
    later: Event | None
    whole: bool
    since_us: int | None


def unknown_job(link: Link, prefix: str, name: str, job_id: str) -> UnknownJob:
    """The error for a job that the queue does not have, with what the journal knows about it."""
    base = queue_base(prefix, check_queue_name(name))
    options = link.call("HMGET", f"{base}:options", "epoch", "mode", "journal", "keep_done_ms", "done_max")
    if options[0] is None:
        return error_for(name, [NO_QUEUE])  # type: ignore[return-value]
    epoch, mode, journal, keep_ms, most = ((option or b"").decode() for option in options)
    search = search_journal(link, base, check_job_id(job_id), int(epoch), journal_on=journal == "1")
    advice = _how_to_keep(name, int(keep_ms or 0), most) if mode in (WORK, EXTERNAL) else ""
    if search.end is None and search.later is None:
        return UnknownJob(f"queue {name!r} {_not_found(search, job_id, advice, name, journal_on=journal == '1')}")
    return UnknownJob(f"queue {name!r} has no job {job_id!r} any more: {_how_it_ended(search, advice)}")


def search_journal(link: Link, base: str, job_id: str, epoch: int, *, journal_on: bool) -> JournalSearch:
    """Reads the journal backwards from its end."""
    later: Event | None = None
    expected, since_us = read_summary(link.call("GET", f"{base}:summary")).sequence, None
    first, gaps, before, count, bytes_read, seen = None, False, "+", FIRST_ENTRIES, 0, 0
    while bytes_read < MAX_JOURNAL_BYTES and seen < MAX_JOURNAL_ENTRIES:
        entries = link.call("XREVRANGE", f"{base}:events", before, "-", "COUNT", count)
        read = 0
        for _, flat in entries:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            entry = _readable(fields)
            if entry is None or entry.epoch != epoch:
                return JournalSearch(None, later, first == 1 and not gaps and journal_on, since_us)
            number, since_us = entry.sequence, entry.time_us
            # Other clients keep writing: the newest entry may be newer than `expected`.
            gaps = gaps or (number < expected if first is None else number != first - 1)
            first = number
            read += len(entry.text)
            if job_id in entry.text:
                for event in reversed(_events_of(fields, job_id)):
                    if event.verb in _FORGOTTEN:
                        later = later or event
                    else:
                        return JournalSearch(event, _if_same_job(later, event), False, since_us)
        if len(entries) < count:
            return JournalSearch(None, later, first == 1 and not gaps and journal_on, since_us)
        before, bytes_read, seen = f"({entries[-1][0].decode()}", bytes_read + read, seen + count
        count = max(1, min(MOST_ENTRIES, 4 * count, count * (READ_BYTES // 4) // max(read, 1)))
    return JournalSearch(None, later, False, since_us)


def _readable(fields: dict[bytes, bytes]) -> Entry | None:
    try:
        return unpack_entry(fields)
    except InvalidData:
        return None


def _events_of(fields: dict[bytes, bytes], job_id: str) -> list[Event]:
    try:
        return [event for event in read_entry(fields) if event.job == job_id]
    except InvalidData:
        return []


def _if_same_job(later: Event | None, end: Event) -> Event | None:
    """`later` may be about an earlier job with the id, forgotten after the last one ended."""
    return later if later is not None and later.fence == end.fence else None


def _not_found(search: JournalSearch, job_id: str, advice: str, name: str, *, journal_on: bool) -> str:
    if search.whole:
        return f"never had a job {job_id!r}; `forqctl jobs {name}` lists its jobs"
    if not journal_on:
        known = "its journal is off"
    elif search.since_us is None:
        known = "its journal is empty"
    else:
        known = f"its journal does not mention it since {show_time(search.since_us / 1e6)}, as far as it was read"
    return f"has no job {job_id!r}: it never existed, or has ended{advice}; {known}"


def _how_it_ended(search: JournalSearch, advice: str) -> str:
    end, later = search.end, search.later
    forgotten = later and _forgotten(later)
    if end is None:
        return f"it failed for good, and {forgotten}"
    when = show_time(end.time_us / 1e6)
    match end.verb:
        case "done":
            return f"it was done at {when}{_run_time(end)}{advice}"
        case "released":
            return f"it was released at {when}"
        case "cancelled" if end.fence:
            return f"it was removed or killed while it ran, and ended at {when}"
        case "cancelled":
            return f"it was cancelled at {when}"
        case "dead" | "failing":
            return f"it failed for good at {when}, and {forgotten or 'is not kept any more (dead_ttl, dead_max)'}"
        case _:
            return f"its last event in the journal is {end.verb!r}, at {when}, and it has no record now"


def _forgotten(later: Event) -> str:
    cause = "discarded" if later.verb == "discarded" else "removed by dead_ttl or dead_max"
    return f"was {cause} at {show_time(later.time_us / 1e6)}"


def _run_time(end: Event) -> str:
    if end.micros is None:
        return ""
    milliseconds = end.micros / 1000
    return f" (it ran for {f'{milliseconds:.1f} ms' if milliseconds < 1000 else f'{milliseconds / 1000:.1f} s'})"


def _how_to_keep(name: str, keep_ms: int, most: Any) -> str:
    if keep_ms:
        return f" and is not kept any more (keep_done = {show_duration(keep_ms / 1000)}, done_max = {most})"
    return f" and is not kept (`forqctl set {name} keep_done=1h` keeps jobs that end after it, with results)"
