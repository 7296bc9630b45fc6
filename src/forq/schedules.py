"""A schedule as people give it: in a config file, over the control socket, or in Python; checked in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from forq.errors import ForqError, UsageError
from forq.names import check_schedule_key, check_type, shown
from forq.procs import jsonrpc
from forq.settings import SCHEDULE, nearest
from forq.ticks import Every, Rule, read_cron
from forq.values import parse_duration

# Who has made it: a config file, whose next reading may remove it, or somebody.
CONFIG, USER = "config", "user"


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
        """What is None counts as not given."""
        for name in given:
            if name not in SCHEDULE:
                raise UsageError(f"a schedule has no {shown(name)}{nearest(name, SCHEDULE)}")
        defaults = {name: row.default for name, row in SCHEDULE.items() if row.default is not None and name != "zone"}
        fields = defaults | {name: value for name, value in given.items() if value is not None}
        priority = fields["priority"]
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 9:
            raise UsageError(f"priority {shown(priority)} is not allowed: 0 (first) to 9 (last)")
        # Whether it is JSON is known here, and not at the first tick.
        jsonrpc.encode(fields.get("data"))
        return cls(
            check_schedule_key(key),
            _read_rule(fields),
            fields.get("data"),
            priority,
            check_type(fields["type"]) if "type" in fields else None,
            _word("overlap", fields["overlap"]),
            _word("catch_up", fields["catch_up"]),
            _milliseconds("jitter", fields["jitter"]),
            origin,
        )


def read_schedules(given: object, where: str) -> dict[str, dict[str, Any]]:
    """The schedules of a queue in a config file, checked and as they were given."""
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
        raise UsageError("zone goes with cron: every knows no zone")
    return Every(_milliseconds("every", fields["every"]))


def _milliseconds(name: str, given: object) -> int:
    lowest, highest = (round(1000 * seconds) for seconds in SCHEDULE[name].range)
    value = given.total_seconds() if isinstance(given, timedelta) else given
    try:
        found = round(parse_duration(value) * 1000)  # type: ignore[arg-type]
    except UsageError as exc:
        raise UsageError(f"{name}: {exc}") from exc
    if not lowest <= found <= highest:
        raise UsageError(f"{name} {shown(given)} is not allowed: {lowest} ms to {highest // 86_400_000} days")
    return found


def _word(name: str, given: object) -> str:
    if given not in SCHEDULE[name].range:
        raise UsageError(f"{name} {shown(given)} is not allowed: {', '.join(SCHEDULE[name].range)}")
    return str(given)
