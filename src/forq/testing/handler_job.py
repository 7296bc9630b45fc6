"""Jobs for calling handlers directly."""

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypedDict, Unpack

from forq.broker.dependencies import READ
from forq.broker.record import pack_data
from forq.errors import UsageError
from forq.job import Inputs, Job, TraceContext, new_id
from forq.settings import suggestion
from forq.values import shown


class Progress(NamedTuple):
    """One report of progress."""

    fraction: float
    text: str


class JobFields(TypedDict, total=False):
    """Fields of `job()`. `attempt`: counts the failed attempts before it. `results`: of the jobs that it waited for, as
    `Job.results` returns them."""

    queue: str
    id: str
    identifier: str
    type: str | None
    priority: int
    enqueued_at: datetime | float
    fence: int
    attempt: int
    retry_count: int
    stall_count: int
    timeout_count: int
    snoozes: int
    tick: datetime | None
    is_last: bool
    should_stop: bool
    trace: TraceContext | None
    results: Sequence[Any]


class HandlerJob(Job):
    """A job that no queue holds. `reports`: what the handler has reported with `progress`. `is_last` and `should_stop`
    may be set."""

    __slots__ = ("_is_last", "_should_stop", "reports")

    def __init__(self, *args: Any, is_last: bool, should_stop: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reports: list[Progress] = []
        self._is_last = is_last
        self._should_stop = should_stop
        self._reporter = _Recorder(self.reports)

    @property
    def is_last(self) -> bool:
        return self._is_last

    @is_last.setter
    def is_last(self, value: bool) -> None:
        self._is_last = value

    @property
    def should_stop(self) -> bool:
        return self._should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._should_stop = value


class _Recorder:
    def __init__(self, reports: list[Progress]) -> None:
        self._reports = reports

    def report(self, position: int, job_id: str, fence: int, fraction: float, text: str) -> None:
        self._reports.append(Progress(fraction, text))


def job(**fields: Unpack[JobFields]) -> HandlerJob:
    """A job for calling a handler directly: `handle({"n": 1}, forq.testing.job(id="x", attempt=2))`.

    Fields that are not given have the values of a new job. `attempt=3` is a job that has failed twice.
    """
    for name in fields:
        if name not in JobFields.__annotations__:
            raise UsageError(f"job() has no field {shown(name)}{suggestion(name, JobFields.__annotations__)}")
    id = fields.get("id") or new_id()
    others = fields.get("stall_count", 0) + fields.get("timeout_count", 0)
    attempt = fields.get("attempt", fields.get("retry_count", 0) + others + 1)
    retries = fields.get("retry_count", attempt - 1 - others)
    if retries < 0 or retries + others + 1 != attempt:
        raise UsageError(
            f"attempt = {shown(attempt)} does not fit: it is 1 + retry_count + stall_count + timeout_count; "
            "give either attempt or the counts"
        )
    inputs = None
    if "results" in fields:
        packed = tuple(b"done " + pack_data(each, f"results[{n}]") for n, each in enumerate(fields["results"]))
        inputs = Inputs(len(packed), READ, packed)
    enqueued_at, tick = fields.get("enqueued_at", time.time()), fields.get("tick")
    return HandlerJob(
        fields.get("queue", "testing"),
        id,
        fields.get("identifier", id),
        fields.get("type"),
        fields.get("priority", 5),
        enqueued_at.timestamp() if isinstance(enqueued_at, datetime) else enqueued_at,
        fields.get("fence", round(time.time() * 1e6)),
        (retries, fields.get("stall_count", 0), fields.get("timeout_count", 0)),
        fields.get("trace"),
        fields.get("snoozes", 0),
        None if tick is None else round(tick.timestamp() * 1000),
        inputs,
        is_last=fields.get("is_last", False),
        should_stop=fields.get("should_stop", False),
    )
