"""The clerk's requests to other supervisors, on a real server and without blocking."""

import select
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forq.broker.control import ANSWER_SECONDS, Control
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.supervisors import Supervisors
from forq.errors import ForqError, PermissionRefused, TimedOut, UnknownQueue
from forq.procs import jsonrpc
from forq.procs.loop import Loop
from forq.services.elsewhere import MAX_WAITING, Elsewhere
from forq.services.rpc import PendingReply
from tests.broker.test_control import ABOUT
from tests.support.drive.redis_cluster import connect
from tests.support.drive.wait import wait_until


class Rig:
    """`skipped_seconds`: added to the monotonic clock."""

    def __init__(self, url: str) -> None:
        self.skipped_seconds = 0.0
        self.loop = Loop(self.now, poller=select.poll())
        self.link = Link(url)
        self.raw: Any = connect(url, "forq:{control}")
        self.elsewhere = Elsewhere(self.link, DEFAULT_PREFIX, self.loop, now=self.now)
        self.far_link = Link(url)
        self.control = Control(self.far_link, DEFAULT_PREFIX)
        Supervisors(self.link, DEFAULT_PREFIX).announce("far", 60_000, ABOUT | {"queues": ["q"]})
        self.answers: list[Any] = []

    def now(self) -> float:
        return time.monotonic() + self.skipped_seconds

    def ask(self, method: str = "stack", on: str | None = None, seconds: float | None = None, **params: Any) -> None:
        given = {"method": method, "params": {"name": "q", **params}, "on": on, "besides": "near", "seconds": seconds}
        reply = self.elsewhere.ask(given)
        if isinstance(reply, PendingReply):
            reply.bind(self.answers.append)
        else:
            self.answers.append(reply)

    def answer(self, value: Any = None) -> None:
        for request in self.control.take("far", 8).requests:
            self.control.answer("far", request.id, jsonrpc.result(request.id, value))

    def wait_for_answer(self) -> Any:
        def passed() -> bool:
            self.loop.tick(0.01)
            return bool(self.answers)

        wait_until(passed, what="an answer")
        assert len(self.elsewhere) == 0
        return self.answers.pop()

    def close(self) -> None:
        for waiting in list(self.elsewhere._waiting):
            self.elsewhere._end(waiting)
        self.link.close()
        self.far_link.close()
        self.raw.close()


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    rig = Rig(redis_url)
    yield rig
    rig.close()


def test_an_answer_arrives_without_polling(rig: Rig) -> None:
    rig.ask()
    rig.loop.tick(0)
    assert rig.answers == []
    rig.answer({"stacks": []})
    assert rig.wait_for_answer() == {"here": False, "result": {"stacks": []}}


def test_an_answer_whose_announcement_was_lost_is_read_when_the_subscription_breaks(rig: Rig) -> None:
    rig.ask()
    clients = [client for client in rig.raw.client_list() if client["name"] == "forq-clerk-answers"]
    for request in rig.control.take("far", 8).requests:
        rig.raw.rpush(f"forq:{{control}}:answer:far:{request.id}", jsonrpc.result(request.id, {"stacks": []}))
    for client in clients:
        rig.raw.client_kill_filter(_id=client["id"])
    assert rig.wait_for_answer()["result"] == {"stacks": []}


def test_a_request_that_is_not_read_ends_at_its_deadline(rig: Rig) -> None:
    rig.ask()
    rig.skipped_seconds = ANSWER_SECONDS - 1
    answer = rig.wait_for_answer()
    assert isinstance(answer, TimedOut)
    assert "was not carried out, and will not be" in str(answer)


def test_a_request_that_is_read_but_not_answered_ends_when_its_time_is_up(rig: Rig) -> None:
    rig.ask("queue.restart", wait=30)
    rig.control.take("far", 8)
    rig.skipped_seconds = ANSWER_SECONDS + 29
    rig.loop.tick(0)
    assert rig.answers == []
    rig.skipped_seconds = ANSWER_SECONDS + 31
    assert "may or may not have been carried out" in str(rig.wait_for_answer())


def test_the_time_for_an_answer_can_be_shorter(rig: Rig) -> None:
    rig.ask(seconds=2.0)
    rig.control.take("far", 8)
    rig.skipped_seconds = 2.1
    assert "may or may not have been carried out" in str(rig.wait_for_answer())


def test_a_request_on_this_supervisor_is_left_to_it(rig: Rig) -> None:
    Supervisors(rig.link, DEFAULT_PREFIX).announce("near", 60_000, ABOUT | {"host": "nearby"})
    rig.ask(on="nearby")
    assert rig.answers == [{"here": True}]


def test_a_request_that_cannot_be_sent_leaves_no_connection(rig: Rig) -> None:
    with pytest.raises(UnknownQueue):
        rig.ask(name="unknown")
    Supervisors(rig.link, DEFAULT_PREFIX).announce("far", 60_000, ABOUT | {"remote_control": "read"})
    with pytest.raises(PermissionRefused, match='remote_control = "full"'):
        rig.ask()
    assert len(rig.elsewhere) == 0
    wait_until(
        lambda: not [each for each in rig.raw.client_list() if each["name"] == "forq-clerk-answers"],
        what="no connection is left",
    )


def test_the_number_of_waiting_requests_is_limited(rig: Rig) -> None:
    for _ in range(MAX_WAITING):
        rig.ask()
    with pytest.raises(ForqError, match="wait for an answer; try again"):
        rig.ask()
    while rig.control.take("far", 8).requests:
        pass
    rig.skipped_seconds = ANSWER_SECONDS + 1

    def all_ended() -> bool:
        rig.loop.tick(0.01)
        return len(rig.answers) == MAX_WAITING

    wait_until(all_ended, what="all have ended")
