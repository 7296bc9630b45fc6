"""What a run has left: files outside Redis, and the final state of Redis."""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forq.broker.journal import Event, read_entry
from forq.broker.keys import DEFAULT_PREFIX, fail_queue, queue_base
from tests.chaos.ground import lines
from tests.chaos.stage import QUEUES, Stage
from tests.support.drive.processes import tree_of
from tests.support.drive.supervisor import Trace

Entry = dict[bytes, bytes]
_LISTS = ("pending", *(f"pending:{priority}" for priority in range(10)), "retry", "failed", "resolving")
# What queues hold for jobs that wait for others.
FLOW_HASHES = ("held", "held:jobs", "held:open", "inputs", "sources", "edges", "batch:members", "reports")


@dataclass
class QueueEnd:
    """One queue, or one fail queue, in Redis."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    # Leftover ids by key.
    places: dict[str, set[str]] = field(default_factory=dict)
    processed: int = 0
    failed: int = 0
    dead: set[str] = field(default_factory=set)  # id@fence
    done: dict[str, int] | None = None  # id -> fence; None: it keeps none
    journal_lost: int = 0
    # Queue and id of members without an end, of batches that were never sealed: these are kept for a day.
    abandoned: set[tuple[str, str]] = field(default_factory=set)


class Plan(NamedTuple):
    """When a job may run, and the ids that it waits for: none for the first jobs of flows, and members of batches.

    `flow`: its id, or '-'."""

    flow: str
    when: str
    needed: tuple[str, ...]


@dataclass
class Evidence:
    verdicts: dict[str, tuple[str, str]] = field(default_factory=dict)  # id -> queue, verdict
    traces: list[Trace] = field(default_factory=list)
    processors: dict[int, set[str]] = field(default_factory=dict)  # pid -> those that it was a worker of
    # Processors. Not from the logs of supervisors: the one that evicted it may have died before it could log.
    evicted: set[str] = field(default_factory=set)
    plans: dict[str, Plan] = field(default_factory=dict)  # id -> what it waits for
    taken_away: dict[str, set[str]] = field(default_factory=dict)  # id -> "yes cancel", "unknown remove" …
    logged: dict[str, set[str]] = field(default_factory=dict)  # queue -> ids in failed logs
    queues: dict[str, QueueEnd] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    fired: dict[str, list[str]] = field(default_factory=dict)


def collect(stage: Stage, fired: dict[str, list[str]]) -> Evidence:
    """Collects the evidence after the supervisors have been stopped."""
    ground = stage.ground
    evidence = Evidence(exits=list(stage.exits), fired=fired)
    for verdicts in sorted(ground.verdicts.iterdir()):
        for verdict, queue, *ids in lines(verdicts):
            # Later verdicts replace "asked"; for an id that is dispatched repeatedly, the last one counts.
            evidence.verdicts |= dict.fromkeys(ids, (queue, "unknown" if verdict == "asked" else verdict))
    evidence.traces = stage.supervisors[0].traces()
    for pid, processor in lines(ground.joined):
        evidence.processors.setdefault(int(pid), set()).add(processor)
    for supervisor in stage.supervisors:
        for queue in QUEUES:
            for file in (supervisor.state_dir / "logs" / queue).glob("failed.jsonl*"):
                logged = {json.loads(line)["id"] for line in file.read_text().splitlines()}
                evidence.logged.setdefault(queue, set()).update(logged)
        evidence.survivors += [f"{pid} of {supervisor.name}" for pid in tree_of(supervisor.state_dir)]
    for job_id, flow, when, *needed in lines(ground.plans):
        evidence.plans[job_id] = Plan(flow, when, tuple(needed))
    for answer, how, job_id in lines(ground.taken_away):
        evidence.taken_away.setdefault(job_id, set()).add(f"{answer} {how}")
    with stage.connect() as client:
        for name in QUEUES:
            for each in (name, fail_queue(name)):
                evidence.queues[each] = _queue_end(client, each)
                graves = client.zrange(f"{queue_base(DEFAULT_PREFIX, each)}:graves", 0, -1)
                # Entries of single workers are two words.
                evidence.evicted |= {name.decode() for name in graves if b" " not in name}
    return evidence


def _queue_end(client: Any, name: str) -> QueueEnd:
    base = queue_base(DEFAULT_PREFIX, name)
    entries = [fields for _, fields in client.xrange(f"{base}:events")]
    events = [event for fields in entries for event in read_entry(fields, name)]
    places = {key: set(client.hkeys(f"{base}:{key}")) for key in ("jobs", "active", "blocked", *FLOW_HASHES)}
    places |= {key: set(client.zrange(f"{base}:{key}", 0, -1)) for key in ("scheduled", "suspects")}
    places |= {key: set(client.lrange(f"{base}:{key}", 0, -1)) for key in _LISTS}
    lists = [key.decode() for key in client.scan_iter(match=f"{base}:processor:*:processing", count=1000)]
    places |= {key: set(client.lrange(key, 0, -1)) for key in lists}
    abandoned = _abandoned_members(client, base)
    places["batch:members"] -= abandoned.keys()
    # Two lines per list of lines that were not written.
    outboxes = [f"{base}:outbox", *(key.decode() for key in client.scan_iter(match=f"{base}:outbox:*", count=1000))]
    places |= {key: {line[:80] for line in client.lrange(key, 0, 1)} for key in outboxes}
    keeps = int(client.hget(f"{base}:options", "keep_done_ms") or 0) > 0
    done = {job.decode(): int(kept.split(b" ")[1]) for job, kept in client.hgetall(f"{base}:done:jobs").items()}
    return QueueEnd(
        name,
        entries,
        events,
        {key: {each.decode() for each in found if each} for key, found in places.items() if found - {b""}},
        int(client.get(f"{base}:processed:count") or 0),
        int(client.get(f"{base}:failed:count") or 0),
        {member.decode() for member in client.zrange(f"{base}:dead", 0, -1)},
        done if keeps else None,
        int(client.hget(f"{base}:counts", "journal_lost") or 0),
        set(abandoned.values()),
    )


def _abandoned_members(client: Any, base: str) -> dict[bytes, tuple[str, str]]:
    """Their fields, and the queue and id of each."""
    states = {batch: state.split(b" ")[0] for batch, state in client.hgetall(f"{base}:batches").items()}
    found = {}
    for member, value in client.hgetall(f"{base}:batch:members").items():
        if states.get(member.split(b" ")[0]) == b"abandoned":
            queue, job_id, *_ = value.decode().split(" ")
            found[member] = queue, job_id
    return found
