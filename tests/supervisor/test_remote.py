"""Requests from and to other supervisors, without processes: levels, deadlines, limits, and what is forwarded."""

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from forq.errors import ForqError, RedisUnavailable, UnknownApp, UnknownJob, UnknownQueue, UsageError
from forq.procs import jsonrpc
from forq.procs.unix_socket import Peer
from forq.remote_control import REMOTE_VERBS
from forq.supervisor.control import Request
from forq.supervisor.remote import (
    MAX_ANSWER_BYTES,
    MAX_PENDING,
    MAX_STACKS,
    SENT_WITH_ON,
    OtherSupervisors,
    RemoteCalls,
    with_short_stacks,
)
from tests.supervisor.fakes import FakeLoop

Verb = Callable[[Request], None]
READ = {name for name, level in REMOTE_VERBS.items() if level == "read"}


def fake_services(level: str = "full") -> Any:
    services = MagicMock()
    services.processor = "me"
    services.context.about = {"host": "here", "config": "/etc/forq.toml", "remote_control": level}
    return services


class Incoming:
    """Verbs that record their calls; the test reads the answers that go to pulse."""

    def __init__(self, level: str = "full", **verbs: Verb) -> None:
        self.loop = FakeLoop()
        self.services = fake_services(level)
        self.called: list[tuple[str, str, dict[str, Any]]] = []
        tables = {
            name: {verb: self._recording(name, verb) for verb in (*REMOTE_VERBS, "shutdown", "queue.create")} | verbs
            for name in ("read", "full")
        }
        self.calls = RemoteCalls(self.services, self.loop, tables)  # type: ignore[arg-type]

    def _recording(self, table: str, verb: str) -> Verb:
        def run(request: Request) -> None:
            self.called.append((table, verb, request.params))
            request.reply({"done": verb, "stacks": []})

        return run

    def receive(self, method: str, params: dict[str, Any] | None = None, *, left: float = 10.0, id: str = "r") -> Any:
        given = {"processor": "me", "id": id, "until": self.loop.now() + left, "method": method, "params": params or {}}
        before = self.services.pulse.request.call_count
        self.calls.receive(given)
        if self.services.pulse.request.call_count == before:
            return None
        verb, sent, *_ = self.services.pulse.request.call_args.args
        assert (verb, sent["processor"], sent["id"]) == ("remote_answer", "me", id)
        assert self.services.pulse.request.call_args.kwargs == {"repeat": True}
        return jsonrpc.read_answer(sent["line"].encode())[1]


@pytest.mark.parametrize("level", ["off", "read", "full"])
def test_each_level_allows_the_verbs_of_the_table_and_no_others(level: str) -> None:
    allowed = {"off": set(), "read": READ, "full": set(REMOTE_VERBS)}[level]
    rig = Incoming(level)
    for method in (*REMOTE_VERBS, "shutdown", "queue.create", "no.such"):
        answer = rig.receive(method)
        if method in allowed:
            assert answer["done"] == method
        else:
            assert answer.code == "permission"
    assert {(table, verb) for table, verb, _ in rig.called} == {(level, verb) for verb in allowed}


def test_a_refusal_names_the_host_the_file_and_the_value() -> None:
    assert str(Incoming("read").receive("kill")) == (
        'supervisor me on host here does not accept kill from elsewhere (remote_control = "read"): set remote_control '
        '= "full" in /etc/forq.toml there and restart it, or run forqctl on that host'
    )


def test_a_request_that_arrives_after_its_deadline_is_not_carried_out() -> None:
    rig = Incoming()
    assert rig.receive("queue.restart", left=0.0).code == "timeout"
    assert rig.called == []


def test_logs_from_elsewhere_do_not_wait_and_come_in_small_parts() -> None:
    rig = Incoming()
    rig.receive("logs", {"name": "q", "lines": 5, "wait": 5, "small": False, "other": 1})
    assert rig.called == [("full", "logs", {"name": "q", "lines": 5, "small": True})]


def test_an_error_or_a_bug_in_a_verb_is_answered() -> None:
    def refuse(request: Request) -> None:
        raise UnknownJob("no such job")

    def fail(request: Request) -> None:
        raise ZeroDivisionError

    rig = Incoming(kill=refuse, stack=fail)
    assert isinstance(rig.receive("kill"), UnknownJob)
    assert "internal error in stack" in str(rig.receive("stack"))


def test_an_answer_that_is_too_large_is_replaced_by_an_error() -> None:
    rig = Incoming(status=lambda request: request.reply({"x": "y" * MAX_ANSWER_BYTES}))
    assert rig.receive("status").code == "invalid_data"


def test_the_number_of_unanswered_requests_is_limited() -> None:
    waiting: list[Request] = []
    rig = Incoming(stack=waiting.append)
    for number in range(MAX_PENDING):
        assert rig.receive("stack", id=str(number)) is None
    assert "try again" in str(rig.receive("stack", id="more"))
    waiting[0].reply({"stacks": []})
    assert rig.receive("stack", id="next") is None


def test_long_stacks_are_cut_and_counted() -> None:
    def entries(count: int, length: int) -> dict[str, Any]:
        return {"stacks": [{"role": "main", "stack": "x" * length} for _ in range(count)]}

    assert with_short_stacks(entries(2, 1000)) == entries(2, 1000)
    assert with_short_stacks({"stacks": [{"stack": None}]}) == {"stacks": [{"stack": None}]}
    cut = with_short_stacks(entries(2, 150_000))
    assert cut["cut"] == 2
    assert all(entry["stack"].endswith("… (cut)") for entry in cut["stacks"])
    many = with_short_stacks(entries(MAX_STACKS + 7, 10_000))
    assert (len(many["stacks"]), many["cut"]) == (MAX_STACKS, MAX_STACKS + 7)
    assert len(json.dumps(many)) < MAX_ANSWER_BYTES


class Outgoing:
    """The verbs of the control socket; the test answers for the clerk."""

    def __init__(self, here: Verb) -> None:
        self.services = fake_services()
        self.table = OtherSupervisors(self.services).forwarding(dict.fromkeys(SENT_WITH_ON, here))

    def call(self, method: str, **params: Any) -> "Answered":
        answered = Answered()
        self.table[method](Request(answered, jsonrpc.Call(1, method, {"name": "q", **params}, True)))
        return answered

    def asked(self) -> Any:
        return self.services.clerk.request.call_args.args[1] if self.services.clerk.request.called else None

    def answer(self, value: Any) -> None:
        self.services.clerk.request.call_args.args[2](value)


class Answered:
    peer = Peer(1, 0, 0)
    value: Any = None

    def answer(self, request: Request, line: bytes) -> None:
        self.value = jsonrpc.read_answer(line)[1]


def reply_here(request: Request) -> None:
    request.reply("here")


def no_queue(request: Request) -> None:
    raise UnknownQueue("this supervisor serves no queue 'q'")


def test_a_request_that_can_be_carried_out_here_stays_here() -> None:
    rig = Outgoing(reply_here)
    for method in SENT_WITH_ON:
        assert rig.call(method).value == "here"
        assert rig.call(method, on="me").value == "here"
    assert rig.asked() is None


@pytest.mark.parametrize("method", ["kill", "stack", "queue.restart"])
def test_a_request_about_a_queue_that_is_not_here_is_sent_elsewhere(method: str) -> None:
    rig = Outgoing(no_queue)
    answered = rig.call(method)
    assert rig.asked() == {"method": method, "params": {"name": "q"}, "on": None, "besides": "me", "seconds": None}
    rig.answer({"here": False, "result": {"done": 1}})
    assert answered.value == {"done": 1}


@pytest.mark.parametrize("method", ["logs", "status"])
def test_logs_and_status_are_sent_elsewhere_only_on_request(method: str) -> None:
    with pytest.raises(UnknownQueue):
        Outgoing(no_queue).call(method)
    rig = Outgoing(no_queue)
    rig.call(method, on="web-2", timeout=1.5)
    assert rig.asked() == {"method": method, "params": {"name": "q"}, "on": "web-2", "besides": "me", "seconds": 1.5}


def test_other_errors_are_not_a_reason_to_ask_elsewhere() -> None:
    def unknown_app(request: Request) -> None:
        raise UnknownApp("no app")

    with pytest.raises(UnknownApp):
        Outgoing(unknown_app).call("queue.restart")


def test_on_must_be_a_name() -> None:
    for on in ("", 5, ["x"]):
        with pytest.raises(UsageError):
            Outgoing(reply_here).call("kill", on=on)


def test_a_timeout_must_be_seconds() -> None:
    for timeout in (0, -1, True, "5s", 1e9, float("nan")):
        with pytest.raises(UsageError):
            Outgoing(reply_here).call("kill", timeout=timeout)


def test_on_that_turns_out_to_be_this_host_is_carried_out_here() -> None:
    rig = Outgoing(reply_here)
    answered = rig.call("stack", on="here")
    rig.answer({"here": True})
    assert answered.value == "here"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UnknownQueue("nobody serves it"), "this supervisor serves no queue 'q'; nobody serves it"),
        (RedisUnavailable("down"), "this supervisor serves no queue 'q'; other supervisors cannot be asked: down"),
        (ForqError("late"), "late"),
    ],
)
def test_an_error_says_what_is_known_here_and_elsewhere(error: ForqError, message: str) -> None:
    rig = Outgoing(no_queue)
    answered = rig.call("stack")
    rig.answer(error)
    assert str(answered.value) == message
