"""Messages between a queue's process and the program of an exec handler, one JSON object per line
(docs/reference/bridge.md).

ProgramFailed is how an attempt fails there, whatever the reason.
"""

import socket
import time
from typing import Any, NamedTuple

import orjson

from forq.errors import ForqError, InvalidData
from forq.job import Job, assignment_payload
from forq.values import shown

MAX_NAME = 200
EXIT_FOR_GOOD = 65  # EX_DATAERR of sysexits.h

_HOST = socket.gethostname()
_ALIASES = {"worker_finished": "job_finished", "worker_busy": "worker_progress"}
_ABOUT_THE_JOB = ("job_finished", "job_failed", "worker_progress", "job_accepted")
_KINDS = (None, "permanent", "retriable")


class ProgramFailed(ForqError):
    """The program's attempt failed. `name` stands where a Python exception has its class, `trace` for its traceback."""

    def __init__(
        self, name: str, message: str, *, kind: str = "retriable", retry_at: object = None, trace: str = ""
    ) -> None:
        super().__init__(message)
        self.name = name
        self.kind = kind
        self.retry_at = retry_at
        self.trace = trace


class Finished(NamedTuple):
    """The job is done."""

    result: Any


class Progress(NamedTuple):
    """How far it is."""

    fraction: float
    text: str | None


def assignment(data: Any, job: Job, worker: str) -> bytes:
    """The message that gives a program its job."""
    payload = assignment_payload(
        data,
        uuid=job.id,
        queue=job.queue,
        worker=worker,
        identifier=job.identifier,
        type=job.type,
        priority=job.priority,
        counts=(job.retry_count, job.stall_count, job.timeout_count),
        enqueued_at=job.enqueued_at,
        fence=job.fence,
        trace=job.trace,
    )
    message = {
        "topic": "job_assignment",
        "payload": payload,
        "service_name": "forq",
        "service_uuid": worker,
        "service_host": _HOST,
        "created_at": time.time(),
    }
    return orjson.dumps(message) + b"\n"


def attempt_number(job: Job) -> int:
    return 1 + job.retry_count + job.stall_count + job.timeout_count


def read_answer(line: bytes, job: Job) -> Finished | Progress | ProgramFailed | None:
    """What a program says about its job; None if that means nothing here. Raises InvalidData for anything else."""
    topic, payload = _open(line)
    if topic == "worker_idle":
        return None
    if topic not in _ABOUT_THE_JOB:
        raise InvalidData(f"there is no topic {shown(topic)}")
    if payload.get("uuid") != job.id or payload.get("queue_name", job.queue) != job.queue:
        raise InvalidData(f"{topic} is about another job, uuid {shown(payload.get('uuid'))}")
    if topic == "job_finished":
        return Finished(payload.get("result"))
    if topic == "job_failed":
        return _failure(payload)
    return _progress(payload) if topic == "worker_progress" else None


def means_nothing(line: bytes) -> bool:
    """Whether a program may say this while it has no job."""
    try:
        return not line.strip() or _open(line)[0] == "worker_idle"
    except InvalidData:
        return False


def _open(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        message = orjson.loads(line)
    except ValueError as exc:
        raise InvalidData(f"not JSON: {shown(line.decode(errors='backslashreplace'))}") from exc
    if not isinstance(message, dict):
        raise InvalidData(f"not an object: {shown(message)}")
    topic, payload = message.get("topic"), message.get("payload")
    if not isinstance(topic, str) or not isinstance(payload, dict):
        raise InvalidData('a message has a "topic" that is a text and a "payload" that is an object')
    return _ALIASES.get(topic, topic), payload


def _progress(payload: dict[str, Any]) -> Progress:
    fraction, text = payload.get("progress"), payload.get("text")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise InvalidData(f"progress = {shown(fraction)} is not a number from 0 to 1")
    if not isinstance(text, str | None):
        raise InvalidData(f"text = {shown(text)} is not a text")
    return Progress(float(fraction), text)


def _failure(payload: dict[str, Any]) -> ProgramFailed:
    error, kind = payload.get("error"), payload.get("kind")
    fields = {"message": error} if isinstance(error, str) else {} if error is None else error
    if not isinstance(fields, dict):
        raise InvalidData(f"error = {shown(error)} is neither a text nor an object with name and message")
    if kind not in _KINDS:
        raise InvalidData(f'kind = {shown(kind)} is not allowed: "permanent" or "retriable"')
    texts = {key: fields.get(key) or "" for key in ("name", "message", "traceback")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise InvalidData(f"{key} = {shown(text)} of an error is not a text")
    return ProgramFailed(
        texts["name"][:MAX_NAME] or "JobFailed",
        texts["message"],
        kind=kind or "retriable",
        retry_at=payload.get("retry_at"),
        trace=texts["traceback"],
    )
