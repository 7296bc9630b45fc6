"""Two supervisors on one Redis: jobs and queues of the second, controlled through the first and through a Client."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from forq import AsyncClient, Client
from forq.broker.control import Control
from forq.broker.link import Link
from forq.broker.recovery import WorkerRecovery
from forq.broker.supervisors import Supervisors
from forq.errors import PermissionRefused, TimedOut, UnknownJob
from tests.support.drive.processes import tree_of
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, Trace, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

FULL = 'remote_control = "full"\n'


class Pair:
    """`near` has no queues of its own; jobs run under `far`."""

    def __init__(self, near: Forq, far: Forq) -> None:
        self.near, self.far = near, far
        self.client = Client(far.url)
        self.link = Link(far.url)
        self.control = Control(self.link, "forq:")
        self.supervisors = Supervisors(self.link, "forq:")
        wait_until(lambda: len(self.supervisors.all()) == 2, what="both are announced")

    @property
    def far_processor(self) -> str:
        return str(self.far.status()["supervisor"]["processor"])

    def create(self, name: str, function: str = "act", **options: object) -> None:
        self.far.create(name, function, **options)
        wait_until(lambda: name in self.supervisors.choose(self.far_processor)["queues"], what=f"{name} is announced")

    def traces(self, job_id: str, event: str = "start") -> list[Trace]:
        return [trace for trace in self.far.traces(event) if trace.job == job_id]

    def begin(self, queue: str, job_id: str, do: str = "hang") -> Trace:
        self.client.queue(queue).enqueue({"do": do}, id=job_id)
        started: Trace = wait_until(lambda: self.traces(job_id), what=f"{job_id} started")[-1]
        wait_until(lambda: self.far.child(queue)["job"] == job_id, what=f"{job_id} is shown as running")
        return started

    def gone(self, queue: str, job_id: str) -> bool:
        return self.near.run_ctl("job", queue, job_id).returncode == 4

    def close(self) -> None:
        self.link.close()


@pytest.fixture(scope="module")
def pair(server: Server) -> Iterator[Pair]:
    server.flush()
    with running(redis=server.url) as near, running(redis=server.url, settings=FULL) as far:
        pair = Pair(near, far)
        yield pair
        pair.close()


def test_forqctl_kills_a_job_that_runs_elsewhere(pair: Pair) -> None:
    pair.create("k")
    started = pair.begin("k", "k1")
    said = pair.near.ctl("kill", "k", "k1")
    assert said == f"killing k1 (process {started.pid}) now; it is cancelled"
    wait_until(lambda: pair.gone("k", "k1"), what="the job is gone")
    assert "remote request verb=kill" in pair.far.log


def test_kill_with_retry_returns_a_job_that_runs_elsewhere(pair: Pair) -> None:
    pair.create("kr")
    started = pair.begin("kr", "r1")
    killed = json.loads(pair.near.ctl("kill", "kr", "r1", "--retry", "--on", pair.far_processor, "--json"))
    assert killed == {"id": "r1", "pid": started.pid, "outcome": "interrupted", "others": []}
    wait_until(lambda: len(pair.traces("r1")) == 2, what="it runs again")
    wait_until(lambda: pair.far.child("kr")["job"] == "r1", what="it is shown as running")
    pair.near.ctl("kill", "kr", "r1")


def test_forqctl_shows_the_stack_and_the_output_of_a_job_that_runs_elsewhere(pair: Pair) -> None:
    pair.create("s")
    started = pair.begin("s", "s1", "spin")
    text = pair.near.ctl("stack", "s")
    assert text.startswith(f"main process {started.pid}: job s1")
    assert "in do" in text
    missing = pair.near.run_ctl("logs", "s")
    assert (missing.returncode, "forqctl logs s --on HOST" in missing.stderr) == (4, True)
    pair.create("loud", "fail", max_retries=0)
    pair.client.queue("loud").enqueue({}, id="l1")

    def lines() -> list[dict[str, Any]]:
        shown = pair.near.ctl("logs", "loud", "--on", pair.far_processor[:12], "--json")
        return [json.loads(line) for line in shown.splitlines()]

    wait_until(lambda: [line for line in lines() if line.get("job") == "l1"], what="its output")
    pair.near.ctl("kill", "s", "s1")


def test_forqctl_restarts_a_queue_that_another_supervisor_serves(pair: Pair) -> None:
    pair.create("again", "noop")
    before = pair.far.wait_for_child("again")["pid"]
    assert pair.near.ctl("restart", "again") == "restarted again"
    pair.far.wait_for_child("again", not_pid=before)


def test_status_of_another_supervisor(pair: Pair) -> None:
    shown = json.loads(pair.near.ctl("status", "--on", pair.far_processor, "--json"))
    assert shown["supervisor"]["pid"] == pair.far.pid


def test_a_client_controls_jobs_and_queues(pair: Pair) -> None:
    pair.create("c")
    queue = pair.client.queue("c")
    started = pair.begin("c", "c1")
    [stack] = queue.stack()
    assert (stack["pid"], stack["job"], "in hang" in (stack["stack"] or "")) == (started.pid, "c1", True)
    assert queue.kill("c1") == {"id": "c1", "pid": started.pid, "outcome": "cancelled", "others": []}
    wait_until(lambda: pair.gone("c", "c1"), what="the job is gone")
    before = pair.far.wait_for_child("c", not_pid=started.pid)["pid"]
    queue.restart(on=pair.far_processor)
    pair.far.wait_for_child("c", not_pid=before)
    pair.create("loud", "fail", max_retries=0)
    pair.client.queue("loud").enqueue({}, id="c2")
    wait_until(lambda: pair.client.queue("loud").logs(job="c2"), what="a line about c2")
    assert {record.get("job") for record in pair.client.queue("loud").logs(job="c2")} == {"c2"}
    assert len(pair.client.queue("loud").logs(lines=1)) == 1
    with pytest.raises(UnknownJob, match="no supervisor runs job 'c1'"):
        queue.kill("c1")


def test_the_first_supervisor_refuses_everything_because_remote_control_is_off_by_default(pair: Pair) -> None:
    pair.near.create("local", "act")
    pair.client.queue("local").enqueue({"do": "hang"}, id="mine")
    wait_until(lambda: pair.near.child("local")["job"] == "mine", what="it runs")
    for command in (("kill", "local", "mine"), ("stack", "local"), ("restart", "local")):
        refused = pair.far.run_ctl(*command)
        assert refused.returncode == 5
        assert 'set remote_control = "full" in ' in refused.stderr
        assert str(pair.near.config) in refused.stderr
    pair.near.ctl("kill", "local", "mine")
    pair.near.ctl("delete", "local", "--force")


def test_the_supervisor_checks_the_level_itself(pair: Pair) -> None:
    """A requester can claim anything about the level."""
    near = pair.supervisors.choose(str(pair.near.status()["supervisor"]["processor"]))
    near["remote_control"] = "full"
    for method in ("ping", "stack", "kill"):
        with pytest.raises((PermissionRefused, UnknownJob)):
            pair.control.wait_for_answer(
                pair.control.send(near, method, {"name": "q", "id": "a", "fence": 1}), seconds=20
            )


def test_verbs_that_are_not_for_elsewhere_are_refused_at_every_level(pair: Pair, monkeypatch: Any) -> None:
    monkeypatch.setattr("forq.broker.control.check_allowed", lambda method, about: None)
    far = pair.supervisors.choose(pair.far_processor)
    for method in ("shutdown", "queue.create", "queue.set", "queue.delete", "push", "no.such.verb", "__init__"):
        with pytest.raises(PermissionRefused, match="cannot be requested from elsewhere"):
            pair.control.wait_for_answer(pair.control.send(far, method, {"name": "x"}), seconds=20)
    assert pair.far.status()["supervisor"]["pid"] == pair.far.pid


def test_a_kill_with_an_old_fence_is_not_carried_out(pair: Pair) -> None:
    pair.create("old")
    first = pair.begin("old", "o1")
    far = pair.supervisors.choose(pair.far_processor)
    _, attempt = pair.supervisors.running("old", "o1")
    assert attempt.fence == first.fence
    pair.client.queue("old").kill("o1", retry=True)
    second: Trace = wait_until(lambda: pair.traces("o1")[1:], what="the second attempt")[0]
    wait_until(lambda: pair.far.child("old")["job"] == "o1", what="it is shown as running")
    for fence in (first.fence, second.fence + 1):
        sent = pair.control.send(far, "kill", {"name": "old", "id": "o1", "fence": fence})
        with pytest.raises(UnknownJob, match=f"attempt o1@{fence} of queue 'old' no longer runs"):
            pair.control.wait_for_answer(sent, seconds=20)
    assert pair.far.child("old")["job"] == "o1"
    assert len(pair.traces("o1")) == 2
    pair.client.queue("old").kill("o1")


def test_a_late_request_is_not_carried_out(pair: Pair, server: Server) -> None:
    """Pulse is frozen until the deadline has passed, then reads the list."""
    pair.create("late", "noop")
    before = pair.far.wait_for_child("late")["pid"]
    far = pair.supervisors.choose(pair.far_processor)
    pulse = next(each for each in pair.far.processes() if "forq: pulse" in " ".join(each.cmdline()))
    pulse.suspend()
    try:
        sent = pair.control.send(far, "queue.restart", {"name": "late"}, read_seconds=0.2)
        with pytest.raises(TimedOut, match="it was not carried out, and will not be"):
            pair.control.wait_for_answer(sent, seconds=20)
    finally:
        pulse.resume()
    wait_until(lambda: "dropped remote requests late=1" in pair.far.log, what="it was dropped")
    assert pair.far.child("late")["pid"] == before


@pytest.mark.parametrize(
    "entry", ["junk", "id 99999999999999 no json", "id2 99999999999999 []", 'id3 99999999999999 {"method": 1}', "\x00"]
)
def test_what_no_client_sends_is_dropped_and_the_supervisor_goes_on(pair: Pair, server: Server, entry: str) -> None:
    with server.connect() as redis:
        redis.rpush(f"forq:{{control}}:requests:{pair.far_processor}", entry)
    far = pair.supervisors.choose(pair.far_processor)
    sent = pair.control.send(far, "ping", {})
    assert pair.control.wait_for_answer(sent, seconds=20) == {"pong": True, "pid": pair.far.pid}


def test_status_all_lists_both_supervisors(pair: Pair) -> None:
    shown = {each["processor"]: each for each in json.loads(pair.near.ctl("status", "--all", "--json"))["supervisors"]}
    far = shown[pair.far_processor]
    assert (far["pid"], far["remote_control"], far["config"]) == (pair.far.pid, "full", str(pair.far.config))
    assert len(shown) == 2
    assert not any(each["duplicates"] or each["version_skew"] for each in shown.values())
    table = pair.near.ctl("status", "--all")
    assert table.splitlines()[0].split() == [
        *("PROCESSOR", "HOST", "PID", "VERSION", "PROTOCOL", "QUEUES", "PROCESSES", "HEARTBEAT", "REMOTE", "NOTE")
    ]
    assert pair.far_processor[:12] in table


def test_a_supervisor_with_level_read_shows_its_status_and_refuses_the_rest(server: Server, pair: Pair) -> None:
    with running(redis=server.url, settings='remote_control = "read"\n') as reader:
        reader.create("r", "act")
        pair.client.queue("r").enqueue({"do": "hang"}, id="r1")
        wait_until(lambda: reader.child("r")["job"] == "r1", what="it runs")
        processor = str(reader.status()["supervisor"]["processor"])
        wait_until(lambda: "r" in pair.supervisors.choose(processor)["queues"], what="its queue is announced")
        shown = json.loads(pair.near.ctl("status", "--on", processor, "--json"))
        assert shown["queues"][0]["children"][0]["job"] == "r1"
        for command in (("kill", "r", "r1"), ("stack", "r"), ("restart", "r"), ("logs", "r", "--on", processor)):
            refused = pair.near.run_ctl(*command)
            assert (refused.returncode, 'set remote_control = "full"' in refused.stderr) == (5, True)
        with pytest.raises(PermissionRefused, match=str(reader.config)):
            pair.client.queue("r").kill("r1")
        target = pair.supervisors.choose(processor)
        target["remote_control"] = "full"
        fence = pair.supervisors.running("r", "r1")[1].fence
        sent = pair.control.send(target, "kill", {"name": "r", "id": "r1", "fence": fence})
        with pytest.raises(PermissionRefused, match='remote_control = "read"'):
            pair.control.wait_for_answer(sent, seconds=20)
        assert reader.child("r")["job"] == "r1"
        reader.ctl("kill", "r", "r1")
        reader.ctl("delete", "r", "--force")


def test_a_queue_that_several_supervisors_serve_needs_on(pair: Pair, server: Server) -> None:
    pair.create("shared", "noop")
    with running(redis=server.url, settings=FULL) as third:
        third.create("shared", "noop")
        wait_until(
            lambda: sum("shared" in each["queues"] for each in pair.supervisors.all()) == 2, what="both serve it"
        )
        refused = pair.near.run_ctl("restart", "shared")
        assert (refused.returncode, "choose one with --on" in refused.stderr) == (2, True)
        before = third.wait_for_child("shared")["pid"], pair.far.wait_for_child("shared")["pid"]
        pair.near.ctl("restart", "shared", "--on", str(third.status()["supervisor"]["processor"]))
        third.wait_for_child("shared", not_pid=before[0])
        assert pair.far.child("shared")["pid"] == before[1]


def test_a_request_survives_the_death_of_pulse_and_is_carried_out_once(pair: Pair) -> None:
    """It is stored while pulse is frozen; that pulse is killed, and the next one takes it."""
    pair.create("twice", "noop")
    before = pair.far.wait_for_child("twice")["pid"]
    far = pair.supervisors.choose(pair.far_processor)
    pulse = next(each for each in pair.far.processes() if "forq: pulse" in " ".join(each.cmdline()))
    pulse.suspend()
    sent = pair.control.send(far, "queue.restart", {"name": "twice"}, read_seconds=60)
    pair.control.send(far, "queue.restart", {"name": "twice"}, read_seconds=60, request_id=sent.id)
    pulse.kill()
    assert pair.control.wait_for_answer(sent, seconds=60) == {"name": "twice"}
    pair.far.wait_for_child("twice", not_pid=before)
    wait_until(lambda: "dropped remote requests late=0 repeated=1" in pair.far.log, what="the second was dropped")
    assert pair.far.log.count("remote request verb=queue.restart params={'name': 'twice'}") == 1


def test_coroutines_control_jobs_too(pair: Pair) -> None:
    pair.create("co")
    pair.begin("co", "co1")

    async def control() -> tuple[list[str | None], str]:
        async with AsyncClient(pair.far.url) as client:
            queue = client.queue("co")
            stacks = [stack["job"] for stack in await queue.stack()]
            killed = await queue.kill("co1")
            await queue.restart(on=pair.far_processor, wait=30)
            assert isinstance(await queue.logs(lines=5), list)
            return stacks, killed["outcome"]

    assert asyncio.run(control()) == (["co1"], "cancelled")
    wait_until(lambda: pair.gone("co", "co1"), what="the job is gone")


def test_a_coroutine_that_runs_elsewhere_is_cancelled(pair: Pair) -> None:
    pair.create("coroutine", "sleep_async", concurrency=2)
    pair.client.queue("coroutine").enqueue(60, id="s1")
    wait_until(lambda: pair.far.child("coroutine")["job"] == "s1", what="it runs")
    assert pair.client.queue("coroutine").kill("s1")["outcome"] == "cancelled"
    wait_until(lambda: pair.gone("coroutine", "s1"), what="the job is gone")


def test_a_job_of_a_queue_that_both_supervisors_serve_is_killed_where_it_runs(pair: Pair, server: Server) -> None:
    pair.create("both")
    pair.begin("both", "b1")
    pair.near.create("both", "act")
    said = pair.near.ctl("kill", "both", "b1")
    assert said.endswith("now; it is cancelled")
    wait_until(lambda: pair.gone("both", "b1"), what="the job is gone")
    wrong = pair.near.run_ctl("kill", "both", "b1", "--on", pair.far_processor)
    assert (wrong.returncode, "no supervisor runs job 'b1'" in wrong.stderr) == (4, True)
    pair.near.ctl("delete", "both", "--force")


def test_forqctl_says_in_time_what_became_of_its_request(pair: Pair) -> None:
    pair.create("slow", "noop")
    pulse = next(each for each in pair.far.processes() if "forq: pulse" in " ".join(each.cmdline()))
    pulse.suspend()
    try:
        late = pair.near.run_ctl("stack", "slow", "--timeout", "1s")
    finally:
        pulse.resume()
    assert late.returncode == 6
    assert "has not read the request stack in time: it was not carried out, and will not be" in late.stderr


def test_a_request_to_an_earlier_run_is_never_carried_out(pair: Pair, server: Server) -> None:
    """The supervisor was killed and runs under a new name; its requester still has the old one."""
    with running(redis=server.url, settings=FULL) as forq:
        forq.create("earlier", "noop")
        old = pair.supervisors.choose(str(forq.status()["supervisor"]["processor"]))
        os.kill(forq.pid, signal.SIGKILL)
        assert forq.process is not None
        forq.process.wait()
        # Its pulse could take the request before it notices the death.
        wait_until(lambda: not tree_of(forq.state_dir), what="all its processes have ended")
        # The heartbeats have not expired, so Redis accepts the request.
        sent = pair.control.send(old, "queue.restart", {"name": "earlier"}, read_seconds=60)
        forq.start()
        new = str(forq.status()["supervisor"]["processor"])
        wait_until(lambda: new in {each["processor"] for each in pair.supervisors.all()}, what="it is announced")
        wait_until(lambda: old["processor"] not in {each["processor"] for each in pair.supervisors.all()})
        with server.connect() as redis:
            assert not redis.exists(f"forq:{{control}}:requests:{old['processor']}")
        assert not pair.control.is_read(sent)
        assert "remote request" not in forq.log


def test_a_supervisor_that_was_evicted_is_reached_under_its_new_name(pair: Pair, server: Server) -> None:
    with running(redis=server.url, settings=f'{FULL}heartbeat = "200ms"\nexpiry = "2s"\n') as forq:
        forq.create("evicted", "noop")
        old = str(forq.status()["supervisor"]["processor"])
        WorkerRecovery(pair.link, "forq:", "test").evict("evicted", old, "host_lost")

        def renamed() -> bool:
            return bool(forq.status()["supervisor"]["processor"] != old)

        wait_until(renamed, what="it has a new name")
        wait_until(lambda: _serves(pair, str(forq.status()["supervisor"]["processor"]), "evicted"), what="announced")
        wait_until(
            lambda: old not in {each["processor"] for each in pair.supervisors.all()}, what="the old one is gone"
        )
        before = forq.wait_for_child("evicted")["pid"]
        pair.client.queue("evicted").restart()
        forq.wait_for_child("evicted", not_pid=before)


def _serves(pair: Pair, processor: str, queue: str) -> bool:
    return any(each["processor"] == processor and queue in each["queues"] for each in pair.supervisors.all())
