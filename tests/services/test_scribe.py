"""The scribe and the failed log: no line is lost, whatever fails."""

import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.outbox import Outbox
from forq.broker.registry import Registry
from forq.errors import ForqError
from forq.procs import jsonrpc
from forq.services.scribe import CHECK_SECONDS, MAX_FILES, Scribe, append_lines, run_scribe
from forq.settings import stored_defaults
from tests.support.drive.contexts import context
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until, whole_lines


class ScribeRig:
    """The supervisor's end of a scribe's leash."""

    def __init__(self, url: str, directory: Path, processor: str = "p1", max_bytes: int = 10**6) -> None:
        self.leash, self._theirs = socket.socketpair()
        self.leash.settimeout(10)
        self.directory = directory
        self.context = context(
            url=url, processor=processor, expiry_ms=15_000, logs_dir=directory, failed_log_max=max_bytes
        )

    def scribe(self, *queues: str) -> Scribe:
        scribe = Scribe(self.context, self._theirs)
        scribe._serve({"queues": list(queues or ("q",))})
        return scribe

    def events(self) -> list[dict[str, Any]]:
        """Returns the events received so far."""
        self.leash.setblocking(False)
        try:
            return [json.loads(line) for line in self.leash.recv(1 << 20).splitlines()]
        except BlockingIOError:
            return []

    def logged(self, queue: str = "q") -> list[str]:
        path = self.directory / queue / "failed.jsonl"
        return [json.loads(line)["id"] for line in whole_lines(path)]

    def close(self) -> None:
        self.leash.close()
        self._theirs.close()


@pytest.fixture
def store(redis_url: str) -> Iterator[Any]:
    link = Link(redis_url)
    for name in ("q", "r"):
        Registry(link, DEFAULT_PREFIX).create(name, "work", 10, stored_defaults(), {})
    link.close()
    with redis.Redis.from_url(redis_url) as store:
        yield store


@pytest.fixture
def rig(redis_url: str, tmp_path: Path) -> Iterator[ScribeRig]:
    rig = ScribeRig(redis_url, tmp_path / "logs")
    yield rig
    rig.close()


def key(queue: str = "q", name: str = "outbox") -> str:
    return f"forq:queue:{{{queue}}}:{name}"


def line(job: str) -> str:
    entry = {"id": job, "fence": "7", "died_ms": 5000, "priority": 5, "enqueued_us": 1_000_000, "counts": [0, 0, 0]}
    return json.dumps({**entry, "body": [None, None, {"n": job}], "error": {"name": "E", "message": "no"}})


def fail(store: Any, *jobs: str, queue: str = "q") -> None:
    """Does the same as the script that moves jobs to dead."""
    store.rpush(key(queue), *map(line, jobs))
    store.publish(f"forq:queue:{{{queue}}}@0:outbox", queue)


@contextmanager
def size_limit(size: int) -> Iterator[None]:
    """Simulates a full disk: no file of this process grows past `size`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.spec("N19")
def test_lines_are_written_and_then_forgotten(store: Any, rig: ScribeRig) -> None:
    fail(store, "a", "b")
    scribe = rig.scribe()
    scribe.tick(1.0)
    assert rig.logged() == ["a", "b"]
    assert not store.exists(key(), key(name="outbox:p1"))
    path = rig.directory / "q" / "failed.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text().splitlines()[0])["data"] == {"n": "a"}


@pytest.mark.fault("service killed half way")
def test_a_crash_between_write_and_forget_writes_again_and_loses_nothing(
    store: Any, rig: ScribeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(store, "a")

    def crash(self: Outbox, queue: str, lines: list[bytes]) -> bool:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "forget", crash)
        with pytest.raises(SystemExit):
            rig.scribe().tick(1.0)
    assert rig.logged() == ["a"]
    fail(store, "b")
    successor = rig.scribe()
    successor.tick(1.0)
    successor.tick(2.0)
    assert rig.logged() == ["a", "a", "b"]
    assert not store.exists(key(), key(name="outbox:p1"))


def test_lines_of_a_killed_scribe_are_written_by_its_successor(store: Any, redis_url: str, tmp_path: Path) -> None:
    """A real process, killed while it cannot write."""
    rig = ScribeRig(redis_url, tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "q").symlink_to(tmp_path)
    fail(store, "a")
    pid = os.fork()
    if pid == 0:
        os._exit(run_scribe(rig.context, rig._theirs))
    try:
        rig.leash.sendall(jsonrpc.request(1, "serve", {"queues": ["q"]}))
        wait_until(lambda: store.exists(key(name="outbox:p1")), what="it has the line in hand")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (tmp_path / "logs" / "q").unlink()
    rig.scribe().tick(1.0)
    assert rig.logged() == ["a"]
    rig.close()


def test_a_forget_whose_reply_was_lost_does_not_write_twice(
    store: Any, rig: ScribeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forq.errors import OutcomeUnknown

    fail(store, "a")
    scribe = rig.scribe()

    def lose(self: Outbox, queue: str, lines: list[bytes]) -> bool:
        raise OutcomeUnknown("the reply was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "forget", lose)
        scribe.tick(1.0)
    scribe.tick(2.0)
    assert rig.logged() == ["a"]
    assert not store.exists(key(), key(name="outbox:p1"))


def test_two_scribes_write_each_line_once(store: Any, redis_url: str, tmp_path: Path) -> None:
    jobs = [f"j{number}" for number in range(3000)]
    fail(store, *jobs)
    rigs = [ScribeRig(redis_url, tmp_path / name, name) for name in ("p1", "p2")]

    def work(rig: ScribeRig) -> None:
        scribe = rig.scribe()
        for now in range(20):
            scribe.tick(1.0 + now / 100)

    threads = [threading.Thread(target=work, args=(rig,)) for rig in rigs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    logged = [rig.logged() for rig in rigs]
    assert sorted(logged[0] + logged[1]) == sorted(jobs)
    assert not store.exists(key(), key(name="outbox:p1"), key(name="outbox:p2"))
    for rig in rigs:
        rig.close()


@pytest.mark.fault("disk of the failed log full")
@pytest.mark.parametrize("trick", ["directory", "file"])
def test_lines_that_cannot_be_written_stay_in_redis_and_are_written_later(
    store: Any, rig: ScribeRig, tmp_path: Path, trick: str, caplog: pytest.LogCaptureFixture
) -> None:
    obstacle = rig.directory / "q" if trick == "directory" else rig.directory / "q" / "failed.jsonl"
    obstacle.parent.mkdir(parents=True)
    obstacle.symlink_to(tmp_path / "elsewhere" if trick == "directory" else "/dev/full")
    (tmp_path / "elsewhere").mkdir()
    fail(store, "a")
    fail(store, "b", queue="r")
    scribe = rig.scribe("q", "r")
    for now in (1.0, 1.1, 1.3, 9.0):
        scribe.tick(now)
    assert rig.logged("r") == ["b"]
    assert store.llen(key(name="outbox:p1")) == 1
    assert not list((tmp_path / "elsewhere").iterdir())
    received = rig.events()
    assert [(event["event"], event["queue"], event["failures"]) for event in received] == [
        ("failed_log", "q", failures) for failures in (1, 2, 3)
    ]
    assert len([record for record in caplog.records if "cannot write the failed log" in record.message]) == 1
    obstacle.unlink()
    scribe.tick(60.0)
    assert rig.logged() == ["a"]
    assert rig.events()[0] == {"event": "failed_log", "queue": "q", "error": None, "failures": 3}
    assert not store.exists(key(), key(name="outbox:p1"))


@pytest.mark.fault("disk of the failed log full")
def test_a_full_disk_leaves_no_partial_line(store: Any, rig: ScribeRig) -> None:
    fail(store, "a")
    scribe = rig.scribe()
    scribe.tick(1.0)
    fail(store, "b", "c")
    path = rig.directory / "q" / "failed.jsonl"
    size = path.stat().st_size
    with size_limit(size + 10):
        scribe.tick(1.0 + CHECK_SECONDS)
    assert path.stat().st_size == size
    assert len(rig.events()) == 1
    scribe.tick(100.0)
    assert rig.logged() == ["a", "b", "c"]


def test_the_scribe_retries_while_redis_is_down_and_logs_it_once(
    store: Any, rig: ScribeRig, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    scribe = rig.scribe()
    scribe.tick(1.0)
    server.kill()
    scribe._receive()
    for now in (2.0, 2.1, 2.3, 3.0):
        scribe.tick(now)
    assert scribe._redis_failures.failures == 3
    assert len([record for record in caplog.records if "cannot drain failed logs" in record.message]) == 1
    server.start()
    link = Link(server.url)
    Registry(link, DEFAULT_PREFIX).create("q", "work", 10, stored_defaults(), {})
    link.close()
    with server.connect() as fresh:
        fail(fresh, "a")
    for now in (60.0, 90.0):  # the first run may use the old connection
        scribe.tick(now)
    assert (rig.logged(), scribe._redis_failures.failures) == (["a"], 0)


def test_a_server_that_refuses_writes_is_logged_as_one_outage(
    store: Any, rig: ScribeRig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forq.errors import RedisUnavailable

    fail(store, "a")
    scribe = rig.scribe()

    def refuse(self: Outbox, queue: str, max_lines: int = 0) -> list[bytes]:
        raise RedisUnavailable("MISCONF")

    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "collect", refuse)
        for now in (1.0, 2.0, 3.0):
            scribe.tick(now)
    assert len([record for record in caplog.records if "cannot drain failed logs" in record.message]) == 1
    scribe.tick(60.0)
    assert rig.logged() == ["a"]


def test_an_invalid_line_is_kept_as_it_is_and_blocks_nothing(store: Any, rig: ScribeRig) -> None:
    store.rpush(key(), "not json", line("a"))
    rig.scribe().tick(1.0)
    first, second = (rig.directory / "q" / "failed.jsonl").read_text().splitlines()
    assert json.loads(first)["line"] == "not json"
    assert json.loads(second)["id"] == "a"


def test_data_at_the_nesting_limit_is_written(store: Any, rig: ScribeRig) -> None:
    body = "[" * 254 + "]" * 254
    store.rpush(key(), line("a").replace('{"n": "a"}', body))
    rig.scribe().tick(1.0)
    assert rig.logged() == ["a"]
    assert body in (rig.directory / "q" / "failed.jsonl").read_text()


def test_the_process_drains_at_start_on_notification_and_after_a_reconnect(store: Any, rig: ScribeRig) -> None:
    fail(store, "a")
    thread = threading.Thread(target=run_scribe, args=(rig.context, rig._theirs))
    thread.start()
    try:
        rig.leash.sendall(jsonrpc.request(1, "serve", {"queues": ["q"]}))
        wait_until(lambda: rig.logged() == ["a"])
        fail(store, "b")
        wait_until(lambda: rig.logged() == ["a", "b"], seconds=10)
        store.rpush(key(), line("c"))  # without a notification
        subscriptions = [client["id"] for client in store.client_list() if client["name"] == "forq-scribe-subscription"]
        assert subscriptions
        for subscription in subscriptions:
            store.client_kill_filter(_id=subscription)
        wait_until(lambda: rig.logged() == ["a", "b", "c"], seconds=10)
        fail(store, "d")
        wait_until(lambda: rig.logged() == ["a", "b", "c", "d"], seconds=10)
    finally:
        rig.leash.shutdown(socket.SHUT_WR)
        thread.join(10)
    assert not thread.is_alive()


def test_lines_without_a_notification_are_found_by_the_next_check(store: Any, rig: ScribeRig) -> None:
    scribe = rig.scribe()
    scribe.tick(1.0)
    store.rpush(key(), line("a"))
    scribe.tick(CHECK_SECONDS)
    assert rig.logged() == []
    scribe.tick(CHECK_SECONDS + 1.0)
    assert rig.logged() == ["a"]


def test_a_log_is_rotated_by_size_and_the_oldest_of_ten_is_dropped(tmp_path: Path) -> None:
    for number in range(12):
        append_lines(tmp_path / "q", [{"n": number}] * 3, max_bytes=30)
    files = {path.name: path.read_text() for path in (tmp_path / "q").iterdir()}
    names = ["failed.jsonl", *(f"failed.jsonl.{number}" for number in range(1, MAX_FILES))]
    assert sorted(files) == sorted(names)
    assert [json.loads(files[name].splitlines()[0])["n"] for name in names] == list(range(11, 1, -1))


def test_rotation_stops_at_the_first_gap_and_drops_nothing(tmp_path: Path) -> None:
    for number in range(12):
        append_lines(tmp_path / "q", [{"n": number}], max_bytes=8)
    (tmp_path / "q" / "failed.jsonl.3").unlink()
    oldest = (tmp_path / "q" / "failed.jsonl.9").read_text()
    append_lines(tmp_path / "q", [{"n": 12}], max_bytes=8)
    assert (tmp_path / "q" / "failed.jsonl.9").read_text() == oldest
    assert len(list((tmp_path / "q").iterdir())) == MAX_FILES


def test_a_line_truncated_by_a_crash_does_not_corrupt_the_next(tmp_path: Path) -> None:
    append_lines(tmp_path, [{"n": 1}])
    with (tmp_path / "failed.jsonl").open("ab") as file:
        file.write(b'{"n":')
    append_lines(tmp_path, [{"n": 2}])
    assert (tmp_path / "failed.jsonl").read_text() == '{"n":1}\n{"n":\n{"n":2}\n'


def test_several_writers_and_rotations_lose_nothing(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        for number in range(50):
            append_lines(tmp_path / "q", [{"w": writer, "n": number}], max_bytes=300)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    lines = [json.loads(text) for path in (tmp_path / "q").iterdir() for text in path.read_text().splitlines()]
    assert sorted((entry["w"], entry["n"]) for entry in lines) == [(w, n) for w in range(3) for n in range(50)]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "failed.jsonl").symlink_to("/dev/full")
    with pytest.raises(ForqError, match=r"failed\.jsonl"):
        append_lines(tmp_path, [{"n": 1}])


def test_a_batch_is_synced_once_and_the_directory_when_names_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr(os, "fsync", note)
    (tmp_path / "q").mkdir()
    append_lines(tmp_path / "q", [{"n": 1}] * 3, max_bytes=30)
    assert synced == ["failed.jsonl", "q"]
    synced.clear()
    append_lines(tmp_path / "q", [{"n": 2}], max_bytes=40)
    assert synced == ["failed.jsonl"]
    synced.clear()
    append_lines(tmp_path / "q", [{"n": 3}], max_bytes=30)
    assert synced == ["q", "failed.jsonl", "q"]
