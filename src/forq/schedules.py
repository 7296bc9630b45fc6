"""Schedules: their definition, and the times of their ticks. Times are arguments, in ms.

1. Schedule checks a definition from a config file, the control socket or Python.
2. Every and Cron are the two kinds of rule.
3. plan decides which due ticks create jobs, how many are missed, and which tick is next.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from forq.errors import ForqError, UsageError
from forq.procs import jsonrpc
from forq.settings import SCHEDULE, suggestion
from forq.values import check_schedule_key, check_type, parse_duration, show_duration, shown

MAX_EXPRESSION = 100
# A tick that is less late than this does not count as missed.
ON_TIME_MS = 1000
# With catch_up "all": late ticks that still create jobs, and how many of them per call.
MAX_CAUGHT_UP_TICKS = 1000
TICKS_PER_CALL = 100
# Each tick of a cron rule must be searched for, so only this many missed ones are counted.
MAX_COUNTED_TICKS = 5000
_HOUR_MS = 3_600_000
# A cron rule without a tick within 50 years of this time never has one.
_PROBE_MS = 1_767_225_600_000


@dataclass(frozen=True, slots=True)
class Every:
    """Ticks at a fixed interval."""

    every_ms: int

    zone = "UTC"

    def __str__(self) -> str:
        return f"every {show_duration(self.every_ms / 1000)}"

    def after(self, tick_ms: int) -> Iterator[int]:
        """The ticks after this one, without end."""
        while True:
            tick_ms += self.every_ms
            yield tick_ms

    def due(self, tick_ms: int, now_ms: int, limit: int) -> tuple[list[int], int]:
        """The newest ticks from `tick_ms` until now, at most `limit`, and the number of all of them."""
        count = (now_ms - tick_ms) // self.every_ms + 1
        kept = min(count, limit)
        return [tick_ms + number * self.every_ms for number in range(count - kept, count)], count


@dataclass(frozen=True, slots=True)
class Cron:
    """Ticks at the times of a 5-field expression in a time zone. Clock changes are handled as in Debian's cron."""

    expression: str
    zone: str

    def __str__(self) -> str:
        return self.expression

    def after(self, ms: int) -> Iterator[int]:
        """The ticks after this time."""
        start = datetime.fromtimestamp(ms // 1000, read_zone(self.zone))
        for tick in CronSim(self.expression, start):
            tick_ms = round(tick.timestamp()) * 1000
            # In the hour that a clock repeats, the search starts in the first pass and may find past ticks.
            if tick_ms > ms:
                yield tick_ms

    def due(self, tick_ms: int, now_ms: int, limit: int) -> tuple[list[int], int]:
        """As Every.due; the number of ticks may be a lower bound."""
        newest = self._newest(tick_ms, now_ms, limit)
        if newest[0] == tick_ms:
            return newest, len(newest)
        older = takewhile(lambda tick: tick < newest[0], self.after(tick_ms))
        return newest, len(newest) + 1 + sum(1 for _ in islice(older, MAX_COUNTED_TICKS))

    def _newest(self, tick_ms: int, now_ms: int, limit: int) -> list[int]:
        """Searches back from now in growing steps, because the first due tick may be far away."""
        span_ms = _HOUR_MS
        while True:
            start_ms = max(tick_ms, now_ms - span_ms)
            found = deque([tick_ms] if start_ms == tick_ms else [], maxlen=limit)
            found.extend(takewhile(lambda tick: tick <= now_ms, self.after(start_ms)))
            if start_ms == tick_ms or len(found) == limit:
                return list(found)
            span_ms *= 2


Rule = Every | Cron


@dataclass(frozen=True, slots=True)
class Plan:
    """`ticks` create jobs, in this order; `next_ms` is None if no tick follows."""

    ticks: list[int]
    missed: int
    next_ms: int | None


def plan(rule: Rule, catch_up: str, tick_ms: int, now_ms: int) -> Plan:
    """Plans the due tick `tick_ms` and all later ones that are due."""
    ticks, count = rule.due(tick_ms, now_ms, MAX_CAUGHT_UP_TICKS if catch_up == "all" else 1)
    missed = count - len(ticks)
    if catch_up == "none" and now_ms - ticks[-1] >= ON_TIME_MS:
        return Plan([], count, next_tick(rule, ticks[-1]))
    if len(ticks) > TICKS_PER_CALL:
        return Plan(ticks[:TICKS_PER_CALL], missed, ticks[TICKS_PER_CALL])
    return Plan(ticks, missed, next_tick(rule, ticks[-1]))


def next_tick(rule: Rule, after_ms: int) -> int | None:
    return next(rule.after(after_ms), None)


def show_tick(rule: Rule, tick_ms: int) -> str:
    """ISO 8601 in the rule's zone."""
    moment = datetime.fromtimestamp(tick_ms / 1000, read_zone(rule.zone))
    return moment.isoformat(timespec="milliseconds" if tick_ms % 1000 else "seconds")


def read_zone(name: str) -> tzinfo:
    # Works without a time zone database.
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        allowed = "a name in this machine's time zone database (Europe/Berlin, UTC)"
        raise UsageError(f"zone {shown(name)} is not allowed: {allowed}") from exc


def read_cron(expression: object, zone: object) -> Cron:
    allowed = "5 fields, minute hour day month weekday ('30 2 * * MON-FRI')"
    refusal = f"cron {shown(expression)} is not allowed"
    if not isinstance(expression, str) or len(expression) > MAX_EXPRESSION or len(expression.split()) != 5:
        raise UsageError(f"{refusal}: {allowed}, at most {MAX_EXPRESSION} characters")
    if not isinstance(zone, str):
        raise UsageError(f"zone {shown(zone)} is not allowed: it must be text")
    read_zone(zone)
    rule = Cron(" ".join(expression.split()), zone)
    try:
        never = next_tick(rule, _PROBE_MS) is None
    except CronSimError as exc:
        raise UsageError(f"{refusal}: {exc}; {allowed}") from exc
    if never:
        raise UsageError(f"{refusal}: no such day exists")
    return rule


# The origin of a schedule. One from a config file is removed at a start whose file lacks it, one from an app by
# `forqctl restart --app`.
CONFIG, APP, USER = "config", "app", "user"


@dataclass(frozen=True, slots=True)
class Schedule:
    key: str
    rule: Rule
    data: Any
    priority: int
    type: str | None
    overlap: str
    catch_up: str
    jitter_ms: int
    origin: str

    @classmethod
    def from_mapping(cls, key: object, given: Mapping[str, Any], origin: str = USER) -> "Schedule":
        """None counts as not given."""
        for name in given:
            if name not in SCHEDULE:
                raise UsageError(f"a schedule has no setting {shown(name)}{suggestion(name, SCHEDULE)}")
        defaults = {name: row.default for name, row in SCHEDULE.items() if row.default is not None and name != "zone"}
        fields = defaults | {name: value for name, value in given.items() if value is not None}
        priority = fields["priority"]
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 9:
            raise UsageError(f"priority {shown(priority)} is not allowed: 0 (first) to 9 (last)")
        # Fails here, not at the first tick, if the data is not JSON.
        jsonrpc.encode(fields.get("data"))
        return cls(
            check_schedule_key(key),
            _read_rule(fields),
            fields.get("data"),
            priority,
            check_type(fields["type"]) if "type" in fields else None,
            _check_word("overlap", fields["overlap"]),
            _check_word("catch_up", fields["catch_up"]),
            _parse_milliseconds("jitter", fields["jitter"]),
            origin,
        )


def read_schedules(given: object, where: str) -> dict[str, dict[str, Any]]:
    """Checks the schedules of a queue in a config file, and returns them unchanged."""
    if not isinstance(given, Mapping) or not all(isinstance(fields, Mapping) for fields in given.values()):
        raise UsageError(f"{where}: schedules = {shown(given)} is not allowed: tables [queues.NAME.schedules.KEY]")
    for key, fields in given.items():
        try:
            Schedule.from_mapping(key, fields, CONFIG)
        except ForqError as exc:
            raise type(exc)(f"{where}: schedule {shown(key)}: {exc}") from exc
    return {key: dict(fields) for key, fields in given.items()}


def _read_rule(fields: Mapping[str, Any]) -> Rule:
    if ("every" in fields) == ("cron" in fields):
        raise UsageError("a schedule needs either every or cron")
    if "cron" in fields:
        return read_cron(fields["cron"], fields.get("zone", SCHEDULE["zone"].default))
    if "zone" in fields:
        raise UsageError("zone needs cron: every has no zone")
    return Every(_parse_milliseconds("every", fields["every"]))


def _parse_milliseconds(name: str, given: object) -> int:
    lowest, highest = (round(1000 * seconds) for seconds in SCHEDULE[name].range)
    value = given.total_seconds() if isinstance(given, timedelta) else given
    try:
        found = round(parse_duration(value) * 1000)  # type: ignore[arg-type]
    except UsageError as exc:
        raise UsageError(f"{name}: {exc}") from exc
    if not lowest <= found <= highest:
        raise UsageError(f"{name} {shown(given)} is not allowed: {lowest} ms to {highest // 86_400_000} days")
    return found


def _check_word(name: str, given: object) -> str:
    if given not in SCHEDULE[name].range:
        raise UsageError(f"{name} {shown(given)} is not allowed: {', '.join(SCHEDULE[name].range)}")
    return str(given)
