"""Watchers of the clerk: the real class and a real server, with a fake clock and a loop that the test drives."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forq.broker.claim import report_progress
from forq.broker.keys import DEFAULT_PREFIX
from forq.errors import ForqError, InvalidId, InvalidName, RedisUnavailable, UnknownJob, UnknownQueue, UsageError
from forq.procs.loop import service_loop
from forq.services.rpc import PendingReply
from forq.services.waiting import LISTEN_SECONDS, LONGEST_WAIT_SECONDS, WATCH_SECONDS, Watchers
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until


class WatcherRig:
    """The clerk's loop, a step at a time; `clock` is added to the real time, which stands still otherwise."""

    def __init__(self, queue: OneQueue) -> None:
        self.queue = queue
        self.worker = queue.worker()
        self.time = time.monotonic()
        self.answers: list[Any] = []
        self._loop = service_loop()
        self.watchers = Watchers(queue.link, DEFAULT_PREFIX, self._loop, now=lambda: self.time)

    def watch(self, seen: str | None = None, job_id: str = "a", **more: Any) -> Any:
        """What the verb answers at once; else the answer will be in `answers`."""
        answer = self.watchers.watch({"name": "q", "id": job_id, "seen": seen, **more})
        if isinstance(answer, PendingReply):
            answer.bind(self.answers.append)
        return answer

    def step(self) -> list[Any]:
        self._loop.tick(0.01)
        self.watchers.tick()
        return self.answers

    def listens(self) -> bool:
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


def test_the_first_question_is_answered_at_once(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    answer = rig.watch()
    assert (answer["id"], answer["state"], answer["progress"], answer["run_at"]) == ("a", "waiting", None, None)
    with pytest.raises(UnknownJob):
        rig.watch(job_id="b")
    assert len(rig.watchers) == 0


def test_progress_is_answered_as_soon_as_it_is_heard_without_a_look(rig: WatcherRig) -> None:
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


def test_the_end_of_a_job_that_told_progress_is_heard(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.worker.turn(want=1)
    rig.report(0.4)
    assert isinstance(rig.watch(rig.watch()["seen"]), PendingReply)
    rig.worker.turn(done="a")
    (answer,) = rig.until(lambda: rig.answers)
    assert answer["state"] == "gone"


def test_another_job_s_progress_is_no_reason_to_look(rig: WatcherRig) -> None:
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


def test_the_same_progress_told_again_is_no_change(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.worker.turn(want=1)
    rig.report(0.4, "same")
    rig.watch(rig.watch()["seen"])
    time.sleep(0.002)
    rig.report(0.4, "same")
    rig.time += WATCH_SECONDS
    assert rig.step() == []


def test_a_job_that_tells_nothing_is_looked_at_once_a_second(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.watch(rig.watch()["seen"])
    rig.worker.turn(want=1)
    assert rig.step() == []
    assert rig.watchers.tick() == pytest.approx(WATCH_SECONDS)
    rig.time += WATCH_SECONDS
    assert [answer["state"] for answer in rig.step()] == ["active"]


def test_without_a_change_the_answer_comes_after_a_while_and_is_the_same(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    seen = rig.watch()["seen"]
    rig.watch(seen)
    for _ in range(4):
        rig.time += LONGEST_WAIT_SECONDS / 5
        assert rig.step() == []
    rig.time += LONGEST_WAIT_SECONDS / 5
    assert [answer["seen"] for answer in rig.step()] == [seen]


def test_who_does_not_want_to_wait_is_answered_at_once(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    seen = rig.watch()["seen"]
    assert rig.watch(seen, wait=0)["seen"] == seen


@pytest.mark.parametrize("seen_active", [False, True])
def test_a_job_that_dies_is_dead_and_one_that_ends_well_is_gone_though_an_earlier_one_died(
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
def test_a_wrong_question_is_refused(rig: WatcherRig, wrong: dict[str, Any], error: type[ForqError]) -> None:
    rig.queue.enqueue("a")
    with pytest.raises(error):
        rig.watchers.watch({"name": "q", "id": "a", **wrong})


def test_it_listens_only_while_somebody_watches(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    assert (rig.listens(), rig.watchers.tick()) == (False, None)
    rig.watch()
    # The server may still have the subscription of an earlier test.
    wait_until(lambda: rig.queue.redis.pubsub_numpat() == 1)
    rig.step()
    assert rig.listens()
    assert rig.watchers.tick() == LISTEN_SECONDS
    rig.time += LISTEN_SECONDS
    rig.step()
    assert (rig.listens(), rig.watchers.tick()) == (False, None)
    wait_until(lambda: rig.queue.redis.pubsub_numpat() == 0)


def test_when_redis_goes_who_watches_is_told_so(rig: WatcherRig, server: Server) -> None:
    rig.queue.enqueue("a")
    rig.watch(rig.watch()["seen"])
    server.stop()
    rig.until(lambda: not rig.listens())
    rig.time += WATCH_SECONDS
    (answer,) = rig.step()
    assert isinstance(answer, RedisUnavailable)
    with pytest.raises(RedisUnavailable):
        rig.watch()


def test_a_deleted_queue_is_told(rig: WatcherRig) -> None:
    rig.queue.enqueue("a")
    rig.watch(rig.watch()["seen"])
    rig.queue.registry.delete("q", force=True)
    rig.time += WATCH_SECONDS
    assert isinstance(rig.step()[0], UnknownQueue)
