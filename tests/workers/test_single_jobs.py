"""A worker whose jobs come one by one settles each with its next wait; one with a backlog claims batches."""

from pathlib import Path

from forq.broker.claim import Turn
from forq.workers.attempt import AttemptRunner
from forq.workers.handlers import Handlers
from tests.support.drive.server import Server
from tests.support.drive.supervisor import running
from tests.support.drive.wait import wait_until
from tests.support.faults.proxy import Proxy
from tests.workers.loop_rig import NOTHING, Rig, jobs


def waiting_rig(*answers: Turn | Exception, **options: int) -> Rig:
    """A worker that waits for 5 ms for each job."""
    rig = Rig(lambda data, job: None, *answers, **options)
    rig.consumer.after_settled = lambda: rig.pass_ms(5)
    return rig


def pass_round(rig: Rig) -> None:
    """One pass of run(): serves a batch, or waits."""
    if not rig.loop.serve_batch():
        rig.loop.wait_for_work()


def test_a_job_that_came_alone_is_settled_with_the_next_wait() -> None:
    rig = waiting_rig(NOTHING, jobs("a"), jobs("b"))
    for _ in range(4):
        pass_round(rig)
    assert [call.done for call in rig.consumer.calls] == [[], [], []]
    assert rig.consumer.settles == [[b"a", "7", b"1"]]
    assert rig.slot.done == 1
    assert [call.want for call in rig.consumer.calls[1:]] == [1, 1], "other workers may be idle too"


def test_a_job_that_was_there_at_once_is_settled_by_a_turn_that_claims_more() -> None:
    rig = waiting_rig(NOTHING, jobs("a"), jobs("b"), NOTHING)
    rig.consumer.after_settled = lambda: None
    for _ in range(3):
        pass_round(rig)
    assert rig.consumer.settles == []
    assert rig.consumer.calls[-1].done[0] == b"a"
    assert rig.consumer.calls[-1].want > 1


def test_a_round_trip_is_no_wait() -> None:
    rig = waiting_rig(NOTHING, jobs("a"), jobs("b"), jobs("c"))
    rig.consumer.before_settled = lambda: rig.pass_ms(5)
    for _ in range(2):
        pass_round(rig)
    rig.consumer.after_settled = lambda: None
    for _ in range(3):
        pass_round(rig)
    assert len(rig.consumer.settles) == 1
    assert rig.consumer.calls[-1].done[0] == b"b", "it was there when the first one was settled"
    assert rig.consumer.calls[-1].want > 1


def test_several_jobs_are_settled_by_a_turn() -> None:
    rig = waiting_rig(NOTHING, jobs("a", "b"), jobs("c"))
    for _ in range(3):
        pass_round(rig)
    assert rig.consumer.settles == []
    assert rig.consumer.calls[-1].done[::3] == [b"a", b"b"]


def test_a_failed_job_is_settled_by_a_turn() -> None:
    rig = waiting_rig(NOTHING, jobs("a"), jobs("b"))
    rig.loop.use(AttemptRunner("q", Handlers({None: lambda data, job: 1 / 0}), rig.slot))
    for _ in range(3):
        pass_round(rig)
    assert rig.consumer.settles == []
    assert rig.consumer.calls[-1].failed[0] == b"a"


def test_a_worker_that_reaches_max_jobs_settles_at_once() -> None:
    rig = waiting_rig(NOTHING, jobs("a"), NOTHING, max_jobs=1)
    for _ in range(2):
        pass_round(rig)
    assert not rig.loop.serve_batch()
    assert (rig.consumer.settles, rig.consumer.calls[-1].done[0]) == ([], b"a")
    assert rig.replaced == ["max_jobs = 1"]


def test_after_a_settle_that_failed_a_turn_settles() -> None:
    rig = waiting_rig(NOTHING, jobs("a"), jobs("b"))
    rig.consumer.settle_and_wait = lambda *_: None  # type: ignore[method-assign]
    for _ in range(4):
        pass_round(rig)
    assert rig.consumer.calls[-1].done[0] == b"a"


def test_on_a_cluster_a_turn_settles() -> None:
    rig = waiting_rig(NOTHING, jobs("a"), jobs("b"))
    rig.consumer.is_cluster = True
    for _ in range(3):
        pass_round(rig)
    assert (rig.consumer.settles, rig.consumer.calls[-1].done[0]) == ([], b"a")


def test_a_worker_far_from_the_server_claims_a_backlog_in_batches(
    server: Server, redis_url: str, tmp_path: Path
) -> None:
    with Proxy(server.socket, listen=tmp_path / "proxy.sock") as proxy, running(redis=proxy.url) as forq:
        proxy.delay(0.001)
        forq.create("work", "noop", concurrency=1)
        forq.wait_for_child("work")
        queue = forq.client().queue("work")
        queue.enqueue(0)
        wait_until(lambda: queue.status()["done"] == 1, what="a job that came alone is done")
        with server.connect() as admin:
            admin.config_resetstat()
            queue.enqueue_many([0] * 2000)
            wait_until(lambda: queue.status()["done"] == 2001, what="all are done")
            calls = admin.info("commandstats")["cmdstat_fcall"]["calls"]
        assert calls < 500, "turns, and the calls of this test and of services"
