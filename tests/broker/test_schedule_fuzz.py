"""Random schedules with several pulses that check, wait, fire, repeat and are late: every tick ends in exactly one of
the three counts, and every run is one job."""

import os
import random
from collections import Counter

import pytest

from forq.broker.claim import Settled
from forq.broker.link import Link
from forq.broker.schedules import DueTick
from forq.schedules import Every, Schedule
from tests.support.drive.one_queue import HandWorker, OneQueue
from tests.support.drive.scheduled_queue import ScheduleRig
from tests.support.models.journal_replay import Replay
from tests.support.thorough import examples

STEPS = int(os.environ.get("FORQ_TEST_STEPS", examples(500, 1500)))
# Shorter than users may set, because a test cannot advance the server's clock.
EVERY_MS = (2, 3, 7, 20)


class Pulses:
    """Three pulses with the ticks each has read, and the schedules as they were set."""

    def __init__(self, queue: OneQueue, seed: int) -> None:
        self.chance = random.Random(seed)
        self.queue = queue
        self.rig = ScheduleRig(queue)
        self.links = [Link(queue.url) for _ in range(3)]
        self.held: list[list[tuple[DueTick, int]]] = [[], [], []]
        self.worker: HandWorker = queue.worker()
        self.active: list[bytes] = []
        self.schedules: dict[str, Schedule] = {}
        self.first_ms: dict[str, int] = {}
        self.jobs = 0
        self.triggered = 0
        for number, every_ms in enumerate(EVERY_MS):
            self.set(f"s{number}", every_ms)

    def set(self, key: str, every_ms: int) -> None:
        overlap, catch_up = self.chance.choice(("skip", "queue")), self.chance.choice(("once", "all", "none"))
        schedule = Schedule(
            key, Every(every_ms), {"n": 1}, self.chance.choice((0, 5)), None, overlap, catch_up, 0, "user"
        )
        self.schedules[key] = schedule
        self.first_ms[key] = self.rig.schedules.set(schedule)

    def look(self) -> None:
        number = self.chance.randrange(3)
        due, now_ms = self.rig.due(self.links[number])
        self.held[number] += [(tick, now_ms) for tick in due]

    def fire(self) -> None:
        number = self.chance.randrange(3)
        if self.held[number]:
            tick, now_ms = self.chance.choice(self.held[number])
            fired = self.rig.fire(tick, now_ms)
            assert self.rig.fire(tick, now_ms) is False, "the call is repeated after a lost reply"
            if fired or self.chance.random() < 0.5:
                self.held[number].remove((tick, now_ms))

    def set_again(self) -> None:
        """Sets the same definition, or another policy with the same rule; ticks and counts continue."""
        key = self.chance.choice(list(self.schedules))
        first_ms = self.first_ms[key]
        if self.chance.random() < 0.5:
            self.rig.schedules.set(self.schedules[key])
        else:
            rule = self.schedules[key].rule
            assert isinstance(rule, Every)
            self.set(key, rule.every_ms)
        self.first_ms[key] = first_ms

    def trigger(self) -> None:
        key = self.chance.choice(list(self.schedules))
        if not self.rig.redis.hexists(self.queue.key("jobs"), f"schedule:{key}"):
            self.rig.schedules.trigger(key)
            self.triggered += 1

    def work(self) -> None:
        done: Settled = [part for job in self.active for part in (job.decode(), self.worker.fence, 7)]
        self.worker.number += 1
        turn = self.worker.consumer.turn(self.worker.number, done, [], 0, self.chance.choice((0, 1, 50)))
        self.worker.fence = turn.fence or self.worker.fence
        self.active = turn.jobs[::2]

    def run(self) -> None:
        doings = [self.look] * 5 + [self.fire] * 8 + [self.work] * 2 + [self.set_again, self.trigger]
        for _ in range(STEPS):
            self.chance.choice(doings)()

    def close(self) -> None:
        self.rig.close()
        for link in self.links:
            link.close()


@pytest.mark.parametrize("seed", range(int(os.environ.get("FORQ_TEST_SEEDS", "4"))))
def test_every_tick_is_run_skipped_or_missed_and_each_run_is_one_job(queue: OneQueue, seed: int) -> None:
    pulses = Pulses(queue, seed)
    pulses.run()
    runs = 0
    for key, schedule in pulses.schedules.items():
        assert isinstance(schedule.rule, Every)
        next_ms = pulses.rig.next_ms(key)
        assert next_ms is not None
        passed, rest = divmod(next_ms - pulses.first_ms[key], schedule.rule.every_ms)
        counts = pulses.rig.counts(key)
        assert (sum(counts), rest) == (passed, 0), f"{key}: {counts} of {passed} ticks"
        runs += counts[0]
    assert runs > 20
    born = Counter(job for verb, job in queue.journal_events() if verb == "enqueued")
    assert sum(born.values()) == runs + pulses.triggered
    assert max(count for job, count in born.items() if job and job.count(":") > 1) == 1, "one job per tick"
    journal = Replay().read_all(queue.entries())
    assert set(journal.ready) | set(journal.active) == queue.state().jobs, "the journal has all jobs"
    pulses.close()
