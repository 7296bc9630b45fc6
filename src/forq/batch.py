"""Batches: jobs of any queues that belong together, and jobs that run when all of them have ended.

    with client.batch("reports", on_done=new_job({"task": "summary"})) as batch:
        batch.enqueue("pages", {"page": 1})
        batch.enqueue("pages", {"page": 2})

A batch lives in one queue, its home; its callbacks are jobs of that queue. It is sealed at the end of the block.
"""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from forq.api_types import BatchInfo
from forq.broker.batches import MEMBERS_PER_CALL, StoredBatch, check_batch_id
from forq.broker.enqueue import NewJob, Producer, Update, new_job
from forq.broker.link import Link
from forq.errors import Exists, UsageError
from forq.job import new_id
from forq.values import check_queue_name, shown

if TYPE_CHECKING:
    from forq.app.tasks import JobRef, Prepared

T = TypeVar("T")
# Name of a callback -> what it waits for.
_WHEN = {"on_done": "done", "on_end": "ended", "on_dead": "dead"}
_REFUSE = Update("refuse")
CANCELLED_PER_CALL = 1000


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
    ) -> None:
        self.queue = check_queue_name(queue)
        self.id = check_batch_id(id)
        self._link, self._prefix = link, prefix
        self._keeps_results = keeps_results
        # The running member that adds others, and how many it has added.
        self._parent, self._parent_id, self._children = parent, parent_id, 0
        self._unsent: list[tuple[str, NewJob]] = []

    def enqueue(self, queue: str, data: Any, **options: Any) -> str:
        """Adds a job of this queue and returns its id. Options: as for `Queue.enqueue`, without those for known ids."""
        return self.add_job(queue, new_job(data, **options))

    def add(self, prepared: "Prepared[T]") -> "JobRef[T]":
        """Adds a task that was prepared: `batch.add(send.prepare("a@b.c"))`."""
        sender = prepared.sender
        id = self.add_job(sender.queue, prepared.job)
        return sender._ref(id, None)

    def add_job(self, queue: str, job: NewJob) -> str:
        """The same for a job made with `forq.client.new_job`."""
        if self._parent is not None:
            # The next attempt of the running member adds the same jobs, and none of them twice.
            self._children += 1
            name = f"{self._parent_id[:80]}.{self.id[-24:]}.{self._parent}.{self._children}"
            job = job._replace(id=name, token=name)
        self._unsent.append((check_queue_name(queue), job))
        if len(self._unsent) >= MEMBERS_PER_CALL:
            self.flush()
        return job.id

    def flush(self) -> None:
        """Stores the members that were added so far."""
        members, self._unsent = self._unsent, []
        if not members:
            return
        stored = self._stored()
        after = self._children - len(members)
        numbers = stored.reserve([(queue, job.id) for queue, job in members], self._parent, max(0, after))
        by_queue: dict[str, list[NewJob]] = {}
        for (queue, job), number in zip(members, numbers, strict=True):
            if number:
                edge = stored.edge(number, queue, keeps_results=self._keeps_results)
                by_queue.setdefault(queue, []).append(job._replace(edges=(edge, *job.edges)))
        for queue, jobs in by_queue.items():
            producer = Producer(self._link(), self._prefix, queue)
            try:
                producer.enqueue_many(jobs, _REFUSE)
            except Exists:
                if self._parent is None:
                    raise
                # An earlier attempt has stored some of them.
                for job in jobs:
                    producer.enqueue([job], Update("skip"))

    def seal(self) -> None:
        """Sends what was added; from now on the batch ends when its members have ended. Safe to repeat."""
        self.flush()
        self._stored().seal()

    def cancel(self) -> int:
        """Cancels the members that have not begun, and returns how many. Running ones continue; then the batch has
        failed: `on_end` runs, `on_done` never."""
        self._unsent = []
        cancelled, more = self.cancel_part()
        while more:
            part, more = self.cancel_part()
            cancelled += part
        return cancelled

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


def open_batch(
    link: Callable[[], Link],
    prefix: str,
    queue: str,
    id: str | None,
    *,
    callbacks: Mapping[str, NewJob | None],
    results: bool,
) -> Batch:
    """Creates a batch and stores its callbacks, which wait for it. May be repeated with the same id."""
    batch = Batch(link, prefix, queue, new_id() if id is None else id, keeps_results=results)
    is_new = batch._stored().open(keeps_results=results)
    # Then on_dead may have run already, and must not be stored again.
    has_died = not is_new and batch.info()["dead"] > 0
    waiting = [
        job._replace(
            id=f"{batch.id}:{name}",
            after=f"{_WHEN[name]} 0 b{batch.id}",
            options=f"{job.options},g={batch.id}" if job.options else f"g={batch.id}",
        )
        for name, job in callbacks.items()
        if job is not None and not (has_died and name == "on_dead")
    ]
    if waiting:
        # A repeated call finds them.
        Producer(link(), prefix, batch.queue).enqueue(waiting, Update("skip"))
    return batch


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
