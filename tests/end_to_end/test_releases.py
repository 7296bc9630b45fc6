"""Release modes with whole supervisors: items per awaiter, how often, how late. Longer with `make releases`."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import orjson
import psutil
import pytest

from forq import Client
from forq.broker.journal import Event, read_entry
from forq.client import Release, new_job
from forq.errors import RedisUnavailable
from tests.support.drive.server import Server
from tests.support.drive.supervisor import BIN, Forq, running
from tests.support.drive.wait import wait_until, whole_lines
from tests.support.thorough import examples

ITEMS = int(os.environ.get("FORQ_TEST_AWAITED", "200"))
RELEASES = int(os.environ.get("FORQ_TEST_RELEASES", examples(600, 1500)))
AGING = int(os.environ.get("FORQ_TEST_AGING", examples(1000, 2000)))
# Limit for loaded CI machines; the measured time is printed.
LATE_SECONDS = float(os.environ.get("FORQ_TEST_LATE", "2.0"))
INTERVAL_US = 5000
ROOT = Path(__file__).parent.parent.parent


def journal(server: Server, name: str) -> list[Event]:
    with server.connect() as redis:
        entries: Any = redis.xrange(f"forq:queue:{{{name}}}:events")
        return [event for _, fields in entries for event in read_entry(fields, name)]


def failed_log(forq: Forq, name: str) -> list[dict[str, Any]]:
    file = forq.state_dir / "logs" / name / "failed.jsonl"
    return [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def create(forq: Forq, name: str, mode: str, **options: object) -> None:
    forq.ctl("create", name, "--mode", mode, *(f"--set={key}={value}" for key, value in options.items()))


def spread(values: list[float]) -> str:
    cuts = quantiles(values, n=100)
    return f"min {min(values):.2f}, p50 {cuts[49]:.2f}, p99 {cuts[98]:.2f}, max {max(values):.2f}"


@pytest.mark.timeout(300)
@pytest.mark.spec("N13", "N14", "N20")
def test_each_awaiter_gets_exactly_its_item_and_two_supervisors_release_no_faster(
    server: Server, redis_url: str
) -> None:
    ids = [f"item{number}" for number in range(ITEMS)]
    got: dict[str, Release | None] = {}

    def wait_for(job_id: str) -> None:
        got[job_id] = Client(server.url).queue("gate").wait_release(job_id, timeout=60 + ITEMS * 0.02)

    with running(redis=redis_url) as one, running(redis=redis_url) as two:
        create(one, "gate", "auto_release", release_interval="5ms")
        wait_until(lambda: [queue["state"] for queue in two.status()["queues"]] == ["running"])
        threads = [threading.Thread(target=wait_for, args=(job_id,)) for job_id in random.sample(ids, len(ids))]
        for thread in threads:
            thread.start()
        wait_until(lambda: one.queue_status("gate")["awaiters"] == ITEMS, 60)
        one.client().queue("gate").enqueue_jobs(new_job({"n": job_id}, id=job_id) for job_id in ids)
        for thread in threads:
            thread.join()
        tried_by = {event.actor for event in journal(server, "gate") if event.verb == "claimed"}

    assert {job_id: release and (release.id, release.data) for job_id, release in got.items()} == {
        job_id: (job_id, {"n": job_id}) for job_id in ids
    }
    claims = [event.time_us for event in journal(server, "gate") if event.verb == "claimed"]
    gaps = [after - before for before, after in itertools.pairwise(claims)]
    assert len(claims) == ITEMS
    assert min(gaps) >= INTERVAL_US
    print(f"\n{ITEMS} releases by {len(tried_by)} supervisors, gaps in ms: {spread([gap / 1000 for gap in gaps])}")


@pytest.mark.timeout(300)
@pytest.mark.spec("N15", "N16", "N17", "N18", "N19")
def test_an_item_without_an_awaiter_is_tried_then_logged_and_can_be_recovered_once(
    server: Server, redis_url: str
) -> None:
    items, retries, lane_retries = 100, 10, 3
    with running(redis=redis_url) as forq:
        create(forq, "gate", "auto_release", release_interval="1ms")
        forq.client().queue("gate").enqueue_jobs(new_job(number, id=f"item{number}") for number in range(items))
        wait_until(lambda: len(failed_log(forq, "gate")) == items, 120, "every item is in the failed log")
        events = journal(server, "gate")
        file = str(forq.state_dir / "logs" / "gate" / "failed.jsonl")
        forq.ctl("pause", "gate")
        first, second = (
            orjson.loads(forq.ctl("recover", file, "--json")),
            orjson.loads(forq.ctl("recover", file, "--json")),
        )
        status = forq.queue_status("gate")

    tries = Counter(event.job for event in events if event.verb == "claimed")
    assert tries == {f"item{number}": 1 + retries + lane_retries for number in range(items)}
    assert [event for event in events if event.verb == "dead" and event.cause != "NotAwaited"] == []
    assert lane_tries_while_others_waited(events, 1 + retries) == []
    assert (first["recovered"], second["recovered"]) == (items, 0)
    assert status["waiting"] == items
    lines = sum(event.verb == "dead" for event in events)
    print(f"\n{items} items, {tries.total()} tries; {lines} in the failed log; recovered {first}, then {second}")


def lane_tries_while_others_waited(events: list[Event], main_tries: int) -> list[Event]:
    """Tries after the last one in the main lane, made while an item was in line there."""
    waiting: set[str] = set()
    number: dict[str, int] = {}
    early = []
    for event in events:
        job = event.job or ""
        if event.verb == "claimed":
            waiting.discard(job)
            number[job] = event.attempt or 0
            if number[job] > main_tries and waiting:
                early.append(event)
        elif event.verb in ("enqueued", "promoted") or (event.verb == "retried" and number[job] < main_tries):
            waiting.add(job)
        elif event.verb == "scheduled":
            waiting.discard(job)
    return early


class Awaiters:
    """Processes that await items; killed ones are replaced."""

    def __init__(self, url: str, folder: Path, number: int) -> None:
        self._command = [sys.executable, "-m", "tests.end_to_end.awaiter", url, "gate"]
        self._folder = folder
        self._started = 0
        self.processes = [self._start() for _ in range(number)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        return subprocess.Popen([*self._command, str(self._folder / f"got{self._started}")], cwd=ROOT)

    def kill_one(self, chance: random.Random) -> None:
        which = chance.randrange(len(self.processes))
        self.processes[which].kill()
        self.processes[which].wait()
        self.processes[which] = self._start()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def got(self) -> list[tuple[str, int]]:
        lines = [line.split() for file in self._folder.glob("got*") for line in whole_lines(file)]
        return [(job_id, int(fence)) for job_id, fence in lines]


def kill(what: str, forq: Forq, server: Server, awaiters: Awaiters, chance: random.Random) -> None:
    """Kills a child, an awaiter or the server (which is restarted)."""
    if what == "awaiter":
        awaiters.kill_one(chance)
    elif what == "redis":
        server.kill()
        time.sleep(chance.random() * 0.3)
        server.start()
    else:
        done = forq.run_ctl("status", "gate", "--json")
        children = orjson.loads(done.stdout)["queues"][0]["children"] if done.returncode == 0 else []
        pids = [child["pid"] for child in children if child["pid"]]
        with suppress(ProcessLookupError, IndexError):
            os.kill(chance.choice(pids), signal.SIGKILL)


def enqueue_all(url: str, ids: list[str]) -> None:
    """Enqueues each id exactly once, whatever breaks meanwhile."""
    queue = Client(url).queue("gate")
    for start in range(0, len(ids), 100):
        chunk = [new_job({"n": job_id}, id=job_id, token=job_id) for job_id in ids[start : start + 100]]
        while True:
            with suppress(RedisUnavailable):
                queue.enqueue_jobs(chunk, if_exists="skip")
                break
            time.sleep(0.05)


@pytest.mark.timeout(1800)
def test_under_random_kills_each_item_is_released_once_or_still_queued_or_logged(tmp_path: Path) -> None:
    seed = int(os.environ.get("FORQ_TEST_SEED", "0")) or random.randrange(1, 10**6)
    chance, killed = random.Random(seed), Counter[str]()
    ids = [f"item{number}" for number in range(RELEASES)]
    with ExitStack() as stack:
        server = stack.enter_context(Server(appendonly=True))
        forq = stack.enter_context(running(redis=server.url))
        options = {"release_interval": "1ms", "lease": "1s", "journal_max": "1gb", "dead_max": 10**6}
        create(forq, "gate", "auto_release", **options)
        awaiters = Awaiters(server.url, tmp_path, 4)
        stack.callback(awaiters.end)
        producer = threading.Thread(target=enqueue_all, args=(server.url, ids))
        producer.start()
        deadline = time.monotonic() + 60 + RELEASES * 0.03
        # One of each to begin with: a quick machine may be done soon.
        first = ["awaiter", "child"]
        while first or (len(set(awaiters.got())) < RELEASES * 0.95 and time.monotonic() < deadline):
            time.sleep(chance.random() * 0.5)
            what = first.pop() if first else chance.choices(("child", "awaiter", "redis"), (5, 5, 1))[0]
            kill(what, forq, server, awaiters, chance)
            killed[what] += 1
        producer.join()
        wait_until(lambda: _left(forq) == 0, 60 + RELEASES * 0.01, "no item is waiting or handed over")
        wait_until(lambda: len(failed_log(forq, "gate")) >= forq.queue_status("gate")["failed"], 60)
        awaiters.end()
        events = journal(server, "gate")
        logged = {line["id"] for line in failed_log(forq, "gate")}

    released = [(event.job or "", event.fence) for event in events if event.verb == "released"]
    got = awaiters.got()
    print(f"\nseed {seed}: {len(ids)} items, killed {dict(killed)}")
    print(f"released {len(released)}, in the failed log {len(logged)}, written down by awaiters {len(got)}")
    assert len(released) == len({job for job, _ in released}), "nothing is released twice"
    assert len(got) == len({job for job, _ in got}), "no item went to two awaiters"
    assert set(got) <= set(released)
    assert {job for job, _ in released} | logged == set(ids)
    assert {job for job, _ in released} & logged == set()


def _left(forq: Forq) -> int | None:
    status = forq.queue_status("gate")
    counts = [status[state] for state in ("waiting", "active", "scheduled", "retry", "blocked")]
    return None if None in counts else sum(counts)


@pytest.mark.timeout(300)
@pytest.mark.spec("N22")
def test_items_above_max_age_are_given_up_on_time_and_none_silently(server: Server, redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        create(forq, "orders", "on_request", item_timeout="2s", journal_max="1gb", dead_max=10**6)
        forq.client().queue("orders").enqueue_many(range(AGING))
        wait_until(lambda: forq.queue_status("orders")["dead"] == AGING, 60)
        wait_until(lambda: len(failed_log(forq, "orders")) == AGING, 60)
        events = journal(server, "orders")
        commands = {child["role"]: child["state"] for child in forq.queue_status("orders")["children"]}
        title = psutil.Process(forq.child("orders")["pid"]).cmdline()[0]
    born = {event.job: event.time_us for event in events if event.verb == "enqueued"}
    late = [(event.time_us - born[event.job] - 2_000_000) / 1000 for event in events if event.verb == "dead"]
    print(f"\n{AGING} items, lateness in ms: {spread(late)}; children {commands}; {title}")
    assert len(late) == len(born) == AGING
    # Due times are whole milliseconds, rounded down.
    assert min(late) > -1
    assert max(late) <= LATE_SECONDS * 1000
    assert "on request" in title


@pytest.mark.spec("N24")
def test_a_queue_keeps_its_mode_and_its_options(server: Server, redis_url: str) -> None:
    with running(redis=redis_url) as one, running(redis=redis_url) as two:
        create(one, "gate", "auto_release", release_interval="50ms")
        for arguments in (("--mode", "on_request"), ("--mode", "auto_release", "--set=release_interval=1ms")):
            refused = subprocess.run(
                [str(BIN / "forqctl"), "create", "gate", *arguments], env=two.environ(), capture_output=True, text=True
            )
            assert refused.returncode == 1
            assert "exists with" in refused.stderr
        assert one.run_ctl("set", "gate", "release_interval=1ms").returncode == 2
