"""A producer: enqueues at random, singly and in bulk, and records a verdict on every id.

    asked     about to be sent; if nothing follows (this process was killed), the outcome is unknown
    ok        stored
    refused   certainly not stored
    unknown   may be stored or not

A dispatch with a token is repeated until it is stored. Flows and batches are not: if a call fails, they are withdrawn,
and their outcome is unknown. At SIGTERM it ends after the current dispatch.
"""

import argparse
import os
import random
import signal
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forq import Client, ForqError
from forq.api_types import When
from forq.broker.dependencies import NOT_USED, READ
from forq.broker.flows import FlowJob, store_flow
from forq.client import NewJob, Queue, new_job
from forq.errors import OutcomeUnknown
from tests.chaos.ground import Ground, append
from tests.chaos.unfenced import use_what_is_asked_for

# Queues whose ids are dispatched once each, and the one whose ids are dispatched repeatedly.
COROUTINES = "coroutines"
ONCE = ("kept", "crowd", COROUTINES, "plain")
REPEATS = "repeats"
REPEATED_IDS = 12

# Actions of handlers, how many of 1,000 jobs ask for each, and how often it fails before the job succeeds.
MISDEEDS = {
    "raise": (40, (1, 1, 2)),
    "permanent": (25, (9,)),
    "snooze": (40, (1, 1, 2)),
    "crash": (8, (1, 1, 9)),
    "segfault": (6, (1, 9)),
    "hang": (3, (1, 9)),
    "daemonise": (8, (1,)),
    "keep": (3, (1,)),
}
# Always included: without failures, fail handlers and scribes have nothing to do; snoozes do no harm.
USUAL = ("permanent", "snooze")

_PAUSE_SECONDS = 0.07
# Durations: most jobs are short; some are long enough to be still running when their supervisor is evicted.
_SECONDS = (*[0.0] * 5, *[0.001, 0.005] * 3, *[0.02] * 4, 0.1, 0.1, 0.3)
_AGAIN_SECONDS = 0.1
# Options of single jobs. None of them lets a job fail that would succeed otherwise, or its result expire.
_OPTIONS = (*[""] * 6, "r=20,b=20:50", "t=20000", "k=3600000", "x=3600000", "t=15000,r=30,b=10,k=7200000,x=3600000")
_MOST_IN_BULK = 20
# What a dispatch is; all others are jobs that wait for nothing.
_REPEATS, _BULK, _DEPENDANT, _FLOW, _BATCH = 0.1, 0.1, 0.06, 0.04, 0.04
_WHENS: tuple[When, ...] = ("done", "done", "done", "ended", "dead")
_RECENT = 30
# In place of the flow, in plans of other jobs.
NO_FLOW = "-"


class Producing:
    def __init__(self, url: str, verdicts: Path, seed: int, misdeeds: list[str]) -> None:
        self._client = Client(url)
        self._queues = {name: self._client.queue(name) for name in (*ONCE, REPEATS)}
        self._verdicts = verdicts
        self._plans = Ground(verdicts.parent.parent).plans
        # Ids that were enqueued not long ago, by queue.
        self._recent: dict[str, deque[str]] = {name: deque(maxlen=_RECENT) for name in ONCE}
        self._chance = random.Random(seed)
        self._misdeeds = misdeeds
        self._name = f"{seed}-{os.getpid()}"
        self._number = 0
        self._over = threading.Event()

    def run(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: self._over.set())
        # Each at least once, even in a short run.
        for what in self._misdeeds:
            self._dispatch("kept", [self._job(self._data(what), with_token=True)])
        while not self._over.wait(self._chance.random() * _PAUSE_SECONDS):
            kinds = ((_REPEATS, self._repeat), (_DEPENDANT, self._wait), (_FLOW, self._flow), (_BATCH, self._batch))
            drawn = self._chance.random()
            for share, dispatch in kinds:
                drawn -= share
                if drawn < 0:
                    dispatch()
                    break
            if drawn < 0:
                continue
            count = self._chance.randrange(2, _MOST_IN_BULK) if self._chance.random() < _BULK else 1
            # All of a call or none: a dispatch without a token must not be repeated with the others.
            with_token = self._chance.random() < 0.5
            jobs = [self._job(self._random_data(), with_token=with_token) for _ in range(count)]
            self._dispatch(self._chance.choice(ONCE), jobs)

    def _repeat(self) -> None:
        """An id that may exist or run: its verdict is recorded, but its run cannot be attributed."""
        job_id = f"repeat{self._chance.randrange(REPEATED_IDS)}"
        self._dispatch(REPEATS, [new_job(self._random_data(), id=job_id, token=self._token())])

    def _wait(self) -> None:
        """A job that waits for others, which may wait, run, have ended, or not exist: then it is refused."""
        if self._chance.random() < 0.2:
            after = [f"repeat{self._chance.randrange(REPEATED_IDS)}"]
            self._dispatch(REPEATS, [new_job(self._data("work"), id=self._new_id(), after=after, when="ended")])
            return
        queue = self._chance.choice(ONCE)
        if not (recent := self._recent[queue]):
            return
        after = self._chance.sample(recent, min(len(recent), self._chance.choice((1, 1, 2, 4))))
        when = self._chance.choice(_WHENS)
        job = new_job(self._random_data(), id=self._new_id(), after=after, when=when)
        self._plan(job.id, when, after)
        self._dispatch(queue, [job])

    def _flow(self) -> None:
        """One job, several that wait for it, one that waits for those; in one queue, or in two."""
        home = self._chance.choice(ONCE)
        queues, flow_id = (home, self._chance.choice(ONCE)), self._new_id()
        jobs: list[FlowJob] = []

        def add(queue: str, needs: tuple[int, ...], when: When = "done", use: int = NOT_USED) -> None:
            needed = [jobs[index].job.id for index in needs]
            data = {**self._random_data(), "needs": needed if use else []}
            jobs.append(FlowJob(queue, new_job(data, id=self._new_id()), needs, when, use))
            self._plan(jobs[-1].job.id, when, needed, flow_id)

        add(home, ())
        for _ in range(self._chance.randrange(1, 6)):
            add(self._chance.choice(queues), (0,), use=self._chance.choice((NOT_USED, READ)))
        add(self._chance.choice(queues), tuple(range(1, len(jobs))), self._chance.choice(_WHENS), READ)
        by_queue: defaultdict[str, list[str]] = defaultdict(list)
        for each in jobs:
            by_queue[each.queue].append(each.job.id)
        with self._recorded(by_queue):
            store_flow(self._client.link(), self._client.prefix, flow_id, jobs)

    def _batch(self) -> None:
        home, batch_id = self._chance.choice(ONCE), self._new_id()
        members = [(self._chance.choice(ONCE), self._job(self._random_data(), with_token=False)) for _ in range(5)]
        ids = [job.id for _, job in members]
        whens: dict[str, When] = {"on_done": "done", "on_end": "ended", "on_dead": "dead"}
        by_queue = defaultdict(list, {home: [f"{batch_id}:{name}" for name in whens]})
        for queue, job in members:
            by_queue[queue].append(job.id)
            self._plan(job.id, "done", [])
        for name, when in whens.items():
            self._plan(f"{batch_id}:{name}", when, ids)
        callbacks = {name: new_job(self._data("work")) for name in whens}
        keeps_results = self._chance.random() < 0.5
        with (
            self._recorded(by_queue),
            self._client.batch(home, id=batch_id, results=keeps_results, **callbacks) as batch,
        ):
            for queue, job in members:
                batch.add_job(queue, job)
                if self._chance.random() < 0.3:
                    batch.flush()

    @contextmanager
    def _recorded(self, by_queue: Mapping[str, list[str]]) -> Iterator[None]:
        """Records the verdict on jobs that are stored in several calls."""
        verdict = "ok"
        for queue, ids in by_queue.items():
            append(self._verdicts, f"asked {queue} {' '.join(ids)}")
        try:
            yield
        except ForqError:
            verdict = "unknown"
        for queue, ids in by_queue.items():
            append(self._verdicts, f"{verdict} {queue} {' '.join(ids)}")

    def _plan(self, job_id: str, when: When, needed: Sequence[str], flow: str = NO_FLOW) -> None:
        append(self._plans, " ".join((job_id, flow, when, *needed)))

    def _dispatch(self, queue: str, jobs: list[NewJob]) -> None:
        names = f"{queue} {' '.join(job.id for job in jobs)}"
        append(self._verdicts, f"asked {names}")
        verdict = self._sent(self._queues[queue], jobs)
        append(self._verdicts, f"{verdict} {names}")
        if queue in self._recent:
            self._recent[queue] += [job.id for job in jobs]

    def _sent(self, queue: Queue, jobs: list[NewJob]) -> str:
        may_be_stored = False
        while True:
            try:
                queue.enqueue_jobs(jobs)
                return "ok"
            except OutcomeUnknown:
                may_be_stored = True
            except ForqError:
                pass  # refused: this call stored nothing
            if not jobs[0].token or self._over.is_set():
                return "unknown" if may_be_stored else "refused"
            self._over.wait(_AGAIN_SECONDS)

    def _job(self, data: dict[str, Any], *, with_token: bool) -> NewJob:
        token = self._token() if with_token else None
        delay = self._chance.choice((None, None, None, 0.05, 0.5))
        priority = self._chance.choice((5, 5, 5, 2, 7))
        options = self._chance.choice(_OPTIONS)
        return new_job(data, id=self._new_id(), token=token, run_in=delay, priority=priority, options=options)

    def _new_id(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    def _token(self) -> str:
        return f"{self._name}-{self._chance.getrandbits(64)}"

    def _random_data(self) -> dict[str, Any]:
        drawn = self._chance.randrange(1000)
        for what in self._misdeeds:
            drawn -= MISDEEDS[what][0]
            if drawn < 0:
                return self._data(what)
        return self._data("work")

    def _data(self, what: str) -> dict[str, Any]:
        times = self._chance.choice(MISDEEDS[what][1]) if what in MISDEEDS else 0
        seconds = self._chance.choice(_SECONDS)
        return {"do": what, "times": times, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("verdicts", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("misdeeds", nargs="*")
    given = parser.parse_args()
    use_what_is_asked_for()
    Producing(given.url, given.verdicts, given.seed, given.misdeeds).run()


if __name__ == "__main__":
    main()
