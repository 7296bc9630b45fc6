"""Supervisors in Redis, and requests to them: stored with a deadline, taken once, answered once."""

from collections.abc import Iterator
from typing import Any

import pytest

from forq.api_types import SupervisorInfo
from forq.broker.control import MAX_REQUEST_BYTES, Control
from forq.broker.keys import (
    DEFAULT_PREFIX,
    answer_key,
    answered_channel,
    control_base,
    requests_channel,
    taken_key,
)
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.broker.supervisors import Supervisors
from forq.errors import (
    ForqError,
    InvalidData,
    PermissionRefused,
    TimedOut,
    UnknownJob,
    UnknownQueue,
    UnknownSupervisor,
    UsageError,
)
from forq.procs import jsonrpc
from tests.support.drive.one_queue import one_queue
from tests.support.drive.redis_cluster import connect
from tests.support.drive.wait import wait_until

BASE = control_base(DEFAULT_PREFIX)
ABOUT: dict[str, Any] = {
    "host": "one",
    "pid": 7,
    "version": "1.0.0",
    "protocol": 2,
    "state_dir": "/var/lib/forq",
    "config": None,
    "remote_control": "full",
    "queues": ["q"],
    "processes": 2,
    "expiry_ms": 15_000,
}


class Redis:
    def __init__(self, url: str) -> None:
        self.link = Link(url)
        self.raw: Any = connect(url, BASE)
        self.supervisors = Supervisors(self.link, DEFAULT_PREFIX)
        self.control = Control(self.link, DEFAULT_PREFIX)

    def add(self, processor: str = "p1", expiry_ms: int = 15_000, **changes: Any) -> SupervisorInfo:
        self.supervisors.announce(processor, expiry_ms, ABOUT | changes)
        return self.supervisors.choose(processor)

    def requests(self, processor: str = "p1") -> str:
        return f"{BASE}:requests:{processor}"


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    found = Redis(redis_url)
    yield found
    found.link.close()
    found.raw.close()


def test_a_supervisor_is_listed_with_its_description_and_the_age_of_its_heartbeat(redis: Redis) -> None:
    redis.add(queues=["a", "b"])
    [found] = redis.supervisors.all()
    assert 0 <= found.pop("heartbeat_age_seconds") < 5  # type: ignore[misc]
    expected = {name: value for name, value in ABOUT.items() if name != "expiry_ms"}
    assert found == expected | {"processor": "p1", "queues": ["a", "b"], "duplicates": [], "version_skew": False}
    redis.raw.zincrby(f"{BASE}:supervisors", -4000, "p1")
    assert 4 <= redis.supervisors.all()[0]["heartbeat_age_seconds"] < 9


def test_a_heartbeat_without_a_description_keeps_it_and_reports_if_it_is_lost(redis: Redis) -> None:
    redis.add()
    assert not redis.supervisors.announce("p1", 15_000, None).unknown
    assert redis.supervisors.all()[0]["host"] == "one"
    redis.raw.delete(f"{BASE}:about")
    assert redis.supervisors.announce("p1", 15_000, None).unknown


def test_a_silent_supervisor_is_not_listed_and_the_next_heartbeat_of_another_removes_it(redis: Redis) -> None:
    redis.add("p1")
    redis.control.send(redis.add("p2"), "ping", {})
    redis.raw.zadd(f"{BASE}:supervisors", {"p2": 1})
    assert [each["processor"] for each in redis.supervisors.all()] == ["p1"]
    redis.supervisors.announce("p1", 15_000, None)
    assert redis.raw.zrange(f"{BASE}:supervisors", 0, -1) == [b"p1"]
    assert redis.raw.hkeys(f"{BASE}:about") == [b"p1"]
    assert not redis.raw.exists(redis.requests("p2"))


def test_a_late_heartbeat_does_not_remove_its_own_supervisor(redis: Redis) -> None:
    redis.add("p1")
    redis.raw.zadd(f"{BASE}:supervisors", {"p1": 1})
    assert not redis.supervisors.announce("p1", 15_000, None).unknown
    assert [each["processor"] for each in redis.supervisors.all()] == ["p1"]


def test_a_supervisor_that_withdraws_leaves_nothing(redis: Redis) -> None:
    redis.control.send(redis.add(), "ping", {})
    redis.supervisors.withdraw("p1")
    assert redis.raw.keys(f"{BASE}:*") == []


@pytest.mark.parametrize(
    "about", [b"no json", b"[]", b"{}", b'{"host": 3}', {"remote_control": "all"}, {"queues": [1]}, {"pid": "7"}]
)
def test_a_description_that_no_supervisor_has_written_is_left_out(redis: Redis, about: Any) -> None:
    redis.add("p1")
    redis.add("p2")
    packed = about if isinstance(about, bytes) else jsonrpc.encode(ABOUT | about)
    redis.raw.hset(f"{BASE}:about", "p2", packed)
    assert [each["processor"] for each in redis.supervisors.all()] == ["p1"]


def test_duplicates_and_older_versions_are_marked(redis: Redis) -> None:
    redis.add("same-state-dir")
    redis.add("original", version="0.9.9")
    redis.add("same-config-1", state_dir="/a", config="/etc/forq.toml")
    redis.add("same-config-2", state_dir="/b", config="/etc/forq.toml")
    redis.add("other-host", host="two", version="0.10.0")
    marks = {each["processor"]: (each["duplicates"], each["version_skew"]) for each in redis.supervisors.all()}
    assert marks == {
        "same-state-dir": (["original"], False),
        "original": (["same-state-dir"], True),
        "same-config-1": (["same-config-2"], False),
        "same-config-2": (["same-config-1"], False),
        "other-host": ([], True),
    }


def test_a_supervisor_is_chosen_by_name_beginning_or_host(redis: Redis) -> None:
    redis.add("aaaaaaaa1", host="one")
    redis.add("aaaaaaaa2", host="two")
    redis.add("bbbbbbbb", host="two")
    for on, processor in (("aaaaaaaa1", "aaaaaaaa1"), ("one", "aaaaaaaa1"), ("bbbbbb", "bbbbbbbb")):
        assert redis.supervisors.choose(on)["processor"] == processor
    for on, error in (("two", UsageError), ("aaaaaaaa", UsageError), ("bbb", UnknownSupervisor), ("", UsageError)):
        with pytest.raises(error):
            redis.supervisors.choose(on)


def test_the_supervisor_of_a_queue_must_be_the_only_one(redis: Redis) -> None:
    redis.add("p1", queues=["mine", "ours"])
    redis.add("p2", queues=["ours"], host="two")
    assert redis.supervisors.serving("mine")["processor"] == "p1"
    assert redis.supervisors.serving("ours", besides="p1")["processor"] == "p2"
    with pytest.raises(UsageError, match=r"2 supervisors serve queue 'ours': p1 \(one\), p2 \(two\); choose one"):
        redis.supervisors.serving("ours")
    with pytest.raises(UnknownQueue):
        redis.supervisors.serving("mine", besides="p1")


def test_the_supervisor_of_a_running_job_is_found_by_its_worker(redis: Redis, redis_url: str) -> None:
    processor = "0123456789abcdef" * 2
    redis.add(processor)
    with one_queue(redis_url) as queue:
        queue.enqueue("job", "other")
        with pytest.raises(UnknownJob, match="no supervisor runs job 'job'"):
            redis.supervisors.running("q", "job")
        queue.worker(f"w{processor[-16:]}").turn(want=1)
        found, attempt = redis.supervisors.running("q", "job")
        assert found["processor"] == processor
        assert f"{attempt.worker}:{attempt.fence}" == queue.state().owners["job"]
        queue.worker("elsewhere").turn(want=1)
        with pytest.raises(UnknownJob, match="runs in worker elsewhere, which belongs to no live supervisor"):
            redis.supervisors.running("q", "other")


def test_a_request_is_taken_once_with_its_deadline(redis: Redis) -> None:
    sent = redis.control.send(redis.add(), "kill", {"name": "q", "id": "a"})
    assert redis.supervisors.announce("p1", 15_000, None).waiting == 1
    assert not redis.control.is_read(sent)
    taken = redis.control.take("p1", 16)
    [request] = taken.requests
    assert (request.id, taken.left, taken.late, taken.repeated, taken.malformed) == (sent.id, 0, 0, 0, 0)
    assert jsonrpc.decode(request.body) == {"method": "kill", "params": {"name": "q", "id": "a"}}
    assert request.until <= sent.read_by
    assert redis.control.is_read(sent)
    assert redis.control.take("p1", 16).requests == []


def test_requests_are_taken_in_order_and_a_few_at_a_time(redis: Redis) -> None:
    target = redis.add()
    sent = [redis.control.send(target, "ping", {}).id for _ in range(5)]
    first, second = redis.control.take("p1", 3), redis.control.take("p1", 3)
    assert [each.id for each in (*first.requests, *second.requests)] == sent
    assert (first.left, second.left) == (2, 0)


def test_a_request_past_its_deadline_is_dropped(redis: Redis) -> None:
    sent = redis.control.send(redis.add(), "ping", {}, read_seconds=0.001)
    wait_until(lambda: redis.control._now() > sent.read_by + 0.01, what="the deadline has passed")
    taken = redis.control.take("p1", 16)
    assert (taken.requests, taken.late) == ([], 1)
    assert not redis.control.is_read(sent)


def test_a_request_that_was_taken_before_is_dropped(redis: Redis) -> None:
    target = redis.add()
    for _ in range(2):
        redis.control.send(target, "queue.restart", {"name": "q"}, request_id="same")
    taken = redis.control.take("p1", 16)
    assert ([each.id for each in taken.requests], taken.repeated) == (["same"], 1)
    redis.control.send(target, "queue.restart", {"name": "q"}, request_id="same")
    assert redis.control.take("p1", 16).repeated == 1
    redis.control.answer("p1", "same", b"{}")
    redis.control.send(target, "queue.restart", {"name": "q"}, request_id="same")
    assert redis.control.take("p1", 16).repeated == 1


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"x",
        b"id notanumber {}",
        b"id -5 {}",
        b"../id 99999999999999 {}",
        b"id 9999999999999999999999 {}",
        b"i" * 65 + b" 99999999999999 {}",
        b"id 99999999999999 " + b"x" * (MAX_REQUEST_BYTES + 100),
    ],
)
def test_a_malformed_entry_is_dropped(redis: Redis, entry: bytes) -> None:
    target = redis.add()
    redis.raw.rpush(redis.requests(), entry)
    sent = redis.control.send(target, "ping", {})
    taken = redis.control.take("p1", 16)
    assert ([each.id for each in taken.requests], taken.malformed) == ([sent.id], 1)


def test_the_list_of_requests_is_bounded_and_expires(redis: Redis) -> None:
    target = redis.add()
    for _ in range(32):
        redis.control.send(target, "ping", {}, read_seconds=9999)
    with pytest.raises(ForqError, match="32 requests wait for supervisor p1 already; nothing was sent"):
        redis.control.send(target, "ping", {})
    assert 0 < redis.raw.pttl(redis.requests()) <= 60_000
    taken = redis.control.take("p1", 32)
    assert len(taken.requests) == 32
    assert all(each.until <= redis.control._now() + 60 for each in taken.requests), "no deadline is later"
    assert 0 < redis.raw.pttl(taken_key(BASE, "p1", taken.requests[0].id)) <= 15 * 60_000


def test_no_request_is_stored_for_a_supervisor_that_is_gone_or_does_not_accept_it(redis: Redis) -> None:
    target = redis.add()
    with pytest.raises(PermissionRefused, match="shutdown cannot be requested from elsewhere"):
        redis.control.send(target, "shutdown", {})
    off = target.copy()
    off["remote_control"] = "off"
    with pytest.raises(PermissionRefused, match=r'host one .* set remote_control = "full" in its config file'):
        redis.control.send(off, "kill", {})
    with pytest.raises(InvalidData, match="too large"):
        redis.control.send(target, "ping", {"x": "y" * MAX_REQUEST_BYTES})
    redis.raw.zadd(f"{BASE}:supervisors", {"p1": 1})
    with pytest.raises(UnknownSupervisor):
        redis.control.send(target, "ping", {})
    redis.supervisors.withdraw("p1")
    with pytest.raises(UnknownSupervisor):
        redis.control.send(target, "ping", {})
    assert not redis.raw.exists(redis.requests())


def test_a_request_wakes_the_pulse_of_its_supervisor_only(redis: Redis, redis_url: str) -> None:
    listening = Subscription(
        redis_url, *(requests_channel(BASE, 0, name) for name in ("p1", "p2")), name="test", exact=True
    )
    listening.connect()
    try:
        sent = redis.control.send(redis.add("p1"), "ping", {})
        assert wait_until(listening.receive) == [(requests_channel(BASE, 0, "p1"), sent.id)]
    finally:
        listening.close()


def test_an_answer_reaches_its_requester_and_expires(redis: Redis) -> None:
    target = redis.add()
    sent, other = redis.control.send(target, "ping", {}), redis.control.send(target, "ping", {})
    redis.control.take("p1", 16)
    assert redis.control.read_answer(sent) is None
    assert redis.control.answer("p1", sent.id, jsonrpc.result(sent.id, {"pong": True}))
    assert 0 < redis.raw.pttl(answer_key(BASE, "p1", sent.id)) <= 60_000
    assert redis.control.wait_for_answer(sent, 5) == {"pong": True}
    assert redis.control.read_answer(other) is None
    redis.control.answer("p1", other.id, jsonrpc.failure(other.id, UnknownJob("no such job")))
    with pytest.raises(UnknownJob, match="no such job"):
        redis.control.wait_for_answer(other, 5)


def test_a_stored_answer_is_announced(redis: Redis, redis_url: str) -> None:
    sent = redis.control.send(redis.add(), "ping", {})
    redis.control.take("p1", 16)
    channel = answered_channel(BASE, 0, sent.id)
    listening = Subscription(redis_url, channel, name="test", exact=True)
    listening.connect()
    try:
        redis.control.answer("p1", sent.id, b"{}")
        assert wait_until(listening.receive) == [(channel, "")]
    finally:
        listening.close()


def test_an_answer_is_stored_once_and_only_for_a_request_that_was_taken(redis: Redis) -> None:
    sent = redis.control.send(redis.add(), "ping", {})
    assert not redis.control.answer("p1", sent.id, b"early")
    redis.control.take("p1", 16)
    assert not redis.control.answer("p2", sent.id, b"of another supervisor")
    assert redis.control.answer("p1", sent.id, jsonrpc.result(sent.id, {}))
    assert not redis.control.answer("p1", sent.id, b"repeated")
    assert redis.control.read_answer(sent) == {}
    assert not redis.control.answer("p1", sent.id, b"repeated after it was read")
    assert redis.control.read_answer(sent) is None
    assert 0 < redis.raw.pttl(taken_key(BASE, "p1", sent.id)) <= 60_000


def test_a_timeout_says_what_is_known_about_the_request(redis: Redis) -> None:
    target = redis.add()
    unread = redis.control.send(target, "kill", {}, read_seconds=0.05)
    with pytest.raises(TimedOut, match=r"supervisor p1 on host one has not read .* not carried out, and will not be"):
        redis.control.wait_for_answer(unread, 5)
    early = redis.control.send(target, "kill", {})
    with pytest.raises(TimedOut, match=r"it may still be carried out within \d+\.\d s"):
        redis.control.wait_for_answer(early, 0.05)
    redis.control.take("p1", 16)
    with pytest.raises(TimedOut, match=r"has read the request kill, .* may or may not have been carried out"):
        redis.control.wait_for_answer(early, 0.05)
