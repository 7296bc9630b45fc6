"""Jobs that are sent when a transaction commits: using(on_commit=ALIAS)."""

import asyncio
import time
import unittest
from contextlib import suppress

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.test import TestCase

import forq
from forq.app.tasks import JobRef, Sender, SyncTask
from forq.broker.chunks import NewJob
from forq.contrib.django.late_jobs import job_at_send
from forq.contrib.django.project import project_app
from forq.contrib.django.refs import NotSent
from forq.errors import UsageError
from tests.support.drive.server import Server


@pytest.fixture
def receipt(project: None) -> SyncTask[[str], None]:
    from tests.support.django_project.orders.tasks import send_receipt

    project_app().create_queue("mails")
    return send_receipt


def ids(queue: str = "mails") -> list[str]:
    return [job["id"] for job in project_app().client.queue(queue).jobs().jobs]


class Rollback(Exception):
    pass


def enqueue_and_roll_back(sender: Sender[[str], None]) -> JobRef[None]:
    with suppress(Rollback), transaction.atomic():
        ref = sender.enqueue("2")
        raise Rollback
    return ref


def test_a_job_is_sent_at_the_commit_and_its_id_is_known_at_once(receipt: SyncTask[[str], None]) -> None:
    with transaction.atomic():
        ref = receipt.using(on_commit="default", id="order-1").enqueue("1")
        assert ref.id == "order-1"
        assert ids() == []
    assert ids() == ["order-1"]
    assert ref.state() == "waiting"


def test_without_a_transaction_it_is_sent_at_once(receipt: SyncTask[[str], None]) -> None:
    ref = receipt.using(on_commit="default").enqueue("1")
    assert ids() == [ref.id]
    assert ref.cancel() is True


def test_a_rollback_sends_nothing_and_the_ref_says_so(receipt: SyncTask[[str], None]) -> None:
    ref = enqueue_and_roll_back(receipt.using(on_commit="default"))
    assert ids() == []
    with pytest.raises(UsageError, match="the transaction of database 'default' was rolled back"):
        ref.result(timeout=1)


def test_savepoints_count(receipt: SyncTask[[str], None]) -> None:
    sender = receipt.using(on_commit="default")
    with transaction.atomic():
        kept = sender.enqueue("1")
        enqueue_and_roll_back(sender)
        with transaction.atomic():
            also_kept = sender.enqueue("3")
    assert ids() == [kept.id, also_kept.id]


def test_durable_blocks_work(receipt: SyncTask[[str], None]) -> None:
    with transaction.atomic(durable=True):
        ref = receipt.using(on_commit="default").enqueue("1")
    assert ids() == [ref.id]


@pytest.mark.parametrize("call", ["state", "cancel", "result"])
def test_calls_inside_the_block_say_why_they_cannot_work(receipt: SyncTask[[str], None], call: str) -> None:
    with transaction.atomic():
        ref = receipt.using(on_commit="default").enqueue("1")
        with pytest.raises(UsageError, match=rf"{call}\(\) of job '.*' inside its transaction.* after the atomic\(\)"):
            getattr(ref, call)()
        with pytest.raises(UsageError, match=r"aresult\(\) .*inside its transaction"):
            asyncio.run(ref.aresult())
        with pytest.raises(UsageError, match=r"as_completed\(\) .*inside its transaction"):
            list(forq.as_completed([ref], timeout=1))


def test_after_the_commit_the_ref_means_this_job_alone(receipt: SyncTask[[str], None]) -> None:
    with transaction.atomic():
        ref = receipt.using(on_commit="default", id="a").enqueue("1")
    project_app().client.queue("mails").remove("a")
    receipt.using(id="a").enqueue("2")
    assert ref.state() == "gone"
    assert ref.cancel() is False


def test_wrong_arguments_are_an_error_in_the_call(receipt: SyncTask[[str], None]) -> None:
    with transaction.atomic():
        with pytest.raises(TypeError):
            receipt.using(on_commit="default").enqueue(1)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            receipt.using(on_commit="default").enqueue()  # type: ignore[call-arg]
    assert ids() == []


def test_an_unknown_database_is_refused_with_those_that_exist(receipt: SyncTask[[str], None]) -> None:
    with pytest.raises(UsageError, match=r"using\(on_commit='defualt'\): there is no such database.*'default'"):
        receipt.using(on_commit="defualt")
    with pytest.raises(UsageError, match=r"using\(outbox=True\)"):
        receipt.using(outbox=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give one of them"):
        receipt.using(on_commit="default", outbox="default")


def test_jobs_that_wait_for_others_are_refused(receipt: SyncTask[[str], None]) -> None:
    first = receipt.enqueue("1")
    with pytest.raises(UsageError, match=r"using\(on_commit=…, after=…\) is not allowed.*transaction\.on_commit"):
        receipt.using(on_commit="default", after=first)
    with pytest.raises(UsageError, match=r"using\(outbox=…, after=…\) is not allowed"):
        receipt.using(outbox="default", after=first)
    with transaction.atomic():
        transaction.on_commit(lambda: receipt.using(after=first).enqueue("2"))
    status = project_app().client.queue(first.queue).status()
    assert (status["waiting"], status["held"]) == (1, 1)


def test_manual_transactions_are_refused(receipt: SyncTask[[str], None]) -> None:
    connections["default"].set_autocommit(False)
    try:
        with pytest.raises(UsageError, match=r"autocommit off.*transaction\.atomic"):
            receipt.using(on_commit="default").enqueue("1")
    finally:
        connections["default"].set_autocommit(True)


def test_a_token_that_is_known_at_the_commit_gives_the_id_of_the_earlier_job(receipt: SyncTask[[str], None]) -> None:
    receipt.using(id="a", token="t").enqueue("1")
    with transaction.atomic():
        ref = receipt.using(on_commit="default", token="t").enqueue("1")
    assert (ref.id, ids()) == ("a", ["a"])


def test_jobs_of_mixed_senders_are_stored_in_bulk(receipt: SyncTask[[str], None]) -> None:
    from tests.support.django_project.orders.models import Order

    later, boxed = receipt.using(on_commit="default"), receipt.using(outbox="default")
    senders: list[Sender[[str], None]] = [receipt, later, boxed, later, receipt]
    with transaction.atomic():
        Order.objects.create(number="1")
        refs = project_app().enqueue_many(sender.prepare(str(n)) for n, sender in enumerate(senders))
        assert ids() == [refs[0].id, refs[4].id]
    assert ids() == [refs[n].id for n in (0, 4, 1, 3, 2)]
    assert [ref.state() for ref in refs] == ["waiting"] * 5


def test_a_remote_task_is_sent_at_the_commit(receipt: SyncTask[[str], None]) -> None:
    remote = project_app().task_ref("orders.send_receipt", queue="mails")
    with transaction.atomic():
        ref = remote.using(on_commit="default").enqueue(number="1")
        assert ids() == []
    assert ids() == [ref.id]


def test_coroutines_enqueue_in_the_thread_of_their_transactions(receipt: SyncTask[[str], None]) -> None:
    async def view() -> list[str]:
        sender = receipt.using(on_commit="default")
        ref = await sender.aenqueue("1")

        def with_transaction() -> str:
            with transaction.atomic():
                inner = sender.enqueue("2")
                assert ids() == [ref.id]
            return inner.id

        return [ref.id, await sync_to_async(with_transaction)()]

    assert asyncio.run(view()) == ids()


def test_an_outage_at_the_commit_says_that_the_transaction_is_committed(
    receipt: SyncTask[[str], None], server: Server
) -> None:
    from tests.support.django_project.orders.models import Order

    def order() -> None:
        with transaction.atomic():
            Order.objects.create(number="1")
            receipt.using(on_commit="default", id="a").enqueue("1")
            server.stop()
            project_app().client.close()

    try:
        with pytest.raises(
            NotSent, match=r"'default' has been committed, but job 'a' .* was not sent.*outbox='default'"
        ):
            order()
    finally:
        server.start()
    assert Order.objects.count() == 1


def test_an_error_does_not_say_that_jobs_of_an_earlier_call_were_not_sent(receipt: SyncTask[[str], None]) -> None:
    """A program that enqueues them again would store them twice."""
    client = project_app().client
    client.create_queue("full", max_items=1)
    client.queue("full").enqueue(None)
    sender, other = receipt.using(on_commit="default", id="a"), receipt.using(on_commit="default", queue="full")
    with pytest.raises(NotSent, match=r"job 'a' .* and 1 other may not have been sent: .*full"):
        project_app().enqueue_many([sender.prepare("1"), other.prepare("2")])
    assert ids() == ["a"]


class CommitsInTestCase(TestCase):
    """Runs inside a transaction that never commits, as the tests of users do."""

    # Not by pytest itself.
    __test__ = False

    def runTest(self) -> None:
        from tests.support.django_project.orders.tasks import send_receipt

        for sender in (send_receipt.using(on_commit="default"), send_receipt.using(outbox="default")):
            with self.captureOnCommitCallbacks(execute=True) as callbacks:
                refs = [sender.enqueue("1"), sender.enqueue("2")]
                assert ids() == []
            assert len(callbacks) == 2
            assert ids() == [ref.id for ref in refs]
            assert refs[0].state() == "waiting"
            for ref in refs:
                assert ref.cancel()
        ref = send_receipt.using(on_commit="default").enqueue("1")
        with pytest.raises(UsageError, match="inside its transaction"):
            ref.result()


def test_tests_of_users_run_callbacks_with_capture_on_commit_callbacks(receipt: SyncTask[[str], None]) -> None:
    result = unittest.TestSuite([CommitsInTestCase()]).run(unittest.TestResult())
    assert result.testsRun == 1
    assert result.errors + result.failures == []


@pytest.mark.parametrize(
    ("run_at", "options", "elapsed", "sent_run_at", "sent_options"),
    [
        ("", "", 5, "", ""),
        ("+60000", "", 5, "+55000", ""),
        ("+3000", "t=1,x=10000", 5, "+0", "t=1,x=8000"),
        ("", "x=10000", 60, "", "x=1"),
        ("+60000", "x=10000", 5, "+55000", "x=10000"),
        ("+60000", "x=10000", -5, "+60000", "x=10000"),
    ],
)
def test_run_in_and_expires_in_count_from_the_call(
    run_at: str, options: str, elapsed: float, sent_run_at: str, sent_options: str
) -> None:
    sent = job_at_send(NewJob("a", 5, b"", "", run_at, options), elapsed)
    assert (sent.run_at, sent.options) == (sent_run_at, sent_options)


def test_an_expiry_counts_from_a_time_that_was_given(receipt: SyncTask[[str], None]) -> None:
    now_ms = round(time.time() * 1000)
    future = NewJob("a", 5, b"", "", str(now_ms + 60_000), "x=5000")
    assert job_at_send(future, 10) == future
    past = job_at_send(future._replace(run_at=str(now_ms - 1000)), 10)
    assert 3000 < int(past.options.removeprefix("x=")) <= 4000
