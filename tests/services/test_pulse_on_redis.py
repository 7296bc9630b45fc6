"""Pulse on a real server: it receives the timers of served and of new queues in time."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forq import Client
from forq.broker.keys import DEFAULT_PREFIX
from forq.procs import jsonrpc
from forq.procs.scoreboard import Scoreboard
from forq.services.pulse import Pulse
from tests.support.drive.contexts import context
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until

# Heartbeats promote jobs too. A long interval keeps them from hiding a lost timer.
RARELY_SECONDS = 3600.0
BEATS = "forq:queue:{q}:counts"
# Pulse subscribes to the timers of all queues, and to requests for its supervisor.
PATTERNS = 2


class LeashedPulse:
    """Runs a pulse in a thread; the test has the supervisor's end of its leash."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(20)
        self._answers = self._ours.makefile("rb")
        self._watch_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._scoreboard = Scoreboard.create()
        given = context(
            url=url,
            prefix=DEFAULT_PREFIX,
            processor="p",
            heartbeat_seconds=RARELY_SECONDS,
            expiry_ms=2 * round(RARELY_SECONDS * 1000),
            scoreboard=self._scoreboard,
            watch_fd=self._watch_fd,
        )
        self._theirs = theirs
        self._thread = threading.Thread(target=Pulse(given, theirs).run)
        self._thread.start()

    def request(self, method: str, **params: Any) -> Any:
        self._ours.sendall(jsonrpc.request(1, method, params))
        while "event" in jsonrpc.decode(line := self._answers.readline()):
            pass
        number, answer = jsonrpc.read_answer(line)
        assert number == 1
        return answer

    def wait_for_event(self, event: str) -> None:
        while jsonrpc.decode(self._answers.readline()).get("event") != event:
            pass

    def close(self) -> None:
        self._answers.close()
        self._ours.close()
        self._thread.join(20)
        self._theirs.close()
        os.close(self._watch_fd)


@pytest.fixture
def pulse(redis_url: str) -> Iterator[LeashedPulse]:
    pulse = LeashedPulse(redis_url)
    yield pulse
    pulse.close()


def subscriptions(server: Server) -> int:
    with server.connect() as redis:
        return int(redis.execute_command("PUBSUB", "NUMPAT"))


@pytest.mark.one_server
def test_pulse_receives_timers_of_a_new_queue_once_it_has_replied(server: Server, redis_url: str) -> None:
    """Even if Redis has only just come up and the next heartbeat is far away."""
    server.stop()
    pulse = LeashedPulse(redis_url)
    try:
        pulse.wait_for_event("redis")
        server.start()
        Client(redis_url).create_queue("q")
        assert pulse.request("serve_also", queue="q", with_fail_queue=False) == {}
        assert subscriptions(server) == PATTERNS
        queue = Client(redis_url).queue("q")
        queue.enqueue(1, run_in=0.1)
        wait_until(lambda: queue.status()["waiting"] == 1)
    finally:
        pulse.close()


@pytest.mark.one_server
def test_serving_one_more_queue_adds_its_fail_queue_and_keeps_the_others(
    pulse: LeashedPulse, server: Server, redis_url: str
) -> None:
    Client(redis_url).create_queue("q")
    others = [f"other{number}" for number in range(3)]
    for name in others:
        Client(redis_url).create_queue(name)
    pulse.request("serve", queues=others, with_fail_queue=[])
    for _ in range(2):
        pulse.request("serve_also", queue="q", with_fail_queue=True)
    for name in (*others, "q"):
        Client(redis_url).queue(name).enqueue(1, run_in=0.1)
    queues = [Client(redis_url).queue(name) for name in (*others, "q")]
    wait_until(lambda: [queue.status()["waiting"] for queue in queues] == [1, 1, 1, 1])


@pytest.mark.one_server
def test_a_broken_subscription_is_restored_and_missed_timers_are_read(
    pulse: LeashedPulse, server: Server, redis_url: str
) -> None:
    queue = Client(redis_url).create_queue("q")
    pulse.request("serve", queues=["q"], with_fail_queue=[])
    with server.connect() as redis:
        # A second heartbeat may follow after a second; the third is an hour away.
        first, since = redis.hget(BEATS, "last_beat_ms"), time.monotonic()
        wait_until(lambda: redis.hget(BEATS, "last_beat_ms") != first or time.monotonic() > since + 2)
        subscription = next(client for client in redis.client_list() if client["name"] == "forq-pulse-subscription")
        redis.client_kill_filter(_id=subscription["id"])
        queue.enqueue(1, run_in=0.1)
    wait_until(lambda: queue.status()["waiting"] == 1)
    wait_until(lambda: subscriptions(server) == PATTERNS)
    queue.enqueue(2, run_in=0.1)
    wait_until(lambda: queue.status()["waiting"] == 2)


@pytest.mark.one_server
def test_items_of_a_client_created_queue_are_promoted_in_time_before_it_is_served(
    pulse: LeashedPulse, server: Server, redis_url: str
) -> None:
    pulse.request("serve", queues=[], with_fail_queue=[])
    queue = Client(redis_url).create_queue("gate", mode="on_request")
    queue.enqueue(1, run_in=0.1)
    pulse.wait_for_event("queue_found")
    wait_until(lambda: queue.status()["waiting"] == 1)


@pytest.mark.one_server
@pytest.mark.parametrize("message", ["look", "look ", "look w", "look w x", "look w 1 2", "²", "-1", ""])
def test_an_unknown_message_does_not_stop_pulse(
    pulse: LeashedPulse, server: Server, redis_url: str, message: str
) -> None:
    """Any producer may publish on the queue channels, and a later release may add messages."""
    queue = Client(redis_url).create_queue("q")
    pulse.request("serve", queues=["q"], with_fail_queue=[])
    with server.connect() as redis:
        assert redis.publish("forq:queue:{q}@0:due", message) >= 1
        assert redis.publish(b"forq:queue:{\xff}@0:due", message) >= 1
    queue.enqueue(1, run_in=0.1)
    wait_until(lambda: queue.status()["waiting"] == 1)
