"""Snapshots of the metrics process, made by hand, and scrapes read with the official parser."""

import http.client
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from forq.broker.inspect import Counts
from forq.procs.scoreboard import BUCKETS, QueueStats
from forq.services.snapshot import Activity, Snapshot

NOW_NS = 10**15
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

_COUNTS = Counts(
    waiting=0,
    scheduled=0,
    blocked=0,
    held=0,
    retry=0,
    fail_jobs=0,
    active=0,
    dead=0,
    done=0,
    failed=0,
    in_flight=0,
    oldest_waiting_seconds=None,
    paused=False,
    mode="work",
    dropped=0,
    journal={"entries": 0, "bytes": 0, "trimmed": 0, "lost": 0},
    epoch=1,
    journal_sequence=0,
    journal_hash="",
    kept=0,
    awaiters=0,
    next_due_seconds=None,
    limits=None,
    overdue=0,
)


def queue_counts(**fields: Any) -> Counts:
    return replace(_COUNTS, **fields)


def queue_status(
    name: str,
    *,
    state: str = "running",
    mode: str = "work",
    main: str = "idle",
    pid: int | None = 7,
    uptime_seconds: float = 1000.0,
) -> dict[str, Any]:
    child = {"role": "main", "pid": pid, "state": main, "uptime_seconds": uptime_seconds, "restarts": 0}
    return {"name": name, "state": state, "mode": mode, "reason": None, "children": [child]}


def queue_stats(run: dict[int, int] | None = None, last_ns: int = 0) -> QueueStats:
    """`run`: bucket -> count, for both histograms."""
    buckets = [(run or {}).get(bits, 0) for bits in range(BUCKETS)]
    return QueueStats(buckets, sum(buckets), list(buckets), sum(buckets), 0, last_ns)


def make_snapshot(
    queues: list[dict[str, Any]],
    *,
    counts: dict[str, Counts | None] | None = None,
    activity: dict[str, Activity] | None = None,
    stats: dict[str, QueueStats] | None = None,
    capacity_waiting: list[dict[str, Any]] | None = None,
) -> Snapshot:
    supervisor = {
        "version": "1.0",
        "processor": "p",
        "uptime_seconds": 5.0,
        "redis": {"ok": True, "server": "Valkey 9"},
        "services": [{"name": "pulse", "restarts": 0, "state": "running"}],
        "failed_log": {"errors": {}},
    }
    capacity = {"units": 100, "in_use": 0, "free": 100, "waiting": capacity_waiting or []}
    return Snapshot(
        status={"queues": queues, "capacity": capacity, "supervisor": supervisor},
        status_error="",
        counts=counts or {},
        redis_error="",
        round_trip_seconds=0.0001,
        stats=stats or {},
        activity=activity or {},
        now_ns=NOW_NS,
        took_seconds=0.01,
        snapshots=1,
        errors={"redis": 0, "supervisor": 0},
    )


def read_samples(text: str) -> Samples:
    """Every sample by its name and labels; fails on a duplicate."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def metric_names(text: str) -> set[str]:
    """The names of all samples, and the names that samples of empty families would have."""
    names = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


class Scraper:
    """Sends requests to the metrics process at a unix socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, page: str, **headers: str) -> tuple[int, str, str]:
        """Returns status, content type and body."""
        connection = _Connection(self._path)
        try:
            connection.request("GET", page, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
        finally:
            connection.close()

    def samples(self) -> Samples:
        status, _, text = self.get("/metrics")
        assert status == 200
        return read_samples(text)

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, tuple(sorted(labels.items()))))

    def health(self) -> tuple[int, list[dict[str, str]]]:
        status, _, text = self.get("/healthz")
        answer = json.loads(text)
        assert answer["ok"] == (status == 200) == (not answer["faults"])
        return status, answer["faults"]
