"""The clerk's watchers on a real server. The test drives the loop and a fake clock."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forq.broker.claim import report_progress
from forq.broker.keys import DEFAULT_PREFIX
from forq.errors import ForqError, InvalidId, InvalidName, RedisUnavailable, UnknownJob, UnknownQueue, UsageError
from forq.procs.loop import service_loop
from forq.services.rpc import PendingReply
from forq.services.waiting import LONGEST_WAIT_SECONDS, UNSUBSCRIBE_SECONDS, WATCH_SECONDS, Watchers
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until


class WatcherRig:
    """Runs the clerk's loop step by step; `time` is a fake clock that only the test advances."""

    def __init__(self, queue: OneQueue) -> None:
        self.queue = queue
        self.worker = queue.worker()
        self.time = time.monotonic()
        self.answers: list[Any] = []
        self._loop = service_loop()
        self.watchers = Watchers(queue.link, DEFAULT_PREFIX, self._loop, now=lambda: self.time)

    def watch(self, seen: str | None = None, job_id: str = "a", **more: Any) -> Any:
        """Returns the immediate reply, or a PendingReply whose value is later added to `answers`."""
        answer = self.watchers.watch({"name": "q", "id": job_id, "seen": seen, **more})
        if isinstance(answer, PendingReply):
            answer.bind(self.answers.append)
        return answer

    def step(self) -> list[Any]:
        self._loop.tick(0.01)
        self.watchers.tick()
        return self.answers

    def is_subscribed(self) -> bool:
        return self.watchers._subscription.connected

    def until(self, condition: Callable[[], Any]) -> Any:
        def stepped() -> Any:
            self.step()
            return condition()

        return wait_until(stepped)

    def report(self, fraction: float, text: str = "", job_id: str = "a") -> None:
        fence = int(self.worker.fence)
        assert report_progress(self.queue.link, DEFAULT_PREFIX, "q", self.worker.name, job_id, fence, fraction, text)


@pytest.fixture
def rig(redis_url: str) -> Iterator[WatcherRig]:
    with one_queue(redis_url) as queue:
        rig = WatcherRig(queue)
        yield rig
        rig.watchers._subscription.close()


def test_the_first_request_is_answered_at_once(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    answer = rig.watch()
    assert (answer["id"], answer["state"], answer["progress"], answer["run_at"]) == ("a", "waiting", None, None)
    with pytest.raises(UnknownJob):
        rig.watch(job_id="b")
    assert len(rig.watchers) == 0


def test_published_progress_is_sent_at_once_without_a_read(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.worker.turn(want=1)
    seen = rig.watch()["seen"]
    assert isinstance(rig.watch(seen), PendingReply)
    assert rig.step() == []
    rig.report(0.4, "page 12 of 30")
    (answer,) = rig.until(lambda: rig.answers)
    progress = answer["progress"]
    assert (answer["state"], progress["fraction"], progress["text"]) == ("active", 0.4, "page 12 of 30")
    assert len(rig.watchers) == 0


def test_the_end_of_a_job_with_progress_is_received(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.worker.turn(want=1)
    rig.report(0.4)
    assert isinstance(rig.watch(rig.watch()["seen"]), PendingReply)
    rig.worker.turn(done="a")
    (answer,) = rig.until(lambda: rig.answers)
    assert answer["state"] == "gone"


def test_progress_of_another_job_causes_no_read(rig: WatcherRig) -> None:
    rig.queue.enqueue("a", "b")
    rig.worker.turn(want=2)
    seen = rig.watch()["seen"]
    rig.watch(seen)
    rig.report(0.4, job_id="b")
    rig.queue.redis.hset(rig.queue.key("progress"), "a", "0.1 1 unheard")
    rig.report(0.5, job_id="b")
    for _ in range(5):
        assert rig.step() == []
    rig.time += WATCH_SECONDS
    assert rig.step()[0]["progress"]["text"] == "unheard"


def test_the_same_progress_reported_again_is_not_a_change(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.worker.turn(want=1)
    rig.report(0.4, "same")
    rig.watch(rig.watch()["seen"])
    time.sleep(0.002)
    rig.report(0.4, "same")
    rig.time += WATCH_SECONDS
    assert rig.step() == []


def test_a_job_without_progress_is_read_once_a_second(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.watch(rig.watch()["seen"])
    rig.worker.turn(want=1)
    assert rig.step() == []
    assert rig.watchers.tick() == pytest.approx(WATCH_SECONDS)
    rig.time += WATCH_SECONDS
    assert [answer["state"] for answer in rig.step()] == ["active"]


def test_without_a_change_the_same_answer_is_sent_after_a_while(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    seen = rig.watch()["seen"]
    rig.watch(seen)
    for _ in range(4):
        rig.time += LONGEST_WAIT_SECONDS / 5
        assert rig.step() == []
    rig.time += LONGEST_WAIT_SECONDS / 5
    assert [answer["seen"] for answer in rig.step()] == [seen]


def test_a_request_without_waiting_is_answered_at_once(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    seen = rig.watch()["seen"]
    assert rig.watch(seen, wait=0)["seen"] == seen


@pytest.mark.parametrize("seen_active", [False, True])
def test_a_failed_job_is_dead_and_a_finished_job_is_gone_even_if_an_earlier_one_died(
    rig: WatcherRig, seen_active: bool
) -> None:
    for end, expected in (("failed", "dead"), ("done", "gone"), ("failed", "dead")):
        rig.queue.enqueue("a")
        if seen_active:
            rig.worker.turn(want=1)
        first = rig.watch()
        assert first["state"] == ("active" if seen_active else "waiting")
        if not seen_active:
            rig.worker.turn(want=1)
        rig.worker.turn(done="a" if end == "done" else "", failed="a" if end == "failed" else "")
        assert rig.watch(first["seen"])["state"] == expected


def test_a_dead_job_is_shown_with_its_error(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.worker.turn(want=1)
    rig.worker.turn(failed="a", error='{"name":"E","message":"no"}')
    answer = rig.watch()
    assert (answer["state"], answer["error"]["name"]) == ("dead", "E")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"seen": "rubbish"}, UsageError),
        ({"seen": 7}, UsageError),
        ({"wait": "long"}, UsageError),
        ({"id": None}, InvalidId),
        ({"name": "no/name"}, InvalidName),
        ({"name": "other"}, UnknownQueue),
    ],
)
def test_an_invalid_request_is_refused(rig: WatcherRig, wrong: dict[str, Any], error: type[ForqError]) -> None:
    rig.queue.enqueue("a")
    with pytest.raises(error):
        rig.watchers.watch({"name": "q", "id": "a", **wrong})


def test_it_is_subscribed_only_while_there_are_watchers(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    assert (rig.is_subscribed(), rig.watchers.tick()) == (False, None)
    rig.watch()
    # The server may still have the subscription of an earlier test.
    wait_until(lambda: rig.queue.redis.pubsub_numpat() == 1)
    rig.step()
    assert rig.is_subscribed()
    assert rig.watchers.tick() == UNSUBSCRIBE_SECONDS
    rig.time += UNSUBSCRIBE_SECONDS
    rig.step()
    assert (rig.is_subscribed(), rig.watchers.tick()) == (False, None)
    wait_until(lambda: rig.queue.redis.pubsub_numpat() == 0)


def test_watchers_get_an_error_when_redis_goes_down(rig: WatcherRig, server: Server) -> None:
    rig.queue.enqueue("a")
    rig.watch(rig.watch()["seen"])
    server.stop()
    rig.until(lambda: not rig.is_subscribed())
    rig.time += WATCH_SECONDS
    (answer,) = rig.step()
    assert isinstance(answer, RedisUnavailable)
    with pytest.raises(RedisUnavailable):
        rig.watch()


def test_watchers_of_a_deleted_queue_get_an_error(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.watch(rig.watch()["seen"])
    rig.queue.registry.delete("q", force=True)
    rig.time += WATCH_SECONDS
    assert isinstance(rig.step()[0], UnknownQueue)
