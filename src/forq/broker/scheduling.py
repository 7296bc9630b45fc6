"""The schedules of a queue: set, dropped, listed, triggered; and how a definition is stored.

    RULE '\\n' POLICY '\\n' DATA

RULE is {"every_ms"} or {"cron", "zone"}, POLICY {"catch_up", "jitter_ms", "origin", "overlap", "priority", "type"},
with keys in this order, so that equal definitions are equal bytes. Scripts read POLICY; DATA goes into jobs as it is.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import orjson

from forq.broker.codes import EXISTS, OK, error_for
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.record import pack_data
from forq.broker.scripts import script
from forq.errors import Exists, ForqError, InvalidData, UnknownSchedule, UsageError
from forq.names import check_queue_name, check_schedule_key
from forq.schedules import CONFIG, Schedule
from forq.ticks import Cron, Every, Rule, next_tick, read_zone, show_tick
from forq.version import PROTOCOL

MAX_DATA_BYTES = 64 * 1024
UPCOMING = 5


def pack_schedule(schedule: Schedule) -> bytes:
    data = pack_data(schedule.data)
    if len(data) > MAX_DATA_BYTES:
        raise InvalidData(f"the data of a schedule is larger than {MAX_DATA_BYTES} bytes; nothing was set")
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
    """The rule and catch_up, from the first two lines of a definition."""
    rule, policy = _read_lines(head)
    return rule, str(policy["catch_up"])


def _read_lines(head: bytes) -> tuple[Rule, dict[str, Any]]:
    first, _, second = head.partition(b"\n")
    try:
        described, policy = orjson.loads(first), orjson.loads(second)
        rule = Every(int(described["every_ms"])) if "every_ms" in described else _cron(described)
        return rule, {"catch_up": policy["catch_up"], **policy}
    except (ValueError, TypeError, KeyError) as exc:
        raise InvalidData(f"broken definition of a schedule: {exc!r}") from exc


def _cron(described: dict[str, str]) -> Cron:
    # A zone that another host knows may be unknown here.
    read_zone(described["zone"])
    return Cron(described["cron"], described["zone"])


class Schedules:
    def __init__(self, link: Link, prefix: str, name: str) -> None:
        self.name = check_queue_name(name)
        self._link = link
        self._base = queue_base(prefix, name)

    def set(self, schedule: Schedule) -> int:
        """Stores the schedule; its next tick. The same again changes nothing."""
        rule, definition = schedule.rule, pack_schedule(schedule)
        # An interval's first tick depends on its last run, which the script knows.
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

    def follow(self, given: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """What a config file says: sets these, and drops those that an earlier reading had set. Which it dropped."""
        for key, fields in given.items():
            self.set(Schedule.from_mapping(key, fields, CONFIG))
        dropped = []
        for key, definition in self._stored().items():
            if key not in given and _origin(definition) == CONFIG and self._drop(key, definition):
                dropped.append(key)
        return dropped

    def trigger(self, key: str) -> str:
        """Runs it now; the job's id. Exists if that would overlap."""
        identifier = orjson.dumps(f"{check_schedule_key(key)} triggered")
        reply = self._link.run(script("trigger"), self._base, key, identifier)
        if reply[0] == EXISTS:
            raise Exists(f"the last job of schedule {key!r} of queue {self.name!r} is unfinished, and overlap is skip")
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return str(reply[1].decode())

    def all(self) -> list[dict[str, Any]]:
        """Every schedule, by key, as it is shown."""
        stored, ticks, counted, exists = self._link.pipeline(
            [
                ("HGETALL", f"{self._base}:schedules"),
                ("ZRANGE", f"{self._base}:schedules:next", 0, -1, "WITHSCORES"),
                ("HGETALL", f"{self._base}:schedules:runs"),
                ("EXISTS", f"{self._base}:options"),
            ]
        )
        if not exists:
            raise error_for(self.name, [-1])
        next_ms = {key: int(float(tick)) for key, tick in zip(ticks[::2], ticks[1::2], strict=True)}
        runs = dict(zip(counted[::2], counted[1::2], strict=True))
        return [
            {"queue": self.name, "key": key.decode()}
            | describe(definition)
            | _times(next_ms.get(key), runs.get(key, b"0 0 0 0"))
            for key, definition in sorted(zip(stored[::2], stored[1::2], strict=True))
        ]

    def one(self, key: str) -> dict[str, Any]:
        """One of them, with its next ticks."""
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
        """The ticks that it would have if it were set now for the first time."""
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
    """A definition as it is shown; of a broken one, or of a zone that is unknown here, why."""
    head, _, data = definition.rpartition(b"\n")
    try:
        rule, policy = _read_lines(head)
    except ForqError as exc:
        return {"rule": None, "origin": _origin(definition), "error": str(exc)}
    every = rule.every_ms / 1000 if isinstance(rule, Every) else None
    return {
        "rule": str(rule),
        "every": every,
        "cron": rule.expression if isinstance(rule, Cron) else None,
        "zone": rule.zone if isinstance(rule, Cron) else None,
        "data": orjson.loads(data),
        "jitter": policy.pop("jitter_ms", 0) / 1000,
        **policy,
    }


def upcoming(rule: Rule, first_ms: int | None) -> list[dict[str, Any]]:
    """The first tick and those after it, for people too."""
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
