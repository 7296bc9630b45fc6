"""Servers that hang, lose their scripts, or are kept busy by another client's script."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.faults.supervisor_pair import assert_nobody_was_evicted, supervisor_pair
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

STILL_SECONDS = 2.5


@pytest.fixture
def pair(redis_url: str, tmp_path: Path) -> Iterator[tuple[Forq, Forq]]:
    """Two supervisors of one queue, which write into one trace."""
    with supervisor_pair(redis_url, tmp_path / "trace") as pair:
        for forq in pair:
            forq.create("shared", "sleep", concurrency=2)
            forq.wait_for_child("shared")
        yield pair


def assert_each_ran_once(pair: tuple[Forq, Forq], count: int) -> None:
    one, _ = pair
    seen = one.client().queue("shared")
    wait_until(lambda: seen.status()["done"] == count, 30.0, f"{count} jobs are done")
    starts = [trace.job for trace in one.traces("start")]
    assert len(starts) == len(set(starts)) == count
    assert {trace.stalls for trace in one.traces()} == {0}
    assert_nobody_was_evicted(*pair)


def pause_clients(server: Server) -> None:
    with server.connect() as client:
        client.execute_command("CLIENT", "PAUSE", round(STILL_SECONDS * 1000), "ALL")
    time.sleep(STILL_SECONDS)


def stop_process(server: Server) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        time.sleep(STILL_SECONDS)
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.fault("server frozen")
@pytest.mark.parametrize("stand_still", [pause_clients, stop_process])
def test_a_server_that_hangs_longer_than_the_expiry_runs_no_job_twice(
    server: Server, pair: tuple[Forq, Forq], stand_still: Callable[[Server], None]
) -> None:
    queue = pair[0].client().queue("shared")
    queue.enqueue_many([0.05] * 40)
    wait_until(lambda: len(pair[0].traces("end")) >= 4, what="some are done")
    stand_still(server)
    queue.enqueue_many([0] * 10)
    assert_each_ran_once(pair, 50)


@pytest.mark.fault("scripts forgotten")
def test_a_server_that_loses_its_scripts_repeatedly_has_no_effect(server: Server, pair: tuple[Forq, Forq]) -> None:
    queue = pair[0].client().queue("shared")
    with server.connect() as client:
        for round_ in range(1, 7):
            queue.enqueue_many([0.005] * 10)
            client.script_flush()
            client.function_flush()
            wait_until(lambda so_far=round_ * 5: len(pair[0].traces("end")) >= so_far, what="they run")  # type: ignore[misc]
    assert_each_ran_once(pair, 60)
    for forq in pair:
        assert forq.child("shared")["restarts"] == 0


@contextmanager
def runaway_script(server: Server) -> Iterator[redis.Redis]:
    """Another client's script, which runs until the block ends."""
    with server.connect() as client:
        client.config_set("busy-reply-threshold", 100)

        def run() -> None:
            with redis.Redis.from_url(server.url) as other, pytest.raises(redis.ResponseError):
                other.eval("while true do end", 0)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield client
        finally:
            wait_until(lambda: killed(client), what="the script is killed")
            thread.join()
            client.config_set("busy-reply-threshold", 5000)


def killed(client: redis.Redis) -> bool:
    try:
        client.script_kill()
    except redis.ResponseError as exc:
        return "NOTBUSY" in str(exc)
    return False


@pytest.mark.fault("runaway script")
def test_another_client_s_runaway_script_raises_an_alarm_and_costs_no_job(
    server: Server, pair: tuple[Forq, Forq]
) -> None:
    one, _ = pair
    queue = one.client().queue("shared")
    queue.enqueue_many([0.3] * 8)
    wait_until(lambda: len(one.traces("start")) >= 4, what="four run")
    with runaway_script(server):
        began = time.monotonic()
        error = wait_until(lambda: not (r := one.status()["supervisor"]["redis"])["ok"] and r["error"], what="an alarm")
        assert "BUSY" in error
        assert one.run_ctl("status", "--check").returncode == 3
        wait_until(lambda: time.monotonic() - began > STILL_SECONDS, what="it outlasts the expiry")
    assert_each_ran_once(pair, 8)
    wait_until(lambda: one.status()["supervisor"]["redis"]["ok"], what="the alarm is over")
