"""Frozen services: each is detected, named and replaced, and its work continues."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forq.services.snapshot import request_status
from tests.support.drive.metrics import Scraper
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

# The warden runs where the kernel does not enforce the limits.
SETTINGS = """
cgroup = "off"
[metrics]
listen = "./m.sock"
[[bridge]]
listen = "bridge.sock"
"""
REPLACED_SECONDS = 5.0


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings=SETTINGS) as forq:
        forq.create("limited", "noop", memory_limit="1gb")
        forq.wait_for_child("limited")
        yield forq


def services(forq: Forq) -> dict[str, dict[str, Any]]:
    """Without counts, which would need another service."""
    status = request_status(str(forq.state_dir / "control.sock"), 10.0)
    return {service["name"].split()[0]: service for service in status["supervisor"]["services"]}


@pytest.mark.fault("service frozen")
@pytest.mark.parametrize("name", ["pulse", "scribe", "clerk", "logger", "warden", "metrics", "bridge"])
def test_a_frozen_service_is_reported_and_replaced(forq: Forq, name: str) -> None:
    before = services(forq)[name]
    os.kill(before["pid"], signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: services(forq)[name]["state"] == "unresponsive", REPLACED_SECONDS, f"{name} is named")
    checked = forq.run_ctl("status", "--check")
    # It may have been replaced while forqctl was starting.
    if services(forq)[name]["state"] == "unresponsive":
        assert checked.returncode == 3
        assert f"service {services(forq)[name]['name']} is unresponsive" in checked.stderr
    wait_until(
        lambda: services(forq)[name]["pid"] not in (None, before["pid"]) and services(forq)[name]["state"] == "running",
        REPLACED_SECONDS,
        f"{name} is replaced",
    )
    took = time.monotonic() - began
    print(f"{name} was replaced {took:.2f} s after it was stopped")
    assert took < REPLACED_SECONDS
    assert services(forq)[name]["restarts"] == before["restarts"] + 1
    assert f"replacing unresponsive service service={before['name']}" in forq.log
    assert forq.run_ctl("status", "--check").returncode == 0


def test_health_and_check_report_a_frozen_service_until_it_is_replaced(forq: Forq) -> None:
    scraper = Scraper(forq.directory / "m.sock")
    wait_until(lambda: scraper.health() == (200, []), what="healthy before")
    pid = services(forq)["scribe"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    fault = {"check": "service", "reason": "service scribe is unresponsive"}
    wait_until(lambda: scraper.health() == (503, [fault]), REPLACED_SECONDS, "/healthz names it")
    wait_until(lambda: services(forq)["scribe"]["state"] == "running", REPLACED_SECONDS, "it is replaced")
    wait_until(lambda: scraper.health() == (200, []), what="healthy again")


def test_a_due_job_runs_soon_although_pulse_is_frozen(forq: Forq) -> None:
    forq.create("due", "record")
    forq.wait_for_child("due")
    os.kill(services(forq)["pulse"]["pid"], signal.SIGSTOP)
    job = forq.client().queue("due").enqueue(1, run_in=1)
    wait_until(lambda: [trace for trace in forq.traces("end") if trace.job == job], 6.0, "the job ran")


@pytest.mark.fault("service frozen")
@pytest.mark.timeout(120)
def test_a_hanging_redis_causes_no_service_to_be_replaced(server: Server, redis_url: str) -> None:
    """It hangs longer than a service may be silent: all of them wait for Redis, and report it."""
    with running(redis=redis_url, settings='heartbeat = "300ms"\nexpiry = "900ms"\n') as forq:
        forq.create("q", "noop")
        forq.wait_for_child("q")
        before = services(forq)
        seen: set[str] = set()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            until = time.monotonic() + 7
            while time.monotonic() < until:
                forq.run_ctl("status")
                seen |= {name for name, service in services(forq).items() if service["state"] != "running"}
        finally:
            os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: forq.run_ctl("status", "--check").returncode == 0, what="all is well again")
        assert seen == set()
        assert {name: service["pid"] for name, service in services(forq).items()} == {
            name: service["pid"] for name, service in before.items()
        }
