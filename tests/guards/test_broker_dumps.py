"""The broker leaves the same keys and journals: recorded runs, repeated, end in the recorded dumps.

To see a difference, set FORQ_GUARDS_DUMPS=DIR on both trees: it writes the whole dumps. Then compare the folders.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from forq.broker.dead import DeadJobs
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.outbox import Outbox
from tests.broker.test_external_model import ExternalMachine
from tests.broker.test_limits_model import LimitedQueueMachine
from tests.broker.test_model import QueueMachine
from tests.broker.test_release_model import ReleaseMachine
from tests.guards.model_runs import choose, dump, read_runs, repeat, write_runs
from tests.guards.recording import RECORD, RECORDED, compare
from tests.support.drive.one_queue import EXPIRY_MS, one_queue
from tests.support.drive.scheduled_queue import ScheduleRig
from tests.support.drive.server import Server

MACHINES = {"queue": QueueMachine, "limits": LimitedQueueMachine, "release": ReleaseMachine}
SEEDS = 4


@pytest.mark.parametrize("name", MACHINES)
def test_recorded_runs_of_the_models_end_as_they_did(server: Server, name: str) -> None:
    runs = RECORDED / f"runs_{name}.jsonl"
    if RECORD:
        write_runs(runs, choose(MACHINES[name], server))
    check(f"dumps_{name}.txt", model_dumps(MACHINES[name], server, runs))


def model_dumps(machine: type[RuleBasedStateMachine], server: Server, runs: Path) -> Iterator[str]:
    for run in read_runs(runs):
        yield repeat(machine, server, run)


def test_seeded_runs_of_external_workers_end_as_they_did(server: Server) -> None:
    def dumps() -> Iterator[str]:
        for seed in range(SEEDS):
            server.flush()
            machine = ExternalMachine(server.url, seed)
            machine.run()
            yield dump(server)
            machine.queue.close()

    check("dumps_external.txt", dumps())


def test_jobs_enqueued_alone_end_as_they_did(server: Server) -> None:
    """enqueue.lua stores one new job of a queue without max_items on a shorter path, which the models do not take."""
    server.flush()
    check("dumps_single.txt", single_jobs(server))


def single_jobs(server: Server) -> Iterator[str]:
    """A job for nobody, jobs for an idle worker, and an id that is known already; a dump after each."""
    with one_queue(server.url, "q", max_items=0) as queue:
        queue.enqueue("a")
        yield dump(server)
        worker = queue.worker()
        assert worker.turn(want=1) == ["a"]
        assert worker.turn(done="a") == []
        queue.enqueue("b", priority=2)
        queue.enqueue("c", if_exists="update")
        yield dump(server)
        queue.enqueue("c", priority=1, if_exists="update")
        yield dump(server)


def test_operations_outside_the_models_end_as_they_did(server: Server) -> None:
    server.flush()
    check("dumps_others.txt", others(server))


def others(server: Server) -> Iterator[str]:
    """Schedules, dead jobs that are revived and discarded, outboxes, options, deleted queues; a dump after each."""
    with one_queue(server.url, "q", max_retries=0, retry_lane_retries=0) as queue:
        worker = queue.worker()
        queue.enqueue("a", "b", "c")
        assert worker.turn(want=3) == ["a", "b", "c"]
        worker.turn(failed="abc", kind="permanent")
        yield dump(server)
        dead = DeadJobs(queue.link, DEFAULT_PREFIX, "q")
        dead.retry("a")
        dead.discard("b")
        yield dump(server)
        outbox = Outbox(queue.link, DEFAULT_PREFIX, "p1", EXPIRY_MS)
        lines = outbox.collect("q")
        yield dump(server)
        assert outbox.forget("q", lines)
        rig = ScheduleRig(queue)
        rig.set("hourly", data={"n": 1}, priority=3, overlap="skip")
        rig.set("nightly", cron="0 3 * * *", zone="Europe/Berlin", catch_up="all")
        rig.pass_time(3 * 3_600_000, "hourly")
        rig.promote()
        rig.schedules.trigger("nightly")
        yield dump(server)
        rig.schedules.drop("hourly")
        rig.close()
        queue.registry.configure("q", {"max_retries": 9}, {})
        queue.registry.pause("q", paused=True)
        yield dump(server)
        queue.registry.delete("q", force=True)
        yield dump(server)
        while queue.registry.purge("q", lambda dropped: None):
            pass
        yield dump(server)


def check(name: str, dumps: Iterator[str]) -> None:
    digests = []
    for number, text in enumerate(dumps):
        digests.append(f"{number} {hashlib.sha256(text.encode()).hexdigest()}")
        if "FORQ_GUARDS_DUMPS" in os.environ:
            folder = Path(os.environ["FORQ_GUARDS_DUMPS"]) / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(number)).write_text(text)
    assert digests, "nothing was run"
    compare(name, "\n".join(digests) + "\n")
