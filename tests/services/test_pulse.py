"""Pulse with a fake clock and a fake Redis: heartbeats, recovery, timers, rescue, reconnect. No forks, no server."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forq.broker.control import Taken, TakenRequest
from forq.broker.recovery import Heartbeat, Position, QueueGone, Recovered
from forq.broker.scripts import Fate
from forq.broker.supervisors import Announced
from forq.errors import Fenced, ForqError, RedisUnavailable
from forq.procs import jsonrpc
from forq.procs.scoreboard import Role, Slot, State, pack_position
from forq.services.pulse import ABANDONED_SECONDS, INCOMPLETE_CHECK_SECONDS, LONGEST_TIMER_MS, Pulse
from tests.support.drive.contexts import context

HEARTBEAT_SECONDS = 10.0
CHANNEL = "forq:queue:{%s}@0:due"
AGAIN = Fate("returned", 0, 1, 4)
RECOVERY: dict[str, Any] = {
    "queue": "q",
    "processor": "p",
    "with_fail_queue": False,
    "worker": "w",
    "turn": 1,
    "index": 0,
    "running": True,
    "outcome": "stalled",
    "cause": "signal_9",
    "micros": 5,
    "stack": "frames",
    "peak_bytes": 7,
    "output": None,
}


def beat(**changes: Any) -> Heartbeat:
    usual: dict[str, Any] = {"evicted": [], "due_ms": None, "more": False, "unread": {}}
    return Heartbeat(**usual | changes)


class FakeRedis:
    """Replaces the subscription, the registry, the link and WorkerRecovery. `down`: every call fails."""

    processor = "p" * 16

    def __init__(self) -> None:
        self.down = False
        self.loses_functions = False
        self.functions_missed = 0
        # Queue -> reply to its heartbeat; None: nothing to report.
        self.replies: dict[str, Heartbeat | ForqError] = {}
        self.beats: list[str] = []
        self.positions: dict[str, list[Position]] = {}
        self.recovered: list[tuple[str, Position, dict[str, Any]]] = []
        self.recovery = Recovered(0)
        self.evicted: list[tuple[str, str, str]] = []
        self.rescued: list[tuple[str, Position]] = []
        self.promoted: list[str] = []
        self.next_due_ms: list[int | None] = []
        self.turns: dict[str, int] = {}
        self.unserved_queues: dict[str, str] = {}
        self.searches = 0
        self.incomplete_queues: dict[str, str] = {}
        self.connected = False
        self.connects = 0
        self.messages: list[tuple[str, str]] = []
        # The description in each announcement; None: unchanged.
        self.announced: list[dict[str, Any] | None] = []
        self.withdrawn: list[str] = []
        self.requests: list[TakenRequest] = []
        self._reading, self._writing = os.pipe()

    def _check(self) -> None:
        if self.down:
            raise RedisUnavailable("down")

    def library_reloads(self) -> int:
        return self.functions_missed

    def heartbeats(
        self, queues: list[str], expiry_ms: int, positions: dict[str, list[Position]]
    ) -> Iterator[tuple[str, Heartbeat | ForqError]]:
        self.positions = positions
        self.functions_missed += self.loses_functions
        for queue in queues:
            self.beats.append(queue)
            yield queue, RedisUnavailable("down") if self.down else self.replies.get(queue, beat())

    def recover(self, queue: str, processor: str, at: Position, **how: Any) -> Recovered:
        self._check()
        self.recovered.append((queue, at, how))
        return self.recovery

    def evict(self, queue: str, processor: str, cause: str, on_lost: Callable[[str, Fate], None]) -> int:
        self.evicted.append((queue, processor, cause))
        on_lost("a", AGAIN)
        return 1

    def rescue(self, queue: str, at: Position, *, has_results: bool = False) -> int:
        self._check()
        self.rescued.append((queue, at))
        return 1

    def promote(self, queue: str) -> int | None:
        self._check()
        self.promoted.append(queue)
        return self.next_due_ms.pop(0) if self.next_due_ms else None

    def registered(self, queue: str) -> dict[str, int]:
        return self.turns

    def unserved(self, served: set[str]) -> dict[str, str]:
        self.searches += 1
        self._check()
        return {name: mode for name, mode in self.unserved_queues.items() if name not in served}

    def names(self) -> dict[str, str]:
        return dict(self.incomplete_queues)

    def incomplete(self, names: dict[str, str]) -> dict[str, str]:
        return names

    def announce(self, processor: str, expiry_ms: int, about: dict[str, Any] | None) -> Announced:
        self._check()
        self.announced.append(about)
        return Announced(len(self.requests), False)

    def withdraw(self, processor: str) -> None:
        self.withdrawn.append(processor)

    def take(self, processor: str, count: int) -> Taken:
        taken, self.requests = self.requests[:count], self.requests[count:]
        return Taken(taken, len(self.requests), 0, 0, 0)

    def connect(self) -> None:
        self.connects += 1
        self._check()
        self.connected = True

    def fileno(self) -> int:
        return self._reading if self.connected else -1

    def publish(self, queue: str, message: str) -> None:
        self.messages.append((CHANNEL % queue, message))
        os.write(self._writing, b"x")

    def break_connection(self) -> None:
        self.down = True
        os.write(self._writing, b"x")

    def receive(self) -> list[tuple[str, str]]:
        if self.down:
            # The byte stays unread: pulse must not poll a broken connection.
            self.connected = False
            raise RedisUnavailable("broken")
        os.read(self._reading, 4096)
        messages, self.messages = self.messages, []
        return messages

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


class Rig:
    """A started pulse that serves `q` and its fail queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, down: bool = False) -> None:
        self.now = 1000.0
        self.redis = FakeRedis()
        self.redis.down = down
        self.watch_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.ours, self.theirs = socket.socketpair()
        given = context(processor=FakeRedis.processor, heartbeat_seconds=HEARTBEAT_SECONDS, watch_fd=self.watch_fd)
        self.pulse = pulse = Pulse(given, self.theirs, now=lambda: self.now)
        self.board = given.scoreboard
        for attribute in ("_recovery", "_registry", "_link", "_subscription"):
            setattr(pulse, attribute, self.redis)
        for holder in (pulse._batches, pulse._unread):
            holder._recovery = self.redis  # type: ignore[assignment]
        pulse._incomplete._registry = self.redis  # type: ignore[assignment]
        pulse._remote._supervisors = pulse._remote._control = self.redis  # type: ignore[assignment]
        pulse._batches._now_ns = lambda: int(self.now * 1e9)
        self.events: list[dict[str, Any]] = []
        monkeypatch.setattr(pulse._rpc, "notify", lambda event, **more: self.events.append({"event": event, **more}))
        pulse._queues = ["q", "q#fail"]
        pulse.start()
        self.advance(0)

    def advance(self, seconds: float) -> None:
        """Calls each timer at its time."""
        until = self.now + seconds
        while True:
            self.pulse._loop.tick(0)
            timers = [due for due, _, timer in self.pulse._loop._timers if not timer.cancelled]
            if not timers or min(timers) > until:
                break
            self.now = max(self.now, min(timers))
        self.now = until
        self.pulse._loop.tick(0)

    def take_beats(self) -> list[str]:
        beats, self.redis.beats = self.redis.beats, []
        return beats

    def take_events(self, *names: str) -> list[dict[str, Any]]:
        """Returns the events with these names, or all, and clears the list."""
        events, self.events = self.events, []
        return [event for event in events if not names or event["event"] in names]

    def request(self, method: str, **params: Any) -> Any:
        self.ours.sendall(jsonrpc.request(1, method, params))
        self.pulse._loop.tick(0)
        return jsonrpc.read_answer(self.ours.recv(65536).rstrip(b"\n"))[1]

    def slot(self, **fields: Any) -> Slot:
        slot = self.board.slot(self.board.take())
        usual: dict[str, Any] = {"queue": "q", "worker": "w", "role": Role.MAIN, "state": State.BUSY, "pid": 7}
        for name, value in (usual | fields).items():
            setattr(slot, name, value)
        return slot

    def run_job(self, slot: Slot, turn: int, index: int = 0, *, running: bool = True) -> None:
        """Marks the job as started now."""
        slot.turn = turn
        slot.position = pack_position(int(self.now * 1e9), turn, index, running)

    def close(self) -> None:
        self.redis.close()
        self.ours.close()
        self.theirs.close()
        os.close(self.watch_fd)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    rig.take_beats()
    rig.take_events()
    yield rig
    rig.close()


def test_heartbeats_are_sent_for_every_served_queue_at_the_interval(rig: Rig) -> None:
    rig.advance(HEARTBEAT_SECONDS - 0.01)
    assert rig.take_beats() == []
    rig.advance(0.01)
    assert rig.take_beats() == ["q", "q#fail"]
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.take_beats() == ["q", "q#fail"]


def test_a_heartbeat_has_the_position_of_every_worker_that_has_started(rig: Rig) -> None:
    rig.run_job(rig.slot(worker="main"), 5, 2)
    rig.run_job(rig.slot(worker="retry", role=Role.RETRY), 8, running=False)
    rig.slot(worker="new", state=State.STARTING)
    rig.slot(worker="", state=State.EMPTY)
    rig.advance(HEARTBEAT_SECONDS)
    retry = Position("retry", 8, 0, False)
    assert rig.redis.positions == {"q": [Position("main", 5, 2, True), retry], "q#fail": [retry]}


def test_while_redis_is_unreachable_heartbeats_are_retried_every_second(rig: Rig) -> None:
    rig.redis.down = True
    rig.advance(HEARTBEAT_SECONDS)
    rig.take_beats()
    rig.advance(3.0)
    assert rig.take_beats() == ["q", "q#fail"] * 3


def test_each_change_of_redis_is_reported_once(rig: Rig) -> None:
    rig.redis.down = True
    rig.advance(3 * HEARTBEAT_SECONDS)
    assert rig.take_events("redis") == [{"event": "redis", "ok": False, "error": "down"}]
    rig.redis.down = False
    rig.advance(3 * HEARTBEAT_SECONDS)
    assert rig.take_events("redis") == [{"event": "redis", "ok": True, "error": None}]


def test_a_starting_redis_is_not_reported_as_down(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, down=True)
    assert rig.take_events("redis") == []
    rig.advance(1.0)
    assert rig.take_events("redis") == [{"event": "redis", "ok": False, "error": "down"}]
    rig.close()


def test_lost_functions_are_reported_since_clients_may_not_load_them(rig: Rig) -> None:
    rig.redis.loses_functions = True
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.take_events("redis_back") == [{"event": "redis_back"}]
    rig.redis.loses_functions = False
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.take_events("redis_back") == []


def test_an_unfinished_eviction_is_continued_with_another_heartbeat_at_once(rig: Rig) -> None:
    rig.redis.replies["q"] = beat(more=True)
    rig.pulse._send_heartbeats(["q"])
    del rig.redis.replies["q"]
    rig.advance(0)
    assert rig.take_beats() == ["q", "q"]


def test_after_its_eviction_pulse_reports_it_and_sends_no_further_heartbeats(rig: Rig) -> None:
    rig.redis.replies["q"] = Fenced("evicted")
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.take_beats() == ["q"]
    assert rig.take_events("evicted") == [{"event": "evicted", "queue": "q"}]


@pytest.mark.parametrize("deleted", [True, False])
def test_a_queue_that_is_gone_is_reported_by_its_main_name(rig: Rig, deleted: bool) -> None:
    rig.redis.replies["q#fail"] = QueueGone("q#fail", deleted=deleted)
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.take_events() == [{"event": "queue_gone", "queue": "q", "deleted": deleted}]


def test_a_refused_heartbeat_is_logged_and_the_other_queues_get_theirs(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.redis.replies["q"] = ForqError("other protocol")
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.take_beats() == ["q", "q#fail"]
    assert caplog.messages == ["heartbeat refused queue=q error=other protocol"]


def test_an_evicted_processor_is_logged_with_the_attempts_that_were_lost(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.redis.replies["q"] = beat(evicted=["other"], lost=[("a", AGAIN)])
    rig.advance(HEARTBEAT_SECONDS)
    assert caplog.messages == [
        "evicted processors without heartbeats queue=q processors=['other']",
        "job lost with its process (host lost): attempt 1 of 4, retry at once queue=q job=a",
    ]


def test_resting_workers_are_probed_while_jobs_wait_for_them(rig: Rig) -> None:
    main, retry = rig.slot(state=State.IDLE), rig.slot(state=State.PARKED, role=Role.RETRY)
    for name, reply, slot in (
        ("q", beat(main_wanted=True), main),
        ("q", beat(retry_wanted=True), retry),
        ("q#fail", beat(main_wanted=True), retry),
    ):
        rig.redis.replies = {name: reply}
        rig.advance(HEARTBEAT_SECONDS)
        assert rig.take_events("probe") == [{"event": "probe", "slots": [slot.number], "unread": False}]


def test_every_heartbeat_reports_suspects_and_fail_jobs_that_wait(rig: Rig) -> None:
    rig.redis.replies = {"q": beat(helpers_wanted=2), "q#fail": beat(helpers_wanted=1)}
    rig.pulse._send_heartbeats(["q", "q#fail"])
    assert rig.take_events() == [
        {"event": "suspects", "queue": "q", "waiting": 2},
        {"event": "fail_jobs", "queue": "q"},
    ]


def test_a_child_that_reports_an_eviction_causes_a_heartbeat_at_once(rig: Rig) -> None:
    assert rig.request("heartbeat", queues=["q"]) == {}
    assert rig.take_beats() == ["q"]


def test_recovery_passes_on_what_is_known_about_the_worker_and_its_job(rig: Rig) -> None:
    assert rig.request("recover", **RECOVERY) == {}
    how = {name: RECOVERY[name] for name in ("outcome", "cause", "micros", "stack", "peak_bytes")}
    assert rig.redis.recovered == [("q", Position("w", 1, 0, True), how)]


def test_a_recovered_worker_is_drained_twice_more(rig: Rig) -> None:
    """Redis may still serve its pending BLMOVE."""
    rig.request("recover", **RECOVERY | {"with_fail_queue": True})
    assert [queue for queue, _, _ in rig.redis.recovered] == ["q", "q#fail"]
    again = [
        (queue, Position("w", -1, 0, False), {"outcome": "interrupted", "cause": "late"}) for queue in ("q", "q#fail")
    ]
    for seconds in (0.1, 0.9):
        rig.redis.recovered.clear()
        rig.advance(seconds - 0.01)
        assert rig.redis.recovered == []
        rig.advance(0.01)
        assert rig.redis.recovered == again
    rig.redis.recovered.clear()
    rig.advance(5.0)
    assert rig.redis.recovered == []


def test_a_recovery_that_redis_did_not_accept_is_an_error_for_the_supervisor(rig: Rig) -> None:
    rig.redis.down = True
    assert isinstance(rig.request("recover", **RECOVERY), RedisUnavailable)
    rig.redis.down = False
    assert rig.request("recover", **RECOVERY) == {}


def test_the_job_of_a_recovered_worker_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.redis.recovery = Recovered(1, "a", AGAIN)
    rig.request("recover", **RECOVERY)
    assert caplog.messages == ["job lost with its process (signal 9): attempt 1 of 4, retry at once queue=q job=a"]


def test_after_the_recovery_of_running_jobs_one_heartbeat_counts_the_suspects(rig: Rig) -> None:
    rig.redis.replies["q"] = beat(helpers_wanted=3)
    for number in range(3):
        rig.pulse._recover(RECOVERY | {"worker": f"w{number}"})
    rig.advance(0.01)
    assert (rig.take_beats(), rig.take_events()) == (["q"], [{"event": "suspects", "queue": "q", "waiting": 3}])
    rig.pulse._recover(RECOVERY | {"running": False})
    rig.advance(0.01)
    assert rig.take_beats() == [], "nothing was running in this process"
    rig.pulse._recover(RECOVERY)
    rig.advance(0.01)
    assert rig.take_beats() == ["q"]


def test_an_eviction_covers_the_fail_queues_and_logs_lost_attempts(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    assert rig.request("evict", processor="old", cause="restarted", queues=["q"]) == {}
    assert rig.redis.evicted == [("q", "old", "restarted"), ("q#fail", "old", "restarted")]
    assert rig.redis.withdrawn == ["old"]
    assert caplog.messages[0] == "job lost with its process (restarted): attempt 1 of 4, retry at once queue=q job=a"


def test_a_job_is_promoted_when_it_is_due_and_then_the_next_one(rig: Rig) -> None:
    rig.redis.replies["q"] = beat(due_ms=500)
    rig.pulse._send_heartbeats(["q"])
    rig.redis.next_due_ms = [300, None]
    rig.advance(0.49)
    assert rig.redis.promoted == []
    rig.advance(0.01)
    assert rig.redis.promoted == ["q"]
    rig.advance(0.3)
    assert rig.redis.promoted == ["q", "q"]
    rig.advance(5.0)
    assert rig.redis.promoted == ["q", "q"]


def test_only_the_earliest_time_of_a_queue_has_a_timer(rig: Rig) -> None:
    for delay_ms in ("400", "100", "200"):
        rig.redis.publish("q", delay_ms)
        rig.advance(0)
    rig.advance(0.1)
    assert rig.redis.promoted == ["q"]
    rig.advance(5.0)
    assert rig.redis.promoted == ["q"], "promote returned that nothing else is due"


def test_a_promotion_that_fails_is_retried(rig: Rig) -> None:
    rig.redis.publish("q", "100")
    rig.advance(0)
    rig.redis.down = True
    rig.advance(0.2)
    rig.redis.down = False
    rig.advance(0.14)
    assert rig.redis.promoted == []
    rig.advance(0.01)
    assert rig.redis.promoted == ["q"]


def test_a_time_far_in_the_future_is_checked_again_after_an_hour(rig: Rig) -> None:
    rig.redis.publish("q", "9" * 16)
    rig.advance(0)
    assert rig.pulse._due == {"q": rig.now + LONGEST_TIMER_MS / 1000}


@pytest.mark.parametrize("message", ["look", "look w", "look w x", "look w 1 2", "²", "-1", "", "9" * 17])
def test_a_message_that_no_script_sends_is_ignored(rig: Rig, message: str) -> None:
    rig.redis.publish("q", message)
    rig.redis.publish("other", "100")
    rig.advance(1.0)
    assert (rig.redis.promoted, rig.pulse._due) == ([], {})


def test_a_created_queue_is_reported_and_its_times_count_until_it_is_served(rig: Rig) -> None:
    rig.redis.unserved_queues = {"gate": "on_request"}
    rig.redis.publish("gate", "new")
    rig.redis.publish("gate", "100")
    rig.advance(0.1)
    assert rig.take_events() == [{"event": "queue_found", "queue": "gate", "mode": "on_request"}]
    assert rig.redis.promoted == ["gate"]
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.take_events("queue_found") != [], "it is reported until it is served"
    rig.redis.publish("gate", "100")
    rig.advance(1.0)
    assert rig.redis.promoted == ["gate"], "another supervisor serves it, or nobody"


def test_queues_are_not_searched_after_heartbeats_have_failed(rig: Rig) -> None:
    rig.redis.down = True
    rig.advance(HEARTBEAT_SECONDS)
    searches = rig.redis.searches
    rig.advance(5.0)
    assert rig.redis.searches == searches


@pytest.mark.parametrize("how", ["published", "promoted"])
@pytest.mark.parametrize("state", [State.BUSY, State.PARKED])
def test_a_fail_job_causes_a_heartbeat_only_if_the_retry_process_is_busy(rig: Rig, state: State, how: str) -> None:
    rig.slot(role=Role.RETRY, state=state)
    rig.redis.replies["q#fail"] = beat(helpers_wanted=1)
    for _ in range(5):
        rig.redis.publish(*(("q", "fail") if how == "published" else ("q#fail", "0")))
    rig.advance(0.04)
    assert rig.take_beats() == [], "an idle process claims it in the meantime"
    rig.advance(0.2)
    busy = state == State.BUSY
    assert rig.take_beats() == (["q#fail"] if busy else [])
    assert rig.take_events() == ([{"event": "fail_jobs", "queue": "q"}] if busy else [])


def test_a_worker_wakes_pulse_when_it_starts_a_batch(rig: Rig) -> None:
    rig.advance(5.0)
    assert rig.board.watching == 0, "nothing is polled while there are no batches"
    slot = rig.slot(held=3)
    rig.run_job(slot, 4, 1)
    rig.advance(1.0)
    assert rig.redis.rescued == []
    os.eventfd_write(rig.watch_fd, 1)
    rig.advance(0.1)
    assert rig.redis.rescued == [("q", Position("w", 4, 1, True))]
    assert rig.board.watching == 1
    with pytest.raises(BlockingIOError):
        os.eventfd_read(rig.watch_fd)


def test_a_published_claim_that_its_worker_does_not_start_is_rescued(rig: Rig) -> None:
    worker = "w" + FakeRedis.processor
    slot = rig.slot(worker=worker, state=State.IDLE)
    rig.run_job(slot, 5, running=False)
    rig.redis.publish("q", f"look {worker} 6")
    rig.advance(0.4)
    assert rig.take_events() == [{"event": "probe", "slots": [slot.number], "unread": True}]
    rig.advance(1.0)
    assert rig.redis.rescued == [("q", Position(worker, 6, 0, False))]


@pytest.mark.parametrize("how", ["heartbeat", "request"])
def test_unread_claims_are_also_found_by_heartbeats_and_on_request(rig: Rig, how: str) -> None:
    slot = rig.slot(state=State.IDLE)
    rig.run_job(slot, 5, running=False)
    rig.redis.turns = {"w": 6}
    if how == "heartbeat":
        rig.redis.replies["q"] = beat(unread={"w": 6})
        rig.pulse._send_heartbeats(["q"])
    else:
        assert rig.request("check_unread", queue="q") == {}
    assert rig.take_events() == [{"event": "probe", "slots": [slot.number], "unread": True}]


def test_many_rescues_log_one_line_per_queue_and_minute(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        found = [message.partition(" queue=")[2] for message in caplog.messages]
        caplog.clear()
        return found

    at = Position("w", 1, 0, True)
    caplog.set_level(logging.INFO, "forq")
    for _ in range(100):
        assert rig.pulse._batches.rescue("a", at)
    assert rig.pulse._batches.rescue("b", at)
    assert lines() == ["a jobs=1", "b jobs=1"]
    rig.advance(60)
    assert lines() == ["a jobs=99"]
    rig.advance(60)
    assert lines() == []
    assert rig.pulse._batches.rescue("a", at)
    assert lines() == ["a jobs=1"]


def test_a_broken_subscription_is_restored_and_every_queue_gets_a_heartbeat(rig: Rig) -> None:
    rig.redis.break_connection()
    rig.advance(0)
    rig.redis.down = False
    rig.advance(0.09)
    assert (rig.redis.connects, rig.take_beats()) == (1, [])
    rig.advance(0.01)
    assert (rig.redis.connects, rig.take_beats()) == (2, ["q", "q#fail"])
    assert rig.take_events("redis_back") == [{"event": "redis_back"}]
    rig.redis.publish("q", "100")
    rig.advance(0.1)
    assert rig.redis.promoted == ["q"]


def test_while_redis_is_unreachable_the_subscription_is_retried_every_second(rig: Rig) -> None:
    rig.redis.break_connection()
    rig.advance(0.1)
    connects = rig.redis.connects
    rig.advance(3.0)
    assert rig.redis.connects == connects + 3
    assert rig.take_events() == [{"event": "redis", "ok": False, "error": "down"}]


def test_a_new_queue_gets_a_heartbeat_and_the_others_do_not(rig: Rig) -> None:
    assert rig.request("serve_also", queue="r", with_fail_queue=True) == {}
    assert rig.take_beats() == ["r", "r#fail"]
    assert rig.request("serve", queues=["q", "s"], with_fail_queue=["q"]) == {}
    assert rig.take_beats() == ["s"]
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.take_beats() == ["q", "s", "q#fail"]


def test_serving_a_queue_restores_a_missing_subscription(rig: Rig) -> None:
    rig.redis.break_connection()
    rig.advance(0)
    rig.redis.down = False
    assert rig.request("serve_also", queue="r", with_fail_queue=False) == {}
    assert rig.redis.connected
    assert rig.take_beats() == ["q", "q#fail", "r"], "messages of all queues were lost"


def test_incomplete_queues_are_reported_while_redis_is_reachable(rig: Rig) -> None:
    rig.redis.incomplete_queues = {"half": "work"}
    rig.advance(INCOMPLETE_CHECK_SECONDS + ABANDONED_SECONDS - 1)
    assert rig.take_events("queue_incomplete") == []
    rig.advance(1)
    for _ in range(2):
        assert rig.take_events("queue_incomplete") == [{"event": "queue_incomplete", "queue": "half"}]
        rig.advance(INCOMPLETE_CHECK_SECONDS)
    rig.redis.down = True
    rig.advance(HEARTBEAT_SECONDS)
    rig.take_events()
    rig.advance(2 * INCOMPLETE_CHECK_SECONDS)
    assert rig.take_events("queue_incomplete") == []


def test_the_supervisor_is_announced_with_each_heartbeat_and_described_only_when_something_has_changed(
    rig: Rig,
) -> None:
    rig.redis.announced.clear()
    for _ in range(2):
        rig.advance(HEARTBEAT_SECONDS)
    assert rig.redis.announced == [None, None]
    rig.slot(pid=7)
    rig.slot(pid=7)
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.redis.announced[2] == {"queues": ["q"], "processes": 1, "expiry_ms": 30_000}
    rig.request("serve", queues=["q", "r"], with_fail_queue=["r"])
    rig.advance(0)
    assert rig.redis.announced[3] == {"queues": ["q", "r"], "processes": 1, "expiry_ms": 30_000}


def test_an_announcement_that_failed_is_repeated_with_the_description(rig: Rig) -> None:
    rig.slot(pid=7)
    rig.redis.down = True
    rig.advance(HEARTBEAT_SECONDS)
    rig.redis.announced.clear()
    rig.redis.down = False
    rig.advance(HEARTBEAT_SECONDS)
    assert rig.redis.announced[0] is not None


def test_a_supervisor_that_stops_is_not_announced_again(rig: Rig) -> None:
    rig.request("evict", processor=FakeRedis.processor, cause="stopped", queues=[])
    rig.redis.announced.clear()
    rig.advance(HEARTBEAT_SECONDS)
    assert (rig.redis.withdrawn, rig.redis.announced) == ([FakeRedis.processor], [])


def test_requests_are_forwarded_when_a_message_or_a_heartbeat_reports_them(rig: Rig) -> None:
    def forwarded() -> list[str]:
        return [event["request"]["id"] for event in rig.take_events("remote_request")]

    rig.redis.requests = [TakenRequest(str(number), 1e9, b'{"method":"ping","params":{}}') for number in range(20)]
    rig.redis.messages.append((f"forq:{{control}}@0:requests:{FakeRedis.processor}", "0"))
    rig.redis.publish("q", "0")
    rig.advance(0)
    assert forwarded() == [str(number) for number in range(20)]
    rig.redis.requests = [TakenRequest("later", 1e9, b'{"method":"ping","params":{}}')]
    rig.advance(HEARTBEAT_SECONDS)
    assert forwarded() == ["later"]
