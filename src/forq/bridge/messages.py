"""What comes in and goes out, one JSON object per line.

1. read_message: a line as a request of its own type, every field checked; BadMessage says what is wrong.
2. Envelopes: what goes out.
"""

import math
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from forq.broker.enqueue import MAX_SECONDS
from forq.broker.keys import DEFAULT_PRIORITY
from forq.errors import ForqError, UsageError
from forq.job import new_id
from forq.values import check_job_id, check_queue_name, shown

SERVICE_NAME = "forq-bridge"
MAX_TEXT = 1024
MAX_MESSAGE = 10_000
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
KINDS = ("permanent", "retriable")
# No colon: in Redis it ends the name of whoever owns a job.
_WORKER = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class BadMessage(UsageError):
    """A line that is no message, or says what cannot be."""

    code = "bad_message"


@dataclass(frozen=True, slots=True)
class AddJob:
    queue: str
    uuid: str
    command: str
    args: Any
    priority: int
    reference_uuid: str | None
    # So that the message can be repeated when nobody knows what became of it.
    token: str = field(default_factory=new_id)


@dataclass(frozen=True, slots=True)
class WorkerIdle:
    queue: str
    worker: str


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker says about a job that it holds, or believes to hold."""

    topic: str
    queue: str
    worker: str
    uuid: str
    fence: int | None


@dataclass(frozen=True, slots=True)
class JobAccepted(Held):
    pass


@dataclass(frozen=True, slots=True)
class WorkerProgress(Held):
    progress: float
    text: str


@dataclass(frozen=True, slots=True)
class JobFinished(Held):
    # JSON; or '!' and why there is none.
    result: bytes


@dataclass(frozen=True, slots=True)
class JobFailed(Held):
    name: str
    message: str
    kind: str
    retry_at_ms: int | None


@dataclass(frozen=True, slots=True)
class ListOf:
    """`what`: jobs, workers, dispatched or progress."""

    what: str
    queue: str
    limit: int


@dataclass(frozen=True, slots=True)
class DelJob:
    queue: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Request = AddJob | WorkerIdle | JobAccepted | WorkerProgress | JobFinished | JobFailed | ListOf | DelJob | Tick


class Payload:
    """A payload whose fields are asked for by name and kind."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def queue(self) -> str:
        return self._checked("queue_name", check_queue_name)

    def uuid(self) -> str:
        return self._checked("uuid", lambda value: check_job_id(value, "uuid"))

    def worker(self) -> str:
        name = self._needed("worker_uuid")
        if not isinstance(name, str) or not _WORKER.fullmatch(name):
            raise _refusal("worker_uuid", name, "1 to 128 of A-Z a-z 0-9 _ . -")
        return name

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def any(self, name: str) -> Any:
        return self._fields.get(name)

    def text(self, name: str, longest: int = MAX_TEXT) -> str:
        value = self._needed(name)
        if not isinstance(value, str) or not 1 <= len(value) <= longest:
            raise _refusal(name, value, f"text of 1 to {longest} characters")
        return value

    def whole(self, name: str, lowest: int, highest: int) -> int:
        value = self._needed(name)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise _refusal(name, value, f"a whole number from {lowest} to {highest}")
        return value

    def number(self, name: str, lowest: float, highest: float) -> float:
        value = self._needed(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            raise _refusal(name, value, f"a number from {lowest:g} to {highest:g}")
        return float(value)

    def _needed(self, name: str) -> Any:
        if name not in self._fields:
            raise BadMessage(f"payload has no {name}")
        return self._fields[name]

    def _checked(self, name: str, check: Callable[[object], str]) -> str:
        try:
            return check(self._needed(name))
        except BadMessage:
            raise
        except ForqError as exc:
            raise BadMessage(str(exc)) from exc


def read_message(line: bytes) -> Request:
    """The request in a line; BadMessage, and nothing else, if there is none."""
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise BadMessage(f"not JSON, at character {exc.pos}") from exc
    if not isinstance(message, dict):
        raise BadMessage("a message is a JSON object")
    topic, payload = message.get("topic"), message.get("payload")
    if not isinstance(topic, str) or topic not in _TOPICS:
        raise BadMessage(f"topic {shown(topic)} is not known: {', '.join(_TOPICS)}")
    if not isinstance(payload, dict):
        raise BadMessage(f"payload {shown(payload)} is not an object")
    return _TOPICS[topic](Payload(payload))


class Envelopes:
    """What goes out says who sent it, and when."""

    def __init__(self, service_uuid: str, *, now: Callable[[], float] = time.time) -> None:
        self._sender = {
            "service_name": SERVICE_NAME,
            "service_uuid": service_uuid,
            "service_host": socket.gethostname(),
        }
        self._now = now

    def line(self, topic: str, payload: Mapping[str, Any]) -> bytes:
        message = {"topic": topic, **self._sender, "created_at": round(self._now(), 3), "payload": payload}
        return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)


def _add_job(payload: Payload) -> AddJob:
    return AddJob(
        queue=payload.queue(),
        uuid=payload.uuid() if payload.has("uuid") else new_id(),
        command=payload.text("command"),
        args=payload.any("args"),
        priority=payload.whole("priority", 0, 9) if payload.has("priority") else DEFAULT_PRIORITY,
        reference_uuid=payload.text("reference_uuid") if payload.has("reference_uuid") else None,
    )


def _held(topic: str, payload: Payload) -> tuple[str, str, str, str, int | None]:
    fence = payload.whole("fence", 1, 2**53) if payload.has("fence") else None
    return topic, payload.queue(), payload.worker(), payload.uuid(), fence


def _progress(payload: Payload) -> WorkerProgress:
    text = payload.any("text") or ""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise _refusal("text", text, f"text of up to {MAX_TEXT} characters")
    return WorkerProgress(*_held("worker_progress", payload), payload.number("progress", 0, 1), text)


def _failed(payload: Payload) -> JobFailed:
    error = payload.any("error")
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        raise _refusal("error", error, "text, or an object with name and message")
    name, message = error.get("name") or "Error", error.get("message") or ""
    if not isinstance(name, str) or not isinstance(message, str):
        raise BadMessage("name and message of an error are text")
    kind = payload.any("kind") or "retriable"
    if kind not in KINDS:
        raise _refusal("kind", kind, " or ".join(KINDS))
    retry_at = math.ceil(payload.number("retry_at", 0, MAX_SECONDS) * 1000) if payload.has("retry_at") else None
    return JobFailed(*_held("job_failed", payload), name[:MAX_TEXT], message[:MAX_MESSAGE], kind, retry_at)


def _list(what: str) -> Callable[[Payload], ListOf]:
    def read(payload: Payload) -> ListOf:
        limit = payload.whole("limit", 1, MAX_LIMIT) if payload.has("limit") else DEFAULT_LIMIT
        return ListOf(what, payload.queue(), limit)

    return read


def _finished(payload: Payload) -> JobFinished:
    return JobFinished(*_held("job_finished", payload), _result(payload.any("result")))


def _result(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as exc:  # more levels can be read than written; the job is done all the same
        return f"!it cannot be written as JSON: {exc}".encode()


def _refusal(name: str, value: object, allowed: str) -> BadMessage:
    return BadMessage(f"{name} {shown(value)} is not allowed: {allowed}")


_TOPICS: Mapping[str, Callable[[Payload], Request]] = {
    "add_job": _add_job,
    "worker_idle": lambda payload: WorkerIdle(payload.queue(), payload.worker()),
    "job_accepted": lambda payload: JobAccepted(*_held("job_accepted", payload)),
    "worker_progress": _progress,
    "worker_busy": _progress,
    "job_finished": _finished,
    "worker_finished": _finished,
    "job_failed": _failed,
    "list_jobs": _list("jobs"),
    "list_workers": _list("workers"),
    "list_dispatched": _list("dispatched"),
    "list_progress": _list("progress"),
    "del_job": lambda payload: DelJob(payload.queue(), payload.uuid()),
    "tick": lambda payload: Tick(),
}
