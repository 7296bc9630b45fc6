"""The messages of the bridge: parses and validates incoming lines, encodes outgoing ones."""

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
from forq.job_options import pack_job_options
from forq.values import check_job_id, check_queue_name, shown

SERVICE_NAME = "forq-bridge"
MAX_TEXT = 1024
MAX_ERROR_MESSAGE = 10_000
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
KINDS = ("permanent", "retriable")
_OWN_OPTIONS = ("timeout", "max_retries", "backoff", "expires_in", "keep_done")
# No colon: in Redis it separates the owner of a job from the fence.
_WORKER = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class InvalidMessage(UsageError):
    """A line is not a message, or a field of it is not allowed."""

    code = "bad_message"


@dataclass(frozen=True, slots=True)
class AddJob:
    queue: str
    uuid: str
    command: str
    args: Any
    priority: int
    reference_uuid: str | None
    # The job's own, packed; '' if it has none.
    options: str = ""
    # Makes a retry safe when the reply of Redis was lost.
    token: str = field(default_factory=new_id)


@dataclass(frozen=True, slots=True)
class WorkerIdle:
    queue: str
    worker: str


@dataclass(frozen=True, slots=True)
class JobReport:
    """A worker's message about a job that it holds, or once held."""

    topic: str
    queue: str
    worker: str
    uuid: str
    fence: int | None


@dataclass(frozen=True, slots=True)
class JobAccepted(JobReport):
    pass


@dataclass(frozen=True, slots=True)
class WorkerProgress(JobReport):
    progress: float
    text: str


@dataclass(frozen=True, slots=True)
class JobFinished(JobReport):
    # JSON, or '!' and the reason why there is no result.
    result: bytes


@dataclass(frozen=True, slots=True)
class JobFailed(JobReport):
    name: str
    message: str
    kind: str
    retry_at_ms: int | None


@dataclass(frozen=True, slots=True)
class ListRequest:
    """`listing`: jobs, workers, dispatched or progress."""

    listing: str
    queue: str
    limit: int


@dataclass(frozen=True, slots=True)
class DelJob:
    queue: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Request = AddJob | WorkerIdle | JobAccepted | WorkerProgress | JobFinished | JobFailed | ListRequest | DelJob | Tick


class Payload:
    """Reads and validates the fields of a payload."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def queue(self) -> str:
        return self._checked("queue_name", check_queue_name)

    def uuid(self) -> str:
        return self._checked("uuid", lambda value: check_job_id(value, "uuid"))

    def worker(self) -> str:
        name = self._required("worker_uuid")
        if not isinstance(name, str) or not _WORKER.fullmatch(name):
            raise _invalid("worker_uuid", name, "1 to 128 of A-Z a-z 0-9 _ . -")
        return name

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def text(self, name: str, longest: int = MAX_TEXT) -> str:
        value = self._required(name)
        if not isinstance(value, str) or not 1 <= len(value) <= longest:
            raise _invalid(name, value, f"a string of 1 to {longest} characters")
        return value

    def integer(self, name: str, lowest: int, highest: int) -> int:
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise _invalid(name, value, f"a whole number from {lowest} to {highest}")
        return value

    def number(self, name: str, lowest: float, highest: float) -> float:
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            raise _invalid(name, value, f"a number from {lowest:g} to {highest:g}")
        return float(value)

    def own_options(self) -> str:
        try:
            return pack_job_options(**{name: self.get(name) for name in _OWN_OPTIONS})
        except ForqError as exc:
            raise InvalidMessage(str(exc)) from exc

    def _required(self, name: str) -> Any:
        if name not in self._fields:
            raise InvalidMessage(f"payload has no {name}")
        return self._fields[name]

    def _checked(self, name: str, check: Callable[[object], str]) -> str:
        try:
            return check(self._required(name))
        except InvalidMessage:
            raise
        except ForqError as exc:
            raise InvalidMessage(str(exc)) from exc


def parse_message(line: bytes) -> Request:
    """Raises nothing but InvalidMessage."""
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise InvalidMessage(f"not JSON, at character {exc.pos}") from exc
    if not isinstance(message, dict):
        raise InvalidMessage("a message must be a JSON object")
    topic, payload = message.get("topic"), message.get("payload")
    if not isinstance(topic, str) or topic not in TOPICS:
        raise InvalidMessage(f"unknown topic {shown(topic)}; allowed: {', '.join(TOPICS)}")
    if not isinstance(payload, dict):
        raise InvalidMessage(f"payload {shown(payload)} is not an object")
    return TOPICS[topic](Payload(payload))


class MessageEncoder:
    """Adds the sender and the time to outgoing messages."""

    def __init__(self, service_uuid: str, *, now: Callable[[], float] = time.time) -> None:
        self._sender = {
            "service_name": SERVICE_NAME,
            "service_uuid": service_uuid,
            "service_host": socket.gethostname(),
        }
        self._now = now

    def encode(self, topic: str, payload: Mapping[str, Any]) -> bytes:
        message = {"topic": topic, **self._sender, "created_at": round(self._now(), 3), "payload": payload}
        return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)


def _add_job(payload: Payload) -> AddJob:
    return AddJob(
        queue=payload.queue(),
        uuid=payload.uuid() if payload.has("uuid") else new_id(),
        command=payload.text("command"),
        args=payload.get("args"),
        priority=payload.integer("priority", 0, 9) if payload.has("priority") else DEFAULT_PRIORITY,
        reference_uuid=payload.text("reference_uuid") if payload.has("reference_uuid") else None,
        options=payload.own_options(),
    )


def _job_report(topic: str, payload: Payload) -> tuple[str, str, str, str, int | None]:
    fence = payload.integer("fence", 1, 2**53) if payload.has("fence") else None
    return topic, payload.queue(), payload.worker(), payload.uuid(), fence


def _progress(payload: Payload) -> WorkerProgress:
    text = payload.get("text") or ""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise _invalid("text", text, f"a string of up to {MAX_TEXT} characters")
    return WorkerProgress(*_job_report("worker_progress", payload), payload.number("progress", 0, 1), text)


def _failed(payload: Payload) -> JobFailed:
    error = payload.get("error")
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        raise _invalid("error", error, "a string, or an object with name and message")
    name, message = error.get("name") or "Error", error.get("message") or ""
    if not isinstance(name, str) or not isinstance(message, str):
        raise InvalidMessage("name and message of an error must be strings")
    kind = payload.get("kind") or "retriable"
    if kind not in KINDS:
        raise _invalid("kind", kind, " or ".join(KINDS))
    retry_at = math.ceil(payload.number("retry_at", 0, MAX_SECONDS) * 1000) if payload.has("retry_at") else None
    return JobFailed(*_job_report("job_failed", payload), name[:MAX_TEXT], message[:MAX_ERROR_MESSAGE], kind, retry_at)


def _list_reader(listing: str) -> Callable[[Payload], ListRequest]:
    def read(payload: Payload) -> ListRequest:
        limit = payload.integer("limit", 1, MAX_LIMIT) if payload.has("limit") else DEFAULT_LIMIT
        return ListRequest(listing, payload.queue(), limit)

    return read


def _finished(payload: Payload) -> JobFinished:
    return JobFinished(*_job_report("job_finished", payload), _result(payload.get("result")))


def _result(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as exc:  # orjson reads deeper nesting than it writes; the job is done anyway
        return f"!it cannot be written as JSON: {exc}".encode()


def _invalid(name: str, value: object, allowed: str) -> InvalidMessage:
    return InvalidMessage(f"{name} {shown(value)} is not allowed: {allowed}")


TOPICS: Mapping[str, Callable[[Payload], Request]] = {
    "add_job": _add_job,
    "worker_idle": lambda payload: WorkerIdle(payload.queue(), payload.worker()),
    "job_accepted": lambda payload: JobAccepted(*_job_report("job_accepted", payload)),
    "worker_progress": _progress,
    "worker_busy": _progress,
    "job_finished": _finished,
    "worker_finished": _finished,
    "job_failed": _failed,
    "list_jobs": _list_reader("jobs"),
    "list_workers": _list_reader("workers"),
    "list_dispatched": _list_reader("dispatched"),
    "list_progress": _list_reader("progress"),
    "del_job": lambda payload: DelJob(payload.queue(), payload.uuid()),
    "tick": lambda payload: Tick(),
}
