"""The schedules of a queue: set, drop, list and trigger them; and Ticker, which turns due ticks into jobs.

A definition is stored as

    RULE '\n' POLICY '\n' DATA

RULE is {"every_ms"} or {"cron", "zone"}, POLICY {"catch_up", "jitter_ms", "origin", "overlap", "priority", "type"},
with keys in this order, so that equal definitions are equal bytes. Scripts read POLICY. DATA becomes the jobs' data.
"""

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson

from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.record import pack_data
from forq.broker.scripts import CHANGED, EXISTS, NO_QUEUE, OK, error_for, script
from forq.errors import BackPressure, Exists, ForqError, InvalidData, RedisUnavailable, UnknownSchedule, UsageError
from forq.schedules import Cron, Every, Rule, Schedule, next_tick, plan, read_zone, show_tick
from forq.values import check_queue_name, check_schedule_key
from forq.version import PROTOCOL

log = logging.getLogger("forq")

MAX_DATA_BYTES = 64 * 1024
UPCOMING = 5
# Calls of promote in a row for one queue. promote returns 100 ticks at most, and a queue has at most 1,000 schedules.
PROMOTE_CALLS = 16
# Calls of resume_schedule in a row, if the schedule changes meanwhile.
RESUME_CALLS = 10


def pack_schedule(schedule: Schedule) -> bytes:
    data = pack_data(schedule.data)
    if len(data) > MAX_DATA_BYTES:
        raise InvalidData(f"the schedule's data is larger than {MAX_DATA_BYTES} bytes; nothing was set")
    rule = schedule.rule
    described = {"every_ms": rule.every_ms} if isinstance(rule, Every) else {"cron": rule.expression, "zone": rule.zone}
    policy = {
        "catch_up": schedule.catch_up,
        "jitter_ms": schedule.jitter_ms,
        "origin": schedule.origin,
        "overlap": schedule.overlap,
        "priority": schedule.priority,
        "type": schedule.type,
    }
    return b"\n".join((orjson.dumps(described), orjson.dumps(policy), data))


def read_head(head: bytes) -> tuple[Rule, str]:
    """The rule and catch_up, from RULE and POLICY of a definition."""
    rule, policy = _read_rule_and_policy(head)
    return rule, str(policy["catch_up"])


def _read_rule_and_policy(head: bytes) -> tuple[Rule, dict[str, Any]]:
    first, _, second = head.partition(b"\n")
    try:
        described, policy = orjson.loads(first), orjson.loads(second)
        rule = Every(int(described["every_ms"])) if "every_ms" in described else _cron(described)
        return rule, {"catch_up": policy["catch_up"], **policy}
    except (ValueError, TypeError, KeyError) as exc:
        raise InvalidData(f"broken schedule definition: {exc!r}") from exc


def _cron(described: dict[str, str]) -> Cron:
    # Raises if this host does not know the zone.
    read_zone(described["zone"])
    return Cron(described["cron"], described["zone"])


class Schedules:
    """The schedules of one queue."""

    def __init__(self, link: Link, prefix: str, name: str) -> None:
        self.name = check_queue_name(name)
        self._link = link
        self._base = queue_base(prefix, name)

    def set(self, schedule: Schedule) -> int:
        """Stores the schedule; returns its next tick (ms). Setting the same definition again changes nothing.

        A paused schedule stays paused; then it is the tick that it would have if it were resumed.
        """
        rule, definition = schedule.rule, pack_schedule(schedule)
        # The script computes the first tick of an interval, because it depends on the last run.
        interval, first = (rule.every_ms, "") if isinstance(rule, Every) else ("", next_tick(rule, self.now_ms()))
        if first is None:
            raise UsageError(f"schedule {schedule.key!r} would never run: {rule}")
        reply = self._link.run(script("set_schedule"), self._base, PROTOCOL, schedule.key, definition, interval, first)
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return int(reply[2])

    def drop(self, key: str) -> bool:
        """False if there is none."""
        return self._drop(check_schedule_key(key), b"")

    def _drop(self, key: str, definition: bytes) -> bool:
        reply = self._link.run(script("drop_schedule"), self._base, key, definition)
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return bool(reply[1])

    def apply(self, given: Mapping[str, Mapping[str, Any]], origin: str, *, remove: bool = True) -> list[str]:
        """Sets the schedules of a config file or an app. With `remove`, drops those that an earlier version of it had
        set; returns these."""
        for key, fields in given.items():
            self.set(Schedule.from_mapping(key, fields, origin))
        dropped = []
        for key, definition in self._stored().items() if remove else ():
            if key not in given and _origin(definition) == origin and self._drop(key, definition):
                dropped.append(key)
        return dropped

    def pause(self, key: str) -> bool:
        """Pauses the schedule until it is resumed or dropped. False if it was paused before."""
        reply = self._link.run(script("pause_schedule"), self._base, check_schedule_key(key))
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return bool(reply[1])

    def resume(self, key: str) -> bool:
        """Ends the pause; the next tick is computed from now on. False if the schedule was not paused."""
        check_schedule_key(key)
        for _ in range(RESUME_CALLS):
            definition = self._stored().get(key)
            head = b"" if definition is None else definition.rpartition(b"\n")[0]
            interval, first = ("", "") if definition is None else self._first_tick(head)
            reply = self._link.run(script("resume_schedule"), self._base, key, head, interval, first)
            if reply[0] == OK:
                return bool(reply[1])
            if reply[0] != CHANGED:
                raise error_for(self.name, reply)
        raise ForqError(f"schedule {key!r} of queue {self.name!r} changes all the time; it was not resumed")

    def _first_tick(self, head: bytes) -> tuple[object, object]:
        """The interval (ms), or the next tick of a cron rule (ms); '' for the other, and for a rule that has ended."""
        rule, _ = read_head(head)
        if isinstance(rule, Every):
            return rule.every_ms, ""
        tick_ms = next_tick(rule, self.now_ms())
        return "", "" if tick_ms is None else tick_ms

    def trigger(self, key: str) -> str:
        """Enqueues a job now; returns its id. Exists if that would overlap."""
        identifier = orjson.dumps(f"{check_schedule_key(key)} triggered")
        reply = self._link.run(script("trigger"), self._base, key, identifier)
        if reply[0] == EXISTS:
            raise Exists(f"the last job of schedule {key!r} of queue {self.name!r} is unfinished, and overlap is skip")
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return str(reply[1].decode())

    def all(self) -> list[dict[str, Any]]:
        """Every schedule for output, sorted by key."""
        stored, ticks, counted, paused, exists = self._link.pipeline(
            [
                ("HGETALL", f"{self._base}:schedules"),
                ("ZRANGE", f"{self._base}:schedules:next", 0, -1, "WITHSCORES"),
                ("HGETALL", f"{self._base}:schedules:runs"),
                ("HKEYS", f"{self._base}:schedules:paused"),
                ("EXISTS", f"{self._base}:options"),
            ]
        )
        if not exists:
            raise error_for(self.name, [NO_QUEUE])
        next_ms = {key: int(float(tick)) for key, tick in zip(ticks[::2], ticks[1::2], strict=True)}
        runs = dict(zip(counted[::2], counted[1::2], strict=True))
        return [
            {"queue": self.name, "key": key.decode()}
            | describe(definition)
            | {"paused": key in paused}
            | _times(next_ms.get(key), runs.get(key, b"0 0 0 0"))
            for key, definition in sorted(zip(stored[::2], stored[1::2], strict=True))
        ]

    def one(self, key: str) -> dict[str, Any]:
        """One schedule for output, with its next ticks."""
        check_schedule_key(key)
        for shown in self.all():
            if shown["key"] == key:
                if shown["rule"] is None:
                    return shown | {"upcoming": []}
                rule, _ = read_head(self._stored()[key].rpartition(b"\n")[0])
                first_ms = None if shown["next_at"] is None else round(shown["next_at"] * 1000)
                return shown | {"upcoming": upcoming(rule, first_ms)}
        raise UnknownSchedule(f"queue {self.name!r} has no schedule {key!r}")

    def preview(self, schedule: Schedule) -> list[dict[str, Any]]:
        """The first ticks of a schedule if it were set now."""
        now_ms = self.now_ms()
        first_ms = now_ms if isinstance(schedule.rule, Every) else next_tick(schedule.rule, now_ms)
        return upcoming(schedule.rule, first_ms)

    def now_ms(self) -> int:
        seconds, micros = self._link.call("TIME", at=self._base)
        return int(seconds) * 1000 + int(micros) // 1000

    def _stored(self) -> dict[str, bytes]:
        flat = self._link.call("HGETALL", f"{self._base}:schedules")
        return {key.decode(): definition for key, definition in zip(flat[::2], flat[1::2], strict=True)}


def describe(definition: bytes) -> dict[str, Any]:
    """A definition for output; with `error` if it is broken or its zone is unknown on this host."""
    head, _, data = definition.rpartition(b"\n")
    try:
        rule, policy = _read_rule_and_policy(head)
        jitter, known = policy.pop("jitter_ms", 0) / 1000, orjson.loads(data)
    except (ForqError, ValueError, TypeError) as exc:
        error = str(exc) if isinstance(exc, ForqError) else f"broken schedule definition: {exc}"
        return {"rule": None, "origin": _origin(definition), "error": error}
    every = rule.every_ms / 1000 if isinstance(rule, Every) else None
    return {
        "rule": str(rule),
        "every": every,
        "cron": rule.expression if isinstance(rule, Cron) else None,
        "zone": rule.zone if isinstance(rule, Cron) else None,
        "data": known,
        "jitter": jitter,
        **policy,
    }


def upcoming(rule: Rule, first_ms: int | None) -> list[dict[str, Any]]:
    """The first tick and the next ones, also as local time."""
    ticks = [] if first_ms is None else [first_ms, *islice(rule.after(first_ms), UPCOMING - 1)]
    return [{"at": tick / 1000, "local": show_tick(rule, tick)} for tick in ticks]


def _origin(definition: bytes) -> str | None:
    try:
        return str(orjson.loads(definition.split(b"\n")[1])["origin"])
    except (ValueError, TypeError, KeyError, IndexError):
        return None


def _times(next_ms: int | None, counted: bytes) -> dict[str, Any]:
    last_ms, runs, skipped, missed = map(int, counted.split())
    return {
        "next_at": None if next_ms is None else next_ms / 1000,
        "last_at": last_ms / 1000 if last_ms else None,
        "runs": runs,
        "skipped": skipped,
        "missed": missed,
    }


@dataclass(frozen=True, slots=True)
class DueTick:
    """A due tick of a schedule, and RULE and POLICY of the definition at that moment."""

    key: str
    tick_ms: int
    head: bytes


def due_ticks(reply: list[Any]) -> list[DueTick]:
    """The due ticks in a reply of promote."""
    ticks = zip(reply[4::3], reply[5::3], reply[6::3], strict=True)
    return [DueTick(key.decode(errors="replace"), int(float(tick)), head) for key, tick, head in ticks]


class Ticker:
    """Promotes due jobs and fires due ticks: plans each tick here, then fire.lua enqueues its jobs exactly once.

    `chance`: the share of its jitter that a job gets, from 0 to 1.
    """

    def __init__(self, link: Link, prefix: str, chance: Callable[[], float] = random.random) -> None:
        self._link = link
        self._prefix = prefix
        self._chance = chance
        # queue -> schedule -> the tick that could not be fired and the logged error.
        self._logged: dict[str, dict[str, tuple[int, str]]] = {}
        # Batches and held jobs that the last call of promote wants to be verified.
        self.to_verify: list[str] = []

    def promote(self, queue: str) -> int | None:
        """Promotes due jobs and fires ticks; returns the ms until the next call (None: nothing is scheduled).

        A tick that this host cannot fire (unknown zone, definition of a newer release) stays due for another host.
        promote returns few ticks per call, so the next call excludes the refused ones: they must not hide the others.
        """
        base = queue_base(self._prefix, queue)
        refused: dict[str, tuple[int, str]] = {}
        wait_ms = None
        self.to_verify = []
        for _ in range(PROMOTE_CALLS):
            reply = self._link.run(script("promote"), base, *refused)
            if reply[0] == NO_QUEUE:
                self._logged.pop(queue, None)
                return None
            wait_ms = None if reply[1] < 0 else int(reply[1])
            self.to_verify += [what.decode() for what in reply[3]]
            due = due_ticks(reply)
            for number, tick in enumerate(due):
                try:
                    _, wait_ms = self.fire(queue, tick, int(reply[2]))
                except RedisUnavailable:
                    raise
                except BackPressure as exc:
                    # The server is out of memory and would refuse the others too.
                    refused |= {other.key: (other.tick_ms, str(exc)) for other in due[number:]}
                    break
                except ForqError as exc:
                    refused[tick.key] = (tick.tick_ms, str(exc))
            if not due or not refused:
                break
        self._log(queue, refused)
        return wait_ms

    def _log(self, queue: str, refused: dict[str, tuple[int, str]]) -> None:
        """Logs each tick and error once, although each heartbeat tries again."""
        before = self._logged.pop(queue, {})
        for key, (tick_ms, error) in refused.items():
            if before.get(key) != (tick_ms, error):
                log.error("cannot fire a tick queue=%s schedule=%s error=%s", queue, key, error)
        if refused:
            self._logged[queue] = refused

    def fire(self, queue: str, due: DueTick, now_ms: int) -> tuple[bool, int | None]:
        """Whether this call fired it, and the ms until the next promote (None: nothing is scheduled)."""
        args: list[Any] = [due.key, due.tick_ms, due.head, *self._plan(due, now_ms)]
        reply = self._link.run(script("fire"), queue_base(self._prefix, queue), *args)
        if reply[0] == NO_QUEUE:
            return False, None
        return bool(reply[1]), None if reply[2] < 0 else int(reply[2])

    def _plan(self, due: DueTick, now_ms: int) -> list[Any]:
        """The rest of fire.lua's arguments."""
        rule, catch_up = read_head(due.head)
        try:
            planned = plan(rule, catch_up, due.tick_ms, now_ms)
            identifiers = [f"{due.key} {show_tick(rule, tick_ms)}" for tick_ms in planned.ticks]
        except ForqError:
            raise
        except Exception as exc:  # a rule of another release must not crash pulse, which has all timers
            raise InvalidData(f"broken schedule definition: {type(exc).__name__}: {exc}") from exc
        args: list[Any] = ["" if planned.next_ms is None else planned.next_ms, planned.missed]
        for tick_ms, identifier in zip(planned.ticks, identifiers, strict=True):
            args += (tick_ms, orjson.dumps(identifier), f"{self._chance():.6f}")
        return args
