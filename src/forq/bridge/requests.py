"""Executes the requests of peers. Every request can be retried safely."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import orjson

from forq.api_types import JobBrief
from forq.bridge.messages import (
    AddJob,
    DelJob,
    JobAccepted,
    JobFailed,
    JobFinished,
    JobReport,
    ListRequest,
    Request,
    Tick,
    WorkerIdle,
    WorkerProgress,
)
from forq.broker.enqueue import Producer, new_job
from forq.broker.inspect import Inspector
from forq.broker.leases import ExternalJobs, Failure, Lease, LeaseReply
from forq.broker.link import Link
from forq.broker.record import MAX_IDENTIFIER
from forq.broker.recovery import WorkerRecovery
from forq.broker.registry import Registry
from forq.errors import LeaseLapsed, UnknownQueue
from forq.job import assignment_payload
from forq.settings import EXTERNAL, stored, stored_defaults

# One call skips a limited number of jobs that cannot be assigned; this limits the calls per request.
MAX_FETCHES = 1000
LEASE_TICKS = 3

# Topic and payload.
Response = tuple[str, Mapping[str, Any]]
T = TypeVar("T")


class Requests:
    """`bridge`: name of the channel on which Redis notifies this bridge about work for its workers."""

    def __init__(self, link: Link, prefix: str, bridge: str, *, max_queues: int, tick_seconds: float) -> None:
        self._link = link
        self._prefix = prefix
        self._bridge = bridge
        self._max_queues = max_queues
        self._defaults = stored_defaults(EXTERNAL) | stored({"lease": LEASE_TICKS * tick_seconds})
        self._registry = Registry(link, prefix)
        self._recovery = WorkerRecovery(link, prefix, bridge)
        self._handlers: Mapping[type, Callable[[Any], list[Response]]] = {
            AddJob: self._add_job,
            WorkerIdle: self._worker_idle,
            JobAccepted: self._accepted,
            WorkerProgress: self._progress,
            JobFinished: self._finished,
            JobFailed: self._failed,
            ListRequest: self._list,
            DelJob: self._del_job,
            Tick: self._tick,
        }

    def execute(self, request: Request) -> list[Response]:
        """Raises RedisUnavailable if the request must be retried, any other ForqError if it is refused."""
        return self._handlers[type(request)](request)

    def assign(self, queue: str, worker: str) -> list[Response]:
        """The next job for a notified idle worker, if there is one."""
        external = self._external(queue)
        return self._assignment(queue, worker, lambda: external.fetch_assigned(worker, self._bridge))

    def leave(self, queue: str, worker: str) -> None:
        self._external(queue).leave(worker, self._bridge)

    def tick(self) -> dict[str, int | None]:
        """Expires leases and inactive workers and promotes due jobs in every external queue, like a supervisor's pulse.
        Returns by queue the ms until the next job is due."""
        queues = [name for name, mode in self._registry.names().items() if mode == EXTERNAL]
        return {queue: self.promote(queue) for queue in queues}

    def promote(self, queue: str) -> int | None:
        return self._recovery.promote(queue)

    def _add_job(self, request: AddJob) -> list[Response]:
        reference = {} if request.reference_uuid is None else {"reference_uuid": request.reference_uuid}
        job = new_job(
            {"command": request.command, "args": request.args, **reference},
            id=request.uuid,
            identifier=request.command[:MAX_IDENTIFIER],
            priority=request.priority,
            token=request.token,
            options=request.options,
        )
        producer = Producer(self._link, self._prefix, request.queue)
        # A queue that the bridge creates is external, and would refuse the options.
        store = partial(producer.enqueue, [job])
        (uuid,) = store() if request.options else self._creating_queue(request.queue, store)
        return [("job_added", {"uuid": uuid, "queue_name": request.queue, **reference})]

    def _worker_idle(self, request: WorkerIdle) -> list[Response]:
        return self._idle(request.queue, request.worker)

    def _idle(self, queue: str, worker: str) -> list[Response]:
        external = self._external(queue)
        fetch = partial(self._creating_queue, queue, lambda: external.idle(worker, self._bridge))
        return self._assignment(queue, worker, fetch)

    def _assignment(self, queue: str, worker: str, fetch: Callable[[], LeaseReply]) -> list[Response]:
        for _ in range(MAX_FETCHES):
            reply = fetch()
            if reply.lease is not None:
                return [("job_assignment", _assignment_payload(queue, worker, reply.lease))]
            if reply.valid_ms > 0:
                break
        return []

    def _accepted(self, request: JobAccepted) -> list[Response]:
        external = self._external(request.queue)
        return self._refused(request, lambda: external.accept(request.worker, request.uuid, request.fence))

    def _progress(self, request: WorkerProgress) -> list[Response]:
        external = self._external(request.queue)
        progress = (request.progress, request.text)
        return self._refused(request, lambda: external.progress(request.worker, request.uuid, *progress, request.fence))

    def _finished(self, request: JobFinished) -> list[Response]:
        external = self._external(request.queue)
        result = (request.worker, request.uuid, request.fence, request.result)
        refused = self._refused(request, lambda: external.finish(*result))
        return refused or self._idle(request.queue, request.worker)

    def _failed(self, request: JobFailed) -> list[Response]:
        external = self._external(request.queue)
        brief = {"name": request.name, "message": request.message, "kind": request.kind}
        failure = Failure(
            error=orjson.dumps({**brief, "traceback": None}),
            brief=orjson.dumps(brief),
            kind=request.kind,
            retry_at_ms=request.retry_at_ms,
            chance=random.random(),
        )
        refused = self._refused(request, lambda: external.fail(request.worker, request.uuid, failure, request.fence))
        return refused or self._idle(request.queue, request.worker)

    def _refused(self, request: JobReport, call: Callable[[], None]) -> list[Response]:
        """A `job_refused` if the worker does not hold the job, else nothing."""
        try:
            call()
        except LeaseLapsed:
            reason = "this worker does not hold that job (any more)"
        except UnknownQueue as exc:
            reason = str(exc)
        else:
            return []
        about = {"uuid": request.uuid, "queue_name": request.queue, "worker_uuid": request.worker}
        return [("job_refused", {**about, "topic": request.topic, "reason": reason})]

    def _list(self, request: ListRequest) -> list[Response]:
        external, queue = self._external(request.queue), request.queue
        self._registry.mode(queue)  # UnknownQueue if it is not there
        if request.listing == "workers":
            return [("workers", {"queue_name": queue, "workers": external.workers()})]
        if request.listing == "dispatched":
            return [("dispatched", {"queue_name": queue, "jobs": external.dispatched()})]
        if request.listing == "progress":
            return [("progress", {"queue_name": queue, "jobs": external.running()})]
        return [("jobs", {"queue_name": queue, "jobs": self._jobs(queue, request.limit)})]

    def _jobs(self, queue: str, limit: int) -> list[dict[str, str]]:
        inspector, jobs, after = Inspector(self._link, self._prefix, queue), list[JobBrief](), None
        while len(jobs) < limit:
            page = inspector.jobs(limit=limit - len(jobs), after=after)
            jobs += page.jobs
            after = page.next
            if after is None:
                break
        return [{"uuid": job["id"], "identifier": job["identifier"], "state": job["state"]} for job in jobs[:limit]]

    def _del_job(self, request: DelJob) -> list[Response]:
        deleted = Producer(self._link, self._prefix, request.queue).remove(request.uuid)
        return [("job_deleted", {"uuid": request.uuid, "queue_name": request.queue, "deleted": deleted})]

    def _tick(self, _: Tick) -> list[Response]:
        self.tick()
        return []

    def _creating_queue(self, queue: str, call: Callable[[], T]) -> T:
        """Creates a missing queue and repeats the call, once."""
        try:
            return call()
        except UnknownQueue:
            self._registry.create(queue, EXTERNAL, self._max_queues, self._defaults, {})
        return call()

    def _external(self, queue: str) -> ExternalJobs:
        return ExternalJobs(self._link, self._prefix, queue)


def _assignment_payload(queue: str, worker: str, lease: Lease) -> dict[str, Any]:
    record = lease.record
    return assignment_payload(
        record.data,
        uuid=lease.job_id,
        queue=queue,
        worker=worker,
        identifier=record.identifier or lease.job_id,
        type=record.type,
        priority=record.priority,
        counts=(record.retry_count, record.stall_count, record.timeout_count),
        enqueued_at=record.enqueued_us / 1e6,
        fence=lease.fence,
        trace=record.trace,
    )
