"""Jobs that are rows of the database until Redis has them: using(outbox=ALIAS)."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.models.signals import post_delete
from django.test.utils import CaptureQueriesContext
from redis import Redis

import forq
from forq.broker.enqueue import Producer
from forq.contrib.django.outbox import (
    PAUSE_SECONDS,
    Delivered,
    OutboxStatus,
    deliver,
    discard,
    outbox_status,
    send_again,
)
from forq.contrib.django.outbox_delivery import Delivery
from forq.contrib.django.project import make_app, project_app
from forq.contrib.django.refs import NotSent
from forq.contrib.django.tasks import TASK_NAME
from forq.errors import NoReplica, RedisUnavailable, UsageError
from tests.support.drive.outbox import change_rows, failing_sends, order, rows, take_jobs, unknown, waiting_ids
from tests.support.drive.server import Server

DOWN = RedisUnavailable("cannot reach Redis")


@pytest.fixture
def mails(alias: str) -> str:
    """An alias; the queue `mails` exists."""
    project_app().create_queue("mails")
    return alias


def test_a_job_is_sent_at_the_commit_and_leaves_no_row(mails: str) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    with transaction.atomic(using=mails):
        ref = send_receipt.using(outbox=mails, id="a").enqueue("1")
        assert ref.id == "a"
        assert [row.job_id for row in rows(mails)] == ["a"]
        assert waiting_ids() == []
        with pytest.raises(UsageError, match="inside its transaction"):
            ref.result()
        with pytest.raises(UsageError, match="inside its transaction"):
            ref.state()
    assert (waiting_ids(), rows(mails)) == (["a"], [])
    assert ref.state() == "waiting"
    take_jobs()
    send_receipt.using(id="a").enqueue("2")
    assert ref.state() == "gone"


def test_rows_are_written_through_the_alias_that_was_given(mails: str) -> None:
    with failing_sends(DOWN):
        order(mails)
    counts = {alias: len(rows(alias)) for alias in connections}
    assert counts == {alias: int(alias == mails) for alias in connections}


def test_a_rollback_leaves_neither_row_nor_job(mails: str) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    sender = send_receipt.using(outbox=mails)
    with suppress(ZeroDivisionError), transaction.atomic(using=mails):
        ref = sender.enqueue("1")
        raise ZeroDivisionError
    assert (waiting_ids(), rows(mails)) == ([], [])
    with pytest.raises(UsageError, match="rolled back"):
        ref.state()
    with transaction.atomic(using=mails):
        kept = [sender.enqueue("1")]
        with suppress(ZeroDivisionError), transaction.atomic(using=mails):
            sender.enqueue("2")
            raise ZeroDivisionError
        kept.append(sender.enqueue("3"))
    assert waiting_ids() == [ref.id for ref in kept]
    assert rows(mails) == []


def test_a_savepoint_of_the_low_level_functions_is_rolled_back_too(mails: str) -> None:
    """Django calls the on_commit callbacks of such a savepoint all the same."""
    from tests.support.django_project.orders.tasks import send_receipt

    order(mails, "0")
    take_jobs()
    with transaction.atomic(using=mails):
        savepoint = transaction.savepoint(using=mails)
        ref = send_receipt.using(outbox=mails).enqueue("1")
        transaction.savepoint_rollback(savepoint, using=mails)
    assert (waiting_ids(), rows(mails)) == ([], [])
    with pytest.raises(UsageError, match="rolled back"):
        ref.state()


def test_a_transaction_sends_its_jobs_in_one_call_and_adds_two_queries(mails: str) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    order(mails, "0")
    take_jobs()
    transaction.clean_savepoints(using=mails)
    calls: list[int] = []
    call = Producer.enqueue_identified

    def counted(self: Producer, jobs: Any, *args: Any) -> Any:
        calls.append(len(jobs))
        return call(self, jobs, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Producer, "enqueue_identified", counted)
        with CaptureQueriesContext(connections[mails]) as queries:
            order(mails, "1")
        with transaction.atomic(using=mails):
            prepared = [send_receipt.using(outbox=mails).prepare(str(n)) for n in range(250)]
            project_app().enqueue_many(prepared)
            send_receipt.using(outbox=mails).enqueue("250")
    about = [query["sql"].split(" ")[0] for query in queries if "forq_outbox" in query["sql"]]
    assert about == ["INSERT", "DELETE"]
    assert calls == [1, 251]
    assert (len(take_jobs()), rows(mails)) == (252, [])


def test_an_outage_of_redis_keeps_the_rows_and_raises_nothing(
    mails: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    try:
        with caplog.at_level(logging.WARNING, "forq.outbox"):
            refs = [order(mails, str(n)) for n in range(3)]
        assert [ref.state() for ref in refs] == ["undelivered"] * 3
        with pytest.raises(RedisUnavailable):
            refs[0].result(timeout=1)
        with pytest.raises(RedisUnavailable):
            deliver(mails)
    finally:
        server.start()
    # The later ones did not even try.
    assert len(caplog.records) == 1
    assert "until Redis is back" in caplog.text
    assert outbox_status(mails).waiting == 3
    project_app().create_queue("mails")
    assert deliver(mails) == Delivered(sent=3)
    assert waiting_ids() == [ref.id for ref in refs]
    assert [ref.state() for ref in refs] == ["waiting"] * 3


def test_after_a_pause_a_process_sends_its_own_rows_again(mails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_sends(DOWN):
        order(mails, "1", id="a")
    order(mails, "2", id="b")
    assert waiting_ids() == []
    outbox = project_app().outbox(mails)
    outbox._paused_until -= PAUSE_SECONDS
    order(mails, "3", id="c")
    assert waiting_ids() == ["c"]
    assert deliver(mails) == Delivered(sent=2)


def test_rows_are_delivered_in_the_order_of_their_insertion_in_batches(mails: str) -> None:
    with failing_sends(DOWN):
        for number in range(25):
            order(mails, str(number), id=f"j{number}")
    assert deliver(mails, batch=10) == Delivered(sent=25)
    assert waiting_ids() == [f"j{number}" for number in range(25)]


def test_a_result_delivers_the_row_first(mails: str) -> None:
    with failing_sends(DOWN):
        ref = order(mails, "1", keep_done="1h")
        other = order(mails, "2", keep_done="1h")
    with pytest.raises(forq.errors.WaitTimeout):
        ref.result(timeout=0.01)
    assert waiting_ids() == [ref.id]
    with pytest.raises(forq.errors.WaitTimeout):
        asyncio.run(other.aresult(timeout=0.01))
    assert waiting_ids() == [ref.id, other.id]
    assert rows(mails) == []


def test_as_completed_delivers_rows_first(mails: str) -> None:
    with failing_sends(DOWN):
        ref = order(mails, "1", keep_done="1h")
    with pytest.raises(forq.errors.WaitTimeout):
        list(forq.as_completed([ref], timeout=0.01))
    assert waiting_ids() == [ref.id]


def test_a_failed_callback_of_others_leaves_the_row_to_the_deliverer(mails: str) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    def fail() -> None:
        raise ZeroDivisionError

    refs = []
    with suppress(ZeroDivisionError), transaction.atomic(using=mails):
        transaction.on_commit(fail, using=mails)
        refs.append(send_receipt.using(outbox=mails).enqueue("1"))
    assert (refs[0].state(), waiting_ids()) == ("undelivered", [])
    assert deliver(mails) == Delivered(sent=1)
    assert refs[0].state() == "waiting"


def test_cancel_deletes_a_row_that_nobody_tried_to_send(mails: str) -> None:
    with failing_sends(DOWN):
        ref = order(mails, "1")
    assert ref.cancel() is True
    assert (rows(mails), deliver(mails)) == ([], Delivered())
    assert ref.state() == "gone"


def test_receivers_of_all_deletions_change_nothing(mails: str) -> None:
    """Django then selects rows before it deletes them: a row could be sent in between."""
    received: list[Any] = []

    def receive(sender: type, **_: Any) -> None:
        received.append(sender)

    with failing_sends(DOWN):
        ref = order(mails)
    post_delete.connect(receive)
    try:
        with CaptureQueriesContext(connections[mails]) as queries:
            assert ref.cancel()
        assert [query["sql"].split(" ")[0] for query in queries] == ["DELETE"]
        order(mails, "2")
        assert deliver(mails) == Delivered(sent=1)
        assert (rows(mails), received) == ([], [])
    finally:
        post_delete.disconnect(receive)


def test_cancel_of_a_row_that_may_be_in_redis_cancels_the_job(mails: str) -> None:
    with failing_sends(unknown(), stored=True):
        ref = order(mails, "1")
    assert waiting_ids() == [ref.id]
    assert ref.cancel() is True
    assert (waiting_ids(), rows(mails)) == ([], [])


def test_a_row_that_redis_refuses_is_flagged_and_does_not_block_the_others(mails: str) -> None:
    project_app().client.create_queue("mails", max_data=60)
    with failing_sends(DOWN):
        refs = [order(mails, number) for number in ("1", "2" * 40, "3")]
    assert deliver(mails) == Delivered(sent=2, refused=1)
    assert waiting_ids() == [refs[0].id, refs[2].id]
    [row] = rows(mails)
    assert (row.state, row.job_id) == ("refused", refs[1].id)
    assert "larger than max_data = 60" in row.error
    with pytest.raises(NotSent, match=r"refused: .*max_data"):
        refs[1].result()
    assert refs[1].state() == "undelivered"
    # Once the reason is gone, it can be sent.
    project_app().client.create_queue("mails", max_data=1000)
    assert send_again(mails, [row.pk]) == 1
    assert deliver(mails) == Delivered(sent=1)


def test_a_deleted_queue_refuses_and_an_existing_id_with_refuse_too(mails: str) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    with failing_sends(DOWN):
        order(mails, "1")
        send_receipt.using(outbox=mails, queue="shop").enqueue("2")
    project_app().client.delete_queue("mails")
    assert deliver(mails) == Delivered(sent=1, refused=1)
    assert "was deleted; to create it again" in rows(mails)[0].error
    send_receipt.using(queue="shop", id="a").enqueue("3")
    send_receipt.using(outbox=mails, queue="shop", id="a", if_exists="refuse").enqueue("4")
    assert deliver(mails) == Delivered(refused=1)
    assert "already has a job" in rows(mails)[1].error


def test_an_absent_queue_is_created_by_a_process_that_has_imported_no_tasks(
    mails: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a shell, after Redis has lost its data."""
    with failing_sends(DOWN):
        order(mails, id="a", queue="shop")
    with Redis.from_url(redis_url) as redis:
        redis.flushall()
    monkeypatch.setattr("forq.contrib.django.project._app", None)
    monkeypatch.delitem(sys.modules, "tests.support.django_project.orders.tasks")
    assert "shop" not in project_app().queue_names()
    with monkeypatch.context() as patch:
        patch.setattr("forq.contrib.django.project.discover_tasks", lambda: 1 // 0)
        assert "manage.py check" in deliver(mails).stuck["shop"], "they cannot be imported: no reason to refuse"
    assert deliver(mails) == Delivered(sent=1)
    assert waiting_ids("shop") == ["a"]


def test_a_full_queue_keeps_its_rows_waiting_and_the_others_go(mails: str) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    project_app().client.create_queue("mails", max_items=2)
    with failing_sends(DOWN):
        refs = [order(mails, str(number)) for number in range(4)]
        other = send_receipt.using(outbox=mails, queue="shop").enqueue("5")
    done = deliver(mails)
    assert (done.sent, list(done.stuck)) == (3, ["mails"])
    assert waiting_ids() == [ref.id for ref in refs[:2]]
    assert waiting_ids("shop") == [other.id]
    with pytest.raises(NotSent, match="max_items"):
        refs[2].result()
    take_jobs()
    assert deliver(mails) == Delivered(sent=2)
    assert waiting_ids() == [ref.id for ref in refs[2:]]


def test_a_job_that_needs_a_replica_waits_for_one(mails: str) -> None:
    ref = order(mails, durable="replica")
    assert ref.state() == "undelivered"
    done = deliver(mails)
    assert list(done.stuck) == ["mails"]
    assert "no replica" in rows(mails)[0].error
    assert rows(mails)[0].epoch == ""
    assert issubclass(NoReplica, RedisUnavailable)


def test_a_slow_replica_delays_only_the_queue_whose_jobs_need_it(mails: str) -> None:
    """WAIT of Redis ends without an answer of a replica, which is not an outage of Redis."""
    project_app().client.create_queue("shop")
    with failing_sends(DOWN):
        order(mails, "1", id="a", durable="replica")
        order(mails, "2", id="b", queue="shop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forq.broker.enqueue._check_has_replica", lambda *_: None)
        patch.setattr("forq.broker.enqueue.WAIT_MS", 1)
        done = deliver(mails)
        assert (done.sent, list(done.stuck)) == (1, ["mails"])
        assert waiting_ids("shop") == ["b"]
        [row] = rows(mails)
        assert (row.job_id, row.state, row.epoch != "") == ("a", "waiting", True), "the job is stored: the mark stays"
        # Nor does a process that has committed take it for an outage.
        project_app()._outboxes.clear()
        order(mails, "3", id="c", durable="replica")
        order(mails, "4", id="d", queue="shop")
        assert waiting_ids("shop") == ["b", "d"]
        assert waiting_ids() == ["a", "c"]


def test_options_of_a_job_survive_the_outbox(mails: str) -> None:
    with failing_sends(DOWN):
        order(mails, "1", id="a", identifier="i", priority=2, run_in=600, timeout="5m", max_retries=1, expires_in=3600)
    change_rows(mails, created_at=rows(mails)[0].created_at - timedelta(seconds=60))
    assert deliver(mails) == Delivered(sent=1)
    job = project_app().client.queue("mails").job("a")
    assert (job["state"], job["identifier"], job["priority"]) == ("scheduled", "i", 2)
    assert job["options"]["timeout"] == "5m"
    assert job["run_at"] is not None
    assert 530 < job["run_at"] - job["enqueued_at"] <= 541


def test_a_delivery_inside_a_transaction_is_refused(mails: str) -> None:
    with failing_sends(DOWN):
        ref = order(mails)
    with transaction.atomic(using=mails):
        with pytest.raises(UsageError, match="inside a transaction"):
            deliver(mails)
        with pytest.raises(UsageError, match="inside a transaction"):
            ref.result()
    assert len(rows(mails)) == 1


def test_the_status_counts_rows_and_their_age(mails: str) -> None:
    assert outbox_status(mails) == OutboxStatus(0, None, 0, 0)
    with failing_sends(DOWN):
        for number in range(3):
            order(mails, str(number))
    first, second, _ = rows(mails)
    change_rows(mails, created_at=first.created_at - timedelta(hours=1))
    first.state, second.state = "in doubt", "refused"
    first.save(using=mails, update_fields=["state"])
    second.save(using=mails, update_fields=["state"])
    status = outbox_status(mails)
    assert (status.waiting, status.in_doubt, status.refused) == (1, 1, 1)
    assert status.oldest is not None
    assert timedelta(hours=1) <= status.oldest < timedelta(hours=2)
    # A row that waits may be on its way.
    assert discard(mails, [row.pk for row in rows(mails)]) == 2
    assert outbox_status(mails).waiting == 1


def test_the_task_delivers_every_database(mails: str) -> None:
    with failing_sends(DOWN):
        ref = order(mails)
    task = project_app().tasks[TASK_NAME]
    assert task.queue == "outbox"
    asyncio.run(task.function())
    assert waiting_ids() == [ref.id]
    schedules = project_app().definitions()["schedules"]
    assert schedules["outbox"][TASK_NAME]["every"] == "5s"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_hooks_of_either_kind_do_not_disturb_the_task(mails: str, kind: str) -> None:
    def around(job: forq.Job) -> Iterator[None]:
        with transaction.atomic(using=mails):
            yield

    async def async_around(job: forq.Job) -> AsyncIterator[None]:
        raise AssertionError
        yield

    with failing_sends(DOWN):
        ref = order(mails)
    app = make_app({"NAME": "shop", "OUTBOX": {}})
    app.around(around if kind == "sync" else async_around)
    job = forq.Job("outbox", "j1", "j1", TASK_NAME, 5, 1_700_000_000.0, 1)
    asyncio.run(app.tasks[TASK_NAME].run_job({}, job))
    assert waiting_ids() == [ref.id]


def test_large_jobs_are_delivered_in_smaller_rounds(mails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    rounds: list[int] = []
    mark = Delivery.mark

    def counted(self: Delivery, keys: dict[str, list[str]], **how: Any) -> None:
        rounds.append(len(keys["mails"]))
        mark(self, keys, **how)

    sender = send_receipt.using(outbox=mails)
    with failing_sends(DOWN):
        project_app().enqueue_many(sender.prepare("x" * size) for size in (1000, 1000, 1000, 5000, 10))
    monkeypatch.setattr("forq.contrib.django.outbox.BATCH_BYTES", 2500)
    monkeypatch.setattr(Delivery, "mark", counted)
    assert deliver(mails) == Delivered(sent=5)
    assert rounds == [2, 1, 1, 1]


def test_the_task_reports_an_outage_and_does_not_fail(mails: str, caplog: pytest.LogCaptureFixture) -> None:
    with failing_sends(DOWN):
        order(mails)
        asyncio.run(project_app().tasks[TASK_NAME].function())
    assert (
        f"could not deliver the outbox of database {mails}; the next run tries again: cannot reach Redis" in caplog.text
    )


def test_a_database_without_an_outbox_is_refused_with_the_setting(
    project: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app({"NAME": "shop"})
    task = app.task_ref("send")
    with pytest.raises(UsageError, match=r"'default' has no outbox: set FORQ = .*'OUTBOX': \{\}.*migrate"):
        task.using(outbox="default")
    with pytest.raises(UsageError, match="has no outbox"):
        app.outbox("other")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "a dict with DATABASES"),
        ({"DATABASE": ["default"]}, "has no key 'DATABASE'.*DATABASES"),
        ({"DATABASES": "default"}, "a list of aliases"),
        ({"DATABASES": ["othr"]}, "there is no database 'othr'; DATABASES has: 'default'"),
        ({"QUEUE": "a b"}, "queue name"),
        ({"EVERY": "often"}, "often"),
        ({"TIMEOUT": 100}, "TIMEOUT"),
    ],
)
def test_invalid_settings_of_the_outbox_are_refused(project: None, given: object, message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=message):
        make_app({"OUTBOX": given})


def test_a_missing_table_names_the_command(project: None) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE forq_outbox RENAME TO away")
    try:
        with pytest.raises(UsageError, match=r"no table forq_outbox; run: manage\.py migrate forq --database default"):
            send_receipt.using(outbox="default").enqueue("1")
    finally:
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER TABLE away RENAME TO forq_outbox")


def test_the_admin_shows_the_outbox_and_its_actions_decide(project: None) -> None:
    from django.contrib.admin.models import CHANGE, DELETION, LogEntry
    from django.contrib.auth.models import User
    from django.test import Client

    project_app().create_queue("mails")
    with failing_sends(DOWN):
        for number in range(3):
            order("default", str(number), id=f"j{number}")
    doubtful, refused, waiting = rows("default")
    doubtful.state, doubtful.error = "in doubt", "no answer"
    refused.state = "refused"
    doubtful.save()
    refused.save()
    User.objects.create_superuser("root", password="root")
    browser = Client()
    assert browser.login(username="root", password="root")
    page = browser.get("/admin/forq/outboxentry/").content.decode()
    assert "Outbox: 1 waiting, the oldest for " in page
    assert "1 in doubt, 1 refused" in page
    assert "no answer" in page
    assert "orders.send_receipt" in browser.get(f"/admin/forq/outboxentry/{doubtful.pk}/change/").content.decode()

    def act(action: str, *entries: Any) -> str:
        chosen = {"action": action, "_selected_action": [entry.pk for entry in entries]}
        return browser.post("/admin/forq/outboxentry/", chosen, follow=True).content.decode()

    assert "Discarded 1 entry. Entries that wait cannot be discarded." in act("discard", refused, waiting)
    assert "1 entry will be sent again." in act("send_again", doubtful, waiting)
    log = [(entry.object_repr, entry.action_flag, entry.change_message) for entry in LogEntry.objects.order_by("pk")]
    assert log == [
        ("orders.send_receipt j1 in queue mails, refused", DELETION, "Discarded."),
        ("orders.send_receipt j0 in queue mails, in doubt", CHANGE, "Sent again."),
    ]
    assert deliver("default") == Delivered(sent=2)
    assert waiting_ids() == ["j0", "j2"]


def test_the_page_of_a_row_cannot_save_it(project: None) -> None:
    """A save would write back a mark that a delivery has changed, or a row that it has deleted."""
    from django.contrib.auth.models import User
    from django.test import Client

    project_app().create_queue("mails")
    with failing_sends(DOWN):
        order("default", id="a")
    browser = Client()
    browser.force_login(User.objects.create_superuser("root"))
    page = f"/admin/forq/outboxentry/{rows('default')[0].pk}/change/"
    shown = browser.get(page).content.decode()
    assert "orders.send_receipt" in shown
    assert 'name="_save"' not in shown
    assert browser.post(page, {"_save": "Save"}).status_code == 403
    with CaptureQueriesContext(connections["default"]) as queries:
        browser.get("/admin/forq/outboxentry/")
    assert not any('"forq_outbox"."body"' in query["sql"] for query in queries), "the list reads no data"


@pytest.mark.parametrize(
    ("permissions", "actions"),
    [
        (["view"], set()),
        (["change"], {"send_again"}),
        (["view", "delete"], {"discard"}),
        (["change", "delete"], {"send_again", "discard"}),
    ],
)
def test_permissions_decide_about_the_actions(project: None, permissions: list[str], actions: set[str]) -> None:
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    project_app().create_queue("mails")
    with failing_sends(DOWN):
        order("default", id="a")
    change_rows("default", state="refused")
    user = User.objects.create(username="ann", is_staff=True)
    codenames = [f"{name}_outboxentry" for name in permissions]
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    browser = Client()
    browser.force_login(user)
    page = browser.get("/admin/forq/outboxentry/")
    assert page.status_code == 200
    offered = {
        name for name in ("send_again", "discard", "delete_selected") if f'value="{name}"' in page.content.decode()
    }
    assert offered == actions
    for action in {"send_again", "discard"} - actions:
        browser.post("/admin/forq/outboxentry/", {"action": action, "_selected_action": [rows("default")[0].pk]})
    assert [row.state for row in rows("default")] == ["refused"]
