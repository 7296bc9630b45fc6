"""Flows over two queues, and batches, while processes, supervisors and the server are killed. Longer with `make flows`.

Attempts may repeat; each job ends exactly once, and no job begins before those that it waits for have ended.
"""

import os
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from forq import Client
from forq.app.flow import Flow, Node
from forq.batch import Batch
from forq.broker.journal import Event, read_entry
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.errors import ExitCode
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.handlers import flow_traces
from tests.support.handlers.flow_traces import CHILDREN, HOME, PARTS, app
from tests.support.thorough import examples

pytestmark = pytest.mark.timeout(3600)

FLOWS = int(os.environ.get("FORQ_TEST_FLOWS", examples(10, 30)))
PARTS_PER_FLOW = 20
BATCHES = 2 * FLOWS
ITEMS_PER_BATCH = 6
ROOT = Path(__file__).resolve().parents[2]
QUICK = 'heartbeat = "1s"\nexpiry = "4s"\n'
# Attempts are killed again and again, which is no fault of the jobs; the journal is read at the end.
OPTIONS = {"max_stalls": 1000, "max_retries": 1000, "min_backoff": "5ms", "max_backoff": "50ms", "journal_max": "1gb"}
OPTIONS |= {"processes": 2, "done_max": 1_000_000, "dead_max": 1_000_000}
PAUSE_SECONDS = 0.4
STRIKES_PER_SUPERVISOR = 16
DRAIN_SECONDS = 240.0 + FLOWS
# Keys of a queue in which nothing may be left once every job has ended.
TRANSIENT = ("held", "held:jobs", "held:open", "inputs", "sources", "edges", "resolving", "reports", "batch:members")
# Durations of jobs.
SECONDS = (0, 0.01, 0.05, 0.2)
LIVE = ("waiting", "scheduled", "blocked", "active", "held")


class Killer(threading.Thread):
    """Kills a process of one supervisor at random moments, sometimes the supervisor itself, and starts it again."""

    def __init__(self, forq: Forq, seed: int) -> None:
        super().__init__()
        self.kills = self.killed_supervisors = 0
        self.exits: list[int] = []
        self._forq, self._chance = forq, random.Random(seed)
        self._over = threading.Event()

    def run(self) -> None:
        strikes = 0
        while not self._over.wait(self._chance.random() * PAUSE_SECONDS):
            process = self._forq.process
            assert process is not None
            if process.poll() is not None:
                self.exits.append(process.returncode)
                self._forq.start(ready=False)
            elif strikes % STRIKES_PER_SUPERVISOR == 4:
                strikes += 1
                process.kill()
                process.wait()
                self.killed_supervisors += 1
                self._forq.start(ready=False)
            elif self._kill_child():
                strikes += 1
                self.kills += 1

    def _kill_child(self) -> bool:
        try:
            children = psutil.Process(self._forq.pid).children()
            if children:
                os.kill(self._chance.choice(children).pid, signal.SIGKILL)
            return bool(children)
        except (psutil.Error, ProcessLookupError):
            return False

    def stop(self) -> None:
        self._over.set()
        self.join()


@contextmanager
def two_supervisors(server: Server, directory: Path) -> Iterator[list[Forq]]:
    trace = directory / "trace"
    environment = {"PYTHONPATH": str(ROOT)}
    with (
        running(redis=server.url, settings=QUICK, trace=trace, environment=environment) as one,
        running(redis=server.url, settings=QUICK, trace=trace, environment=environment) as two,
    ):
        settings = [f"--set={name}={value}" for name, value in OPTIONS.items()]
        for forq in (one, two):
            for queue in (HOME, PARTS):
                forq.ctl("create", queue, "--handler", f"{flow_traces.__name__}:app", *settings)
        app._client = Client(server.url)
        try:
            yield [one, two]
        finally:
            app._client.close()
            app._client = None


@contextmanager
def fire(supervisors: list[Forq], seed: int) -> Iterator[list[Killer]]:
    killers = [Killer(forq, seed + number) for number, forq in enumerate(supervisors)]
    for killer in killers:
        killer.start()
    try:
        yield killers
    finally:
        for killer in killers:
            killer.stop()
    assert {code for killer in killers for code in killer.exits} <= {ExitCode.EVICTED_TOO_OFTEN}


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("FORQ_TEST_SEED", "0")) or random.randrange(1, 10**6)


def restart(server: Server) -> None:
    """Nothing that was answered is lost: the file is written before the answer."""
    server.kill()
    server.start()
    # The next call opens another connection.
    app.client.close()


def is_drained() -> bool:
    """Everything has ended, so no report is needed any more."""
    return not any(app.client.queue(queue).status()[state] for queue in (HOME, PARTS) for state in LIVE)  # type: ignore[literal-required]


def leftovers(server: Server) -> list[str]:
    with server.connect() as redis:
        bases = [queue_base(DEFAULT_PREFIX, queue) for queue in (HOME, PARTS)]
        found = [f"{base}:{name}" for base in bases for name in TRANSIENT if redis.exists(f"{base}:{name}")]
        return found + [key.decode() for base in bases for key in redis.scan_iter(match=f"{base}:reports:*")]


class Story:
    """What has happened, by job: events from the journals, times of attempts from the trace."""

    def __init__(self, server: Server, forq: Forq) -> None:
        self.events: defaultdict[str, list[Event]] = defaultdict(list)
        with server.connect() as redis:
            for queue in (HOME, PARTS):
                entries: Any = redis.xrange(f"{queue_base(DEFAULT_PREFIX, queue)}:events")
                for _, fields in entries:
                    for event in read_entry(fields, queue):
                        self.events[event.job or ""].append(event)
        self.first_start: dict[str, float] = {}
        self._times: dict[tuple[str, int, str], float] = {}
        self.attempts = 0
        for trace in forq.traces():
            self._times[trace.job, trace.fence, trace.event] = trace.time
            if trace.event == "start":
                self.attempts += 1
                self.first_start[trace.job] = min(trace.time, self.first_start.get(trace.job, trace.time))

    def ends(self, job: str) -> list[str]:
        return [event.verb for event in self.events[job] if event.verb in ("done", "dead", "cancelled")]

    def end_time(self, job: str) -> float:
        """The last time in the trace of the attempt with which the job ended."""
        (event,) = (event for event in self.events[job] if event.verb in ("done", "dead"))
        return self._times[job, event.fence, "end" if event.verb == "done" else "start"]

    def begins_after(self, job: str, other: str) -> bool:
        return self.first_start[job] > self.end_time(other)


def store_flow(number: int, chance: random.Random) -> tuple[Flow, Node[list[int]]]:
    with app.flow() as flow:
        fetched = flow.add(flow_traces.fetch.prepare(PARTS_PER_FLOW))
        parsed = flow.then(flow_traces.parse, fetched, number)
        parts = [flow.then(flow_traces.process, parsed, part, chance.choice(SECONDS)) for part in range(PARTS_PER_FLOW)]
        merged = flow.join(flow_traces.merge, parts)
    return flow, merged


def test_every_flow_runs_to_its_end_exactly_once_and_in_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Server(appendonly=True) as server, two_supervisors(server, tmp_path) as supervisors:
        with fire(supervisors, seed) as killers:
            flows = []
            for number in range(FLOWS):
                flows.append(store_flow(number, chance))
                if number == FLOWS // 2:
                    restart(server)
            wait_until(is_drained, DRAIN_SECONDS, "every flow has ended")
        wait_until(lambda: not leftovers(server), 60.0, "nothing is left")
        story = Story(server, supervisors[0])
        kills, killed = (sum(getattr(each, name) for each in killers) for name in ("kills", "killed_supervisors"))
        jobs = [job for flow, _ in flows for job in flow._jobs]
        print(
            f"seed {seed}: {FLOWS} flows, {len(jobs)} jobs, {story.attempts} attempts, {kills} kills, and of "
            f"supervisors {killed}"
        )
        for number, (flow, merged) in enumerate(flows):
            for each in flow._jobs:
                assert story.ends(each.job.id) == ["done"]
                for needed in each.needs:
                    assert story.begins_after(each.job.id, flow._jobs[needed].job.id)
            assert merged.ref.result(10) == [part * number for part in range(PARTS_PER_FLOW)]
        # The test proves nothing unless kills hit running jobs.
        assert story.attempts > len(jobs)
        assert killed


def open_batch(number: int, chance: random.Random) -> tuple[Batch, list[str]]:
    """Every other batch has a member that dies. Returns the ids of the members but those that are added later."""
    batch = app.batch(
        on_done=flow_traces.tell.prepare("done"),
        on_end=flow_traces.tell.prepare("end"),
        on_dead=flow_traces.tell.prepare("dead"),
    )
    with batch:
        items = [
            flow_traces.item.using(queue=(HOME, PARTS)[each % 2]).prepare(chance.choice(SECONDS))
            for each in range(ITEMS_PER_BATCH)
        ]
        more = [flow_traces.spawn.prepare(0.1)]
        if number % 2:
            more.append(flow_traces.fail.using(queue=PARTS).prepare(0.01))
        members = [batch.add(each).id for each in (*items, *more)]
    return batch, members


def test_every_callback_runs_exactly_once_after_its_batch(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Server(appendonly=True) as server, two_supervisors(server, tmp_path) as supervisors:
        with fire(supervisors, seed) as killers:
            opened = []
            for number in range(BATCHES):
                opened.append(open_batch(number, chance))
                if number == BATCHES // 2:
                    restart(server)
            wait_until(is_drained, DRAIN_SECONDS, "every batch has ended")
        wait_until(lambda: not leftovers(server), 60.0, "nothing is left")
        story = Story(server, supervisors[0])
        kills = sum(killer.kills for killer in killers)
        print(f"seed {seed}: {BATCHES} batches, {story.attempts} attempts, {kills} kills")
        for number, (batch, members) in enumerate(opened):
            spawner = members[ITEMS_PER_BATCH]
            # Their ids begin with that of the member that has added them.
            children = [job for job in story.events if job.startswith(f"{spawner}.")]
            assert len(children) == CHILDREN
            dies = number % 2 == 1
            for member in (*members, *children):
                assert [event.verb for event in story.events[member]].count("enqueued") == 1
                assert story.ends(member) == ["dead" if dies and member == members[-1] else "done"]
                assert story.begins_after(f"{batch.id}:on_end", member)
            assert story.ends(f"{batch.id}:on_end") == ["done"]
            assert story.ends(f"{batch.id}:on_done") == ["dead" if dies else "done"]
            assert story.ends(f"{batch.id}:on_dead") == ["done" if dies else "cancelled"]
            info = batch.info()
            assert (info["state"], info["open"]) == ("failed" if dies else "done", 0)
            assert (info["members"], info["dead"]) == (len(members) + CHILDREN, int(dies))
        assert kills
