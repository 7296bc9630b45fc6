"""Writes rows of a DataFrame as jobs: columns queue and data, optional id, identifier, run_at, priority, type, token,
and the options of a job (timeout, max_retries, backoff, expires_in, keep_done).

1. Each row has a token: its own, else one made of run and job id, else one of run, partition and row number. So a task
   that Spark repeats, or a write repeated with the same `run`, stores nothing twice while the queue remembers tokens
   (dedup_ttl), even if a job has ended meanwhile. Of several rows of a run with the same id, one is stored.
2. By default each write has a new `run`. For a stream it is the query's id and the batch number, so a query that
   continues from its checkpoint can repeat a batch safely.
3. While Redis is down or full, a task waits for up to `patience`.
4. A row that cannot be stored ends the write with an error that names it. Rows stored before stay.
"""

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructType,
    TimestampType,
)

from forq.broker.chunks import CHUNK_BYTES, CHUNK_JOBS, NewJob
from forq.broker.enqueue import Producer, Update, new_job
from forq.broker.keys import DEFAULT_PRIORITY
from forq.broker.link import Link
from forq.errors import BackPressure, ForqError, InvalidData, RedisUnavailable, UsageError
from forq.job import new_id
from forq.job_options import pack_job_options
from forq.pipeline.format import SourceOptions, one_of
from forq.values import parse_duration, shown

_REQUIRED = ("queue", "data")
_DURATIONS = ("timeout", "expires_in", "keep_done")
_OWN_OPTIONS = (*_DURATIONS, "max_retries", "backoff")
_ALLOWED = (*_REQUIRED, "id", "identifier", "run_at", "priority", "type", "token", *_OWN_OPTIONS)
_RUN = re.compile(r"[A-Za-z0-9_.-]{1,48}\Z")
_MAX_TOKEN = 128
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 2.0


@dataclass
class Stored(WriterCommitMessage):
    """Rows written by one task, including those that were stored before."""

    rows: int


class JobWriter(DataSourceArrowWriter):
    def __init__(
        self, options: Mapping[str, str], source_options: SourceOptions, schema: StructType, overwrite: bool
    ) -> None:
        if overwrite:
            raise UsageError("jobs can be added to a queue, but not replace its jobs: use mode('append')")
        _check_columns(schema)
        self._options = source_options
        self._update = Update(one_of(options, "ifExists", ("skip", "update")))
        self._patience_seconds = parse_duration(options.get("patience", "60s"))
        self._given_run = options.get("run")
        if self._given_run is not None and not _RUN.match(self._given_run):
            raise UsageError(f"option run = {shown(self._given_run)} is not allowed: 1 to 48 of A-Z a-z 0-9 _ . -")
        # Created on the driver, once per write: all tasks and their repetitions share it.
        self._new_run = new_id()
        self._read_data = json_converter(schema["data"].dataType)
        self._has_options = any(name in _OWN_OPTIONS for name in schema.fieldNames())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        return self._store(iterator, self._given_run or self._new_run, task.partitionId())

    def _store(self, batches: Iterator[pa.RecordBatch], run: str, partition: int) -> Stored:
        link = Link(self._options.redis, name="forq-sink")
        chunks = _Chunks(link, self._options.prefix, self._update, self._patience_seconds, partition)
        number = 0
        for batch in batches:
            for row in _rows(batch):
                try:
                    queue, job = self._job(row, run, f"{partition}:{number}")
                except ForqError as exc:
                    chunks.flush_all()
                    raise UsageError(f"row {number} of partition {partition} ({_describe(row)}): {exc}") from exc
                chunks.add(queue, job, number)
                number += 1
        chunks.flush_all()
        link.close()
        return Stored(number)

    def _job(self, row: dict[str, Any], run: str, place: str) -> tuple[str, NewJob]:
        queue, job_id, token = row["queue"], row.get("id"), row.get("token")
        if queue is None:
            raise UsageError("column queue is null")
        priority = row.get("priority")
        return queue, new_job(
            self._read_data(row["data"]),
            id=job_id,
            identifier=row.get("identifier"),
            priority=DEFAULT_PRIORITY if priority is None else priority,
            type=row.get("type"),
            token=_token(run, job_id, place) if token is None else token,
            run_at=row.get("run_at"),
            options=_own_options(row) if self._has_options else "",
        )


class StreamJobWriter(JobWriter, DataSourceStreamArrowWriter):
    """Writes each batch of a stream. A query keeps its id when it restarts from its checkpoint."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        query, batch = (task.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        if batch is None:
            raise ForqError("Spark did not set the batch number of the stream (streaming.sql.batchId)")
        return self._store(iterator, f"{self._given_run or query or self._new_run}.{batch}", task.partitionId())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:
        """Rows are stored by `write` already."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:
        """Stored rows stay."""


def _check_columns(schema: StructType) -> None:
    names = schema.fieldNames()
    wrong = [name for name in names if name not in _ALLOWED]
    missing = [name for name in _REQUIRED if name not in names]
    if wrong or missing:
        problem = f"has no column {missing[0]!r}" if missing else f"has an unknown column {shown(wrong[0])}"
        optional = ", ".join(_ALLOWED[len(_REQUIRED) :])
        raise UsageError(f"the DataFrame {problem}: required are queue and data, optional {optional}")
    for name in ("queue", "id", "identifier", "type", "token"):
        if name in names and not isinstance(schema[name].dataType, StringType):
            raise UsageError(f"column {name} is {schema[name].dataType.simpleString()}, not a string")
    if "run_at" in names and not isinstance(schema["run_at"].dataType, TimestampType):
        raise UsageError(f"column run_at is {schema['run_at'].dataType.simpleString()}, not a timestamp")
    for name in ("priority", "max_retries"):
        if name in names and schema[name].dataType.typeName() not in ("byte", "short", "integer", "long"):
            raise UsageError(f"column {name} is {schema[name].dataType.simpleString()}, not a whole number")
    for name in _DURATIONS:
        if name in names and not _is_duration(schema[name].dataType):
            raise UsageError(f"column {name} is {schema[name].dataType.simpleString()}, not a {_DURATION_TYPES}")
    if "backoff" in names:
        kind = schema["backoff"].dataType
        if not _is_duration(kind.elementType if isinstance(kind, ArrayType) else kind):
            raise UsageError(f"column backoff is {kind.simpleString()}, not a {_DURATION_TYPES}, or an array of them")


_DURATION_TYPES = "number of seconds, a string such as '30s' or an interval"


def _is_duration(column: DataType) -> bool:
    return isinstance(column, StringType | NumericType | DayTimeIntervalType | NullType)


def _own_options(row: dict[str, Any]) -> str:
    backoff = row.get("backoff")
    return pack_job_options(
        timeout=_duration(row.get("timeout")),
        max_retries=row.get("max_retries"),
        backoff=[_duration(each) for each in backoff] if isinstance(backoff, list) else _duration(backoff),
        expires_in=_duration(row.get("expires_in")),
        keep_done=_duration(row.get("keep_done")),
    )


def _duration(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
        yield dict(zip(names, values, strict=True))


def _token(run: str, job_id: str | None, place: str) -> str:
    """The name of a run has no colon or slash, so the two kinds of tokens never collide."""
    token = f"spark:{run}:{place}" if job_id is None else f"spark:{run}/{job_id}"
    if len(token) <= _MAX_TOKEN:
        return token
    return f"spark:{run}/{hashlib.sha256(token.encode()).hexdigest()}"


def _describe(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {shown(row[name])}" for name in ("queue", "id") if row.get(name) is not None)


@dataclass
class _Chunk:
    jobs: list[NewJob] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    size: int = 0


class _Chunks:
    """Collects the rows of a task in one chunk per queue, and stores full chunks."""

    def __init__(self, link: Link, prefix: str, update: Update, patience_seconds: float, partition: int) -> None:
        self._link = link
        self._prefix = prefix
        self._update = update
        self._patience_seconds = patience_seconds
        self._partition = partition
        self._producers: dict[str, Producer] = {}
        self._waiting: dict[str, _Chunk] = {}

    def add(self, queue: str, job: NewJob, number: int) -> None:
        chunk = self._waiting.setdefault(queue, _Chunk())
        if len(chunk.jobs) == CHUNK_JOBS or (chunk.jobs and chunk.size + len(job.body) > CHUNK_BYTES):
            self._flush(queue)
            chunk = self._waiting[queue] = _Chunk()
        chunk.jobs.append(job)
        chunk.numbers.append(number)
        chunk.size += len(job.body)

    def flush_all(self) -> None:
        for queue in list(self._waiting):
            self._flush(queue)

    def _flush(self, queue: str) -> None:
        chunk = self._waiting.pop(queue)
        try:
            producer = self._producers.get(queue) or Producer(self._link, self._prefix, queue)
            self._producers[queue] = producer
            with_patience(lambda: producer.enqueue(chunk.jobs, self._update), self._patience_seconds)
        except ForqError as exc:
            raise type(exc)(f"{self._place(chunk, exc)}: {exc}") from exc

    def _place(self, chunk: _Chunk, exc: ForqError) -> str:
        if isinstance(exc, InvalidData):
            # A row is too large for the queue. The script does not report which: it is the largest.
            at = max(range(len(chunk.jobs)), key=lambda index: len(chunk.jobs[index].body))
            return f"row {chunk.numbers[at]} of partition {self._partition} (id {shown(chunk.jobs[at].id)})"
        return f"rows {chunk.numbers[0]} to {chunk.numbers[-1]} of partition {self._partition}"


def with_patience(store: Callable[[], object], patience_seconds: float) -> None:
    """Repeats a call while Redis is down or out of memory. Tokens make the repetition safe."""
    deadline = time.monotonic() + patience_seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            store()
            return
        except (BackPressure, RedisUnavailable):
            if time.monotonic() + pause > deadline:
                raise
        # Random, so that the tasks do not retry at the same time.
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


Converter = Callable[[Any], Any]


def json_converter(column: DataType) -> Converter:
    """Converts values of the column `data` to job data. A string is JSON text."""
    return _parse if isinstance(column, StringType) else _converter(column)


def _parse(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except ValueError as exc:
        raise InvalidData(f"data is not JSON: {exc} (a string column must have JSON text: use to_json)") from exc


def _converter(column: DataType) -> Converter:
    if isinstance(column, DecimalType):
        return _from_decimal
    if isinstance(column, StringType | BooleanType | NumericType | NullType):
        return _unchanged
    if isinstance(column, ArrayType):
        of_element = _converter(column.elementType)
        return lambda value: None if value is None else [of_element(one) for one in value]
    if isinstance(column, MapType) and isinstance(column.keyType, StringType):
        of_value = _converter(column.valueType)
        # Arrow returns a map as a list of pairs.
        return lambda value: None if value is None else {key: of_value(one) for key, one in value}
    if isinstance(column, StructType):
        of_field = {field.name: _converter(field.dataType) for field in column}
        return lambda value: None if value is None else {name: of_field[name](value[name]) for name in of_field}
    raise UsageError(
        f"data of type {column.simpleString()} cannot be written as JSON: allowed are structs, arrays, maps with "
        "string keys, numbers, booleans and strings; use to_json or a cast to string"
    )


def _unchanged(value: Any) -> Any:
    return value


def _from_decimal(value: Decimal | None) -> float | int | None:
    if value is None:
        return None
    if value == value.to_integral_value():
        return int(value)
    if Decimal(repr(float(value))) != value:
        raise InvalidData(f"data has the number {value}, which has no exact float: cast it to a string")
    return float(value)
