"""The outbox: each line is held by exactly one scribe until it is removed."""

import select

import pytest

from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.outbox import Outbox, OutboxSubscription, read_line
from forq.broker.recovery import Position
from forq.errors import Fenced, RedisUnavailable, UnknownQueue
from tests.support.drive.one_queue import EXPIRY_MS, OneQueue
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until

LINE = (
    b'{"id":"a","fence":"7","died_ms":5000,"priority":"2","enqueued_us":1000000,"counts":[3,2,1],'
    b'"body":["Ann","mail",{"x":[]}],"error":{"name":"ValueError","message":"no"}}'
)


def outbox(queue: OneQueue, processor: str = "p1") -> Outbox:
    return Outbox(queue.link, DEFAULT_PREFIX, processor, EXPIRY_MS)


def fill(queue: OneQueue, *lines: str) -> None:
    queue.redis.rpush(queue.key("outbox"), *lines)


def lines_of(queue: OneQueue, name: str = "outbox") -> list[bytes]:
    return list(queue.redis.lrange(queue.key(name), 0, -1))


def test_collect_moves_lines_in_order_to_one_processor(queue: OneQueue) -> None:
    fill(queue, "1", "2", "3")
    assert outbox(queue, "p1").collect("q", 2) == [b"1", b"2"]
    assert outbox(queue, "p2").collect("q", 2) == [b"3"]
    assert outbox(queue, "p3").collect("q", 2) == []
    assert (lines_of(queue), lines_of(queue, "outbox:p1"), lines_of(queue, "outbox:p2")) == ([], [b"1", b"2"], [b"3"])


def test_collect_returns_held_lines_again_before_any_others(queue: OneQueue) -> None:
    fill(queue, "1", "2", "3")
    first = outbox(queue).collect("q", 2)
    assert outbox(queue).collect("q", 500) == first
    assert outbox(queue).forget("q", first)
    assert outbox(queue).collect("q", 500) == [b"3"]


def test_forget_removes_exactly_the_lines_it_is_given(queue: OneQueue) -> None:
    fill(queue, "1", "2", "3")
    first = outbox(queue).collect("q", 2)
    assert outbox(queue).forget("q", first) is True
    second = outbox(queue).collect("q", 2)
    assert outbox(queue).forget("q", first) is False
    assert outbox(queue).forget("q", [b"3", b"4"]) is False
    assert lines_of(queue, "outbox:p1") == second == [b"3"]
    assert outbox(queue).forget("q", second) is True
    assert not queue.redis.exists(queue.key("outbox"), queue.key("outbox:p1"))


def test_a_batch_ends_after_a_megabyte(queue: OneQueue) -> None:
    fill(queue, *["x" * 600_000] * 3)
    assert len(outbox(queue).collect("q")) == 2


def test_waiting_lists_queues_with_lines_in_the_outbox_or_held(queue: OneQueue) -> None:
    assert outbox(queue).waiting(["q", "other"]) == []
    assert outbox(queue).waiting([]) == []
    fill(queue, "1")
    assert outbox(queue).waiting(["other", "q"]) == ["q"]
    lines = outbox(queue).collect("q")
    assert outbox(queue).waiting(["q"]) == ["q"]
    assert outbox(queue, "p2").waiting(["q"]) == []
    outbox(queue).forget("q", lines)
    assert outbox(queue).waiting(["q"]) == []


def test_eviction_returns_held_lines_to_the_front_and_notifies(queue: OneQueue) -> None:
    fill(queue, "1", "2", "3")
    outbox(queue, "p1").collect("q", 2)
    outbox_subscription = OutboxSubscription(queue.url, DEFAULT_PREFIX, "test")
    outbox_subscription.connect()
    queue.recovery("p2").evict("q", "p1", "gone")
    assert lines_of(queue) == [b"1", b"2", b"3"]
    assert wait_until(lambda: select.select([outbox_subscription], [], [], 0)[0])
    assert outbox_subscription.receive_queues() == {"q"}
    with pytest.raises(Fenced):
        outbox(queue, "p1").collect("q")
    assert outbox(queue, "p2").collect("q", 1) == [b"1"]
    outbox_subscription.close()


def test_a_silent_processor_that_only_collected_is_evicted_by_a_heartbeat(queue: OneQueue) -> None:
    fill(queue, "1")
    Outbox(queue.link, DEFAULT_PREFIX, "silent", 1).collect("q")
    wait_until(lambda: queue.redis.zscore(queue.key("processors"), "silent") + 1 < _now_ms(queue))
    queue.redis.hset(queue.key("counts"), mapping={"last_beat_ms": int(_now_ms(queue)), "sweep_after_ms": 0})
    assert queue.recovery("p2").heartbeat("q", EXPIRY_MS, [Position("w", 0, 0, False)]).evicted == ["silent"]
    assert lines_of(queue) == [b"1"]


def _now_ms(queue: OneQueue) -> float:
    seconds, micros = queue.redis.time()
    return float(seconds * 1000 + micros / 1000)


def test_lines_of_a_deleted_queue_are_purged_even_if_held(queue: OneQueue) -> None:
    fill(queue, LINE.decode(), "broken", "3")
    lines = outbox(queue).collect("q", 2)
    queue.registry.delete("q", force=True)
    with pytest.raises(UnknownQueue):
        outbox(queue).collect("q")
    assert outbox(queue).forget("q", lines) is False
    logged: list[dict[str, object]] = []
    while queue.registry.purge("q", logged.extend):
        pass
    assert [(line.get("id"), line.get("line")) for line in logged] == [("a", None), (None, "broken"), (None, "3")]
    assert queue.redis.keys("*outbox*") == []


def test_dead_jobs_of_a_deleted_queue_are_purged_with_their_fence(queue: OneQueue) -> None:
    queue.redis.zadd(queue.key("dead"), {"a@7": 1})
    queue.redis.hset(queue.key("dead:jobs"), "a@7", b'p5 1000000\n[null,null,1]\n{"name":"E"}\n[{"cause":"x"}]')
    queue.registry.delete("q", force=True)
    logged: list[dict[str, object]] = []
    queue.registry.purge("q", logged.extend)
    assert [(line["id"], line["fence"], line["data"], line["error"]) for line in logged] == [("a", 7, 1, {"name": "E"})]


def test_a_line_is_parsed_into_a_failed_log_entry() -> None:
    assert read_line("q", LINE) == {
        "queue": "q",
        "id": "a",
        "identifier": "Ann",
        "type": "mail",
        "priority": 2,
        "data": {"x": []},
        "error": {"name": "ValueError", "message": "no"},
        "retry_count": 3,
        "stall_count": 2,
        "timeout_count": 1,
        "enqueued_at": 1.0,
        "died_at": 5.0,
        "fence": 7,
    }
    assert read_line("q", b"\xff{")["line"] == "\ufffd{"


def test_the_line_of_a_traced_job_has_its_trace() -> None:
    traced = LINE.replace(b'{"x":[]}]', b'{"x":[]},{"traceparent":"00-1-2-01"}]')
    assert traced != LINE
    assert read_line("q", traced) == read_line("q", LINE)


@pytest.mark.one_server
def test_the_subscription_names_the_queues_and_reports_a_lost_server(server: Server, queue: OneQueue) -> None:
    outbox_subscription = OutboxSubscription(queue.url, DEFAULT_PREFIX, "test")
    assert not outbox_subscription.connected
    outbox_subscription.connect()
    for _ in range(3):
        queue.redis.publish(queue.channel("outbox"), "q")
    queue.redis.publish("forq:queue:{other}@0:outbox", "other")
    queue.redis.publish(queue.key("events"), "no")
    found: list[str] = []

    def listen() -> bool:
        if select.select([outbox_subscription], [], [], 0)[0]:
            found.extend(outbox_subscription.receive_queues())
        return "other" in found

    wait_until(listen)
    assert set(found) == {"q", "other"}
    server.kill()
    wait_until(lambda: select.select([outbox_subscription], [], [], 0)[0])
    with pytest.raises(RedisUnavailable):
        outbox_subscription.receive_queues()
    assert not outbox_subscription.connected
    with pytest.raises(RedisUnavailable):
        outbox_subscription.connect()


def test_forgetting_lines_that_are_not_held_changes_nothing(queue: OneQueue) -> None:
    fill(queue, "1", "2")
    scribe = outbox(queue, "p1")
    taken = scribe.collect("q")
    assert not scribe.forget("q", [b"9", b"8"])
    assert scribe.collect("q") == taken


def test_the_options_of_a_job_are_logged_as_a_user_gives_them() -> None:
    line = LINE.replace(b'"body":', b'"options":"t=30000,r=5,x=99","body":')
    assert read_line("q", line)["options"] == {"timeout": "30s", "max_retries": 5}
    assert "options" not in read_line("q", LINE)
    assert "line" in read_line("q", LINE.replace(b'"body":', b'"options":"t=no","body":'))
