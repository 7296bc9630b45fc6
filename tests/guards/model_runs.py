"""Recorded runs of the model-based tests: the rules and their arguments, so that any tree can repeat them.

Hypothesis chooses the calls once, at recording; a repetition does not depend on its version.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.drive.server import Server

Call = tuple[str, dict[str, Any]]
_EXAMPLES, _STEPS = 30, 50


def choose(machine_type: type[RuleBasedStateMachine], server: Server) -> list[list[Call]]:
    """Chooses some runs of this machine."""
    runs: list[list[Call]] = []

    def begin(self: RuleBasedStateMachine) -> None:
        machine_type.__init__(self)
        runs.append([])

    machine = type("Machine", (machine_type,), {"server": server, "__init__": begin})
    state = machine.setup_state()  # type: ignore[attr-defined]
    plain = [(each, each.function) for each in (*state.rules, *state.initializers)]
    for each, function in plain:
        each.function = _noting(function, runs)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=_EXAMPLES,
            stateful_step_count=_STEPS,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    for each, function in plain:
        each.function = function
    return [run for run in runs if len(run) > _STEPS // 2]


def _noting(function: Callable[..., Any], runs: list[list[Call]]) -> Callable[..., Any]:
    def call(machine: RuleBasedStateMachine, **arguments: Any) -> Any:
        runs[-1].append((function.__name__, arguments))
        return function(machine, **arguments)

    return call


def repeat(machine_type: type[RuleBasedStateMachine], server: Server, run: list[Call]) -> str:
    """Repeats this run; returns the dump after it."""
    machine = type("Machine", (machine_type,), {"server": server})()
    try:
        for name, arguments in run:
            getattr(machine, name)(**arguments)
        return dump(server)
    finally:
        machine.teardown()


def write_runs(path: Path, runs: list[list[Call]]) -> None:
    path.write_text("".join(json.dumps(run, separators=(",", ":")) + "\n" for run in runs))


def read_runs(path: Path) -> list[list[Call]]:
    return [[(name, arguments) for name, arguments in json.loads(line)] for line in path.read_text().splitlines()]


# Hashes of the journal's chain, which contain times.
_HASH = re.compile(r"\b[0-9a-f]{40}\b")
# Seconds, milliseconds or microseconds since 1970 (2017 to 2033), or a date and time.
_TIME = re.compile(
    r"(?<![0-9])1[5-9]\d{8}(\d{3}|\d{6})?(?![0-9])(\.\d+)?|20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)"
)
# How many microseconds a job was held, as in the journal, and the size of that in the summary.
_HELD = re.compile(
    r"(\b(?:done|retried|dead|released|stalled) <time> \S+(?: [a-z]+)?|journal_bytes =|<time> \d+ \d+ (?:<hash>|-))"
    r" \d+"
)


def dump(server: Server) -> str:
    """All keys of a server, journals included, without values that depend on the time of day."""
    return "\n".join(_lines(server)) + "\n"


def normal(line: str) -> str:
    return _HELD.sub(r"\1 <number>", _TIME.sub("<time>", _HASH.sub("<hash>", line)))


def _lines(server: Server) -> Iterator[str]:
    # Any: redis-py types its answers for every way of decoding them at once.
    redis: Any = server.connect()
    for key in sorted(redis.scan_iter(count=1000)):
        kind = redis.type(key).decode()
        yield f"{normal(_text(key))} ({kind}{', expires' if redis.pttl(key) > 0 else ''})"
        yield from (f"  {normal(line)}" for line in _ordered(kind, list(_values(redis, key, kind))))
    redis.close()


def _ordered(kind: str, lines: list[str]) -> list[str]:
    """Members with the same millisecond have no order in a sorted set."""
    return lines if kind in ("list", "stream") else sorted(lines, key=normal)


def _values(redis: Any, key: bytes, kind: str) -> Iterator[str]:
    match kind:
        case "string":
            yield _text(redis.get(key))
        case "hash":
            yield from (f"{_text(name)} = {_text(value)}" for name, value in redis.hgetall(key).items())
        case "list":
            yield from map(_text, redis.lrange(key, 0, -1))
        case "set":
            yield from map(_text, redis.smembers(key))
        case "zset":
            members = redis.zrange(key, 0, -1, withscores=True)
            yield from (f"{_text(member)} at {score:.0f}" for member, score in members)
        case "stream":
            for _, fields in redis.xrange(key):
                lines = (f"{name.decode()} {value.decode()}" for name, value in fields.items())
                yield " | ".join(lines).replace("\n", " | ")


def _text(raw: bytes) -> str:
    return raw.decode("latin-1").encode("unicode_escape").decode()
