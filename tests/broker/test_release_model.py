"""The scripts of the release modes against a model, in every order Hypothesis can think of.

FORQ_MODEL_EXAMPLES=5000 looks longer, and elsewhere each time.
"""

import os
from itertools import count

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forq.broker.claim import ReleaseReply
from forq.broker.dead import DeadJobs
from forq.broker.enqueue import Update, new_job
from forq.broker.journal import Event, read_entry
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.leases import LeaseReply
from forq.errors import Exists, Fenced, LeaseLapsed, QueueFull, UnknownJob, UnknownQueue
from tests.broker.sweeping import sweeping_at_once
from tests.support.drive.one_queue import EXPIRY_MS, HandWorker, State
from tests.support.drive.release_queue import ReleaseQueue
from tests.support.drive.server import Server
from tests.support.models.mutants import MUTANT
from tests.support.models.queue import MAX_ITEMS, Dispatch, Full, Taken
from tests.support.models.queue_checks import MINUTE_MS, pass_time
from tests.support.models.release import (
    ITEM_TIMEOUT_MS,
    LEASE_MS,
    RELEASE_RETRIES,
    RETRY_INTERVAL_MS,
    RETRY_LANE_RETRIES,
    Registered,
    ReleaseModel,
)
from tests.support.models.release_checks import ReleaseChecks
from tests.support.thorough import examples

# Every time in a run is ahead by one of these, or has come: far enough apart that the seconds of a run do not matter.
AHEAD_MS = {"now": 0, "soon": 25 * MINUTE_MS, "later": 50 * MINUTE_MS, "far": 600 * MINUTE_MS}
STEP_MS = 35 * MINUTE_MS
NAMES = tuple("uvwxyz")

IDS = st.sampled_from("abcd:")
SEVERAL_IDS = st.lists(IDS, min_size=1, max_size=3).map("".join)
PRIORITIES = st.sampled_from((5, 5, 5, 0, 7))
RUN_AT = st.sampled_from(("now", "now", "now", "soon", "later", "far"))
HOW_RUN_AT = st.sampled_from((True, False, "if_later", "if_earlier"))
IF_EXISTS = st.sampled_from(("update", "update", "update", "skip", "refuse"))
AWAITERS = st.sampled_from(NAMES)
WANTED = st.sampled_from((None, None, "a", "b", ":"))
LANES = st.sampled_from(("main", "main", "retry"))
SELDOM = st.sampled_from((False, False, False, True))
OFTEN = st.sampled_from((True, True, True, False))


class ReleaseMachine(RuleBasedStateMachine):
    server: Server

    @initialize(mode=st.sampled_from(("auto_release", "on_request")), ages=st.booleans())
    def begin(self, mode: str, ages: bool) -> None:
        self.server.flush()
        timeout_ms = ITEM_TIMEOUT_MS if ages else 0
        self.options = {
            "max_items": MAX_ITEMS,
            "release_interval_ms": 600 * MINUTE_MS,
            "release_retries": RELEASE_RETRIES,
            "retry_interval_ms": RETRY_INTERVAL_MS,
            "retry_lane_retries": RETRY_LANE_RETRIES,
            "lease_ms": LEASE_MS,
            "item_timeout_ms": timeout_ms,
        }
        self.queue = ReleaseQueue(self.server.url, mode, name="q", **self.options)
        self.dead = DeadJobs(self.queue.link, DEFAULT_PREFIX, "q")
        seconds, _ = self.queue.redis.time()
        self.model = ReleaseModel(seconds * 1000, (), mode=mode, timeout_ms=timeout_ms)
        self.checks = ReleaseChecks(self.queue, self.model, NAMES)
        self.numbers = count(1)
        self.times_have_come = False
        self.gone: list[HandWorker] = []
        self._join_all()

    def _join_all(self) -> None:
        self.workers = {lane: self._join(lane) for lane in ("main", "retry")}

    def _join(self, lane: str) -> HandWorker:
        worker = HandWorker(self.queue, f"{lane}{next(self.numbers)}", "p1", lane)
        worker.consumer.link = self.queue.link
        worker.consumer.join(EXPIRY_MS)
        return worker

    # Producers

    @rule(job_ids=SEVERAL_IDS, priority=PRIORITIES, run_at=RUN_AT, if_exists=IF_EXISTS)
    def enqueue(self, job_ids: str, priority: int, run_at: str, if_exists: str) -> None:
        self._enqueue(job_ids, self._dispatch(priority, run_at), if_exists)

    @rule(job_ids=SEVERAL_IDS, priority=PRIORITIES)
    def enqueue_at_once(self, job_ids: str, priority: int) -> None:
        """What producers do most."""
        self._enqueue(job_ids, self._dispatch(priority, "now"), "update")

    @rule(
        job_id=IDS,
        priority=PRIORITIES,
        run_at=RUN_AT,
        update_data=st.booleans(),
        how=HOW_RUN_AT,
        reset=st.sampled_from((None, True, False)),
    )
    def update(
        self, job_id: str, priority: int, run_at: str, update_data: bool, how: bool | str, reset: bool | None
    ) -> None:
        dispatch = self._dispatch(priority, run_at)
        changed = Dispatch(dispatch.data, priority, dispatch.run_at, update_data, how, reset)
        self._enqueue(job_id, changed, "update")

    @rule(job_id=IDS, priority=PRIORITIES, run_at=RUN_AT, token=st.sampled_from(("t1", "t2")))
    def enqueue_and_repeat_since_the_reply_was_lost(self, job_id: str, priority: int, run_at: str, token: str) -> None:
        dispatch = self._dispatch(priority, run_at)
        for _ in range(2):
            self._enqueue(job_id, dispatch, "update", token)

    def _dispatch(self, priority: int, run_at: str) -> Dispatch:
        ahead = AHEAD_MS[run_at]
        return Dispatch(next(self.numbers) + 1000, priority, self.model.now_ms + ahead if ahead else 0)

    def _enqueue(self, job_ids: str, dispatch: Dispatch, if_exists: str, token: str | None = None) -> None:
        run_at = dispatch.run_at / 1000 or None
        jobs = [
            new_job(dispatch.data, id=job_id, priority=dispatch.priority, token=token, run_at=run_at)
            for job_id in job_ids
        ]
        update = Update(if_exists, dispatch.update_data, dispatch.update_run_at, dispatch.reset)
        try:
            expected = self.model.enqueue(list(job_ids), dispatch, if_exists, token)
        except (Taken, Full) as refusal:
            with pytest.raises(Exists if isinstance(refusal, Taken) else QueueFull):
                self.queue.producer.enqueue(jobs, update)
        else:
            assert self.queue.producer.enqueue(jobs, update) == expected

    @rule(job_id=IDS, even_active=st.booleans(), again=SELDOM)
    def take_away(self, job_id: str, even_active: bool, again: bool) -> None:
        call = self.queue.producer.remove if even_active else self.queue.producer.cancel
        for _ in range(1 + again):
            assert call(job_id) == self.model.cancel(job_id, even_active=even_active)

    # Awaiters

    @rule(name=AWAITERS, wanted=WANTED, register=OFTEN, via=st.sampled_from(("-", "-", "clerk1")), lose=SELDOM)
    def ask(self, name: str, wanted: str | None, register: bool, via: str, lose: bool) -> None:
        answer = self._ask(name, wanted, register, via)
        if lose and answer is not None:
            assert self._ask(name, wanted, register, via) == answer, "the same call has the same answer"

    def _ask(self, name: str, wanted: str | None, register: bool, via: str) -> LeaseReply | None:
        """None: it was refused."""

        def call() -> LeaseReply:
            return self.queue.leases.request(name, wanted, mode=self.model.mode, register=register, via=via)

        if name in self.model.acked:
            with pytest.raises(LeaseLapsed):
                call()
            return None
        held = self.model.held_by(name)
        if held is not None and self.checks.awaiters().lists.get(name):
            answer = call()
            assert answer.lease is not None
            assert f"{name}:{answer.lease.fence}" == self.model.items_by_id[held].owner
            return answer
        self._note_if_it_was_rung_for_another(name, wanted)
        before = self.queue.state()
        answer = call()
        self._look_at_times()
        if answer.lease is not None:
            self._check_taken(answer.lease.job_id, wanted, before)
            self.model.hand_over(answer.lease.job_id, name, answer.lease.fence)
        elif self.model.mode == "on_request" and not self.model.paused:
            waiting = {job_id for job_id, item in self.model.items_by_id.items() if item.waits}
            assert not (waiting & {wanted} if wanted else waiting), "there was something to take"
        if answer.lease is None:
            self._register(name, wanted or "", register, via)
        return answer

    def _check_taken(self, job_id: str, wanted: str | None, before: State) -> None:
        assert self.model.mode == "on_request"
        assert not self.model.paused
        items = self.model.items_by_id
        if wanted is not None:
            assert job_id == wanted
            return
        assert items[job_id].priority == min(item.priority for item in items.values() if item.waits)
        if not self.times_had_come:
            assert job_id == self.checks.line(before)[0], "it was not its turn"

    def _note_if_it_was_rung_for_another(self, name: str, wanted: str | None) -> None:
        known = self.model.registered.get(name)
        if known and known.wanted and known.wanted != wanted:
            self.model.unheard.add(known.wanted)

    def _register(self, name: str, wanted: str, register: bool, via: str) -> None:
        known = self.model.registered.pop(name, None)
        if not register:
            return
        _, arrival, _, _ = self.checks.awaiters().entries[name]
        if known and known.wanted == wanted and not known.silent:
            assert arrival == known.arrival, "who renews in time keeps its place"
        else:
            others = [each.arrival for each in self.model.registered.values()]
            assert arrival > max(others, default=0), "who comes last, or too late, stands behind the others"
        self.model.registered[name] = Registered(wanted, via, arrival)

    @rule(name=AWAITERS)
    def fall_silent(self, name: str) -> None:
        if name not in self.model.registered:
            return
        self.queue.let_expire(name)
        self.model.registered[name].silent = True
        self.model.unheard.add(self.model.registered[name].wanted)

    # What may be drawn must not depend on what is there: whom a script forgets by chance is not Hypothesis's to repeat.
    @rule(which=st.integers(1, 6), wrong=SELDOM, again=SELDOM)
    def acknowledge(self, which: int, wrong: bool, again: bool) -> None:
        if which > len(self.model.handed):
            return
        handed = self.model.handed[-which]
        if wrong:
            with pytest.raises(LeaseLapsed):
                self.queue.leases.ack(handed.awaiter, handed.job_id, handed.fence + 1)
        for _ in range(1 + again):
            if self.model.ack(handed):
                self.queue.leases.ack(handed.awaiter, handed.job_id, handed.fence)
                continue
            with pytest.raises(LeaseLapsed):
                self.queue.leases.ack(handed.awaiter, handed.job_id, handed.fence)

    @rule(which=st.integers(0, 3))
    def acknowledge_what_is_held(self, which: int) -> None:
        owners = [item.owner for item in self.model.items_by_id.values() if item.owner]
        held = [handed for handed in self.model.handed if f"{handed.awaiter}:{handed.fence}" in owners]
        for handed in held[which : which + 1]:
            assert self.model.ack(handed)
            self.queue.leases.ack(handed.awaiter, handed.job_id, handed.fence)

    @rule(name=AWAITERS, again=SELDOM)
    def leave(self, name: str, again: bool) -> None:
        for _ in range(1 + again):
            held = self.model.held_by(name)
            if held is not None and not self.checks.awaiters().lists.get(name):
                return  # its time is over: the item goes back by its lease
            assert self.queue.leases.leave(name) == self.model.leave(name)

    # The children of the queue

    @precondition(lambda self: self.model.mode == "auto_release")
    @rule(lane=LANES, opened=OFTEN, lose=SELDOM)
    def attempt(self, lane: str, opened: bool, lose: bool) -> None:
        if opened:
            self.queue.open_gate()
        tried = self._attempt(lane)
        if lose and not tried.paused:
            again = self._attempt(lane)
            assert not (again.leased and tried.leased), "one try per interval"

    def _attempt(self, lane: str) -> ReleaseReply:
        closed = "gate_us" in self.queue.hash("counts")
        before, sequence = self.queue.state(), self._sequence()
        tried = self.workers[lane].consumer.release()
        assert self.workers[lane].held() == []
        self._look_at_times()
        assert tried.paused == self.model.paused
        chosen = self._chosen(sequence)
        if chosen is None:
            assert not tried.leased
            self._check_no_try(lane, closed, tried)
            return tried
        assert not closed
        self._check_chosen(chosen.job or "", lane, before)
        to = self.model.first_awaiter(chosen.job or "")
        assert tried.leased == (to is not None)
        if to is None:
            self.model.put_off(chosen.job or "", chosen.fence)
        else:
            self.model.hand_over(chosen.job or "", to, chosen.fence)
        return tried

    def _check_no_try(self, lane: str, closed: bool, tried: ReleaseReply) -> None:
        in_line = self.checks.line(self.queue.state())
        if lane == "retry":
            in_line = [] if self._main_waits() else self.checks.line(self.queue.state(), "retry")
        assert self.model.paused or closed or not in_line, "nothing was tried"
        assert tried.wait_seconds == 0 or closed

    def _main_waits(self) -> bool:
        return any(item.waits and not item.lane for item in self.model.items_by_id.values())

    def _check_chosen(self, job_id: str, lane: str, before: State) -> None:
        items = self.model.items_by_id
        assert items[job_id].waits
        assert (items[job_id].lane > 0) == (lane == "retry")
        if lane == "retry":
            assert not self._main_waits()
        moved = any(before.processing.values())
        if not self.times_had_come and not moved:
            assert job_id == self.checks.line(before, lane)[0] if lane == "main" else True, "it was not its turn"

    def _sequence(self) -> str:
        return self.queue.hash("counts").get("journal_sequence", "0")

    def _last_entry(self) -> list[Event]:
        return list(read_entry(self.queue.redis.xrevrange(self.queue.key("events"), count=1)[0][1]))

    def _chosen(self, sequence: str) -> Event | None:
        """The claim of this call's try, if it made one: that of an item that did not die of its age."""
        if self._sequence() == sequence:
            return None
        events = self._last_entry()
        aged = {event.job for event in events if event.verb == "dead" and event.cause == "ItemTimeout"}
        claims = [event for event in events if event.verb == "claimed" and event.job not in aged]
        assert len(claims) <= 1, "more than one try"
        return claims[0] if claims else None

    @rule(lane=LANES)
    def block(self, lane: str) -> None:
        """A BLMOVE is served, and its worker has not tried yet."""
        if self.model.mode == "auto_release":
            self.workers[lane].block()

    @rule(lane=LANES, again=SELDOM)
    def kill_and_recover(self, lane: str, again: bool) -> None:
        worker = self.workers[lane]
        for _ in range(1 + again):
            self.queue.recover(worker)
        self.gone.append(worker)
        self.workers[lane] = self._join(lane)

    @precondition(lambda self: self.gone)
    @rule(served=st.booleans())
    def hear_of_the_one_that_was_killed_last(self, served: bool) -> None:
        if self.model.mode == "auto_release" and served:
            self.gone[-1].block()
            return
        with pytest.raises((Fenced, UnknownQueue)):
            self.gone[-1].consumer.release()

    # Time

    @rule(by=st.sampled_from(("promote", "heartbeat", "")))
    def let_time_pass(self, by: str) -> None:
        pass_time(self.queue, STEP_MS)
        for timers in ("leases", "expiries"):
            for job_id, at in self.queue.redis.zrange(self.queue.key(timers), 0, -1, withscores=True):
                self.queue.redis.zadd(self.queue.key(timers), {job_id: at - STEP_MS})
        self.model.pass_time(STEP_MS)
        self.checks.pass_time(STEP_MS)
        self.times_have_come = True
        self._end_lists()
        if by:
            self._pulse(by)

    def _end_lists(self) -> None:
        """What the awaiters' lists hold ends with the lease, or a minute after the acknowledgement."""
        for name, found in self.checks.awaiters().lists.items():
            held = self.model.held_by(name)
            over = held is None or self.model.items_by_id[held].lapses_ms <= self.model.now_ms
            if found and over:
                self.queue.redis.delete(self.queue.key(f"awaiter:{name}"))

    @rule(by=st.sampled_from(("promote", "heartbeat")))
    def beat(self, by: str) -> None:
        self._pulse(by)

    def _pulse(self, by: str) -> None:
        beat = None if by == "promote" else self.queue.recovery().heartbeat("q", EXPIRY_MS, [])
        due_ms = self.queue.promote() if beat is None else beat.due_ms
        self._look_at_times()
        items = self.model.items_by_id.values()
        ahead = [item.run_at for item in items if item.scheduled] + [item.lapses_ms for item in items if item.owner]
        ahead += [item.expires_ms for item in items if self.model.timeout_ms]
        assert (due_ms is None) == (not ahead)
        assert due_ms is None or abs(due_ms - max(0, min(ahead) - self.model.now_ms)) < MINUTE_MS

    def _look_at_times(self) -> None:
        """What the last call did about leases, ages and what was due."""
        self.times_had_come, self.times_have_come = self.times_have_come, False
        died = {event.job or "": event.fence for event in self._last_entry() if event.verb == "dead"}
        self.model.look_at_times(died)
        self.model.last_fence = (
            max(self.model.last_fence, *died.values(), 0) if self.times_had_come else self.model.last_fence
        )

    # Operators

    @rule(paused=SELDOM, again=SELDOM)
    def pause_or_resume(self, paused: bool, again: bool) -> None:
        for _ in range(1 + again):
            self.queue.registry.pause("q", paused=paused)
        self.model.paused = paused

    @rule(job_id=IDS, revive=OFTEN)
    def retry_or_discard_the_dead(self, job_id: str, revive: bool) -> None:
        known = [dead for dead in self.model.archive if dead[0] == job_id]
        if not known:
            with pytest.raises(UnknownJob):
                self.dead.retry(job_id)
        elif not revive:
            self.dead.discard(job_id)
            self.model.archive.remove(max(known, key=lambda dead: dead[1]))
        elif job_id in self.model.items_by_id or self.model.items() >= MAX_ITEMS:
            with pytest.raises(Exists if job_id in self.model.items_by_id else QueueFull):
                self.dead.retry(job_id)
        else:
            self.dead.retry(job_id)
            self.model.revive(job_id)

    @rule(sure=SELDOM, really=SELDOM)
    def delete_and_make_again(self, sure: bool, really: bool) -> None:
        if not (sure and really):
            return
        self.queue.registry.delete("q", force=True)
        for handed in self.model.handed[-1:]:
            with pytest.raises(UnknownQueue):
                self.queue.leases.ack(handed.awaiter, handed.job_id, handed.fence)
        while self.queue.registry.purge("q", lambda dropped: None):
            pass
        self.queue.create(**self.options)
        self.model.forget_all()
        self.gone += self.workers.values()
        self._join_all()

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        if hasattr(self, "checks"):
            self.checks.all()

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.queue.close()


@pytest.mark.spec("N13", "N14", "N15", "N16", "N17", "N21", "N22", "N23")
@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 400)
def test_no_interleaving_loses_doubles_or_strands_an_item(server: Server) -> None:
    explore(server)


@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 400)
def test_no_interleaving_does_so_while_stale_hints_are_taken_out(server: Server) -> None:
    with sweeping_at_once():
        explore(server)


def explore(server: Server) -> None:
    asked = os.environ.get("FORQ_MODEL_EXAMPLES")
    machine = type("Machine", (ReleaseMachine,), {"server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(asked or examples(40, 100)),
            stateful_step_count=50,
            derandomize=asked is None,
            deadline=None,
            database=None,
            # Of a mutant only whether it is found counts.
            phases=[Phase.generate] if MUTANT in os.environ else list(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
