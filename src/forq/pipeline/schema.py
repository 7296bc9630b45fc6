"""Schemas of event rows and job rows, for Spark and for Arrow. broker/journal.py explains the columns of events.

(queue, epoch, sequence, position) is the key of an event. Spark requires that both schemas match in types, time zone
and nullability.
"""

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
        StructField("state", _TEXT, nullable=False),  # waiting, scheduled, active, retry, dead
        StructField("priority", _INT),
        StructField("retry_count", _INT),
        StructField("stall_count", _INT),
        StructField("timeout_count", _INT),
        StructField("enqueued_at", _TIME),
        StructField("run_at", _TIME),  # of scheduled
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
