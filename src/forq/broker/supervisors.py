"""The live supervisors of a Redis: each announces itself with its heartbeats; others list them and choose one."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import orjson

from forq.api_types import SupervisorInfo
from forq.broker.keys import control_base, queue_base
from forq.broker.link import Link
from forq.broker.registry import now_ms
from forq.broker.scripts import script
from forq.errors import InvalidData, UnknownJob, UnknownQueue, UnknownSupervisor, UsageError
from forq.remote_control import LEVELS
from forq.values import shown

# The fields that a supervisor stores, with the type that readers require. Others may write to Redis, too.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "host": str,
    "pid": int,
    "version": str,
    "protocol": int,
    "state_dir": str,
    "config": (str, type(None)),
    "remote_control": str,
    "queues": list,
    "processes": int,
    "expiry_ms": int,
}
_OWNER = re.compile(rb"([A-Za-z0-9_.-]+):([0-9]{1,18})(?::|$)")
# Shorter ones may be a mistake.
MIN_PREFIX = 6
# The last characters of a worker's name are those of its processor.
PROCESSOR_SUFFIX = 16


@dataclass(frozen=True, slots=True)
class Announced:
    """`waiting`: requests that this supervisor has not read. `unknown`: Redis has lost its description."""

    waiting: int
    unknown: bool


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """The attempt that holds a job now."""

    worker: str
    fence: int


class Supervisors:
    """All supervisors of a prefix."""

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix
        self._base = control_base(prefix)

    def announce(self, processor: str, expiry_ms: int, about: dict[str, Any] | None) -> Announced:
        """Renews a supervisor. `about`: its description; None if it has not changed."""
        packed = b"" if about is None else orjson.dumps(about)
        reply = self._link.run(script("announce"), self._base, processor, expiry_ms, packed)
        return Announced(reply[1], bool(reply[2]))

    def withdraw(self, processor: str) -> None:
        """Removes a supervisor that has ended."""
        self._link.run(script("withdraw"), self._base, processor)

    def all(self) -> list[SupervisorInfo]:
        """Every supervisor with a current heartbeat, by host and processor, with its duplicates and version skew."""
        beats, flat = self._link.pipeline(
            [
                ("ZRANGE", f"{self._base}:supervisors", 0, -1, "WITHSCORES"),
                ("HGETALL", f"{self._base}:about"),
            ],
            at=self._base,
        )
        now = now_ms(self._link, self._base)
        expiries = {name.decode(errors="replace"): float(at) for name, at in zip(beats[::2], beats[1::2], strict=True)}
        found = []
        for processor, packed in zip(flat[::2], flat[1::2], strict=True):
            name = processor.decode(errors="replace")
            about = _read_about(packed)
            if about is not None and expiries.get(name, 0.0) >= now:
                age_ms = max(0.0, about.pop("expiry_ms") - (expiries[name] - now))
                found.append({"processor": name, **about, "heartbeat_age_seconds": round(age_ms / 1000, 3)})
        found.sort(key=lambda each: (each["host"], each["processor"]))
        return [cast(SupervisorInfo, each | _compared(each, found)) for each in found]

    def choose(self, on: str) -> SupervisorInfo:
        """The supervisor with this processor name, the beginning of one, or this host."""
        if not isinstance(on, str) or not on:
            raise UsageError(f"on {shown(on)} is not allowed: the name of a processor, or of a host")
        everyone = self.all()
        named = [each for each in everyone if each["processor"] == on]
        begin = [each for each in everyone if len(on) >= MIN_PREFIX and each["processor"].startswith(on)]
        at_host = [each for each in everyone if each["host"] == on]
        found = named or at_host or begin
        if not found:
            raise UnknownSupervisor(f"no supervisor {shown(on)} on this Redis; see: forqctl status --all")
        if len(found) > 1:
            raise UsageError(f"{shown(on)} matches {len(found)} supervisors: {_names(found)}; use a processor name")
        return found[0]

    def serving(self, queue: str, besides: str | None = None) -> SupervisorInfo:
        """The one supervisor that serves this queue. `besides`: leaves out this processor."""
        found = [each for each in self.all() if queue in each["queues"] and each["processor"] != besides]
        if not found:
            raise UnknownQueue(f"no supervisor on this Redis serves queue {queue!r}; see: forqctl status --all")
        if len(found) > 1:
            raise UsageError(
                f"{len(found)} supervisors serve queue {queue!r}: {_names(found)}; choose one with --on (Python: on=)"
            )
        return found[0]

    def running(self, queue: str, job_id: str) -> tuple[SupervisorInfo, RunningAttempt]:
        """The supervisor that runs this job, and the attempt. UnknownJob if none does."""
        owner = self._link.call("HGET", f"{queue_base(self._prefix, queue)}:active", job_id)
        if owner is None:
            raise UnknownJob(f"no supervisor runs job {job_id!r} of queue {queue!r}; see: forqctl why {queue} {job_id}")
        attempt = read_owner(owner)
        for each in self.all():
            if attempt.worker.endswith(each["processor"][-PROCESSOR_SUFFIX:]):
                return each, attempt
        raise UnknownJob(
            f"job {job_id!r} of queue {queue!r} runs in worker {attempt.worker}, which belongs to no live supervisor "
            f"that can be asked; see: forqctl why {queue} {job_id}"
        )


def read_owner(owner: bytes) -> RunningAttempt:
    """An entry of the hash `active`: WORKER:FENCE, and a mark if the job was removed."""
    found = _OWNER.match(owner)
    if found is None:
        raise InvalidData(f"the owner of a job in Redis is broken: {owner[:100]!r}")
    return RunningAttempt(found[1].decode(), int(found[2]))


def _read_about(packed: bytes) -> dict[str, Any] | None:
    """None for a description that no supervisor of this release has written."""
    try:
        about = orjson.loads(packed)
    except ValueError:
        return None
    if not isinstance(about, dict) or not all(isinstance(about.get(name), kind) for name, kind in _FIELDS.items()):
        return None
    if about["remote_control"] not in LEVELS or not all(isinstance(name, str) for name in about["queues"]):
        return None
    return {name: about[name] for name in _FIELDS}


def _compared(one: dict[str, Any], everyone: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """`duplicates`: supervisors on the same host with the same state directory or config file. `version_skew`: another
    supervisor has a newer version."""
    others = [each for each in everyone if each is not one]
    same = [
        each["processor"]
        for each in others
        if each["host"] == one["host"]
        and (each["state_dir"] == one["state_dir"] or (one["config"] is not None and each["config"] == one["config"]))
    ]
    newest = max((_version_key(each) for each in others), default=_version_key(one))
    return {"duplicates": same, "version_skew": _version_key(one) < newest}


def _version_key(one: dict[str, Any]) -> tuple[object, ...]:
    numbers = [int(part) if part.isdigit() else 0 for part in one["version"].split(".")]
    return one["protocol"], numbers, one["version"]


def _names(found: Iterable[SupervisorInfo]) -> str:
    return ", ".join(f"{each['processor']} ({each['host']})" for each in found)
