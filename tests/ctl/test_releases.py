"""forqctl await, dequeue and ack, and status of queues in the release modes."""

import json

import pytest

from forq import errors
from tests.ctl.fake_supervisor import NOTHING, FakeSupervisor, forqctl, queue_status, whole_status

ITEM = {"id": "a1", "identifier": "ix", "data": {"n": [1, "é"]}, "fence": 7, "awaiter": "w", "lease_seconds": 10.0}
ACK = {"name": "q", "id": "a1", "fence": 7, "awaiter": "w"}


@pytest.mark.spec("N14", "N21")
@pytest.mark.parametrize(("verb", "wait"), [("await", None), ("dequeue", 0.0)])
def test_an_item_is_acknowledged_before_it_is_printed(fake: FakeSupervisor, verb: str, wait: float | None) -> None:
    fake.answers |= {verb: ITEM, "ack": {"id": "a1"}}
    assert forqctl(fake, verb, "q") == (0, 'a1 {"n":[1,"é"]}\n', "")
    assert fake.calls == [(verb, {"name": "q", "id": None, "wait": wait}), ("ack", ACK)]
    code, out, _ = forqctl(fake, verb, "q", "a1", "--json", "--wait", "2s")
    assert (code, json.loads(out)) == (0, {"id": "a1", "identifier": "ix", "data": {"n": [1, "é"]}})
    method, params = fake.calls[2]
    assert (method, params["id"], round(params["wait"], 1)) == (verb, "a1", 2.0)


@pytest.mark.parametrize("verb", ["await", "dequeue"])
def test_when_the_wait_is_over_nothing_is_printed_and_the_exit_code_is_6(fake: FakeSupervisor, verb: str) -> None:
    fake.answers[verb] = NOTHING
    code, out, err = forqctl(fake, verb, "q", "--wait", "10ms")
    assert (code, out) == (6, "")
    assert err.startswith(("forqctl: queue q released no item", "forqctl: queue q has no item"))


def test_an_item_with_a_lapsed_lease_is_requested_again(fake: FakeSupervisor) -> None:
    lapsed = [errors.LeaseLapsed("gone back")]
    fake.answers |= {"dequeue": ITEM, "ack": lambda params: lapsed.pop() if lapsed else {}}
    assert forqctl(fake, "dequeue", "q", "--wait", "5s")[0] == 0
    assert [method for method, _ in fake.calls] == ["dequeue", "ack", "dequeue", "ack"]
    assert 0 < fake.calls[2][1]["wait"] < fake.calls[0][1]["wait"]


def test_an_acknowledgement_is_repeated_while_redis_is_down(fake: FakeSupervisor) -> None:
    away: list[errors.ForqError] = [errors.RedisUnavailable("away"), errors.OutcomeUnknown("broke")]
    fake.answers |= {"await": ITEM, "ack": lambda params: away.pop() if away else {}}
    assert forqctl(fake, "await", "q") == (0, 'a1 {"n":[1,"é"]}\n', "")
    assert fake.calls[1:] == [("ack", ACK)] * 3


def test_with_a_lease_the_caller_acknowledges(fake: FakeSupervisor) -> None:
    fake.answers |= {"dequeue": ITEM, "ack": {"id": "a1"}}
    assert forqctl(fake, "dequeue", "q", "--lease", "1m") == (0, 'a1 7 w {"n":[1,"é"]}\n', "")
    assert fake.calls == [("dequeue", {"name": "q", "id": None, "wait": 0.0, "lease": 60.0})]
    assert json.loads(forqctl(fake, "dequeue", "q", "--lease", "1m", "--json")[1]) == ITEM
    assert forqctl(fake, "ack", "q", "a1", "7", "w") == (0, "acknowledged a1\n", "")
    assert fake.calls[-1] == ("ack", ACK)
    fake.answers["ack"] = errors.LeaseLapsed("it has gone back")
    assert forqctl(fake, "ack", "q", "a1", "7", "w") == (1, "", "forqctl: it has gone back\n")


def test_await_is_limited_only_by_an_explicit_timeout(fake: FakeSupervisor) -> None:
    fake.answers["await"] = NOTHING
    assert forqctl(fake, "--timeout", "1s", "await", "q")[0] == 6
    assert forqctl(fake, "await", "q")[0] == 6
    waits = [params["wait"] for _, params in fake.calls]
    assert (round(waits[0], 1), waits[1]) == (1.0, None)


def test_status_shows_modes_unless_all_queues_are_work_queues(fake: FakeSupervisor) -> None:
    works = queue_status()
    gate = queue_status(name="gate", mode="auto_release", awaiters=3)
    fake.answers["status"] = whole_status(works)
    assert "MODE" not in forqctl(fake, "status")[1]
    fake.answers["status"] = whole_status({**works, "awaiters": 0}, gate)
    header, first, second = forqctl(fake, "status")[1].splitlines()
    assert header.split()[:3] == ["QUEUE", "MODE", "STATE"]
    assert "AWAITERS" in header
    assert (first.split()[:3], second.split()[:3]) == (
        ["emails", "work", "running"],
        ["gate", "auto_release", "running"],
    )


@pytest.mark.parametrize("mode", ["auto_release", "on_request", None])
def test_create_sends_the_given_mode_and_leaves_the_default_to_the_supervisor(
    fake: FakeSupervisor, mode: str | None
) -> None:
    fake.answers["queue.create"] = {}
    given = [] if mode is None else ["--mode", mode]
    assert forqctl(fake, "create", "q", *given, "--set", "lease=5s")[0] == 0
    assert fake.calls[0][1].get("mode") == mode
    assert fake.calls[0][1]["options"] == {"lease": "5s"}
