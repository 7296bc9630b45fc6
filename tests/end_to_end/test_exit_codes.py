"""However a handler ends its process, and whatever messages it forges, only its own queue is affected.

A sample; `make exits` tries every exit code and every signal, three times each.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from forq.errors import ExitCode
from tests.end_to_end.fuzz_pinger import Pinger
from tests.end_to_end.fuzz_pinger import shown as shown_pings
from tests.end_to_end.neighbor import NAME, Neighbor, shown
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

ALL = bool(os.environ.get("FORQ_TEST_EXITS"))
TIMES = int(os.environ.get("FORQ_TEST_EXITS", "1"))
CODES = range(256) if ALL else (0, 1, ExitCode.QUEUE_GONE, ExitCode.FENCED, ExitCode.INCOMPATIBLE, ExitCode.CONFIG, 255)
SIGNALS = (
    sorted(int(signum) for signum in signal.valid_signals())
    if ALL
    else (signal.SIGINT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP, signal.SIGRTMIN + 5)
)
# The p99 limit for one job of the neighbor on a machine with no idle CPU.
SLOW_MS = 500.0
# The p90 limit for the supervisor's answer to a ping.
SLOW_PING_MS = 250.0

_numbers = count()

pytestmark = pytest.mark.timeout(120 if not ALL else 3600)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


@pytest.fixture(scope="module")
def calm(forq: Forq) -> Neighbor:
    neighbor = Neighbor(forq)
    forq.wait_for_child(NAME)
    return neighbor


@pytest.fixture
def neighbor(forq: Forq, calm: Neighbor) -> Iterator[Neighbor]:
    """Must run in the same process after the test as before, below the same supervisor and beside the same services."""
    pid, services = forq.child(NAME)["pid"], service_pids(forq)
    yield calm
    assert (forq.child(NAME)["pid"], forq.child(NAME)["restarts"]) == (pid, 0)
    assert forq.process is not None
    assert forq.process.poll() is None
    assert forq.status()["supervisor"]["pid"] == forq.pid
    assert service_pids(forq) == services
    assert "was evicted" not in forq.log


def service_pids(forq: Forq) -> dict[str, int]:
    return {service["name"]: service["pid"] for service in forq.status()["supervisor"]["services"]}


@pytest.fixture
def name(forq: Forq) -> Iterator[str]:
    """A queue name; the queue is deleted after the test."""
    name = f"q{next(_numbers)}"
    yield name
    forq.ctl("delete", name, "--force")


def create(forq: Forq, name: str, function: str, **options: object) -> Any:
    settings = [f"--set={key}={value}" for key, value in options.items()]
    forq.ctl("create", name, "--handler", f"exiting:{function}", "--path", str(HANDLERS), *settings)
    return forq.client().queue(name)


def ends(forq: Forq, queue: str, job_id: str) -> list[tuple[str, str]]:
    job = forq.client().queue(queue).job(job_id)
    return [(attempt["outcome"], str(attempt["cause"])) for attempt in job["attempts"]]


def test_no_exit_code_and_no_signal_of_a_handler_affects_others(forq: Forq, neighbor: Neighbor, name: str) -> None:
    queue = create(forq, name, "leave", max_stalls=0, max_timeouts=0, timeout="1s", keep_done="1h", done_max=10**6)
    forq.wait_for_child(name)
    bad = [(f"exit{code}", {"exit": int(code)}) for code in CODES]
    bad += [(f"signal{signum}", {"signal": int(signum)}) for signum in SIGNALS]
    for time_ in range(TIMES):
        for end, data in bad:
            # Settle one first: a process that dies before it did anything is respawned after a pause.
            queue.enqueue({}, id=f"good-{end}-{time_}")
            queue.enqueue(data, id=f"{end}-{time_}")
    total, began = 2 * len(bad) * TIMES, time.monotonic()
    over: Callable[[], bool] = lambda: queue.status()["done"] + queue.status()["dead"] == total  # noqa: E731
    times = neighbor.run(lambda: over() or time.monotonic() - began > 3000)
    print(f"\n{len(bad)} ends {TIMES} times in {time.monotonic() - began:.0f} s; neighbor: {shown(times)}")
    assert over(), forq.log[-2000:]
    for time_ in range(TIMES):
        for code in CODES:
            assert ends(forq, name, f"exit{code}-{time_}") == [("stalled", f"exit_{code}")], code
        for signum in SIGNALS:
            outcomes = ends(forq, name, f"signal{signum}-{time_}")
            assert not outcomes or outcomes[0][0] in ("stalled", "timed_out"), (signum, outcomes)
    assert ends(forq, name, f"signal{int(signal.SIGKILL)}-0") == [("stalled", "signal_9_(SIGKILL)")]
    assert ends(forq, name, f"signal{int(signal.SIGSTOP)}-0") == [("timed_out", "timeout")]
    assert forq.queue_status(name)["state"] == "running"
    assert times[int(len(times) * 0.99)] < SLOW_MS


def test_an_exception_that_cannot_be_inspected_fails_only_its_job(forq: Forq, neighbor: Neighbor, name: str) -> None:
    queue = create(forq, name, "raise_unspeakable", max_retries=0)
    pid = forq.wait_for_child(name)["pid"]
    queue.enqueue(1, id="j")
    neighbor.run(lambda: queue.status()["dead"] == 1)
    dead = queue.dead().jobs[0]
    assert (dead["error"], dead["message"]) == ("Unspeakable", "(unprintable: SystemExit)")
    assert forq.wait_for_child(name)["pid"] == pid


def test_an_exception_that_never_finishes_printing_ends_at_the_deadline_of_its_job(forq: Forq, name: str) -> None:
    queue = create(forq, name, "raise_slow", timeout="500ms", max_timeouts=0)
    queue.enqueue(1, id="j")
    wait_until(lambda: queue.status()["dead"] == 1, what="it is dead")
    assert ends(forq, name, "j") == [("timed_out", "timeout")]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_worker_thread_that_gets_system_exit_takes_its_process_down(
    forq: Forq, neighbor: Neighbor, name: str, concurrency: int
) -> None:
    """Otherwise the worker would vanish unnoticed, with the job that it had just claimed."""
    queue = create(forq, name, "haunt", concurrency=concurrency)
    pid = forq.wait_for_child(name)["pid"]
    queue.enqueue("haunt")
    wait_until(lambda: queue.status()["done"] == 1, what="the thread is there")

    def replaced() -> bool:
        # The exception is raised when the worker wakes up.
        queue.enqueue("wake up")
        return forq.child(name)["pid"] not in (None, pid)

    wait_until(replaced, what="another process")
    wait_until(lambda: (counts := queue.status())["waiting"] + counts["active"] == 0, what="every job is done")
    assert queue.status()["dead"] == 0


def test_a_process_that_cannot_send_messages_any_more_is_replaced(forq: Forq, neighbor: Neighbor, name: str) -> None:
    """Otherwise the deadline of its next job would be unknown."""
    queue = create(forq, name, "fall_silent", timeout="2s")
    pid = forq.wait_for_child(name)["pid"]
    queue.enqueue("fall silent")
    wait_until(lambda: queue.status()["done"] == 1, what="it has closed its leash")
    queue.enqueue("a long job")
    neighbor.run(lambda: queue.status()["done"] == 2)
    assert forq.child(name)["pid"] != pid
    assert f"child closed its leash; killing it child={name} main" in forq.log


@pytest.mark.parametrize("code", [ExitCode.QUEUE_GONE, ExitCode.FENCED, ExitCode.CONFIG])
def test_an_announced_exit_code_is_ignored_while_a_job_runs(
    forq: Forq, neighbor: Neighbor, name: str, code: int
) -> None:
    queue = create(forq, name, "say", keep_done="1h")
    queue.enqueue({"lines": [{"exiting": code, "reason": "forged"}], "exit": code}, id="j")
    neighbor.run(lambda: queue.status()["done"] == 1)
    assert ends(forq, name, "j")[0] == ("stalled", f"exit_{code}")
    assert forq.queue_status(name)["state"] == "running"


def test_a_forged_eviction_restarts_only_its_own_process(forq: Forq, neighbor: Neighbor, name: str) -> None:
    """Sent by a leftover thread of a job, in a process that runs nothing. Pulse asks Redis, which denies it."""
    queue = create(forq, name, "say")
    pid = forq.wait_for_child(name)["pid"]
    for number in range(8):
        lie = {"lines": [{"exiting": ExitCode.FENCED, "reason": "forged"}], "exit": ExitCode.FENCED, "later": True}
        queue.enqueue(lie, id=f"j{number}")
        neighbor.run(lambda pid=pid: forq.child(name)["pid"] not in (None, pid))  # type: ignore[misc]
        pid = forq.wait_for_child(name)["pid"]
    assert queue.status()["done"] == 8
    queue.enqueue({"lines": []})
    wait_until(lambda: queue.status()["done"] == 9, what="the queue continues")


def test_a_forged_config_error_stops_only_its_own_queue(forq: Forq, neighbor: Neighbor, name: str) -> None:
    queue = create(forq, name, "say")
    lie = {"lines": [{"exiting": ExitCode.CONFIG, "reason": "x" * 60_000}], "exit": ExitCode.CONFIG, "later": True}
    queue.enqueue(lie)
    neighbor.run(lambda: forq.queue_status(name)["state"] == "config_error")
    assert len(forq.queue_status(name)["reason"]) <= 4000
    forq.ctl("restart", name)
    forq.wait_for_child(name)


@pytest.mark.parametrize(
    "line",
    [
        {"want": "SLOT", "units": -1000, "priority": 0},
        {"want": "SLOT", "units": 1, "priority": 10**9},
        {"want": "SLOT", "units": "1", "priority": 0},
        {"want": 32000, "units": 1, "priority": 0},
        {"stack_fd": "../../../../etc/passwd"},
        {"exiting": "72", "reason": "x"},
        {"exiting": 72},
        {"no": "such message"},
        {},
        [],
        "ready",
        7,
    ],
)
def test_an_invalid_message_ends_the_process_and_counts_its_job(
    forq: Forq, neighbor: Neighbor, name: str, line: Any
) -> None:
    queue = create(forq, name, "say", keep_done="1h")
    queue.enqueue({"lines": [line], "seconds": 60}, id="j")
    neighbor.run(lambda: queue.status()["done"] == 1)
    assert ends(forq, name, "j") == [("stalled", "garbage_on_leash")]
    assert forq.log.count(f"invalid message from child; killing it child={name} main") == 1


def test_a_handler_that_requests_successors_without_end_gets_a_few(forq: Forq, neighbor: Neighbor, name: str) -> None:
    """Each process announces its replacement, and stays."""
    queue = create(forq, name, "say", stop_grace="0s", timeout="0s", size=1)
    queue.enqueue_many([{"lines": [{"replace": "forged"}] * 3, "seconds": 3600}] * 60)
    neighbor.run(lambda: f"too many retiring processes; successor waits queue={name}" in forq.log)
    assert len(forq.queue_status(name)["children"]) <= 34
    assert forq.log.count(f"replacing process queue={name} ") == 32
    # One of them ends, and the queue continues.
    first = next(child for child in forq.queue_status(name)["children"] if child["state"] == "stopping")
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: forq.log.count(f"replacing process queue={name} ") == 33, what="a successor came and went")


@pytest.mark.parametrize(
    "text",
    [
        *("\n", "x", '{"ready": true}\n', '{"replace": "again"}\n', '{"unguarded": SLOT}\n', '{"left": SLOT}\n'),
        '{"want": SLOT, "units": 1, "priority": 0}\n{"done": SLOT}\n',
    ],
)
def test_a_flood_on_the_leash_delays_nobody(
    forq: Forq, neighbor: Neighbor, name: str, tmp_path: Path, text: str
) -> None:
    queue = create(forq, name, "flood", timeout="3s", max_timeouts=0, max_stalls=0, stop_grace="0s")
    parent = psutil.Process(forq.pid)
    pinger = Pinger(forq.state_dir / "control.sock", {"jsonrpc": "2.0", "id": 1, "method": "ping"}, tmp_path / "pings")
    try:
        pinger.wait_for(50)
        logged, before = len(forq.log), parent.memory_info().rss
        queue.enqueue({"text": text}, id="j")
        times = neighbor.run(lambda: queue.status()["dead"] == 1)
        pings = pinger.take()
    finally:
        pinger.close()
    print(f"\n{text!r}: {shown_pings(pings)}; neighbor: {shown(times)}")
    assert parent.memory_info().rss - before < 30 << 20
    # If the flood blocked the supervisor, every answer would be late; on a busy machine a few are.
    assert pings[int(len(pings) * 0.9)] < SLOW_PING_MS
    assert times[int(len(times) * 0.9)] < SLOW_MS
    assert len(forq.log) - logged < 100_000
