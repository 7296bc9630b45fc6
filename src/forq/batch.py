"""Batches: jobs of any queues that belong together, and jobs that run when all of them have ended.

    with client.batch("reports", on_done=new_job({"task": "summary"})) as batch:
        batch.enqueue("pages", {"page": 1})
        batch.enqueue("pages", {"page": 2})

A batch lives in one queue, its home; its callbacks are jobs of that queue. It is sealed at the end of the block.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from forq.api_types import BatchInfo
from forq.broker.batches import MEMBERS_PER_CALL, StoredBatch, check_batch_id
from forq.broker.chunks import NewJob
from forq.broker.enqueue import Producer, Repeatable, TokenTerms, Update, new_job
from forq.broker.link import Link
from forq.errors import Exists, UnknownQueue, UsageError
from forq.job import Job, new_id
from forq.values import check_queue_name, shown

if TYPE_CHECKING:
    from forq.app.tasks import JobRef, Prepared

T = TypeVar("T")
# A member may be stored for so long after its number was reserved. Twice as long after that, it counts as lost
# (lua/batches.lua, CHECK_MS): clocks may differ by a part of the rest.
STORED_WITHIN_MS = 300_000
# How long a repeated call finds the callbacks that it has stored.
CALLBACKS_KNOWN_MS = 30 * 24 * 3_600_000
# Name of a callback -> what it waits for.
_WHEN = {"on_done": "done", "on_end": "ended", "on_dead": "dead"}
CANCELLED_PER_CALL = 1000
# Length of the ids of jobs that running members add, without the two numbers at the end.
MOST_OF_CHILD_ID = 104


@dataclass(slots=True)
class Children:
    """How many jobs a running member has added, with all of its `batch_of` blocks."""

    added: int = 0


class Batch:
    """One batch. Members are sent in groups of up to 500: at the latest by `flush`, `seal` and the end of the block."""

    is_batch = True

    def __init__(
        self,
        link: Callable[[], Link],
        prefix: str,
        queue: str,
        id: str,
        *,
        keeps_results: bool = False,
        parent: int | None = None,
        parent_id: str = "",
        children: Children | None = None,
        create_queue: Callable[[str], None] | None = None,
    ) -> None:
        """`parent`, `parent_id`, `children`: the running member that adds others. `create_queue`: called for a member
        of a queue that does not exist yet."""
        self.queue = check_queue_name(queue)
        self.id = check_batch_id(id)
        self._link, self._prefix = link, prefix
        self._keeps_results = keeps_results
        self._create_queue = create_queue
        self._parent, self._parent_id = parent, parent_id
        self._children = Children() if children is None else children
        # With the number of each among those that the parent has added.
        self._unsent: list[tuple[str, NewJob, int]] = []
        # Of the queues of members; and when it was read.
        self._terms: dict[str, tuple[TokenTerms, float]] = {}

    def enqueue(self, queue: str, data: Any, **options: Any) -> str:
        """Adds a job of this queue and returns its id. Options: as for `Queue.enqueue`, without those for known ids."""
        if "token" in options:
            raise UsageError("a member of a batch has no token of its own: leave it out")
        self._check_id(options)
        return self.add_job(queue, new_job(data, **options))

    def add(self, prepared: "Prepared[T]") -> "JobRef[T]":
        """Adds a task that was prepared: `batch.add(send.prepare("a@b.c"))`."""
        from forq.app.tasks import check_member

        check_member(prepared, "a batch", "batch.add(TASK.prepare(…))")
        self._check_id(prepared.options)
        sender = prepared.sender
        id = self.add_job(sender.queue, prepared.job)
        return sender._ref(id, None)

    def add_job(self, queue: str, job: NewJob) -> str:
        """The same for a job made with `forq.client.new_job`."""
        check_queue_name(queue)
        number = 0
        if self._parent is not None:
            # The next attempt of the running member adds the same jobs, and none of them twice.
            number = self._children.added = self._children.added + 1
            parent_id = self._parent_id[: MOST_OF_CHILD_ID - len(self.id)]
            job = job._replace(id=f"{parent_id}.{self.id}.{self._parent}.{number}")
        self._unsent.append((queue, job, number))
        if len(self._unsent) >= MEMBERS_PER_CALL:
            self.flush()
        return job.id

    def _check_id(self, options: Mapping[str, Any]) -> None:
        if self._parent is not None and "id" in options:
            raise UsageError(
                f"id {shown(options['id'])} is not allowed: the ids of jobs that a running member adds are derived "
                "from its own, so that its next attempt adds none of them twice"
            )

    def flush(self) -> None:
        """Stores the members that were added so far."""
        members = self._unsent
        if not members:
            return
        stored = self._stored()
        policies = {queue: self._policy(queue) for queue in {queue for queue, _, _ in members}}
        numbers: list[int] = []
        for after, group in _consecutive(members):
            numbers += stored.reserve([(queue, job.id) for queue, job, _ in group], self._parent, after)
        # Not before: a repeated `seal` without them would end the batch as done. From here on their numbers are open.
        self._unsent = []
        by_queue: dict[str, list[NewJob]] = {}
        for (queue, job, _), number in zip(members, numbers, strict=True):
            if number:
                edge = stored.edge(number, queue, keeps_results=self._keeps_results)
                # The next attempt of a running member repeats the call; a later batch of this id must not.
                token = None if self._parent is None else stored.token(number)
                by_queue.setdefault(queue, []).append(job._replace(edges=(edge, *job.edges), token=token or job.token))
        for queue, jobs in by_queue.items():
            self._store(queue, jobs, policies[queue])

    def _policy(self, queue: str) -> Update:
        """The server refuses a member that comes so late that it may count as lost (TooLate)."""
        if queue not in self._terms:
            producer = Producer(self._link(), self._prefix, queue)
            try:
                terms = producer.token_terms()
            except UnknownQueue:
                if self._create_queue is None:
                    raise
                self._create_queue(queue)
                terms = producer.token_terms()
            self._terms[queue] = terms, time.monotonic()
        terms, read_at = self._terms[queue]
        until_ms = terms.now_ms + round((time.monotonic() - read_at) * 1000) + STORED_WITHIN_MS
        return Update("refuse", repeatable=Repeatable(terms.epoch, until_ms, until_ms))

    def _store(self, queue: str, jobs: list[NewJob], policy: Update) -> None:
        producer = Producer(self._link(), self._prefix, queue)
        try:
            producer.enqueue_many(jobs, policy)
        except Exists:
            if self._parent is None:
                raise
            # An earlier attempt has stored some of them.
            for job in jobs:
                producer.enqueue([job], policy._replace(if_exists="skip"))

    def seal(self) -> None:
        """Sends what was added; from now on the batch ends when its members have ended. Safe to repeat."""
        self.flush()
        self._stored().seal()

    def cancel(self) -> int:
        """Cancels the members that have not begun, and returns how many. Running ones continue; then the batch has
        failed: `on_end` runs, `on_done` never."""
        self._unsent = []
        # At once: a part would look again at those whose ends are not reported yet.
        return self._stored().cancel()[0]

    def cancel_part(self) -> tuple[int, bool]:
        """The same for a limited number of members; also returns whether there may be more."""
        return self._stored().cancel(CANCELLED_PER_CALL)

    def info(self) -> BatchInfo:
        """State and counts, in one call."""
        counts = self._stored().counts()
        ended = counts.members - counts.open
        return {
            "id": self.id,
            "queue": self.queue,
            "state": counts.state,
            "members": counts.members,
            "open": counts.open,
            "done": counts.done,
            "dead": counts.dead,
            "other": counts.other,
            "progress": ended / counts.members if counts.members else float(counts.has_ended),
            "ended_at": counts.at if counts.has_ended else None,
        }

    def keeps_results(self) -> bool:
        """Whether it was opened with results=True."""
        return self._stored().counts().keeps_results

    def results(self) -> list[Any]:
        """The results of all members in the order in which they were added; None for a member that is not done.

        UsageError if the batch keeps none; NoResult if a member is done and left none.
        """
        stored = self._stored()
        if not stored.counts().keeps_results:
            raise UsageError(
                f"batch {self.id} keeps no results; open it with results=True: client.batch(…, results=True)"
            )
        return stored.results()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._parent is None:
                self.seal()
            elif kind is None:
                self.flush()
        except BaseException:
            kind = BaseException
            raise
        finally:
            if kind is not None and self._parent is None:
                self.cancel()

    def _stored(self) -> StoredBatch:
        return StoredBatch(self._link(), self._prefix, self.queue, self.id)

    def __repr__(self) -> str:
        return f"Batch(queue={self.queue!r}, id={self.id!r})"


def _consecutive(members: list[tuple[str, NewJob, int]]) -> Iterator[tuple[int, list[tuple[str, NewJob, int]]]]:
    """Groups that one call may reserve, with the number before each: another block of the same member may have added
    some in between. Members without a parent are one group."""
    pairs = groupby(enumerate(members), lambda pair: pair[1][2] and pair[1][2] - pair[0])
    for _, group in pairs:
        part = [member for _, member in group]
        yield max(0, part[0][2] - 1), part


def open_batch(
    link: Callable[[], Link],
    prefix: str,
    queue: str,
    id: str | None,
    *,
    callbacks: Mapping[str, NewJob | None],
    results: bool,
    create_queue: Callable[[str], None] | None = None,
) -> Batch:
    """Creates a batch and stores its callbacks, which wait for it. May be repeated with the same id."""
    for name, job in callbacks.items():
        if job is not None and job.after:
            raise UsageError(f"{name}: a callback waits for its batch, and for nothing else: leave `after` out")
    batch = Batch(link, prefix, queue, new_id() if id is None else id, keeps_results=results, create_queue=create_queue)
    terms = batch._stored().open(keeps_results=results)
    waiting = [
        job._replace(
            id=f"{batch.id}:{name}",
            # Also once it has ended: a repeated call must not store it again.
            token=f"{batch.id}:{name}",
            after=f"{_WHEN[name]} 0 b{batch.id}",
            options=f"{job.options},g={batch.id}" if job.options else f"g={batch.id}",
        )
        for name, job in callbacks.items()
        if job is not None
    ]
    if waiting:
        known_until_ms = terms.now_ms + CALLBACKS_KNOWN_MS
        repeatable = Repeatable(terms.epoch, terms.now_ms + STORED_WITHIN_MS, known_until_ms)
        Producer(link(), prefix, batch.queue).enqueue(waiting, Update("skip", repeatable=repeatable))
    return batch


def membership_of(job: Job) -> tuple[str, str, int]:
    """The queue and id of a running member's batch, and its number there."""
    if job.membership is None:
        raise UsageError(
            f"job {job.id!r} of queue {job.queue!r} is no member of a batch, so it cannot add jobs to one; for the "
            "batch of a callback: client.find_batch(job.queue, job.batch)"
        )
    return job.membership


def callback_queue(queue: str | None, prepared: Mapping[str, Any]) -> str:
    """The home of a batch: its callbacks' queue."""
    queues = {name: each.sender.queue for name, each in prepared.items() if each is not None}
    if queue is not None:
        queues["queue"] = queue
    if len(set(queues.values())) != 1:
        given = ", ".join(f"{name}: {shown(each)}" for name, each in queues.items()) or "none"
        raise UsageError(
            f"the callbacks of a batch must be of one queue, and `queue` the same (given: {given}); "
            "choose it for a task with task.using(queue=…).prepare(…)"
        )
    return cast(str, next(iter(queues.values())))
