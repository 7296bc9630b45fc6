"""Singletons and fail handlers while workers and supervisors are killed. Longer with `make fire`."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forq import Client, ForqError
from tests.end_to_end.test_random_kills import overlaps
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until, whole_lines
from tests.support.thorough import examples

DISPATCHES = int(os.environ.get("FORQ_TEST_DISPATCHES", examples(1200, 3000)))
FAILURES = int(os.environ.get("FORQ_TEST_FAILURES", examples(300, 600)))
PRODUCERS, IDS = 8, 100
QUICK = 'heartbeat = "1s"\nexpiry = "4s"\n'


@contextmanager
def killer(forq: Forq, seed: int, kills: list[int]) -> Iterator[None]:
    """Kills a child of this supervisor every few milliseconds until the block ends."""
    over = threading.Event()

    def kill() -> None:
        chance = random.Random(seed)
        while not over.wait(chance.random() * 0.1):
            done = forq.run_ctl("status", "--json")
            if done.returncode != 0:
                continue
            children = [c["pid"] for q in json.loads(done.stdout)["queues"] for c in q["children"] if c["pid"]]
            if children:
                kills.append(chance.choice(children))
                try:
                    os.kill(kills[-1], signal.SIGKILL)
                except ProcessLookupError:
                    kills.pop()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def dispatch_at_random(url: str, producer: int, seed: int, count: int, unknown: list[int]) -> None:
    """Dispatches the ids of this producer with random flags; some calls are made twice, with a token."""
    chance = random.Random(seed * 1000 + producer)
    queue = Client(url).queue("single")
    for number in range(count):
        job_id = f"id{chance.randrange(producer, IDS, PRODUCERS)}"
        token = f"{producer}-{number}" if chance.random() < 0.5 else None
        flags = {
            "update_data": chance.random() < 0.7,
            "update_run_at": chance.choice([True, False, "if_later", "if_earlier"]),
            "reset_counts": chance.choice([None, True, False]),
            "run_in": chance.choice([None, None, 0.01, 0.1]),
            "priority": chance.choice([5, 5, 2]),
        }
        for _ in range(2 if token and chance.random() < 0.2 else 1):
            try:
                queue.enqueue(f"{producer}.{number}", id=job_id, token=token, **flags)  # type: ignore[arg-type]
            except ForqError:
                unknown.append(number)


@pytest.mark.timeout(1800)
@pytest.mark.spec("Q1", "Q3", "Q5", "Q7")
def test_no_two_runs_of_an_id_overlap_and_the_last_data_runs(server: Server, redis_url: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("FORQ_TEST_SEED", "0")) or random.randrange(1, 10**6)
    trace = tmp_path / "trace"
    unknown: list[int] = []
    kills: list[int] = []
    with (
        running(redis=redis_url, settings=QUICK, trace=trace) as one,
        running(redis=redis_url, settings=QUICK, trace=trace) as two,
    ):
        for forq in (one, two):
            forq.create("single", "brief_run", min_backoff="5ms", max_backoff="20ms", max_retries=1000)
        threads = [
            threading.Thread(target=dispatch_at_random, args=(redis_url, n, seed, DISPATCHES // PRODUCERS, unknown))
            for n in range(PRODUCERS)
        ]
        with killer(one, seed, kills), killer(two, seed + 1, kills):
            for thread in threads:
                thread.start()
            wait_until(lambda: len(one.traces("start")) > DISPATCHES // 20, 120.0)
            os.kill(two.pid, signal.SIGKILL)
            assert two.process is not None
            two.process.wait()
            two.start()
            for thread in threads:
                thread.join()
        queue = Client(redis_url).queue("single")
        for number in range(IDS):
            queue.enqueue(f"final{number}", id=f"id{number}")
        wait_until(lambda: _is_empty(queue.status()), 120.0, "everything has run")
        ran = one.traces()
        print(
            f"seed {seed}: {DISPATCHES} dispatches, {len(unknown)} unknown, {len(kills)} kills and a supervisor, "
            f"{len([t for t in ran if t.event == 'start'])} runs, overlaps {overlaps(ran)}"
        )
        assert overlaps(ran) == 0
        for number in range(IDS):
            last = max((t for t in ran if t.job == f"id{number}" and t.event.startswith("ran=")), key=lambda t: t.fence)
            assert last.event == f"ran=final{number}"
        assert kills
        assert not unknown


def _is_empty(status: object) -> bool:
    assert isinstance(status, dict)
    return not any(status[state] for state in ("waiting", "scheduled", "blocked", "active"))


@pytest.mark.timeout(1800)
@pytest.mark.spec("Q40", "N19")
def test_every_permanent_failure_reaches_its_fail_handler_and_the_failed_log() -> None:
    seed = int(os.environ.get("FORQ_TEST_SEED", "0")) or random.randrange(1, 10**6)
    kills: list[int] = []
    with running() as forq:
        handlers = ["--handler", "traced:fail", "--fail-handler", "traced:on_fail", "--path", str(HANDLERS)]
        forq.ctl("create", "doomed", *handlers, "--set", "max_retries=0", "--set", "fail_min_backoff=10ms")
        with killer(forq, seed, kills):
            began = time.monotonic()
            ids: set[str] = set()
            queue = forq.client().queue("doomed")
            while len(ids) < FAILURES:
                ids |= set(queue.enqueue_many(range(min(200, FAILURES - len(ids)))))
                time.sleep(0.05)

            def handled() -> set[str]:
                events = [t.event for t in forq.traces() if t.event.startswith("failed=")]
                return {event.removeprefix("failed=").split("/")[0] for event in events}

            wait_until(lambda: handled() == ids, 300.0, "every failure has reached the fail handler")
        log = forq.state_dir / "logs" / "doomed"

        def logged() -> set[str]:
            lines = [line for file in log.glob("failed.jsonl*") for line in whole_lines(file)]
            return {json.loads(line)["id"] for line in lines}

        wait_until(lambda: log.exists() and logged() == ids, 60.0, "the failed log holds every failure")
        took = time.monotonic() - began
        print(f"seed {seed}: {FAILURES} failures, {len(kills)} kills, all handled and logged after {took:.1f} s")
        assert kills
        assert forq.queue_status("doomed")["failed"] == FAILURES
