"""job.progress: allowed values, the scoreboard, and sending to Redis without delaying the handler."""

import asyncio
import math
import os
import pickle
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from forq import Job
from forq.broker.keys import DEFAULT_PREFIX, progress_channels
from forq.broker.pubsub import Subscription
from forq.errors import InvalidData
from forq.procs.scoreboard import POSITION, Scoreboard, Slot, State, pack_position
from forq.values import check_progress, show_progress
from forq.workers.attempt import AttemptRunner
from forq.workers.handlers import Handler, Handlers
from forq.workers.progress import MIN_INTERVAL_SECONDS, ProgressSender
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until


class Rig:
    """One worker, driven by hand: its queue, its slot, its progress sender, and handlers that run as in a loop."""

    def __init__(self, queue: OneQueue) -> None:
        self.queue = queue
        self.worker: HandWorker = queue.worker()
        board = Scoreboard.create(2)
        self.slot: Slot = board.slot(board.take())
        self.slot.worker = self.worker.name
        self.sender = ProgressSender(queue.url, DEFAULT_PREFIX)
        self.reporter = self.sender.reporter(self.slot, queue.name)

    def run(self, handler: Handler, job_id: str = "a") -> Any:
        """Claims the job and calls the handler, without settling; returns the exception that the handler raised."""
        self.queue.enqueue(job_id)
        ((claimed, record),) = self._claim()
        self.slot.job, self.slot.state = claimed, State.BUSY
        self.slot.words[POSITION] = pack_position(time.monotonic_ns(), self.worker.number, 0, True)
        attempts = AttemptRunner(self.queue.name, Handlers({None: handler}), self.slot, self.reporter)
        return attempts.run(job_id, record, int(self.worker.fence))

    def _claim(self) -> list[tuple[bytes, bytes]]:
        jobs = self.worker.whole_turn(want=1).jobs
        return list(zip(jobs[::2], jobs[1::2], strict=True))

    def stored(self, job_id: str = "a") -> tuple[float, str] | None:
        progress = self.queue.inspector.job(job_id)["progress"]
        return progress and (progress["fraction"], progress["text"])


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    with one_queue(redis_url) as queue:
        yield Rig(queue)


@pytest.mark.parametrize("fraction", [-0.001, 1.001, math.nan, math.inf, "0.5", None, [1], 1j])
def test_a_fraction_is_a_number_from_0_to_1(fraction: Any) -> None:
    with pytest.raises(InvalidData, match="from 0 to 1"):
        check_progress(fraction)


@pytest.mark.parametrize(("fraction", "read"), [(0, 0.0), (1, 1.0), (0.25, 0.25), (True, 1.0), (Fraction(1, 4), 0.25)])
def test_any_value_comparable_with_0_and_1_is_a_valid_fraction(fraction: Any, read: float) -> None:
    assert check_progress(fraction) == (read, "")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("page 12 of 30", "page 12 of 30"),
        ("x" * 201, "x" * 200),
        ("ü" * 300, "ü" * 200),
        ("two\nlines\t\x1b[31mred\x00\x7f\x9b", "two lines  [31mred   "),
        ("\u2028\u202e\ud800", "   "),
    ],
)
def test_a_progress_text_is_one_line_of_200_characters_without_control_codes(given: str, kept: str) -> None:
    assert check_progress(0.5, given) == (0.5, kept)
    with pytest.raises(InvalidData, match="text"):
        check_progress(0.5, given.encode("utf-8", "replace"))


def test_an_incomplete_fraction_is_never_shown_as_100_percent() -> None:
    assert show_progress(0.29, "") == "29%"
    assert show_progress(0.9999, "nearly") == "99% nearly"
    assert show_progress(1.0, "all") == "100% all"


def test_progress_outside_a_worker_is_checked_but_not_reported() -> None:
    job = Job("q", "a", "a", None, 5, 0.0, 7)
    job.progress(0.5, "to nobody")
    with pytest.raises(InvalidData):
        job.progress(2)


def test_progress_is_in_the_slot_at_once_and_in_redis_soon(rig: Rig) -> None:
    seen: list[Any] = []

    def handle(data: Any, job: Job) -> None:
        job.progress(0.4, "page 12 of 30")
        seen.append(rig.slot.progress())
        wait_until(lambda: rig.stored() == (0.4, "page 12 of 30"))

    assert rig.run(handle) is None
    assert seen == [(0.4, "page 12 of 30")]


def test_a_wrong_fraction_fails_the_attempt(rig: Rig) -> None:
    failure = rig.run(lambda data, job: job.progress(40))
    assert b"from 0 to 1" in failure.brief
    assert rig.slot.progress() is None


def test_coroutines_and_their_threads_can_report_progress(rig: Rig) -> None:
    async def handle(data: Any, job: Job) -> None:
        job.progress(0.1, "in the loop")
        await asyncio.to_thread(job.progress, 0.2, "in a thread")
        await asyncio.to_thread(wait_until, lambda: rig.stored() == (0.2, "in a thread"))

    assert rig.run(handle) is None


def test_a_burst_sends_ten_reports_per_second_and_the_last_one(rig: Rig) -> None:
    subscription = Subscription(rig.queue.url, progress_channels(DEFAULT_PREFIX, 0), name="subscription")
    subscription.connect()
    took: list[float] = []

    def handle(data: Any, job: Job) -> None:
        began, number = time.monotonic(), 0
        while time.monotonic() < began + 0.65 or number < 10_000:
            number += 1
            job.progress(number % 100 / 100, f"step {number}")
        job.progress(1, "the last")
        wait_until(lambda: rig.stored() == (1.0, "the last"))
        took.append(time.monotonic() - began)

    assert rig.run(handle) is None
    received = len(subscription.receive())
    print(f"{received} messages in {took[0]:.2f} s")
    assert 2 <= received <= took[0] / MIN_INTERVAL_SECONDS + 2
    subscription.close()


def test_a_report_after_the_end_of_a_job_has_no_effect(rig: Rig) -> None:
    jobs: list[Job] = []
    rig.run(lambda data, job: jobs.append(job))
    rig.worker.turn(done="a")

    def second(data: Any, job: Job) -> None:
        job.progress(0.1, "mine")
        jobs[0].progress(0.9, "late")
        assert rig.slot.progress() == (0.1, "mine")
        wait_until(lambda: rig.stored("b") == (0.1, "mine"))

    assert rig.run(second, "b") is None


def test_a_slot_shows_no_progress_of_a_finished_job(rig: Rig) -> None:
    rig.run(lambda data, job: job.progress(0.5, "half"))
    assert rig.slot.progress() == (0.5, "half")
    rig.slot.words[POSITION] = pack_position(time.monotonic_ns(), 99, 0, True)
    assert rig.slot.progress() is None


def test_a_redis_outage_does_not_block_the_handler_and_the_latest_report_is_sent_afterwards(
    server: Server, redis_url: str
) -> None:
    with one_queue(redis_url) as queue:
        rig = Rig(queue)
        rig.run(lambda data, job: None)
        owner = queue.redis.hget(queue.key("active"), "a")
        job = Job("q", "a", "a", None, 5, 0.0, int(rig.worker.fence))
        job._reporter, job._position = rig.reporter, rig.slot.position
        server.stop()
        began = time.monotonic()
        for number in range(1000):
            job.progress(number / 1000, "away")
        assert time.monotonic() - began < 1.0
        assert rig.slot.progress() == (0.999, "away")
        wait_until(lambda: rig.sender._redis_lost)
        server.start()
        # The server keeps no data: the queue and its running job are restored by hand.
        again = OneQueue(redis_url)
        again.enqueue("a")
        again.redis.hset(again.key("active"), "a", owner)
        wait_until(lambda: again.inspector.job("a")["progress"], what="the latest report is in Redis")
        assert again.inspector.job("a")["progress"]["text"] == "away"
        again.close()


def test_a_report_for_a_deleted_queue_does_no_harm(rig: Rig) -> None:
    def handle(data: Any, job: Job) -> None:
        rig.queue.registry.delete("q", force=True)
        job.progress(0.1)
        wait_until(lambda: rig.reporter.sent is rig.reporter.latest)
        job.progress(0.2)
        wait_until(lambda: rig.reporter.sent is rig.reporter.latest and rig.reporter.sent)

    assert rig.run(handle) is None


def test_the_reporting_thread_starts_with_the_first_report(rig: Rig) -> None:
    def threads() -> int:
        return sum(thread.name == "progress" for thread in threading.enumerate())

    before = threads()
    rig.run(lambda data, job: None)
    assert threads() == before
    rig.worker.turn(done="a")

    def tell_twice(data: Any, job: Job) -> None:
        job.progress(0.1)
        job.progress(0.2)

    rig.run(tell_twice, "b")
    assert threads() == before + 1


def test_a_forked_process_and_a_pickled_job_report_nothing(rig: Rig) -> None:
    def handle(data: Any, job: Job) -> None:
        job.progress(0.5, "parent")
        pid = os.fork()
        if pid == 0:
            job.progress(0.9, "child")
            os._exit(0)
        os.waitpid(pid, 0)
        copy = pickle.loads(pickle.dumps(job))
        copy.progress(0.8, "copy")
        assert (repr(copy), copy.fence, copy.priority) == (repr(job), job.fence, job.priority)

    assert rig.run(handle) is None
    assert rig.slot.progress() == (0.5, "parent")
    wait_until(lambda: rig.stored() == (0.5, "parent"))
