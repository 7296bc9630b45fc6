"""Exactly once: a process dies at each step of a delivery, replies are lost, several deliver at once."""

import threading
from contextlib import suppress
from typing import Any

import pytest
from django.db import connections

from forq.broker.enqueue import Producer
from forq.contrib.django.outbox import Delivered, Outbox, deliver, send_again
from forq.contrib.django.outbox_delivery import Delivery
from forq.contrib.django.project import project_app
from forq.errors import ForqError, OutcomeUnknown, RedisUnavailable, TooLate
from tests.support.drive.outbox import (
    Crash,
    change_rows,
    crash_at,
    end_process,
    failing_sends,
    order,
    rows,
    take_jobs,
    unknown,
)

STEPS = [
    f"{when} {step}" for step in ("read_terms", "mark", "send_marked", "send", "delete") for when in ("before", "after")
]
# Of a process that has sent to the queue before: its rows are marked when they are written.
OWN_STEPS = ["before send_rows", "before send", "after send", "before delete", "after delete", "after send_rows"]
DOWN = RedisUnavailable("cannot reach Redis")


@pytest.fixture(autouse=True)
def _queue(alias: str) -> None:
    project_app().create_queue("mails")


@pytest.mark.parametrize("step", STEPS)
def test_a_first_attempt_at_the_commit_that_dies(alias: str, step: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, step)
        with pytest.raises(Crash):
            order(alias, id="a")
    end_process(alias)
    ran = take_jobs()
    deliver(alias)
    assert (ran + take_jobs(), rows(alias)) == (["a"], [])


@pytest.mark.parametrize("step", OWN_STEPS)
def test_a_later_attempt_at_the_commit_that_dies(alias: str, step: str) -> None:
    order(alias, "0", id="first")
    assert take_jobs() == ["first"]
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, step)
        with pytest.raises(Crash):
            order(alias, id="a")
    end_process(alias)
    ran = take_jobs()
    deliver(alias)
    assert (ran + take_jobs(), rows(alias)) == (["a"], [])


@pytest.mark.parametrize("step", STEPS)
def test_a_deliverer_that_dies(alias: str, step: str) -> None:
    with failing_sends(DOWN):
        order(alias, "1", id="a")
        order(alias, "2", id="b")
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, step)
        with pytest.raises(Crash):
            deliver(alias)
    end_process(alias)
    ran = take_jobs()
    deliver(alias)
    assert (ran + take_jobs(), rows(alias)) == (["a", "b"], [])


@pytest.mark.parametrize("step", ["before clear", "after clear"])
def test_a_process_that_dies_while_it_takes_a_mark_back(alias: str, step: str) -> None:
    with pytest.MonkeyPatch.context() as patch, failing_sends(DOWN):
        crash_at(patch, step)
        with pytest.raises(Crash):
            order(alias, id="a")
    end_process(alias)
    deliver(alias)
    assert (take_jobs(), rows(alias)) == (["a"], [])


@pytest.mark.parametrize("stored", [True, False])
def test_an_unknown_outcome_is_sent_again_with_its_token(alias: str, stored: bool) -> None:
    with failing_sends(unknown(), stored=stored):
        order(alias, id="a")
    assert take_jobs() == (["a"] if stored else [])
    [row] = rows(alias)
    assert row.epoch
    for _ in range(3):
        with failing_sends(unknown(), stored=stored), suppress(OutcomeUnknown):
            deliver(alias)
    ran = take_jobs()
    assert deliver(alias) == Delivered(sent=1)
    assert ran + take_jobs() == ([] if stored else ["a"])
    assert rows(alias) == []


def test_a_certain_failure_takes_the_mark_back(alias: str) -> None:
    with failing_sends(DOWN):
        order(alias, id="a")
        [row] = rows(alias)
        assert (row.epoch, row.attempt, row.attempted_at, row.error) == ("", "", None, "cannot reach Redis")
        with pytest.raises(RedisUnavailable):
            deliver(alias)
    [row] = rows(alias)
    assert row.epoch == ""


def test_a_certain_failure_leaves_the_mark_of_an_earlier_attempt(alias: str) -> None:
    with failing_sends(unknown(), stored=True):
        order(alias, id="a")
    [before] = rows(alias)
    with failing_sends(DOWN), pytest.raises(RedisUnavailable):
        deliver(alias)
    [row] = rows(alias)
    assert (row.epoch, row.until_ms, row.marked_by) == (before.epoch, before.until_ms, before.marked_by)


def test_a_certain_failure_leaves_a_mark_that_another_attempt_has_used(alias: str) -> None:
    """The first attempt fails, but only after a second one has sent the row with an unknown outcome."""
    send = Delivery.send

    def send_late(self: Delivery, given: Any) -> Any:
        monkey.setattr(Delivery, "send", send)
        with failing_sends(unknown(), stored=True), suppress(OutcomeUnknown):
            deliver(alias)
        raise DOWN

    with pytest.MonkeyPatch.context() as monkey:
        # Without a lock, as the attempt of a committing process: its row was marked when it was written.
        order(alias, "0", id="first")
        monkey.setattr(Delivery, "send", send_late)
        order(alias, id="a")
    [row] = rows(alias)
    assert row.epoch
    assert sorted(take_jobs()) == ["a", "first"]
    assert deliver(alias) == Delivered(sent=1)
    assert take_jobs() == []


def test_an_error_of_unknown_kind_leaves_the_mark(alias: str) -> None:
    """It may come from the middle of the script."""
    with failing_sends(ForqError("Redis refused the call"), stored=True):
        order(alias, id="a")
    [row] = rows(alias)
    assert row.epoch
    assert row.error == "Redis refused the call", "its queue is stuck: the admin shows why"
    assert take_jobs() == ["a"]
    assert deliver(alias) == Delivered(sent=1)
    assert take_jobs() == []


def test_a_short_dedup_ttl_leaves_time_for_the_deliverer(alias: str) -> None:
    project_app().client.create_queue("mails", dedup_ttl=1)
    with failing_sends(unknown()):
        order(alias, id="a")
    [row] = rows(alias)
    assert row.until_ms / 1000 - row.created_at.timestamp() > 3500


def test_after_its_time_an_unknown_outcome_is_in_doubt_and_a_person_decides(alias: str) -> None:
    with failing_sends(unknown(), stored=True):
        order(alias, "1", id="a")
        order(alias, "2", id="b")
    take_jobs()
    change_rows(alias, until_ms=1)
    assert deliver(alias) == Delivered(sent=1, in_doubt=1)
    assert take_jobs() == ["b"]
    [first] = rows(alias)
    assert first.state == "in doubt"
    assert "send it again or discard it" in first.error
    # It is not sent by itself.
    assert deliver(alias) == Delivered()
    assert send_again(alias, [first.pk]) == 1
    assert deliver(alias) == Delivered(sent=1)


def test_a_queue_that_was_created_anew_makes_an_unknown_outcome_doubtful(alias: str) -> None:
    with failing_sends(unknown(), stored=True):
        order(alias, "1", id="a")
    with failing_sends(DOWN):
        order(alias, "2", id="b")
    app = project_app()
    take_jobs()
    app.client.delete_queue("mails", force=True)
    app.create_queue("mails")
    assert deliver(alias) == Delivered(sent=1, in_doubt=1)
    assert take_jobs() == ["b"]


def test_a_sender_that_slept_too_long_is_refused_by_redis(alias: str) -> None:
    """It sends after its time is over, when another process has delivered the row and the token may be forgotten."""
    with failing_sends(unknown()):
        order(alias, id="a")
    frozen = rows(alias)
    change_rows(alias, until_ms=1)
    frozen[0].until_ms = 1
    delivery = Delivery(project_app(), alias, project_app().client)
    with pytest.raises(TooLate):
        delivery.send(frozen)
    assert take_jobs() == []


def test_an_epoch_that_this_process_remembers_wrongly_stores_nothing(alias: str) -> None:
    order(alias, "0", id="first")
    app = project_app()
    take_jobs()
    app.client.delete_queue("mails", force=True)
    app.create_queue("mails")
    order(alias, "1", id="a")
    [row] = rows(alias)
    assert (row.state, row.epoch) == ("waiting", "")
    order(alias, "2", id="b")
    assert take_jobs() == ["b"]
    assert deliver(alias) == Delivered(sent=1)
    assert take_jobs() == ["a"]


@pytest.mark.parametrize("paused", [False, True])
def test_a_deliverer_that_flags_a_row_before_its_process_has_sent_it(alias: str, paused: bool) -> None:
    """The row was written with an old epoch. Redis refuses the send, and nobody else has sent it: no doubt is left."""
    order(alias, "0")
    app = project_app()
    take_jobs()
    app.client.delete_queue("mails", force=True)
    app.create_queue("mails")
    flagged: list[Delivered] = []
    send_committed = Outbox.send_committed

    def deliver_first(self: Outbox, attempt: Any) -> None:
        flagged.append(deliver(alias))
        if paused:
            self._paused_until = float("inf")
        send_committed(self, attempt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outbox, "send_committed", deliver_first)
        order(alias, "1", id="a")
    assert flagged == [Delivered(in_doubt=1)]
    assert [(row.state, row.epoch) for row in rows(alias)] == [("waiting", "")]
    assert deliver(alias) == Delivered(sent=1)
    assert take_jobs() == ["a"]


def test_two_deliverers_at_once_deliver_each_row_once(alias: str) -> None:
    with failing_sends(DOWN):
        for number in range(20):
            order(alias, str(number), id=f"j{number}")
    sending, go_on = threading.Event(), threading.Event()
    call = Producer.enqueue_identified
    found: list[Delivered] = []

    def slow(self: Producer, *args: Any) -> Any:
        stored = call(self, *args)
        if threading.current_thread() is first:
            sending.set()
            assert go_on.wait(20)
        return stored

    def run() -> None:
        found.append(deliver(alias))
        connections[alias].close()

    first = threading.Thread(target=run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Producer, "enqueue_identified", slow)
        first.start()
        assert sending.wait(20)
        second = deliver(alias)
        go_on.set()
        first.join()
    # With locks the second one leaves the rows to the first.
    assert second.sent + found[0].sent == 20
    assert second.sent == (0 if alias == "postgres" else 20)
    assert take_jobs() == [f"j{number}" for number in range(20)]
    assert rows(alias) == []
