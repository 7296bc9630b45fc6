"""An idle supervisor does not poll Redis, and the retry lane stays closed under load."""

import time
from collections import Counter
from typing import Any

import pytest

from forq.broker.connection import Connection
from forq.broker.journal import read_entry
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, running
from tests.support.drive.wait import wait_until
from tests.support.thorough import THOROUGH, examples


def next_command(monitor: Connection) -> str:
    """The next command of a client; empty if there was none for half a second, or a script sent it."""
    try:
        # 1700000000.123456 [0 unix:/…] "BLMOVE" "key" …
        line = monitor.receive()
    except BlockingIOError:
        return ""
    text = line.decode() if isinstance(line, bytes) else str(line)
    return "" if "lua]" in text else text.split('"')[1].upper()


def test_an_idle_supervisor_sends_only_heartbeats_and_blocking_calls(server: Server, redis_url: str) -> None:
    """In 12 s, or 5 s of a quick run, there are two or three heartbeats. On a unix socket, blocking calls are not
    renewed."""
    seconds = examples(quick=5, thorough=12)
    settings = "" if THOROUGH else 'heartbeat = "2s"\n'
    with running(redis=redis_url, settings=settings) as forq:
        names = ["--handler", "traced:noop", "--fail-handler", "traced:on_fail", "--path", str(HANDLERS)]
        forq.ctl("create", "idle", *names, "--set", "retry_lane_retries=3")
        forq.wait_for_child("idle")
        forq.wait_for_child("idle", "parked", "retry")
        monitor = Connection(redis_url, name="monitor", connect_timeout_seconds=5, timeout_seconds=0.5)
        monitor.send(("MONITOR",))
        monitor.receive()
        # A round of regular heartbeats ends with HGETALL; the commands of the start precede it.
        wait_until(lambda: next_command(monitor) == "HGETALL", what="a round of heartbeats")
        commands: Counter[str] = Counter()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if command := next_command(monitor):
                commands[command] += 1
        monitor.close()
        print(f"commands of an idle queue with a fail handler in {seconds} s: {dict(commands)}")
        # Each round of heartbeats announces the supervisor, and reads the registry for queues that others created.
        # Every 30 s it is searched for half-created and half-deleted queues.
        assert set(commands) <= {"FCALL", "HGETALL", "EXISTS"}
        assert commands["HGETALL"] <= 4
        assert commands["EXISTS"] <= 1
        assert commands["FCALL"] <= 9


@pytest.mark.spec("N17", "N18")
def test_the_retry_lane_never_starts_a_job_while_main_has_load(server: Server, redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        options = {"max_retries": 0, "retry_lane_retries": 3, "min_backoff": "0s", "max_backoff": "0s"}
        forq.create("busy", "fail_in_main", journal_max="1gb", **options)
        queue = forq.client().queue("busy")
        forq.ctl("pause", "busy")
        second_chance = queue.enqueue(1)
        others = queue.enqueue_many([0] * 30_000)
        forq.ctl("resume", "busy")
        until = time.monotonic() + 3
        while time.monotonic() < until:
            if queue.status()["waiting"] < 20_000:
                others += queue.enqueue_many([0] * 5000)
        wait_until(lambda: queue.status()["waiting"] == 0)
        wait_until(lambda: [t for t in forq.traces("end") if t.job == second_chance])
        traces = forq.traces()
        starts = [t for t in traces if t.job == second_chance and t.event == "start"]
        last_of_main = max(t.time for t in traces if t.event == "start" and t.job != second_chance)
        gap = starts[1].time - last_of_main
        with server.connect() as redis:
            entries: Any = redis.xrange("forq:queue:{busy}:events")
    print(f"{len(others)} jobs in main; the lane's job started {gap * 1000:.1f} ms after the last of them did")
    assert len(starts) == 2
    # From the journal, not from times: on a busy machine the queue may be empty for a moment.
    changes = {"enqueued": 1, "returned": 1, "claimed": -1}
    waiting, waiting_then = 0, list[int]()
    for _, fields in entries:
        for event in read_entry(fields):
            if event.job != second_chance:
                waiting += changes.get(event.verb, 0)
            elif event.verb == "claimed":
                waiting_then.append(waiting)
    assert waiting_then == [len(others[:30_000]), 0]
