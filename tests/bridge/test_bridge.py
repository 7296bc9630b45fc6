"""Whole bridge processes: several at once, stopped and killed ones, slow peers, Redis outages."""

import json
import os
import random
import resource
import signal
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from forq.bridge.loop import MAX_CONNECTIONS
from forq.broker.inspect import Inspector
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.settings import stored_defaults
from tests.support.drive.bridge import Client, bridge, encode, listening
from tests.support.drive.external_queue import external_queue
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until
from tests.support.models.journal_replay import Replay
from tests.support.thorough import examples, only_in_test_all

RANDOM_LINES = int(os.environ.get("FORQ_TEST_LINES", examples(2000, 5000)))
W = {"queue_name": "q", "worker_uuid": "w1"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bridge.sock"


@pytest.mark.spec("P1")
def test_an_invalid_line_gets_one_error_and_is_never_fatal(redis_url: str) -> None:
    chance = random.Random(17)
    with bridge(redis_url) as process:
        for _ in range(RANDOM_LINES // 500):
            lines = [chance.randbytes(chance.randrange(60)).replace(b"\n", b"") for _ in range(500)]
            process.write(b"\n".join(lines) + b"\n")
        process.send("add_job", queue_name="q", command="c")
        process.wait_for("job_added")
        assert process.end() == 0
        numbers = [error["line"] for error in process.of("error")]
        assert len(numbers) > RANDOM_LINES * 0.9
        assert numbers == sorted(set(numbers)), "one for each line at most, in their order"
        assert max(numbers) <= RANDOM_LINES


def test_a_too_long_line_is_refused_and_the_next_one_is_read(redis_url: str) -> None:
    with bridge(redis_url) as process:
        process.write(b'{"topic":"' + b"x" * (2 << 20) + b'"}\n')
        process.send("add_job", queue_name="q", command="c")
        process.wait_for("job_added")
        assert process.of("error") == [{"line": 1, "reason": "the line is too long: at most 1 MiB is allowed"}]


def test_eof_stops_the_bridge_after_all_requests_and_unregisters_its_idle_workers(redis_url: str) -> None:
    with external_queue(redis_url) as queue, bridge(redis_url) as process:
        process.send("add_job", queue_name="q", uuid="assigned", command="c")
        process.send("worker_idle", queue_name="q", worker_uuid="w1")
        process.send("add_job", queue_name="q", uuid="accepted", command="c")
        process.send("worker_idle", queue_name="q", worker_uuid="w2")
        process.send("job_accepted", queue_name="q", worker_uuid="w2", uuid="accepted")
        process.send("worker_idle", queue_name="q", worker_uuid="w3")
        process.write(encode("add_job", {"queue_name": "q", "uuid": "last", "command": "c"}).rstrip(b"\n"))
        assert process.end() == 0
        assert [added["uuid"] for added in process.of("job_added")] == ["assigned", "accepted", "last"]
        assert queue.states() == {"w2": "busy"}
        assert sorted(queue.pending()) == ["assigned", "last"]
        assert queue.stall_count("assigned") == 0
        Replay().read_all(queue.entries())


def test_a_worker_can_continue_with_another_bridge(redis_url: str) -> None:
    with bridge(redis_url) as first:
        first.send("add_job", queue_name="q", uuid="j", command="c")
        first.send("worker_idle", **W)
        first.wait_for("job_assignment")
        first.send("job_accepted", **W, uuid="j")
        first.send("list_progress", queue_name="q")
        first.wait_for("progress")
        first.kill()
    with bridge(redis_url) as second:
        second.send("worker_progress", **W, uuid="j", progress=0.5)
        second.send("job_finished", **W, uuid="j")
        second.send("list_jobs", queue_name="q")
        assert second.wait_for("jobs") == {"queue_name": "q", "jobs": []}
        assert second.of("job_refused") == []


@pytest.mark.spec("P6")
def test_two_bridges_share_the_queues_and_their_workers(redis_url: str) -> None:
    with bridge(redis_url) as one, bridge(redis_url) as two:
        one.send("worker_idle", queue_name="video", worker_uuid="v")
        one.send("worker_idle", queue_name="audio", worker_uuid="a")
        one.send("list_workers", queue_name="audio")
        one.wait_for("workers")
        two.send("add_job", queue_name="video", uuid="j1", command="c")
        assert one.wait_for("job_assignment")["worker_uuid"] == "v"
        two.send("add_job", queue_name="audio", uuid="j2", command="c")
        assert one.wait_for("job_assignment", 2)["worker_uuid"] == "a"
        assert two.of("job_assignment") == []
        # A worker that uses another bridge gets its assignments there.
        one.send("job_finished", queue_name="video", worker_uuid="v", uuid="j1")
        one.send("list_workers", queue_name="video")
        one.wait_for("workers", 2)
        two.send("worker_idle", queue_name="video", worker_uuid="v")
        two.send("list_workers", queue_name="video")
        two.wait_for("workers")
        one.send("add_job", queue_name="video", uuid="j3", command="c")
        assert two.wait_for("job_assignment")["uuid"] == "j3"


@pytest.mark.spec("P9")
def test_ticks_expire_silent_workers_without_a_supervisor(redis_url: str) -> None:
    with bridge(redis_url, "--tick", "200ms") as process:
        process.send("add_job", queue_name="q", uuid="j", command="c")
        process.send("worker_idle", **W)
        process.wait_for("job_assignment")
        process.send("job_accepted", **W, uuid="j")
        link = Link(redis_url)
        inspector = Inspector(link, DEFAULT_PREFIX, "q")
        wait_until(lambda: inspector.job("j")["stall_count"] == 1, seconds=10)
        process.send("list_workers", queue_name="q")
        assert process.wait_for("workers")["workers"] == []
        process.send("job_finished", **W, uuid="j")
        assert process.wait_for("job_refused")["topic"] == "job_finished"
        # A due retry is assigned to an idle worker.
        process.send("worker_idle", **W)
        again = process.wait_for("job_assignment", 2)
        assert (again["attempt"], again["stall_count"]) == (2, 1)
        link.close()


def test_a_retry_is_assigned_when_it_is_due(redis_url: str) -> None:
    with bridge(redis_url) as process:
        link = Link(redis_url)
        options = {**stored_defaults("external"), "min_backoff_ms": 300}
        Registry(link, DEFAULT_PREFIX).create("q", "external", 10, options, {})
        link.close()
        process.send("add_job", queue_name="q", uuid="j", command="c")
        process.send("worker_idle", **W)
        process.wait_for("job_assignment")
        process.send("job_failed", **W, uuid="j", error="no")
        assert process.wait_for("job_assignment", 2)["retry_count"] == 1


@pytest.mark.spec("P8")
def test_missing_queues_are_created_up_to_max_queues(redis_url: str) -> None:
    with bridge(redis_url, "--max-queues", "2") as process:
        process.send("add_job", queue_name="one", command="c")
        process.send("worker_idle", queue_name="two", worker_uuid="w")
        process.send("add_job", queue_name="three", command="c")
        assert "max_queues is reached" in process.wait_for("error")["reason"]
        link = Link(redis_url)
        assert Registry(link, DEFAULT_PREFIX).names() == {"one": "external", "two": "external"}
        link.close()


def test_a_queue_of_another_mode_accepts_jobs_but_no_workers(redis_url: str) -> None:
    link = Link(redis_url)
    Registry(link, DEFAULT_PREFIX).create("q", "work", 10, {**stored_defaults(), "max_items": 1}, {})
    with bridge(redis_url) as process:
        process.send("add_job", queue_name="q", uuid="j", command="c", args=[1])
        process.wait_for("job_added")
        process.send("worker_idle", **W)
        assert "is of mode work" in process.wait_for("error")["reason"]
        process.send("add_job", queue_name="q", command="c")
        assert "holds max_items = 1" in process.wait_for("error", 2)["reason"]
    assert Inspector(link, DEFAULT_PREFIX, "q").job("j")["data"] == {"command": "c", "args": [1]}
    link.close()


def test_options_of_a_job_need_a_queue_of_mode_work(redis_url: str) -> None:
    """External workers have no deadline and no expiry. A missing queue is not created, since it would be external."""
    link = Link(redis_url)
    registry = Registry(link, DEFAULT_PREFIX)
    registry.create("work", "work", 10, stored_defaults(), {})
    registry.create("outside", "external", 10, stored_defaults("external"), {})
    own = {"timeout": "5m", "max_retries": 2, "backoff": [1, "1m"], "expires_in": 3600, "keep_done": "1h"}
    with bridge(redis_url) as process:
        process.send("add_job", queue_name="work", uuid="j", command="c", **own)
        process.wait_for("job_added")
        process.send("add_job", queue_name="outside", command="c", timeout="5m")
        assert "'outside' is of mode external: timeout, max_retries" in process.wait_for("error")["reason"]
        process.send("add_job", queue_name="missing", command="c", timeout="5m")
        assert process.wait_for("error", 2)["reason"].startswith("no queue 'missing'")
    job = Inspector(link, DEFAULT_PREFIX, "work").job("j")
    assert job["options"] == {"timeout": "5m", "max_retries": 2, "backoff": ["1s", "1m"], "keep_done": "1h"}
    assert "expires_at" in job
    assert registry.names() == {"work": "work", "outside": "external"}
    link.close()


def test_adding_an_existing_uuid_updates_that_job(redis_url: str) -> None:
    with bridge(redis_url) as process:
        for n in (1, 2):
            process.send("add_job", queue_name="q", uuid="j", command="c", args=n)
        process.send("worker_idle", **W)
        assert process.wait_for("job_assignment")["args"] == 2


def test_messages_sent_during_a_redis_outage_are_executed_afterwards(server: Server, redis_url: str) -> None:
    with bridge(redis_url) as process:
        process.send("add_job", queue_name="q", uuid="before", command="c")
        process.wait_for("job_added")
        server.kill()
        for n in range(50):
            process.send("add_job", queue_name="q", uuid=f"j{n}", command="c")
        wait_until(lambda: any("redis is gone" in line for line in process.log))
        server.start()
        process.wait_for("job_added", 51)
        assert [added["uuid"] for added in process.of("job_added")[1:]] == [f"j{n}" for n in range(50)]
        process.send("worker_idle", **W)
        process.wait_for("job_assignment")
        # Notifications work again, too.
        process.send("worker_idle", queue_name="other", worker_uuid="w")
        process.send("add_job", queue_name="other", command="c")
        assert process.wait_for("job_assignment", 2)["queue_name"] == "other"
        assert process.of("error") == []


def test_eof_during_a_redis_outage_waits_for_redis(server: Server, redis_url: str) -> None:
    with bridge(redis_url) as process:
        process.send("add_job", queue_name="q", uuid="before", command="c")
        process.wait_for("job_added")
        server.kill()
        process.send("add_job", queue_name="q", uuid="j", command="c")
        wait_until(lambda: any("redis is gone" in line for line in process.log))
        ended = threading.Thread(target=process.end)
        ended.start()
        server.start()
        ended.join(20)
        assert process.process.returncode == 0
        assert process.of("job_added")[-1]["uuid"] == "j"


def test_a_request_whose_reply_was_lost_takes_effect_once(redis_url: str) -> None:
    from forq.bridge.messages import parse_message
    from forq.bridge.requests import Requests
    from forq.errors import OutcomeUnknown

    class LosesAnswers(Link):
        lost = 0

        def run(self, *args: object) -> list[object]:
            answer = super().run(*args)  # type: ignore[arg-type]
            if args[0].verb in ("enqueue", "finish", "await") and self.lost < 3:  # type: ignore[attr-defined]
                self.lost += 1
                raise OutcomeUnknown("the answer was lost")
            return answer

    link = LosesAnswers(redis_url)
    requests = Requests(link, DEFAULT_PREFIX, "b", max_queues=10, tick_seconds=3.0)

    def insist(line: bytes) -> list[tuple[str, object]]:
        link.lost = 0
        request = parse_message(line)
        for _ in range(10):
            try:
                return requests.execute(request)  # type: ignore[return-value]
            except OutcomeUnknown:
                continue
        raise AssertionError("no answer")

    assert insist(encode("add_job", {"queue_name": "q", "command": "c", "uuid": "j"}))[0][0] == "job_added"
    assert insist(encode("worker_idle", W))[0][0] == "job_assignment"
    assert insist(encode("job_finished", {**W, "uuid": "j"})) == []
    counts = Inspector(link, DEFAULT_PREFIX, "q").counts()
    assert (counts.done, counts.waiting, counts.active) == (1, 0, 0)
    link.close()


def test_sigterm_stops_a_bridge_cleanly(redis_url: str, path: Path) -> None:
    with external_queue(redis_url) as queue, listening(redis_url, path) as process:
        client = Client(path)
        client.send("worker_idle", **W)
        client.send("list_workers", queue_name="q")
        client.wait_for("workers")
        process.kill(signal.SIGTERM)
        assert process.process.wait(10) == 0
        assert queue.states() == {}
        assert not path.exists()


def test_connections_do_not_affect_each_other(redis_url: str, path: Path) -> None:
    with listening(redis_url, path):
        one, two = Client(path), Client(path)
        one.send("worker_idle", **W)
        one.write(b"rubbish\n")
        one.wait_for("error")
        two.send("add_job", queue_name="q", uuid="j", command="c")
        two.wait_for("job_added")
        assert one.wait_for("job_assignment")["uuid"] == "j"
        one.close()
        two.send("worker_idle", queue_name="q", worker_uuid="w2")
        assert two.wait_for("job_assignment")["uuid"] == "j", "it was returned at once"
        assert two.of("error") == []
        two.close()


def test_the_socket_of_a_killed_bridge_is_taken_over(redis_url: str, path: Path) -> None:
    with listening(redis_url, path) as first:
        first.kill()
        first.process.wait()
    assert path.exists()
    with listening(redis_url, path), bridge(redis_url, "--listen", str(path)) as third:
        assert third.process.wait(10) == 1
        wait_until(lambda: any("another process listens there" in line for line in third.log))


@only_in_test_all
def test_a_peer_that_does_not_read_delays_no_other_peer(redis_url: str, path: Path) -> None:
    with listening(redis_url, path):
        deaf = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deaf.connect(str(path))
        deaf.sendall(encode("worker_idle", {"queue_name": "q", "worker_uuid": "deaf"}))
        other = Client(path)
        # Each unread assignment has half a megabyte.
        blob = "x" * 500_000
        for n in range(40):
            other.send("add_job", queue_name="q", uuid=f"j{n}", command="c", args=blob)
            other.wait_for("job_added", n + 1)
            other.send("job_finished", queue_name="q", worker_uuid="deaf", uuid=f"j{n}")
            other.send("list_workers", queue_name="q")
            other.wait_for("workers", n + 1)
        assert len(other.of("workers")) == 40
        other.close()
        deaf.close()


def test_a_connection_that_never_reads_is_closed_eventually(redis_url: str, path: Path) -> None:
    with listening(redis_url, path):
        deaf = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deaf.connect(str(path))
        workers = [f"w{n}" for n in range(40)]
        for worker in workers:
            deaf.sendall(encode("worker_idle", {"queue_name": "q", "worker_uuid": worker}))
        other = Client(path)
        blob = "x" * 500_000
        for n in range(40):
            other.send("add_job", queue_name="q", uuid=f"j{n}", command="c", args=blob)
            other.wait_for("job_added", n + 1)

        def forgotten() -> bool:
            return not other.request("list_workers", "workers", queue_name="q")["workers"]

        wait_until(forgotten, what="its workers are forgotten")
        other.send("list_jobs", queue_name="q", limit=100)
        states = {job["state"] for job in other.wait_for("jobs")["jobs"]}
        assert states == {"waiting"}, "its assigned jobs were returned"
        other.close()
        deaf.close()


def test_lines_stay_whole_under_load(redis_url: str, path: Path) -> None:
    with listening(redis_url, path):
        clients = [Client(path) for _ in range(4)]
        for number, client in enumerate(clients):
            client.write(
                b"".join(
                    encode("add_job", {"queue_name": "q", "uuid": f"{number}-{n}", "command": "c"}) for n in range(300)
                )
            )
        for number, client in enumerate(clients):
            client.wait_for("job_added", 300)
            assert [added["uuid"] for added in client.of("job_added")] == [f"{number}-{n}" for n in range(300)]
            assert json.dumps(client.envelopes[0])
            client.close()


def test_connections_over_the_limit_get_an_error_message(redis_url: str, path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * MAX_CONNECTIONS:
        pytest.skip(f"a process may have {hard} files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MAX_CONNECTIONS), hard))
    with listening(redis_url, path), ExitStack() as held:
        first = Client(path)
        held.callback(first.close)
        for _ in range(MAX_CONNECTIONS - 1):
            sock = held.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(path))
        late = Client(path)
        held.callback(late.socket.close)
        reason = late.wait_for("error")["reason"]
        assert reason == f"too many connections: at most {MAX_CONNECTIONS} at a time"
        first.request("add_job", "job_added", queue_name="q", uuid="a", command="c")


def test_a_notified_worker_of_a_deleted_queue_does_not_keep_the_bridge_busy(redis_url: str) -> None:
    link = Link(redis_url)
    registry = Registry(link, DEFAULT_PREFIX)
    with bridge(redis_url, "--tick", "1h") as process:
        process.send("worker_idle", **W)
        process.request("list_workers", "workers", queue_name="q")
        registry.delete("q", force=True)
        while registry.purge("q", lambda jobs: None):
            pass
        # After a reconnect the bridge requests the assignments of all its workers.
        link.call("CLIENT", "KILL", "TYPE", "pubsub", at="")
        wait_until(lambda: any("no queue 'q'" in line for line in process.log), what="a refused assignment")
        for number in range(50):
            process.request("add_job", "job_added", queue_name="other", uuid=f"j{number}", command="c")
        refused = [line for line in process.log if "no queue 'q'" in line]
        assert len(refused) <= 2, "one for the deletion, one for the reconnect"
    link.close()
