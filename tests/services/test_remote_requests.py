"""Pulse's part in remote control, on a real server: which requests are forwarded, and which attempt a kill may hit."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forq.api_types import SupervisorInfo
from forq.broker.control import Control
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.supervisors import Supervisors
from forq.errors import ForqError, InvalidData, InvalidId, UnknownJob, UsageError
from forq.procs import jsonrpc
from forq.procs.scoreboard import Slot, State, pack_position
from forq.services.remote_requests import RemoteRequests, read_body
from tests.support.drive.contexts import context
from tests.support.drive.one_queue import OneQueue, one_queue

PROCESSOR = "0123456789abcdef" * 2
WORKER = f"w{PROCESSOR[-16:]}"
ABOUT = {
    "host": "here",
    "pid": 1,
    "version": "1.0.0",
    "protocol": 2,
    "state_dir": "/s",
    "config": None,
    "remote_control": "full",
}


class Rig:
    def __init__(self, url: str, queue: OneQueue) -> None:
        self.queue = queue
        self.link = Link(url)
        self.context = context(url=url, processor=PROCESSOR, about=ABOUT)
        self.due: list[Callable[[], None]] = []
        self.forwarded: list[dict[str, Any]] = []
        self.remote = RemoteRequests(
            self.link,
            self.context,
            later=lambda seconds, callback: self.due.append(callback),
            forward=self.forwarded.append,
        )
        self.remote.announce(["q"])
        self.control = Control(self.link, DEFAULT_PREFIX)
        self.target: SupervisorInfo = Supervisors(self.link, DEFAULT_PREFIX).choose(PROCESSOR)

    def receive(self) -> None:
        self.remote.take_soon()
        while self.due:
            self.due.pop(0)()

    def kill(self, fence: object, job_id: object = "a", **more: object) -> Any:
        """The answer to a kill; None if it was forwarded."""
        sent = self.control.send(self.target, "kill", {"name": "q", "id": job_id, "fence": fence, **more})
        self.receive()
        return self.control.read_answer(sent)

    def run_job(self, job_id: str, worker: str = WORKER, turn: int = 1) -> tuple[Slot, int]:
        """Claims the job in Redis and shows it in a slot; returns the slot and the fence."""
        self.queue.enqueue(job_id, if_exists="skip")
        self.queue.worker(worker).turn(want=1)
        slot = self.context.scoreboard.slot(self.context.scoreboard.take())
        slot.queue, slot.worker, slot.state, slot.pid = "q", worker, State.BUSY, 7
        slot.job, slot.turn, slot.started_ns = job_id.encode(), turn, 5_000_000_000
        slot.position = pack_position(5_000_000_000, turn, 0, True)
        return slot, int(self.queue.state().owners[job_id].split(":")[1])


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    with one_queue(redis_url) as queue:
        rig = Rig(redis_url, queue)
        yield rig
        rig.link.close()


def test_a_kill_is_forwarded_with_the_position_of_the_attempt_in_place_of_its_fence(rig: Rig) -> None:
    slot, fence = rig.run_job("a")
    assert rig.kill(fence, retry=True) is None
    [request] = rig.forwarded
    assert request.pop("until") > 0
    assert len(request.pop("id")) == 32
    assert request == {
        "processor": PROCESSOR,
        "method": "kill",
        "params": {"name": "q", "id": "a", "retry": True, "at": {"worker": WORKER, "position": slot.position}},
    }


def test_a_kill_of_another_attempt_is_refused(rig: Rig) -> None:
    slot, fence = rig.run_job("a")
    for other in (fence - 1, fence + 1, 0, -fence):
        assert isinstance(rig.kill(other), UnknownJob)
    slot.worker = "another"
    assert isinstance(rig.kill(fence), UnknownJob), "Redis knows another owner"
    slot.worker = WORKER
    slot.position = pack_position(5_000_000_000, 1, 0, False)
    assert isinstance(rig.kill(fence), UnknownJob), "it does not run"
    assert rig.forwarded == []


def test_a_kill_of_a_job_of_the_same_id_that_was_claimed_later_is_refused(rig: Rig) -> None:
    _, fence = rig.run_job("a")
    rig.queue.recover(rig.queue.worker(WORKER), 0, running=True)
    later, new_fence = rig.run_job("a", worker=f"x{PROCESSOR[-16:]}")
    assert new_fence > fence
    assert isinstance(rig.kill(fence), UnknownJob)
    assert rig.kill(new_fence) is None
    assert rig.forwarded[0]["params"]["at"] == {"worker": later.worker, "position": later.position}


@pytest.mark.parametrize(
    ("fence", "job_id", "error"),
    [
        (None, "a", UsageError),
        ("1", "a", UsageError),
        (True, "a", UsageError),
        (1.5, "a", UsageError),
        (1, "", InvalidId),
        (1, ["a"], InvalidId),
        (1, "x" * 1000, InvalidId),
        (1, "nobody", UnknownJob),
    ],
)
def test_a_kill_with_invalid_params_is_answered_with_an_error(
    rig: Rig, fence: object, job_id: object, error: type[ForqError]
) -> None:
    assert isinstance(rig.kill(fence, job_id), error)
    assert rig.forwarded == []


def test_a_broken_owner_in_redis_does_not_end_pulse(rig: Rig) -> None:
    rig.run_job("a")
    for owner in (b"nonsense", b"w:x", b"\xff:1", b""):
        rig.queue.redis.hset(rig.queue.key("active"), "a", owner)
        assert isinstance(rig.kill(1), InvalidData)


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[]",
        b"1",
        b"{}",
        b'{"method":"kill"}',
        b'{"method":1,"params":{}}',
        b'{"method":"kill","params":[]}',
        b'{"method":"kill","params":{},"reply_to":"forq:queues"}',
        b'{"method":"' + b"m" * 65 + b'","params":{}}',
        b'{"method":"kill","params":{"a":NaN}}',
        b'{"method":"\\ud800","params":{}}',
        b"[" * 10_000,
        b"\xff",
    ],
)
def test_a_body_of_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidData):
        read_body(body)


def test_dropped_requests_are_one_log_line_and_others_are_forwarded(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "forq")
    for entry in (b"junk", b"more junk", b"late 1 {}"):
        rig.queue.redis.rpush(f"forq:{{control}}:requests:{PROCESSOR}", entry)
    for _ in range(2):
        rig.control.send(rig.target, "ping", {}, request_id="same")
    rig.receive()
    assert caplog.messages == ["dropped remote requests late=1 repeated=1 malformed=2"]
    assert [request["id"] for request in rig.forwarded] == ["same"]


def test_an_answer_is_stored_under_the_processor_that_was_asked(rig: Rig) -> None:
    sent = rig.control.send(rig.target, "ping", {})
    rig.receive()
    rig.remote.answer("another", sent.id, jsonrpc.result(sent.id, 1).decode())
    assert rig.control.read_answer(sent) is None
    rig.remote.answer(PROCESSOR, sent.id, jsonrpc.result(sent.id, {"pong": True}).decode())
    assert rig.control.read_answer(sent) == {"pong": True}


def test_a_description_that_redis_lost_is_sent_again(rig: Rig) -> None:
    rig.queue.redis.delete("forq:{control}:about", "forq:{control}:supervisors")
    rig.remote.announce(["q"])
    assert Supervisors(rig.link, DEFAULT_PREFIX).choose(PROCESSOR)["queues"] == ["q"]
