"""Renders a snapshot for Prometheus (docs/guide/metrics.md). Only the metrics process imports prometheus_client."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from forq.broker.inspect import Counts
from forq.procs.scoreboard import cumulated
from forq.services.snapshot import Snapshot, queues_of
from forq.settings import WORK

# Powers of two in µs: fine for common times and coarse otherwise, to keep the page of a thousand queues small.
BOUNDS = (4, 6, 8, *range(10, 26), 27, 29, 31, 33)
_LE = [repr((1 << bound) / 1e6) for bound in BOUNDS]
_EOF = b"# EOF\n"
JOB_STATES = ("waiting", "scheduled", "active", "blocked", "held", "retry", "dead", "kept", "fail_jobs")


def render(snapshot: Snapshot, *, healthy: bool, accept: str) -> tuple[bytes, str]:
    """The page and its content type, in the format that the client accepts."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot, healthy))
    page = encode(registry)
    # OpenMetrics ends with this line.
    body = page.removesuffix(_EOF)
    return body + _histograms(snapshot).encode() + page[len(body) :], content_type


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot, healthy: bool) -> None:
        self._snapshot = snapshot
        self._healthy = healthy

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield from _of_snapshot(snapshot, self._healthy)
        yield from _of_redis(snapshot)
        yield from _of_attempts(snapshot)
        yield from _of_workers(snapshot)
        if snapshot.status is not None:
            yield from _of_queues(snapshot)
            yield from _of_supervisor(snapshot.status)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _of_snapshot(snapshot: Snapshot, healthy: bool) -> Iterator[Metric]:
    yield _gauge("forq_healthy", "1 if /healthz would answer 200", float(healthy))
    yield _gauge("forq_supervisor_up", "1 if the supervisor answered in time", float(snapshot.status is not None))
    yield _gauge("forq_redis_up", "1 if Redis answered in time", float(snapshot.round_trip_seconds is not None))
    if snapshot.round_trip_seconds is not None:
        yield _gauge(
            "forq_redis_round_trip_seconds", "Round trip of a PING in the last snapshot", snapshot.round_trip_seconds
        )
    yield _gauge("forq_look_seconds", "Duration of the last snapshot", snapshot.took_seconds)
    yield CounterMetricFamily("forq_looks", "Snapshots taken of the supervisor and Redis", value=snapshot.snapshots)
    errors = CounterMetricFamily(
        "forq_scrape_errors", "Snapshots in which this source did not answer", labels=["source"]
    )
    for source, number in snapshot.errors.items():
        errors.add_metric([source], number)
    yield errors


def _of_redis(snapshot: Snapshot) -> Iterator[Metric]:
    found = {name: counts for name, counts in snapshot.counts.items() if counts is not None}
    jobs = GaugeMetricFamily("forq_jobs", "Jobs by state", labels=["queue", "state"])
    for name, counts in found.items():
        for state in JOB_STATES:
            jobs.add_metric([name, state], getattr(counts, state))
    yield jobs
    for family, metric, text, read in _COUNTED:
        of_queues = family(metric, text, labels=["queue"])
        for name, counts in found.items():
            value = read(counts)
            if value is not None:
                of_queues.add_metric([name], value)
        yield of_queues


def _limit(counts: Counts, name: Literal["may_begin", "limited_workers"]) -> int | None:
    return None if counts.limits is None else counts.limits[name]


# Figures that are None are left out.
_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
_COUNTED: tuple[tuple[_Family, str, str, Callable[[Counts], float | None]], ...] = (
    (CounterMetricFamily, "forq_done", "Jobs done since the queue was created", lambda it: it.done),
    (CounterMetricFamily, "forq_failed", "Jobs failed for good since the queue was created", lambda it: it.failed),
    (CounterMetricFamily, "forq_dropped", "Job ids dropped because they had no record", lambda it: it.dropped),
    (
        CounterMetricFamily,
        "forq_journal_lost",
        "Journal entries trimmed before a consumer read them",
        lambda it: it.journal["lost"],
    ),
    (GaugeMetricFamily, "forq_journal_bytes", "Size of the journal", lambda it: it.journal["bytes"]),
    (
        GaugeMetricFamily,
        "forq_oldest_waiting_seconds",
        "Age of the oldest waiting job",
        lambda it: it.oldest_waiting_seconds or 0.0,
    ),
    (
        GaugeMetricFamily,
        "forq_next_due_seconds",
        "Time until the next job or tick is due",
        lambda it: it.next_due_seconds,
    ),
    (GaugeMetricFamily, "forq_awaiters", "Registered awaiters", lambda it: it.awaiters),
    (
        GaugeMetricFamily,
        "forq_limit_may_begin",
        "Jobs that rate and max_active allow to start now",
        lambda it: _limit(it, "may_begin"),
    ),
    (
        GaugeMetricFamily,
        "forq_limited_workers",
        "Workers waiting for rate or max_active",
        lambda it: _limit(it, "limited_workers"),
    ),
)


def _of_attempts(snapshot: Snapshot) -> Iterator[Metric]:
    attempts = CounterMetricFamily(
        "forq_attempts", "Attempts whose handler returned or raised", labels=["queue", "outcome"]
    )
    for name, stats in snapshot.stats.items():
        attempts.add_metric([name, "returned"], sum(stats.run) - stats.failed)
        attempts.add_metric([name, "raised"], stats.failed)
    yield attempts


def _histograms(snapshot: Snapshot) -> str:
    """Two thirds of all lines are histograms, and the library takes ten times as long for each."""
    waits, runs = [_HEADER % (_WAIT, _WAIT_TEXT, _WAIT)], [_HEADER % (_RUN, _RUN_TEXT, _RUN)]
    for name, stats in snapshot.stats.items():
        queue = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        waits.append(_histogram(_WAIT_TEMPLATE, queue, stats.wait, stats.wait_micros))
        runs.append(_histogram(_RUN_TEMPLATE, queue, stats.run, stats.run_micros))
    return "".join(waits) + "".join(runs)


def _histogram(template: str, queue: str, counted: list[int], micros: int) -> str:
    total = sum(counted)
    return template.format(*cumulated(counted, BOUNDS), total, total, micros / 1e6, queue=queue)


def _template(metric: str) -> str:
    """A format string: the lines of one queue, with a placeholder for each figure."""
    buckets = [f'{metric}_bucket{{{{queue="{{queue}}",le="{le}"}}}} {{}}\n' for le in (*_LE, "+Inf")]
    return "".join([*buckets, *(f'{metric}_{what}{{{{queue="{{queue}}"}}}} {{}}\n' for what in ("count", "sum"))])


_HEADER = "# HELP %s %s\n# TYPE %s histogram\n"
_WAIT, _WAIT_TEXT = "forq_wait_seconds", "Time from enqueue to claim (first attempts)"
_RUN, _RUN_TEXT = "forq_run_seconds", "Run time of handlers"
_WAIT_TEMPLATE, _RUN_TEMPLATE = _template(_WAIT), _template(_RUN)


def _of_workers(snapshot: Snapshot) -> Iterator[Metric]:
    busy = GaugeMetricFamily("forq_workers_busy", "Workers running a job", labels=["queue"])
    longest = GaugeMetricFamily("forq_longest_running_seconds", "Run time of the longest running job", labels=["queue"])
    for name, activity in snapshot.activity.items():
        busy.add_metric([name], activity.busy)
        longest.add_metric([name], activity.longest_seconds)
    yield busy
    yield longest


def _of_queues(snapshot: Snapshot) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "forq_queue_state", "1 for the current state of the queue", labels=["queue", "mode", "state"]
    )
    processes = GaugeMetricFamily("forq_processes", "Processes by state", labels=["queue", "role", "state"])
    restarts = CounterMetricFamily("forq_restarts", "Restarts after a crash", labels=["queue", "role"])
    for queue in queues_of(snapshot):
        name, state, counts = queue["name"], queue["state"], snapshot.counts.get(queue["name"])
        if state in ("running", "starting", "draining") and counts is not None and counts.paused:
            state = "paused"
        states.add_metric([name, queue["mode"] or "", state], 1)
        children = queue["children"]
        for (role, its), number in Counter((child["role"], child["state"]) for child in children).items():
            processes.add_metric([name, role, its], number)
        for role in dict.fromkeys(child["role"] for child in children):
            restarts.add_metric([name, role], sum(child["restarts"] for child in children if child["role"] == role))
    for name in snapshot.unserved:
        states.add_metric([name, WORK, "unserved"], 1)
    yield states
    yield processes
    yield restarts


def _of_supervisor(status: dict[str, Any]) -> Iterator[Metric]:
    supervisor, capacity = status["supervisor"], status["capacity"]
    info = GaugeMetricFamily("forq_supervisor_info", "Always 1", labels=["version", "processor", "server"])
    info.add_metric([supervisor["version"], supervisor["processor"], str(supervisor["redis"].get("server", ""))], 1)
    yield info
    yield _gauge("forq_supervisor_uptime_seconds", "Uptime of the supervisor", supervisor["uptime_seconds"])
    restarts = CounterMetricFamily("forq_service_restarts", "Restarts after a crash", labels=["service"])
    for service in supervisor["services"]:
        restarts.add_metric([service["name"]], service["restarts"])
    yield restarts
    errors = len(supervisor["failed_log"]["errors"])
    yield _gauge("forq_failed_log_errors", "Queues whose failed log cannot be written", errors)
    yield _gauge("forq_capacity_units", "Capacity units of this supervisor", capacity["units"])
    yield _gauge("forq_capacity_in_use_units", "Capacity units held by running jobs", capacity["in_use"])
    yield _gauge("forq_capacity_free_units", "Free capacity units", capacity["free"])
    yield _gauge("forq_capacity_waiting_workers", "Workers waiting for capacity units", len(capacity["waiting"]))
