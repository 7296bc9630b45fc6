"""Reads the figures of a report with Spark SQL. The result has the size of the charts, not of the history.

1. `Span` and `HeatGrid` divide the report's period into buckets for charts and cells for the heat map, in UTC.
2. `attempts` has one row per claim, with wait, outcome and run time. It is cached: most figures aggregate it.
3. `holds` has one row per time for which a job was held. That is not part of its wait.
4. `Figures` has one series per chart, by time bucket and queue. The busiest queues have names, the others are OTHERS.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from forq.errors import UsageError
from forq.pipeline import verbs
from forq.pipeline.verbs import quoted
from forq.values import parse_duration, shown

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

MAX_BUCKETS = 144
MAX_TICKS = 10
_STEPS = (
    *(n * SECOND // 10 for n in (1, 2, 5)),
    *(n * SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14, 28, 91, 182, 364)),
)


@dataclass(frozen=True, slots=True)
class Span:
    """The period of a report, in microseconds, without `to_us` itself."""

    from_us: int
    to_us: int

    @property
    def length_us(self) -> int:
        return self.to_us - self.from_us

    @property
    def step_us(self) -> int:
        """The width of a bucket."""
        return _least_step(self.length_us, MAX_BUCKETS)

    @property
    def origin_us(self) -> int:
        """Start of bucket 0, at or before `from_us`."""
        return self.from_us - self.from_us % self.step_us

    @property
    def buckets(self) -> int:
        return (self.to_us - 1 - self.origin_us) // self.step_us + 1

    def edges(self, bucket: int) -> tuple[int, int]:
        """Start and end of a bucket within the span."""
        begin = self.origin_us + bucket * self.step_us
        return max(begin, self.from_us), min(begin + self.step_us, self.to_us)

    def seconds_in(self, bucket: int) -> float:
        """Length of a bucket for rates. Short first and last buckets count as half a step, to avoid noise."""
        begin, end = self.edges(bucket)
        return max(end - begin, self.step_us // 2) / SECOND

    def ticks(self) -> list[tuple[float, str]]:
        """Positions (0 to 1) and labels of the time axis."""
        step = _least_step(self.length_us, MAX_TICKS)
        first = -(-self.from_us // step) * step
        return [((at - self.from_us) / self.length_us, tick_label(at, step)) for at in range(first, self.to_us, step)]


@dataclass(frozen=True, slots=True)
class HeatGrid:
    """The heat map: rows of `row_us` with cells of `cell_us`. Long spans have one row per weekday."""

    row_us: int
    cell_us: int
    by_weekday: bool

    @property
    def columns(self) -> int:
        return self.row_us // self.cell_us

    def rows(self, span: Span) -> list[tuple[int, str]]:
        """Number and label of each row."""
        if self.by_weekday:
            return list(enumerate(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")))
        first, last = span.from_us // self.row_us, (span.to_us - 1) // self.row_us
        form = "%a %d %b" if self.row_us == DAY else "%d %b %H:%M"
        return [(row, to_datetime(row * self.row_us).strftime(form)) for row in range(first, last + 1)]

    def times(self, span: Span) -> Iterator[tuple[int, int]]:
        """Yields (row, cell) once for each hour of the span."""
        for hour in range(span.from_us // HOUR, (span.to_us - 1) // HOUR + 1):
            # Day 0 of the epoch was a Thursday.
            yield (hour // 24 + 3) % 7, hour % 24


def heat_grid_of(span: Span) -> HeatGrid:
    for longest, row_us, cell_us in (
        (12 * MINUTE, MINUTE, SECOND),
        (12 * HOUR, HOUR, MINUTE),
        (2 * DAY, 6 * HOUR, 10 * MINUTE),
        (35 * DAY, DAY, HOUR),
    ):
        if span.length_us <= longest:
            return HeatGrid(row_us, cell_us, by_weekday=False)
    return HeatGrid(DAY, HOUR, by_weekday=True)


def to_datetime(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


def tick_label(at_us: int, step_us: int) -> str:
    at = to_datetime(at_us)
    if step_us >= 28 * DAY:
        return at.strftime("%b %Y")
    if step_us >= DAY or at_us % DAY == 0:
        return at.strftime("%d %b")
    if step_us < SECOND:
        return at.strftime("%H:%M:%S.%f")[:-5]
    return at.strftime("%H:%M:%S" if step_us < MINUTE else "%H:%M")


def parse_time(text: str, option: str, now_us: int) -> int:
    """Parses a date, a time (UTC unless it has a zone), or an age."""
    try:
        return now_us - round(parse_duration(text) * SECOND)
    except UsageError:
        pass
    try:
        given = datetime.fromisoformat(text)
    except ValueError as exc:
        allowed = "2026-11-16, 2026-11-16T08:00, 2026-11-16T08:00+01:00, or an age such as 24h or 7d"
        raise UsageError(f"{option} {shown(text)} is not allowed: {allowed}") from exc
    at = given if given.tzinfo else given.replace(tzinfo=UTC)
    return (at - to_datetime(0)) // timedelta(microseconds=1)


def _least_step(length_us: int, most: int) -> int:
    # `most` - 1: a span that begins and ends within steps touches one more.
    for step in _STEPS:
        if length_us <= step * (most - 1):
            return step
    return -(-length_us // (most - 1) // DAY) * DAY


MAX_NAMED_QUEUES = 12
MAX_QUEUES_LISTED = 250
MAX_CAUSES = 25
MAX_JOBS_LISTED = 15
# Not a valid queue name.
OTHERS = "(others)"
_ALL = ""

Percentiles = tuple[int | None, int | None, int | None]
NO_PERCENTILES: Percentiles = (None, None, None)


@dataclass(frozen=True, slots=True)
class Times:
    """p50, p90 and p99 in microseconds, of waits (ready to claimed) and run times (of handlers)."""

    wait: Percentiles = NO_PERCENTILES
    run: Percentiles = NO_PERCENTILES


@dataclass(frozen=True, slots=True)
class Holds:
    """Jobs that were held. `at_end`: those still held at the end. `times`: of the others, p50, p90 and p99."""

    jobs: int = 0
    at_end: int = 0
    times: Percentiles = NO_PERCENTILES


@dataclass(frozen=True, slots=True)
class QueueFigures:
    name: str
    verbs: dict[str, int]
    times: Times
    holds: Holds
    busy_us: int
    peak: int | None  # None: not one of the busiest


@dataclass(frozen=True, slots=True)
class Cause:
    verb: str
    cause: str | None
    count: int
    queues: int
    examples: list[str]


@dataclass(frozen=True, slots=True)
class Attempt:
    queue: str
    job: str
    attempt: int | None
    verb: str
    cause: str | None
    run_us: int | None
    wait_us: int | None
    ended_us: int


@dataclass(slots=True)
class Figures:
    """Series have one value per bucket; dictionaries are by queue name."""

    span: Span
    heat: HeatGrid
    events: int
    names: list[str]
    queues: list[QueueFigures]
    times: Times = Times()
    holds: Holds = Holds()
    peak: int = 0
    done: dict[str, list[int]] = field(default_factory=dict)
    enqueued: list[int] = field(default_factory=list)
    times_over_time: list[Times] = field(default_factory=list)
    times_by_queue: dict[str, list[Times]] = field(default_factory=dict)
    running: dict[str, list[float]] = field(default_factory=dict)
    cells: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # attempts, failed ones
    causes: list[Cause] = field(default_factory=list)
    slowest: list[Attempt] = field(default_factory=list)
    dead: list[Attempt] = field(default_factory=list)

    def total(self, *verbs: str) -> int:
        return sum(queue.verbs.get(verb, 0) for queue in self.queues for verb in verbs)


# SQL over the views that _FiguresReader creates. {from_us} and the like are numbers of the span.
# events → steps (with the previous and the next event) → ended (one row per attempt) → attempts (with run times)
_AFTER_CLAIM = quoted(*verbs.AFTER_CLAIM)
_SUCCEEDED, _FAILED = quoted(*verbs.SUCCEEDED), quoted(*verbs.FAILED)

# `ready_us`: time of the event that made the job ready, or its due time. `promoted` counts only if the event before it
# is not in the report's period, or if a user ran the job before its time. A worker runs the jobs that it settles in one
# entry one after the other: `until_us` is the end of a run, assuming that the later ones followed without a pause.
# A claim that moves a job to dead because of `unmet` ends no wait.
STEPS_SQL = f"""
select queue, epoch, verb, us, until_us, job, fence, attempt,
  lead(verb) over life as next_verb, lead(us) over life as next_us, lead(until_us) over life as next_until_us,
  lead(micros) over life as next_micros,
  lead(cause) over life as next_cause, lag(verb) over life as previous_verb, micros, cause,
  case lag(verb) over life
    when 'unmet' then null
    when 'promoted' then least(last_value(ready_us) ignore nulls over before, lag(us) over life)
    else coalesce(
      last_value(ready_us) ignore nulls over before,
      last_value(if(verb = 'promoted', us, null)) ignore nulls over before
    ) end as ready_us
from (
  select *, unix_micros(time) as us,
    case when verb = 'scheduled' then unix_micros(due)
      when verb in ({quoted(*verbs.READY_AT_ONCE)}) then unix_micros(time) end as ready_us,
    unix_micros(time) - coalesce(sum(if(verb in ('done', 'retried', 'snoozed', 'dead'), micros, 0)) over (
      partition by queue, epoch, sequence order by position rows between 1 following and unbounded following
    ), 0) as until_us
  from report_events
  where verb in (
    'enqueued', 'unblocked', 'revived', 'met', 'unmet', 'scheduled', 'promoted', 'claimed', {_AFTER_CLAIM}
  )
)
window life as (partition by queue, epoch, job order by sequence, position),
  before as (
    partition by queue, epoch, job order by sequence, position rows between unbounded preceding and 1 preceding
  )
"""

# The second part: attempts that were claimed before the report's period.
ENDED_SQL = f"""
select queue, epoch, job, attempt, fence, us as claimed_us, greatest(0, us - ready_us) as wait_us,
  next_verb as verb, next_us as ended_us, next_until_us as until_us, next_micros as micros, next_cause as cause
from report_steps where verb = 'claimed'
union all
select queue, epoch, job, attempt, fence, null, null, verb, us, until_us, micros, cause
from report_steps where previous_verb is null and verb in ({_AFTER_CLAIM}) and fence > 0
"""

ATTEMPTS_SQL = f"""
select *,
  case when verb in ({quoted(*verbs.CUT_SHORT, "deleted")})
    then coalesce(micros, ended_us - coalesce(claimed_us, {{from_us}})) else micros end as run_us
from (
  select ended.queue, job, attempt, fence, claimed_us, wait_us, micros, cause,
    if(verb is null and deleted_us is not null, 'deleted', verb) as verb, coalesce(ended_us, deleted_us) as ended_us,
    coalesce(until_us, deleted_us) as until_us
  from report_ended as ended left join (
    select queue, epoch, unix_micros(time) as deleted_us from report_events where verb = 'deleted'
  ) as deletion on ended.queue = deletion.queue and ended.epoch = deletion.epoch
)
"""

_PERCENTILES = """
percentile_approx(wait_us, array(0.5, 0.9, 0.99), 2000) as wait,
percentile_approx(run_us, array(0.5, 0.9, 0.99), 2000) as run
"""

TIMES_SQL = f"""
select name, bucket, grouping_id() as level, {_PERCENTILES}
from (
  select *, div(coalesce(claimed_us, ended_us) - {{origin_us}}, {{step_us}}) as bucket from report_attempts
)
group by name, bucket grouping sets ((name, bucket), (bucket), ())
"""

TIMES_OF_QUEUES_SQL = f"select queue, sum(run_us) as busy_us, {_PERCENTILES} from report_attempts group by queue"

# A hold begins with the first `held`, and ends when the job is ready, dead or cancelled, or with its queue.
HOLDS_SQL = """
select queue, grouping_id() as level, count(*) as jobs, count_if(until_us is null) as at_end,
  percentile_approx(until_us - since_us, array(0.5, 0.9, 0.99), 2000) as times
from (
  select held.queue, since_us, coalesce(until_us, deleted_us) as until_us
  from (
    select queue, epoch, verb, unix_micros(time) as since_us,
      lag(verb) over life as before,
      last_value(if(verb = 'held', null, unix_micros(time))) ignore nulls over (
        partition by queue, epoch, job order by sequence desc, position desc
        rows between unbounded preceding and 1 preceding
      ) as until_us
    from report_events where verb in ('held', 'met', 'unmet', 'dropped') or (verb = 'cancelled' and fence = 0)
    window life as (partition by queue, epoch, job order by sequence, position)
  ) as held left join (
    select queue, epoch, unix_micros(time) as deleted_us from report_events where verb = 'deleted'
  ) as deletion on held.queue = deletion.queue and held.epoch = deletion.epoch
  where verb = 'held' and coalesce(before, '') != 'held'
)
group by queue grouping sets ((queue), ())
"""

SERIES_SQL = f"""
select name, div(unix_micros(time) - {{origin_us}}, {{step_us}}) as bucket,
  count_if(verb = 'enqueued') as enqueued, count_if(verb in ({_SUCCEEDED})) as done
from report_events where verb in ('enqueued', {_SUCCEEDED}) group by name, bucket
"""

# Per bucket: `net` is the change in running jobs from its start to its end, `area` the running time added by runs that
# began or ended in it, `highest` the peak relative to its start. Ends sort before starts of the same microsecond: a
# worker that continues with its next job counts once.
RUNNING_SQL = """
select name, bucket, sum(change) as net, sum(change * (ends_us - us)) as area, max(level) as highest
from (
  select *, sum(change) over (partition by name, bucket order by us, change) as level
  from (
    select *, least({origin_us} + (bucket + 1) * {step_us}, {to_us}) as ends_us
    from (
      select explode(array(name, '')) as name, us, change, div(us - {origin_us}, {step_us}) as bucket
      from (
        select name, greatest({from_us}, if(ended_us is null, claimed_us, until_us - run_us)) as us, 1 as change
        from report_attempts where run_us is not null or ended_us is null
        union all
        select name, greatest({from_us}, until_us), -1 from report_attempts where run_us is not null
      )
    )
  )
)
group by name, bucket order by name, bucket
"""

# A job buried by a claim has no run time, so max_by may be null.
CAUSES_SQL = f"""
select verb, cause, count(*) as count, count(distinct queue) as queues,
  array_distinct(array_compact(array(max_by(job, ended_us), min_by(job, ended_us), max_by(job, run_us)))) as examples
from report_attempts where verb in ({_FAILED}, 'suspected', 'interrupted')
group by verb, cause order by count desc, verb, cause limit {MAX_CAUSES}
"""

_LISTED = "select queue, job, attempt, verb, cause, run_us, wait_us, ended_us from report_attempts"
SLOWEST_SQL = f"{_LISTED} where run_us is not null order by run_us desc, ended_us limit {MAX_JOBS_LISTED}"
DEAD_SQL = f"{_LISTED} where verb = 'dead' order by ended_us desc limit {MAX_JOBS_LISTED}"

_VIEWS = ("report_attempts", "report_ended", "report_steps", "report_events")


def read_figures(spark: SparkSession, events: DataFrame, since_us: int | None, until_us: int | None) -> Figures | None:
    """The figures of [since, until); None if it has no events."""
    if since_us is not None:
        events = events.where(F.col("time") >= F.timestamp_micros(F.lit(since_us)))
    if until_us is not None:
        events = events.where(F.col("time") < F.timestamp_micros(F.lit(until_us)))
    counted = events.groupBy("queue", "verb").agg(
        F.count("*").alias("count"),
        F.min(F.unix_micros("time")).alias("first_us"),
        F.max(F.unix_micros("time")).alias("last_us"),
    )
    rows = counted.collect()
    if not rows:
        return None
    span = Span(min(row.first_us for row in rows), max(row.last_us for row in rows) + 1)
    return _FiguresReader(spark, events, span, rows).figures()


class _FiguresReader:
    def __init__(self, spark: SparkSession, events: DataFrame, span: Span, counted: list[Row]) -> None:
        self._spark = spark
        self._span = span
        self._heat = heat_grid_of(span)
        self._verbs: dict[str, dict[str, int]] = defaultdict(dict)
        for row in counted:
            self._verbs[row.queue][row.verb] = row["count"]
        by_size = sorted(self._verbs, key=lambda name: (-_size(self._verbs[name]), name))
        self._by_size = by_size
        # A single remaining queue is named, too.
        self._named = by_size if len(by_size) <= MAX_NAMED_QUEUES + 1 else by_size[:MAX_NAMED_QUEUES]
        self._names = self._named if len(self._named) == len(by_size) else [*self._named, OTHERS]
        self._events = self._with_name(events)

    def figures(self) -> Figures:
        # Named views: `sql(…, name=frame)` drops its view, and with it the cached data.
        attempts = None
        try:
            self._events.createOrReplaceTempView("report_events")
            self._sql(STEPS_SQL).createOrReplaceTempView("report_steps")
            self._sql(ENDED_SQL).createOrReplaceTempView("report_ended")
            attempts = self._with_name(self._sql(ATTEMPTS_SQL)).persist()
            attempts.createOrReplaceTempView("report_attempts")
            return self._read()
        finally:
            if attempts is not None:
                attempts.unpersist()
            for view in _VIEWS:
                self._spark.catalog.dropTempView(view)

    def _read(self) -> Figures:
        span = self._span
        peaks, running = self._running()
        of_queue = {row.queue: row for row in self._sql(TIMES_OF_QUEUES_SQL).collect()}
        holds = self._holds()
        queues = [
            QueueFigures(
                name,
                self._verbs[name],
                _times(of_queue.get(name)),
                holds.get(name, Holds()),
                (of_queue[name].busy_us or 0) if name in of_queue else 0,
                peaks.get(name, 0) if name in self._named else None,
            )
            for name in self._by_size
        ]
        figures = Figures(
            span=span,
            heat=self._heat,
            events=sum(count for counts in self._verbs.values() for count in counts.values()),
            names=self._names,
            queues=queues,
            holds=holds.get(_ALL, Holds()),
            peak=peaks.get(_ALL, 0),
            running=running,
            cells=self._cells(),
            causes=[Cause(**row.asDict()) for row in self._sql(CAUSES_SQL).collect()],
            slowest=[Attempt(**row.asDict()) for row in self._sql(SLOWEST_SQL).collect()],
            dead=[Attempt(**row.asDict()) for row in self._sql(DEAD_SQL).collect()],
        )
        self._add_times(figures)
        self._add_series(figures)
        return figures

    def _holds(self) -> dict[str, Holds]:
        """By queue, and of all."""
        if not any("held" in counts for counts in self._verbs.values()):
            return {}
        return {
            _ALL if row.level else row.queue: Holds(
                row.jobs, row.at_end, tuple(row.times) if row.times else NO_PERCENTILES
            )
            for row in self._sql(HOLDS_SQL).collect()
        }

    def _add_times(self, figures: Figures) -> None:
        buckets = self._span.buckets
        figures.times_over_time = [Times()] * buckets
        figures.times_by_queue = {name: [Times()] * buckets for name in self._names}
        for row in self._sql(TIMES_SQL).collect():
            if row.level == 3:
                figures.times = _times(row)
            elif row.bucket is not None:
                line = figures.times_over_time if row.level == 2 else figures.times_by_queue[row.name]
                line[row.bucket] = _times(row)

    def _add_series(self, figures: Figures) -> None:
        figures.enqueued = [0] * self._span.buckets
        figures.done = {name: [0] * self._span.buckets for name in self._names}
        for row in self._sql(SERIES_SQL).collect():
            figures.enqueued[row.bucket] += row.enqueued
            figures.done[row.name][row.bucket] = row.done

    def _running(self) -> tuple[dict[str, int], dict[str, list[float]]]:
        """Peaks (by name, and of all queues), and averages per bucket (by name)."""
        changes: dict[str, dict[int, Row]] = defaultdict(dict)
        span = self._span
        for row in self._sql(RUNNING_SQL).collect():
            changes[row.name][row.bucket] = row
        peaks: dict[str, int] = {}
        averages = {name: [0.0] * span.buckets for name in self._names}
        for name, by_bucket in changes.items():
            at_once = peaks[name] = 0
            for bucket in range(span.buckets):
                begin, end = span.edges(bucket)
                change = by_bucket.get(bucket)
                peaks[name] = max(peaks[name], at_once + (change.highest if change else 0))
                if name in averages:
                    averages[name][bucket] = max(0.0, at_once + (change.area / (end - begin) if change else 0))
                at_once += change.net if change else 0
        return peaks, averages

    def _cells(self) -> dict[tuple[int, int], tuple[int, int]]:
        if self._heat.by_weekday:
            row, cell = f"(div(ended_us, 24 * {HOUR}) + 3) % 7", f"div(ended_us, {HOUR}) % 24"
        else:
            row = f"div(ended_us, {self._heat.row_us})"
            cell = f"div(ended_us % {self._heat.row_us}, {self._heat.cell_us})"
        text = f"""
            select {row} as row, {cell} as cell, count(*) as ended, count_if(verb in ({_FAILED})) as failed
            from report_attempts where verb in ({_SUCCEEDED}, {_FAILED}) group by row, cell
        """
        return {(row.row, row.cell): (row.ended, row.failed) for row in self._sql(text).collect()}

    def _with_name(self, rows: DataFrame) -> DataFrame:
        named = F.when(F.col("queue").isin(self._named), F.col("queue")).otherwise(F.lit(OTHERS))
        return rows.withColumn("name", named)

    def _sql(self, text: str) -> DataFrame:
        """Runs `text` with the numbers of the span filled in."""
        span = self._span
        numbers = {"from_us": span.from_us, "to_us": span.to_us, "origin_us": span.origin_us, "step_us": span.step_us}
        return self._spark.sql(text.format(**numbers))


def _size(counts: dict[str, int]) -> int:
    """Sort key for the busiest queues: ended attempts, then enqueued jobs."""
    ends = sum(counts.get(verb, 0) for verb in (*verbs.SUCCEEDED, *verbs.FAILED))
    return 1_000_000 * ends + counts.get("enqueued", 0)


def _times(row: Row | None) -> Times:
    if row is None:
        return Times()
    return Times(tuple(row.wait) if row.wait else NO_PERCENTILES, tuple(row.run) if row.run else NO_PERCENTILES)
