"""What queue names, job ids and the like may look like, checked in one place."""

import re

from forq.errors import InvalidId, InvalidName

QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
JOB_ID = re.compile(r"[!-~]{1,128}\Z")
HANDLER_TYPE = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


def is_queue_name(name: object) -> bool:
    return isinstance(name, str) and QUEUE_NAME.match(name) is not None and set(name) != {"."}


def check_queue_name(name: object) -> str:
    if not isinstance(name, str) or not is_queue_name(name):
        raise InvalidName(f"queue name {shown(name)} is not allowed: 1 to 64 of A-Z a-z 0-9 _ . - (and not only dots)")
    return name


def check_job_id(job_id: object, what: str = "job id") -> str:
    if not isinstance(job_id, str) or not JOB_ID.match(job_id):
        raise InvalidId(f"{what} {shown(job_id)} is not allowed: 1 to 128 printable ASCII characters without spaces")
    return job_id


def check_type(job_type: object) -> str:
    if not isinstance(job_type, str) or not HANDLER_TYPE.match(job_type):
        raise InvalidId(f"job type {shown(job_type)} is not allowed: 1 to 64 of A-Z a-z 0-9 _ . : -")
    return job_type


def check_schedule_key(key: object) -> str:
    if not isinstance(key, str) or not QUEUE_NAME.match(key):
        raise InvalidId(f"schedule key {shown(key)} is not allowed: 1 to 64 of A-Z a-z 0-9 _ . -")
    return key


def shown(value: object) -> str:
    """A user's value, safe to print: escaped and cut."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
