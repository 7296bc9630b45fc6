"""forqctl status --all and Client.supervisors(): who is listed, and what is marked."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forq import AsyncClient, Client
from forq.api_types import SupervisorInfo
from forq.version import VERSION
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

OLD = "0.0.9"
# Short, so that a test need not wait long for the end of a supervisor that was killed.
FAST = 'heartbeat = "200ms"\nexpiry = "2s"\n'


class OldForq(Forq):
    def program(self) -> list[str]:
        return [sys.executable, "-m", "tests.end_to_end.versioned_supervisor", OLD]


@contextmanager
def running_old(redis: str, settings: str = "") -> Iterator[Forq]:
    forq = OldForq(redis=redis, settings=settings)
    try:
        forq.start()
        yield forq
    finally:
        forq.remove()


def listed(forq: Forq) -> dict[int, SupervisorInfo]:
    """By pid."""
    found: Any = json.loads(forq.ctl("status", "--all", "--json"))["supervisors"]
    return {each["pid"]: each for each in found}


def wait_for_pids(client: Client, *pids: int) -> None:
    wait_until(lambda: {each["pid"] for each in client.supervisors()} == set(pids), what=f"{pids} are listed")


def test_both_supervisors_are_listed_and_the_older_one_is_marked(redis_url: str) -> None:
    with running(redis=redis_url) as new, running_old(redis_url) as old:
        client = Client(redis_url)
        old.create("q", "noop")
        wait_for_pids(client, new.pid, old.pid)
        wait_until(lambda: listed(new)[old.pid]["queues"] == ["q"], what="its queue is listed")
        shown = listed(new)
        assert (shown[new.pid]["version"], shown[new.pid]["version_skew"]) == (VERSION, False)
        assert (shown[old.pid]["version"], shown[old.pid]["version_skew"]) == (OLD, True)
        assert shown[old.pid]["host"] == os.uname().nodename
        assert shown[old.pid]["state_dir"] == str(old.state_dir)
        assert shown[old.pid]["remote_control"] == "off"
        rows = {row.split()[2]: row for row in new.ctl("status", "--all").splitlines()[1:]}
        assert "version skew" in rows[str(old.pid)]
        assert "version skew" not in rows[str(new.pid)]
        assert new.run_ctl("status", "--all", "--check").returncode == 3

        async def from_coroutine() -> set[int]:
            async with AsyncClient(redis_url) as other:
                return {each["pid"] for each in await other.supervisors()}

        assert asyncio.run(from_coroutine()) == {new.pid, old.pid}


def test_two_supervisors_with_one_config_file_are_duplicates(redis_url: str) -> None:
    with running(redis=redis_url) as one:
        other = Forq(redis=redis_url)
        own, other.config = other.config, one.config
        try:
            other.start()
            wait_for_pids(Client(redis_url), one.pid, other.pid)
            shown = listed(one)
            assert shown[one.pid]["duplicates"] == [shown[other.pid]["processor"]]
            assert shown[other.pid]["duplicates"] == [shown[one.pid]["processor"]]
            assert f"duplicate of {shown[other.pid]['processor'][:12]}" in one.ctl("status", "--all")
        finally:
            other.config = own
            other.remove()


def test_a_supervisor_that_stops_or_is_killed_vanishes(server: Server, redis_url: str) -> None:
    client = Client(redis_url)
    with running(redis=redis_url, settings=FAST) as one:
        with running(redis=redis_url, settings=FAST) as stopped:
            wait_for_pids(client, one.pid, stopped.pid)
            assert stopped.stop() == 0
            assert {each["pid"] for each in client.supervisors()} == {one.pid}
        with running(redis=redis_url, settings=FAST) as killed:
            wait_for_pids(client, one.pid, killed.pid)
            os.kill(killed.pid, signal.SIGKILL)
            wait_for_pids(client, one.pid)
            with server.connect() as redis:
                wait_until(lambda: redis.hlen("forq:{control}:about") == 1, what="its description is gone")


def test_a_supervisor_that_starts_again_replaces_the_run_that_was_killed(redis_url: str) -> None:
    """At once, although the heartbeats of the killed run have not expired."""
    client = Client(redis_url)
    with running(redis=redis_url) as forq:
        first = forq.pid
        wait_for_pids(client, first)
        os.kill(first, signal.SIGKILL)
        assert forq.process is not None
        forq.process.wait()
        forq.start()
        wait_for_pids(client, forq.pid)
        [only] = client.supervisors()
        assert only["duplicates"] == []
        assert only["heartbeat_age_seconds"] < 15


def test_all_cannot_be_combined_with_what_concerns_one_supervisor(redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        for more in (["q"], ["--memory"], ["--on", "x"]):
            assert forq.run_ctl("status", "--all", *more).returncode == 2
        unknown = forq.run_ctl("status", "--on", "nowhere")
        assert (unknown.returncode, "see: forqctl status --all" in unknown.stderr) == (4, True)
