"""fakeredis gives the same replies as a server and ends with the same data, for any sequence of operations."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forq.client import Client, Queue, new_job
from forq.errors import ForqError
from forq.testing.fake_server import FakeServer
from tests.guards.model_runs import dump
from tests.support.drive.one_queue import HandWorker, one_queue
from tests.support.drive.server import Server
from tests.support.thorough import examples

Operation = Callable[[Queue, HandWorker], Any]
_id, _key = st.sampled_from("abc"), st.sampled_from(["s1", "s2"])
_data = st.sampled_from([None, 7, "text", {"n": [1, 2.5, "ä"]}])
# Long enough that no job becomes due during a test.
_delay = st.sampled_from([None, 3600, 7200])


def _enqueue(**fields: Any) -> Operation:
    return lambda q, _: q.enqueue(**fields)


def _enqueue_all(ids: list[str]) -> Operation:
    return lambda q, _: q.enqueue_jobs([new_job(1, id=each) for each in ids])


def _call(method: str, *args: Any, **fields: Any) -> Operation:
    return lambda q, _: getattr(q, method)(*args, **fields)


def _work(how: str) -> Operation:
    """A worker takes a job and settles it."""

    def work(_: Queue, worker: HandWorker) -> Any:
        claimed = worker.turn(want=1)
        if not claimed or how == "hold":
            return claimed
        return claimed, worker.turn(**{how: claimed[0]}, **({"kind": "permanent"} if how == "failed" else {}))  # type: ignore[arg-type]

    return work


operations = st.one_of(
    st.builds(
        _enqueue,
        data=_data,
        id=_id,
        priority=st.sampled_from([0, 5, 9]),
        run_in=_delay,
        if_exists=st.sampled_from(["update", "skip", "refuse"]),
        update_data=st.booleans(),
        update_run_at=st.sampled_from([True, False, "if_later", "if_earlier"]),
        token=st.sampled_from([None, "t1"]),
    ),
    st.builds(_enqueue_all, st.lists(_id, max_size=4)),
    st.builds(_work, st.sampled_from(["done", "failed", "hold"])),
    st.builds(_call, st.sampled_from(["cancel", "remove", "job", "retry_dead", "discard_dead"]), _id),
    st.builds(lambda job_id: _call("wait", job_id, timeout=0), _id),
    st.builds(_call, st.sampled_from(["status", "pause", "resume", "schedules", "dead"])),
    st.builds(_call, st.just("jobs"), st.sampled_from([None, "waiting", "scheduled", "blocked", "active", "done"])),
    st.builds(lambda key: _call("schedule", key, every="1h", data={"n": 1}), _key),
    st.builds(lambda key: _call("schedule", key, cron="0 3 * * *", overlap="queue"), _key),
    st.builds(_call, st.sampled_from(["unschedule", "trigger"]), _key),
)


@contextmanager
def on(url: str) -> Iterator[Callable[[Operation], str]]:
    """Yields a function that runs an operation there and returns its reply or error, without times and random parts."""
    client = Client(url)
    with one_queue(url, max_retries=1, retry_lane_retries=0, keep_done_ms=3_600_000) as queue:
        worker = queue.worker()

        def carry_out(operation: Operation) -> str:
            try:
                answer = operation(client.queue("q"), worker)
            except ForqError as exc:
                return f"{type(exc).__name__}: {_normal(str(exc)).replace(url, '<url>')}"
            return _normal(json.dumps(answer, default=_plain, sort_keys=True))

        yield carry_out
    client.close()


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _normal(text: str) -> str:
    """Removes times, ages, random ids and hashes."""
    text = re.sub(r"\b1[5-9]\d{8}(\d{3}|\d{6})?\b(\.\d+)?|20\d\d-\d\d-\d\d[T ][\d:.]+(\+00:00|Z)?", "<time>", text)
    text = re.sub(r'("[a-z_]*(?:seconds|age|ms|bytes|micros)": )[\d.e-]+', r"\1<number>", text)
    return re.sub(r"\b[0-9a-f]{32,40}\b|\b[0-9A-Za-z_-]{22}\b", "<id>", text)


@settings(
    max_examples=examples(25, 200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(operations, min_size=5, max_size=40))
def test_replies_and_stored_data_are_the_same(server: Server, fake: FakeServer, chosen: list[Operation]) -> None:
    server.flush()
    fake.flush()
    with on(server.url) as on_server, on(fake.url) as on_fake:
        for number, operation in enumerate(chosen):
            assert on_fake(operation) == on_server(operation), f"operation {number}"
        # A fake is used like a server.
        assert dump(fake) == dump(server)  # type: ignore[arg-type]
