"""Supervisors that fall silent: one frozen and woken, or all at once because Redis was frozen."""

import os
import signal
import time
from pathlib import Path

import pytest

from forq.errors import ExitCode
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, Trace, running
from tests.support.drive.wait import wait_until

QUICK = 'heartbeat = "300ms"\nexpiry = "900ms"\n'


def overlaps(traces: list[Trace], frozen_pids: set[int], frozen_at: float) -> int:
    """How many pairs of runs of one id were active at the same time. A frozen run counts as ended."""
    runs: dict[str, list[tuple[float, float]]] = {}
    ends = {(trace.job, trace.fence): trace.time for trace in traces if trace.event == "end"}
    for trace in (trace for trace in traces if trace.event == "start"):
        end = ends.get((trace.job, trace.fence))
        if end is None:
            assert trace.pid in frozen_pids, f"{trace} neither ended nor was frozen"
            end = frozen_at
        runs.setdefault(trace.job, []).append((trace.time, end))
    pairs = [(sorted(times)[i], sorted(times)[i + 1]) for times in runs.values() for i in range(len(times) - 1)]
    return sum(first[1] > second[0] for first, second in pairs)


@pytest.mark.fault("zombie")
@pytest.mark.timeout(180)
@pytest.mark.spec("Q18", "Q19", "Q21")
def test_a_frozen_supervisor_settles_nothing_when_it_wakes_and_starts_afresh(redis_url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with (
        running(redis=redis_url, settings=QUICK, trace=trace) as frozen,
        running(redis=redis_url, settings=QUICK, trace=trace) as other,
    ):
        frozen.create("shared", "slices", concurrency=4)
        frozen.wait_for_child("shared")
        ids = frozen.client().queue("shared").enqueue_many([50] * 12)
        wait_until(lambda: len(frozen.traces("start")) >= 4, what="the first four run")
        tree = frozen.processes()
        first_run = {t.job for t in frozen.traces("start")}
        for process in tree:
            process.suspend()
        frozen_at = time.monotonic()
        assert not frozen.traces("end")
        other.create("shared", "slices", concurrency=4)
        wait_until(lambda: "evicted processors without heartbeats" in other.log, what="the other took over")
        wait_until(lambda: first_run <= {t.job for t in other.traces("end")}, 30.0, "the frozen jobs ran elsewhere")
        stalls = {t.job: t.stalls for t in other.traces("end") if t.job in first_run}
        assert set(stalls.values()) == {1}, f"what was running is counted: {stalls}"
        children = {process.pid for process in tree} - {frozen.pid}
        for process in tree:
            process.resume()
        wait_until(lambda: "restarting all queues" in frozen.log, what="the supervisor notices its eviction")
        wait_until(lambda: frozen.child("shared")["pid"] not in {None, *children}, what="its children are replaced")
        late = frozen.client().queue("shared").enqueue_many([1] * 40)
        wait_until(lambda: {*ids, *late} <= {t.job for t in other.traces("end")}, 60.0, "every job ran")
        wait_until(lambda: other.queue_status("shared")["done"] == 52, what="each is done once")
        traces = other.traces()
        finished_late = [t for t in traces if t.event == "end" and t.pid in children]
        print(
            f"\nfrozen with {len(first_run)} jobs running; it finished {len(finished_late)} of them after it woke; "
            f"overlaps {overlaps(traces, children, frozen_at)}; done {other.queue_status('shared')['done']} of 52"
        )
        assert finished_late == []
        assert overlaps(traces, children, frozen_at) == 0
        status = other.queue_status("shared")
        assert (status["waiting"], status["active"], status["dead"], status["in_flight"]) == (0, 0, 0, 0)
        back = {t.pid for t in traces} & {process.pid for process in frozen.processes()}
        assert back, "it works again under its new name"


def freeze_redis(server: Server, url: str, settings: str, seconds: float, watch_seconds: float) -> None:
    with (
        running(redis=url, settings=settings) as one,
        running(redis=url, settings=settings) as two,
        running(redis=url, settings=settings) as three,
    ):
        supervisors: list[Forq] = [one, two, three]
        for forq in supervisors:
            forq.create("shared", "sleep", concurrency=2)
            forq.wait_for_child("shared")
        running_ids = one.client().queue("shared").enqueue_many([0.2] * 6)
        before = [forq.child("shared")["pid"] for forq in supervisors]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        began = time.monotonic()
        wait_until(lambda: one.queue_status("shared")["done"] == 6, 30.0, "the running jobs are settled")
        while time.monotonic() - began < watch_seconds:
            assert not any(
                "evicted processors" in forq.log or "restarting all queues" in forq.log for forq in supervisors
            )
            time.sleep(0.1)
        assert [forq.child("shared")["pid"] for forq in supervisors] == before, "no supervisor lost a process"
        again = three.client().queue("shared").enqueue_many([0] * 30)
        wait_until(lambda: one.queue_status("shared")["done"] == 36, what="all work again")
        stalls = [t.stalls for forq in supervisors for t in forq.traces("start")]
        print(f"\nredis frozen for {seconds:g} s: {len(supervisors)} supervisors, evictions 0, stalls {sum(stalls)}")
        assert len(stalls) == len(running_ids) + len(again)
        assert sum(stalls) == 0


@pytest.mark.fault("server frozen")
@pytest.mark.timeout(120)
@pytest.mark.spec("Q19")
def test_a_frozen_redis_causes_no_eviction(server: Server, redis_url: str) -> None:
    freeze_redis(server, redis_url, QUICK, 4.0, 2.5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_redis_frozen_for_a_minute_causes_no_eviction(server: Server, redis_url: str) -> None:
    freeze_redis(server, redis_url, "", 60.0, 40.0)


@pytest.mark.timeout(120)
@pytest.mark.spec("Q23")
def test_a_supervisor_evicted_repeatedly_gives_up_with_its_own_exit_code(redis_url: str) -> None:
    with running(redis=redis_url, settings=QUICK) as forq:
        forq.create("lost", "noop")
        forq.wait_for_child("lost")
        import redis

        with redis.Redis.from_url(redis_url) as client:

            def evict() -> bool:
                """Evicts it as another supervisor would, whatever its present name."""
                assert forq.process is not None
                base = "forq:queue:{lost}"
                for processor in client.zrange(f"{base}:processors", 0, -1):
                    client.zadd(f"{base}:graves", {processor: time.time() * 1000 + 60_000})
                    client.zrem(f"{base}:processors", processor)
                return forq.process.poll() is not None

            wait_until(evict, 60.0, "it gives up")
        assert forq.process is not None
        assert forq.process.returncode == ExitCode.EVICTED_TOO_OFTEN == 70
        assert "was evicted 6 times within 600 s" in forq.log
