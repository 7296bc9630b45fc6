"""Flows: jobs that wait for one another, stored together, and the picture of them.

1. A flow of one queue that fits into one call is stored by it: all of it or nothing.
2. Any other is stored backwards, each job after those that wait for it, so that its edges can be stored with it. Jobs
   without dependencies wait for a gate, a batch without members in the flow's home queue; sealing it starts the flow.
   If its producer dies before that, the gate is abandoned after an hour, and the jobs are dead (lua/batches.lua).
3. The home queue, that of the first job, keeps the plan of the flow for a week, for `read_flow`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import orjson

from forq.broker.batches import StoredBatch, check_batch_id
from forq.broker.chunks import CHUNK_BYTES, CHUNK_JOBS, NewJob, chunks
from forq.broker.dependencies import MAX_DEPENDENCIES
from forq.broker.enqueue import JobIdentity, Producer, Repeatable, Update
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.scripts import OK, error_for, script
from forq.errors import ForqError, OutcomeUnknown, UnknownFlow, UsageError
from forq.job import new_id

KEPT_MS = 7 * 24 * 3600 * 1000
MAX_FLOW_JOBS = 10_000
# How long a script may be that stores a flow's plan.
MAX_PLAN_BYTES = 4 << 20
# Jobs whose states are read in one round trip.
STATES_PER_CALL = 500
# Queues that are asked for a flow in one round trip.
QUEUES_PER_CALL = 500
# How long storing a flow over several calls may take. Twice as long after it was stored, a job counts its dependencies
# in other calls as lost (lua/batches.lua, CHECK_MS).
STORED_WITHIN_MS = 300_000
_REFUSE = Update("refuse")
# Of a flow's id, so much is part of the id of its gate.
_SHOWN_OF_FLOW = 31

Stored = list[tuple[str, JobIdentity | None]]


class FlowJob(NamedTuple):
    """A job of a flow. `needs`: the indexes of the jobs that it waits for, all of them before it. `use`: how it uses
    their results (dependencies.py). `label`: for the picture."""

    queue: str
    job: NewJob
    needs: tuple[int, ...] = ()
    when: str = "done"
    use: int = 0
    label: str = ""


def store_flow(link: Link, prefix: str, flow_id: str, jobs: Sequence[FlowJob]) -> Stored:
    """Stores all jobs, or none of them; returns their ids with identities. Exists if an id is taken."""
    check_batch_id(flow_id, "flow")
    if not 1 <= len(jobs) <= MAX_FLOW_JOBS:
        raise UsageError(
            f"flow {flow_id} has {len(jobs)} jobs: allowed are 1 to {MAX_FLOW_JOBS}; a batch takes any number of jobs"
        )
    for number, flow_job in enumerate(jobs):
        if len(flow_job.needs) > MAX_DEPENDENCIES:
            raise UsageError(
                f"job {number + 1} of flow {flow_id} waits for {len(flow_job.needs)} jobs: at most {MAX_DEPENDENCIES} "
                "are allowed; let jobs in between wait for groups of them, or use a batch"
            )
    before = _store_plan(link, prefix, flow_id, jobs)
    try:
        if len({flow_job.queue for flow_job in jobs}) == 1 and _fits_into_one_call(jobs):
            return _store_at_once(link, prefix, jobs)
        return _StoreBackwards(link, prefix, flow_id, jobs).run()
    except OutcomeUnknown:
        # It may have been stored.
        raise
    except ForqError:
        with suppress(ForqError):
            _describe(link, prefix, flow_id, jobs[0].queue, before)
        raise


def read_flow(link: Link, prefix: str, queue: str, flow_id: str) -> list[dict[str, Any]]:
    """The jobs of a flow in their order, with their states: {"queue", "id", "label", "needs", "when", "state"}.

    `needs`: indexes. The state of a job that is not kept is "ended", or how it ended if its queue remembers it.
    """
    check_batch_id(flow_id, "flow")
    packed = link.call("GET", f"{queue_base(prefix, queue)}:flow:{flow_id}")
    if packed is None:
        raise UnknownFlow(f"queue {queue!r} has no flow {flow_id!r}: it never existed, or is older than a week")
    plan = orjson.loads(packed)
    for first in range(0, len(plan), STATES_PER_CALL):
        part = plan[first : first + STATES_PER_CALL]
        for each, state in zip(part, _states(link, prefix, part), strict=True):
            each["state"] = state
    return list(plan)


def find_flow(link: Link, prefix: str, names: Sequence[str], flow_id: str) -> str:
    """The home of a flow among these queues. UnknownFlow if it is in none of them."""
    check_batch_id(flow_id, "flow")
    for first in range(0, len(names), QUEUES_PER_CALL):
        part = names[first : first + QUEUES_PER_CALL]
        replies = link.pipeline([("EXISTS", f"{queue_base(prefix, name)}:flow:{flow_id}") for name in part])
        for name, known in zip(part, replies, strict=True):
            if known:
                return name
    raise UnknownFlow(f"no queue has a flow {flow_id!r}: it never existed, or is older than a week")


def _states(link: Link, prefix: str, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The state of each job, in one round trip."""
    commands: list[tuple[Any, ...]] = []
    for each in jobs:
        base, job_id = queue_base(prefix, each["queue"]), each["id"]
        commands += [
            ("HEXISTS", f"{base}:held", job_id),
            ("HEXISTS", f"{base}:jobs", job_id),
            ("HEXISTS", f"{base}:active", job_id),
            ("ZSCORE", f"{base}:scheduled", job_id),
            ("HGET", f"{base}:ends", job_id),
            ("HGET", f"{base}:ends:old", job_id),
        ]
    replies = link.pipeline(commands)
    states = []
    for at in range(0, len(replies), 6):
        held, live, active, due, last_end, end = replies[at : at + 6]
        if held:
            states.append("held")
        elif live:
            states.append("active" if active else "waiting" if due is None else "scheduled")
        else:
            how = last_end or end
            states.append("ended" if how is None else how.decode())
    return states


def _store_plan(link: Link, prefix: str, flow_id: str, jobs: Sequence[FlowJob]) -> bytes:
    """Returns the plan of an earlier flow of this id; b"" if there is none."""
    plan = orjson.dumps(
        [
            {"queue": each.queue, "id": each.job.id, "label": each.label, "needs": each.needs, "when": each.when}
            for each in jobs
        ]
    )
    if len(plan) > MAX_PLAN_BYTES:
        raise UsageError(f"the plan of flow {flow_id} has {len(plan)} bytes: at most {MAX_PLAN_BYTES} are allowed")
    return _describe(link, prefix, flow_id, jobs[0].queue, plan)


def _describe(link: Link, prefix: str, flow_id: str, home: str, plan: bytes) -> bytes:
    reply = link.run(script("describe_flow"), queue_base(prefix, home), flow_id, KEPT_MS, plan)
    if reply[0] != OK:
        raise error_for(home, reply)
    return bytes(reply[1])


def _fits_into_one_call(jobs: Sequence[FlowJob]) -> bool:
    edges = sum(len(each.needs) for each in jobs)
    return len(jobs) <= CHUNK_JOBS and sum(len(each.job.body) for each in jobs) + 40 * edges <= CHUNK_BYTES


def _store_at_once(link: Link, prefix: str, jobs: Sequence[FlowJob]) -> Stored:
    waiting = [
        each.job._replace(after=_after(each, [f"j{jobs[number].job.id}" for number in each.needs])) for each in jobs
    ]
    return Producer(link, prefix, jobs[0].queue).enqueue_identified(waiting, _REFUSE)


def _after(flow_job: FlowJob, words: Sequence[str]) -> str:
    return f"{flow_job.when} {flow_job.use} {' '.join(words)}" if words else ""


class _StoreBackwards:
    """Stores the jobs level by level: first those for which no other waits."""

    def __init__(self, link: Link, prefix: str, flow_id: str, jobs: Sequence[FlowJob]) -> None:
        self._link, self._prefix, self._jobs = link, prefix, jobs
        # Another one for each call: what an earlier producer has left must not start with this flow.
        self._gate = StoredBatch(link, prefix, jobs[0].queue, f"{flow_id[:_SHOWN_OF_FLOW]}.{new_id()}")
        # Of each job: the (index of a job that waits for it, number of the dependency there).
        self._dependants: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, flow_job in enumerate(jobs):
            for number, needed in enumerate(flow_job.needs, 1):
                self._dependants[needed].append((index, number))
        self._stored: dict[int, tuple[str, JobIdentity | None]] = {}
        self._policies: dict[str, Update] = {}

    def run(self) -> Stored:
        self._gate.open(keeps_results=False)
        try:
            for queue in {each.queue for each in self._jobs}:
                terms = Producer(self._link, self._prefix, queue).token_terms()
                until_ms = terms.now_ms + STORED_WITHIN_MS
                # Later, the server refuses them (TooLate).
                self._policies[queue] = Update("refuse", repeatable=Repeatable(terms.epoch, until_ms, until_ms))
            for level in self._levels():
                self._store_level(level)
            self._open_gate_elsewhere()
        except BaseException:
            self._withdraw()
            raise
        try:
            self._gate.seal()
        except OutcomeUnknown:
            # Jobs may have begun. Otherwise the gate is abandoned.
            raise
        except ForqError:
            self._withdraw()
            raise
        return [self._stored[index] for index in range(len(self._jobs))]

    def _levels(self) -> list[list[int]]:
        """Indexes by the longest path to a job for which no other waits."""
        height: dict[int, int] = {}
        for index in reversed(range(len(self._jobs))):
            height[index] = max((height[waits] + 1 for waits, _ in self._dependants[index]), default=0)
        levels: list[list[int]] = [[] for _ in range(max(height.values()) + 1)]
        for index in range(len(self._jobs)):
            levels[height[index]].append(index)
        return levels

    def _store_level(self, level: list[int]) -> None:
        by_queue: defaultdict[str, list[int]] = defaultdict(list)
        for index in level:
            by_queue[self._jobs[index].queue].append(index)
        for queue, indexes in by_queue.items():
            producer, left = Producer(self._link, self._prefix, queue), iter(indexes)
            for chunk in chunks([self._with_edges(index) for index in indexes]):
                # Noted chunk by chunk, since a later one may be refused.
                found = producer.enqueue_identified(chunk, self._policies[queue])
                self._stored |= dict(zip(islice(left, len(found)), found, strict=True))

    def _with_edges(self, index: int) -> NewJob:
        flow_job = self._jobs[index]
        words = [f"f{self._jobs[needed].queue}:{self._jobs[needed].job.id}" for needed in flow_job.needs]
        after = _after(flow_job, words)
        if not words:
            at_home = flow_job.queue == self._gate.queue
            after = f"done 0 {f'b{self._gate.id}' if at_home else f'g{self._gate.queue}:{self._gate.id}'}"
        edges = tuple(self._edge(waits, number, flow_job.queue) for waits, number in self._dependants[index])
        return flow_job.job._replace(after=after, edges=(*flow_job.job.edges, *edges))

    def _edge(self, index: int, number: int, source_queue: str) -> str:
        """From a job in `source_queue` to a dependency of the stored job with this index."""
        flow_job, (job_id, identity) = self._jobs[index], self._stored[index]
        assert identity is not None  # only a call with a token returns none
        edge = f"job {job_id} {identity.enqueued_us} {number} {flow_job.use}"
        return edge if flow_job.queue == source_queue else f"to {flow_job.queue} {identity.epoch} {edge}"

    def _open_gate_elsewhere(self) -> None:
        """The jobs without dependencies in other queues wait for the gate, too."""
        elsewhere = [
            self._edge(index, 1, self._gate.queue)
            for index, flow_job in enumerate(self._jobs)
            if not flow_job.needs and flow_job.queue != self._gate.queue
        ]
        if elsewhere:
            self._gate.attach(elsewhere)

    def _withdraw(self) -> None:
        """Nothing of the flow may run: cancels what was stored. What cannot be reached is dead once the gate has been
        abandoned."""
        with suppress(ForqError):
            # In the order in which they were stored: a job before those that it waits for.
            for index, (job_id, identity) in self._stored.items():
                Producer(self._link, self._prefix, self._jobs[index].queue).cancel(job_id, identity)
            self._gate.seal(cancel=True)
