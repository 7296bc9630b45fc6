"""Replay: dead jobs selected by a predicate are enqueued again, once; for the others there is a reason."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from forq.broker.dead import DeadJobs
from forq.broker.enqueue import new_job
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.broker.record import unpack
from forq.errors import ForqError, UnknownQueue, UsageError
from forq.job_options import pack_job_options
from forq.pipeline import replay
from forq.pipeline.format import EVENTS
from forq.pipeline.history import History, read_history
from forq.pipeline.replay import Lookup, job_lifecycles
from forq.settings import stored_defaults
from tests.pipeline.event_rows import Journal, event
from tests.support.drive.one_queue import OneQueue, one_queue


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url) as queue:
        yield queue


class Replays:
    """The command over a history of what the queue's journal has now."""

    def __init__(self, spark: SparkSession, queue: OneQueue, directory: Path) -> None:
        self._spark = spark
        self._queue = queue
        self._history = str(directory)

    def ingest(self) -> None:
        events = self._spark.read.format("forq").option("redis", self._queue.url).load()
        history = History(self._spark, self._history)
        history.folder.delete("_published/0")
        history.publish(0, events)

    def publish(self, *journals: Journal) -> None:
        rows = [row for journal in journals for row in journal.rows()]
        History(self._spark, self._history).publish(1, self._spark.createDataFrame(rows, EVENTS))

    def __call__(self, where: str, *given: str, prefix: str = DEFAULT_PREFIX) -> int:
        parser = ArgumentParser()
        replay.add_arguments(parser)
        common = Namespace(history=self._history, redis=self._queue.url, prefix=prefix)
        return replay.run(parser.parse_args(["--where", where, *given], common))


@pytest.fixture
def replays(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> Replays:
    return Replays(spark, queue, tmp_path / "history")


def end_all(queue: OneQueue, *, well: bool = False, name: str = "w1") -> None:
    """A worker takes everything that waits; all of it is done, or fails for good."""
    worker = queue.worker(name)
    ids = worker.turn(want=100)
    while ids:
        ended = {"done": ids} if well else {"failed": ids, "kind": "permanent"}
        # The helper walks through ids, and takes a list of longer ones as well.
        ids = worker.turn(want=100, **ended)


def result_of(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("count", [1000])
def test_selected_dead_jobs_are_enqueued_again_with_all_their_fields(
    queue: OneQueue, replays: Replays, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"text": 'ü " \n', "big": 2**63 - 1, "float": 0.1, "deep": [[None, True]]}
    jobs = [
        new_job([number, data], id=f"{kind}{number}", identifier=f"i{number}", priority=number % 10, type="t")
        for kind in ("pick", "leave")
        for number in range(count // (1 if kind == "pick" else 10))
    ]
    queue.producer.enqueue_many(jobs)
    end_all(queue)
    replays.ingest()
    assert replays("job like 'pick%' and state = 'dead' and attempts = 1", "--json") == 0
    assert result_of(capsys) == {
        "picked": count,
        "replayed": count,
        "already": 0,
        "reasons": {},
        "not_replayed": [],
        "not_listed": 0,
        "dry_run": False,
    }
    records = queue.state().records
    assert set(records) == {f"pick{number}" for number in range(count)}
    for number in range(count):
        record = unpack(records[f"pick{number}"])
        assert (record.data, record.identifier, record.type) == ([number, data], f"i{number}", "t")
        assert (record.priority, record.retry_count) == (number % 10, 0)


def test_a_replayed_job_keeps_its_options_without_the_expiry(
    queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"timeout": "5m", "max_retries": 2, "backoff": ["1s", "90s"], "keep_done": "1h"}
    options = pack_job_options(**own, expires_in="1h")  # type: ignore[arg-type]
    queue.producer.enqueue(
        [new_job(1, id="all", options=options), new_job(2, id="expiry", expires_in=60), new_job(3, id="none")]
    )
    end_all(queue)
    replays.ingest()
    assert replays("state = 'dead' and (options is null or options like '%x=%')") == 0
    jobs = {job_id: queue.inspector.job(job_id) for job_id in ("all", "expiry", "none")}
    assert jobs["all"]["options"] == own
    assert not any("expires_at" in job for job in jobs.values())
    assert not any("options" in jobs[job_id] for job_id in ("expiry", "none"))


def test_a_job_with_options_is_not_replayed_to_a_queue_of_another_mode(
    redis_url: str, queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.registry.create("outside", "external", 100, stored_defaults("external"), {})
    queue.producer.enqueue([new_job(1, id="a", max_retries=2), new_job(2, id="b", expires_in=60)])
    end_all(queue)
    replays.ingest()
    assert replays("state = 'dead'", "--to", "outside") == 1
    out = capsys.readouterr().out
    assert "1 of 2 replayed" in out
    assert "1 not replayed: it has options of its own, which need a queue of mode work" in out
    assert queue.redis.hkeys(queue_base(DEFAULT_PREFIX, "outside") + ":jobs") == [b"b"]


def test_a_second_replay_changes_nothing_even_after_the_jobs_have_ended(
    queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.enqueue("a", "b")
    end_all(queue)
    replays.ingest()
    assert replays("state = 'dead'") == 0
    assert capsys.readouterr().out == "2 of 2 replayed\n"
    assert replays("state = 'dead'") == 0
    assert capsys.readouterr().out == "0 of 2 replayed\n2 were replayed before\n"
    end_all(queue, well=True, name="w2")
    assert replays("state = 'dead'") == 0
    assert queue.state().jobs == set()


def test_jobs_that_cannot_be_replayed_are_listed_with_the_reason(
    redis_url: str, queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.enqueue("done")
    end_all(queue, well=True)
    queue.enqueue("discarded", "live", "revived", "broken", "fine", "gone")
    end_all(queue, name="w2")
    dead = DeadJobs(queue.link, DEFAULT_PREFIX, "q")
    dead.discard("discarded")
    dead.retry("revived")
    end_all(queue, well=True, name="w3")
    queue.enqueue("live")
    replays.ingest()
    # After the ingest, so that only Redis shows it.
    dead.discard("gone")
    queue.redis.hset(queue.key("dead:jobs"), dead.find("broken"), "p5 no record")
    assert replays("true", "--json") == 1
    result = result_of(capsys)
    assert (result["picked"], result["replayed"]) == (8, 1)
    assert isinstance(result["not_replayed"], list)
    assert isinstance(result["reasons"], dict)
    reasons = {one["job"]: one["reason"] for one in result["not_replayed"] if one["state"] == "dead"}
    assert reasons == {
        "discarded": "it was discarded",
        "live": replay.IS_LIVE,
        "revived": "it was revived already",
        "broken": replay.BROKEN,
        "gone": replay.NOT_DEAD,
    }
    assert result["reasons"][replay.IS_DONE] == 2
    assert queue.state().jobs == {"live", "fine"}


def test_a_job_that_died_because_of_another_is_replayed_when_that_is_done(
    queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    """c waits for a, which is done before flows are used, and for b, which fails."""
    queue.set_options(keep_done_ms=60_000)
    queue.enqueue("a")
    end_all(queue, well=True)
    queue.producer.enqueue([new_job(1, id="b"), new_job({"n": "c"}, id="c", after=["a", "b"])])
    end_all(queue, name="w2")
    assert set(queue.state().dead) == {"b", "c"}
    replays.ingest()
    assert replays("job = 'c' and waited_for = array('a', 'b') and cause = 'DependencyFailed'") == 1
    assert f"1 not replayed: {replay.NOT_MET}\n    q  c@" in capsys.readouterr().out
    assert replays("state = 'dead'") == 1
    assert queue.state().jobs == {"b"}
    assert replays("state = 'dead'") == 1
    end_all(queue, well=True, name="w3")
    capsys.readouterr()
    assert replays("state = 'dead'") == 0
    assert capsys.readouterr().out == "1 of 2 replayed\n1 were replayed before\n"
    assert unpack(queue.state().records["c"]).data == {"n": "c"}


def test_jobs_of_deleted_queues_and_fail_jobs_are_not_replayed(
    redis_url: str, queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_queue(redis_url, "other") as other:
        other.enqueue("a")
        end_all(other)
        replays.ingest()
        other.registry.delete("other", force=True)
    fail_queue = Journal("q#fail")
    fail_queue.note(1, event("claimed", "b:7", fence=9, attempt=1))
    fail_queue.note(2, event("dead", "b:7", fence=9))
    replays.publish(fail_queue)
    assert replays("true") == 1
    output = capsys.readouterr().out
    assert f"1 not replayed: {replay.NO_QUEUE}\n    other  a@" in output
    assert f"1 not replayed: {replay.IS_FAIL_JOB}\n    q#fail  b:7@9\n" in output


def test_a_predicate_may_use_events_and_other_jobs(
    queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.enqueue("a", "b")
    end_all(queue)
    queue.enqueue("c")
    end_all(queue, name="w2")
    replays.ingest()
    of_worker = "job in (select job from events where verb = 'claimed' and actor = 'w2')"
    assert replays(f"{of_worker} or job = (select min(job) from jobs)") == 0
    assert capsys.readouterr().out == "2 of 2 replayed\n"
    assert queue.state().jobs == {"a", "c"}


def test_jobs_can_be_replayed_into_another_queue(redis_url: str, queue: OneQueue, replays: Replays) -> None:
    queue.enqueue("a")
    end_all(queue)
    replays.ingest()
    with one_queue(redis_url, "other") as other:
        assert replays("true", "--to", "other") == 0
        assert other.state().jobs == {"a"}
        assert queue.state().jobs == set()
    with pytest.raises(UnknownQueue, match="there is no queue 'nowhere'"):
        replays("true", "--to", "nowhere")


def test_a_dry_run_reports_the_jobs_and_changes_nothing(
    queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.enqueue("a")
    end_all(queue)
    replays.ingest()
    before = queue.redis.dbsize()
    assert replays("true", "--dry-run") == 0
    assert capsys.readouterr().out == "1 of 1 could be replayed\n"
    assert (queue.state().jobs, queue.redis.dbsize()) == (set(), before)
    assert replays("job = 'nobody'") == 0
    assert capsys.readouterr().out == "no done, released or dead job matches\n"


def test_only_the_newest_job_of_an_id_is_replayed_and_only_once(
    queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("w1", "w2"):
        queue.producer.enqueue([new_job(name, id="a")])
        end_all(queue, name=name)
    replays.ingest()
    assert replays("true") == 1
    assert capsys.readouterr().out.startswith(f"1 of 2 replayed\n1 not replayed: {replay.NOT_NEWEST}\n    q  a@")
    assert unpack(queue.state().records["a"]).data == "w2"
    end_all(queue, well=True, name="w3")
    assert replays("true") == 1
    assert queue.state().jobs == set()


def test_a_full_queue_takes_some_jobs_and_a_later_replay_adds_the_rest(
    queue: OneQueue, replays: Replays, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.enqueue("a", "b", "c")
    end_all(queue)
    replays.ingest()
    queue.set_options(max_items=1)
    assert replays("true", "--json") == 1
    result = result_of(capsys)
    assert result["replayed"] == len(queue.state().jobs) < 3
    assert isinstance(result["reasons"], dict)
    (reason,) = result["reasons"]
    assert reason.endswith("queue 'q' holds max_items = 1 jobs; nothing was stored")
    queue.set_options(max_items=0)
    assert replays("true") == 0
    assert queue.state().jobs == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("queue = ", "Syntax error"),
        ("colour = 'red'", "`colour`"),
        ("fence", "BOOLEAN"),
        ("true) or (true", "Syntax error"),
        ("cast(job as int) = 1", "cannot be cast"),
    ],
)
def test_a_wrong_predicate_gives_a_one_line_error(queue: OneQueue, replays: Replays, where: str, message: str) -> None:
    queue.enqueue("a")
    end_all(queue)
    replays.ingest()
    with pytest.raises(UsageError) as raised:
        replays(where)
    assert message.lower() in str(raised.value).lower()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_prefix_without_queues_and_a_directory_without_a_history_are_refused(
    spark: SparkSession, queue: OneQueue, replays: Replays, tmp_path: Path
) -> None:
    queue.enqueue("a")
    with pytest.raises(UsageError, match=r"there is no history in .*: give --history, or run `forq pipeline ingest`"):
        replays("true")
    end_all(queue)
    replays.ingest()
    with pytest.raises(UnknownQueue, match=r"no queue whose keys begin with 'other:'.* give --prefix"):
        replays("true", prefix="other:")


def test_an_unreachable_server_is_not_reported_as_a_wrong_predicate(
    spark: SparkSession, queue: OneQueue, replays: Replays, tmp_path: Path
) -> None:
    queue.enqueue("a")
    end_all(queue)
    replays.ingest()
    lifecycles = job_lifecycles(spark, read_history(spark, str(tmp_path / "history")))
    picked = replay.pick(lifecycles, "true")
    with pytest.raises(ForqError, match=r"the jobs cannot be picked: cannot .*nowhere") as raised:
        replay.replay(picked, Lookup("unix:///nowhere.sock", DEFAULT_PREFIX, None), dry_run=True)
    assert raised.type is ForqError
    assert "\n" not in str(raised.value)
