"""The options of format("forq"), checked when a read or write is planned, before any work starts."""

from collections.abc import Mapping
from dataclasses import dataclass

from forq.broker.keys import DEFAULT_PREFIX, main_queue
from forq.errors import UsageError
from forq.paths import redis_url
from forq.values import check_queue_name, shown

# Spark passes on its own options, too. _OF_SINK are read by sink.py.
_FOREIGN = ("checkpointLocation", "path", "queryName")
_OF_SINK = ("run", "ifExists", "patience")
_OWN = ("redis", "prefix", "queues", "what", "startingFrom", "maxEntriesPerBatch", "consumer", "failOnLoss")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    redis: str
    prefix: str
    queues: tuple[str, ...]  # empty: all
    what: str
    starting_from: str
    max_entries_per_batch: int | None
    consumer: str | None
    fail_on_loss: bool


def read_options(options: Mapping[str, str]) -> SourceOptions:
    """Spark passes option names in lower case."""
    known = {name.lower() for name in (*_OWN, *_OF_SINK, *_FOREIGN)}
    for name in options:
        if name.lower() not in known:
            allowed = ", ".join((*_OWN, *_OF_SINK))
            raise UsageError(f"format 'forq' has no option {shown(name)}: allowed are {allowed}")
    return SourceOptions(
        # Resolved on the driver: workers on other machines have another environment.
        redis=options.get("redis") or redis_url(),
        prefix=options.get("prefix", DEFAULT_PREFIX),
        queues=_queues(options.get("queues", "")),
        what=one_of(options, "what", ("events", "jobs")),
        starting_from=one_of(options, "startingFrom", ("earliest", "latest")),
        max_entries_per_batch=_number(options, "maxEntriesPerBatch"),
        consumer=options.get("consumer"),
        fail_on_loss=one_of(options, "failOnLoss", ("true", "false")) == "true",
    )


def one_of(options: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """The value of an option. The first allowed value is the default."""
    value = options.get(name.lower(), allowed[0])
    if value.lower() not in allowed:
        raise UsageError(f"option {name} = {shown(value)} is not allowed: {', '.join(allowed)}")
    return value.lower()


def _queues(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        check_queue_name(main_queue(name))
    return tuple(dict.fromkeys(names))


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    if not text.isdigit() or int(text) == 0:
        raise UsageError(f"option {name} = {shown(text)} is not allowed: a number from 1")
    return int(text)
