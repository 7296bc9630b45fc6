"""The interface of format("forq"): its options, checked when a read or write is planned, and the schemas of its rows.

(queue, epoch, sequence, position) is the key of an event; broker/journal.py explains the columns. Spark requires that
the schemas for Spark and for Arrow match in types, time zone and nullability.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import (
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

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


_TEXT, _LONG, _INT, _TIME, _FLAG = StringType(), LongType(), IntegerType(), TimestampType(), BooleanType()
_ARROW: dict[DataType, pa.DataType] = {
    _TEXT: pa.string(),
    _LONG: pa.int64(),
    _INT: pa.int32(),
    _TIME: pa.timestamp("us", tz="UTC"),
    _FLAG: pa.bool_(),
}

EVENTS = StructType(
    [
        StructField("queue", _TEXT, nullable=False),  # NAME, or NAME#fail
        StructField("epoch", _LONG, nullable=False),
        StructField("sequence", _LONG, nullable=False),  # of the entry
        StructField("position", _INT, nullable=False),  # of the event in its entry, from 0
        StructField("time", _TIME, nullable=False),
        StructField("verb", _TEXT, nullable=False),
        StructField("job", _TEXT),
        StructField("fence", _LONG, nullable=False),
        StructField("attempt", _INT),  # of claimed
        StructField("actor", _TEXT, nullable=False),
        StructField("micros", _LONG),
        StructField("cause", _TEXT),
        StructField("fail_job", _FLAG),  # of dead
        StructField("due", _TIME),  # of scheduled
        StructField("entry", _TEXT),  # whole text of the entry; only at position 0
        StructField("hash", _TEXT),  # only at position 0
    ]
)

JOBS = StructType(
    [
        StructField("queue", _TEXT, nullable=False),
        StructField("id", _TEXT, nullable=False),
        StructField("identifier", _TEXT),
        StructField("type", _TEXT),
        StructField("state", _TEXT, nullable=False),  # waiting, scheduled, held, active, retry, dead
        StructField("priority", _INT),
        StructField("retry_count", _INT),
        StructField("stall_count", _INT),
        StructField("timeout_count", _INT),
        StructField("enqueued_at", _TIME),
        StructField("run_at", _TIME),  # of scheduled and held
        StructField("options", _TEXT),  # its own, packed (job_options.py); null if it has none
        StructField("data", _TEXT),  # JSON; null if the record is broken
        StructField("fence", _LONG),  # of active and dead
        StructField("died_at", _TIME),
        StructField("error", _TEXT),  # of dead, as JSON; of a broken record the reason
    ]
)


def arrow_schema(rows: StructType) -> pa.Schema:
    return pa.schema([pa.field(column.name, _ARROW[column.dataType], column.nullable) for column in rows])


EVENTS_ARROW = arrow_schema(EVENTS)
JOBS_ARROW = arrow_schema(JOBS)
