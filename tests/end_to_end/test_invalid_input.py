"""Invalid input: a clear error, a documented exit code, and nothing lost."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.drive.server import Server
from tests.support.drive.supervisor import BIN, HANDLERS, Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="max_queues = 3\n") as forq:
        forq.create("here", "record")
        yield forq


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["create", "q\r\nDEL x", "--handler", "traced"], 2, "queue name"),
        (["create", "../up", "--handler", "traced"], 2, "queue name"),
        (["create", "{tag}", "--handler", "traced"], 2, "queue name"),
        (["create", "x" * 65, "--handler", "traced"], 2, "queue name"),
        (["create", "..", "--handler", "traced"], 2, "queue name"),
        (["create", "fine"], 2, "handler"),
        (["create", "fine", "--handler", "os.system('x')"], 2, "handler"),
        (["create", "fine", "--handler", "traced", "--set", "max_item=3"], 2, "max_items"),
        (["create", "fine", "--handler", "traced", "--set", "concurrency=0"], 2, "concurrency"),
        (["create", "fine", "--handler", "traced", "--set", "stop_grace=soon"], 2, "stop_grace"),
        (["push", "here", "{not json"], 2, "JSON"),
        (["push", "here", "NaN"], 2, "NaN"),
        (["push", "here", "1", "--id", "two words"], 2, "job id"),
        (["push", "here", "1", "--id", ""], 2, "job id"),
        (["push", "here", "1", "--priority", "10"], 2, "priority"),
        (["push", "here", "123456789012345678901234567890"], 2, "JSON"),
        (["push", "nowhere", "1"], 4, "no queue 'nowhere'"),
        (["status", "nowhere"], 4, "nowhere"),
        (["job", "here", "nothing"], 4, "nothing"),
        (["remove", "here", "nothing"], 4, "nothing"),
        (["cancel", "here", "nothing"], 4, "nothing"),
        (["restart", "nowhere"], 4, "nowhere"),
        (["pause", "nowhere"], 4, "nowhere"),
        (["delete", "nowhere"], 4, "nowhere"),
        (["jobs", "here", "--after", "rubbish"], 2, "cursor"),
        (["no-such-verb"], 2, "no-such-verb"),
        (["statu"], 2, "status"),
    ],
)
def test_an_invalid_command_gets_a_clear_error(forq: Forq, arguments: list[str], code: int, message: str) -> None:
    done = forq.run_ctl(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.fault("payload huge")
def test_data_above_the_limit_is_refused(forq: Forq) -> None:
    queue = forq.client().queue("here")
    with pytest.raises(Exception, match="max_data = 1048576"):
        queue.enqueue("x" * 1_100_000)
    assert queue.status()["waiting"] == 0


@pytest.mark.spec("N2")
def test_queues_above_max_queues_are_refused(forq: Forq) -> None:
    forq.create("second", "noop")
    forq.create("third", "noop")
    done = forq.run_ctl("create", "fourth", "--handler", "traced:noop", "--path", str(HANDLERS))
    assert done.returncode == 1
    assert "max_queues" in done.stderr
    assert {queue["name"] for queue in forq.status()["queues"]} == {"here", "second", "third"}
    forq.ctl("delete", "third")
    forq.ctl("delete", "second")


def test_an_invalid_line_in_a_file_is_reported_and_its_chunk_is_not_sent(forq: Forq, tmp_path: Path) -> None:
    lines = tmp_path / "jobs.jsonl"
    lines.write_text('{"n": 1}\nrubbish\n')
    before = forq.queue_status("here")["done"]
    done = forq.run_ctl("push", "here", "--file", str(lines))
    assert done.returncode == 2
    assert "line 2" in done.stderr
    lines.write_text('{"n": 1}\n2\n')
    assert forq.run_ctl("push", "here", "--file", str(lines)).returncode == 0
    wait_until(lambda: forq.queue_status("here")["done"] == before + 2)


def test_a_second_supervisor_on_the_same_state_directory_is_refused(forq: Forq) -> None:
    command = [str(BIN / "forq"), "run", "--state-dir", str(forq.state_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"another supervisor (pid {forq.pid})" in done.stderr
    assert forq.status()["supervisor"]["pid"] == forq.pid


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    forq = Forq()
    forq.state_dir.mkdir(mode=0o700)
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(forq.state_dir / "control.sock"))
    left_over.close()
    try:
        forq.start()
        assert forq.ctl("ping")
    finally:
        forq.remove()


def test_a_missing_supervisor_is_reported_with_its_path(tmp_path: Path) -> None:
    environ = {**os.environ, "FORQ_SOCKET": str(tmp_path / "none.sock")}
    done = subprocess.run([str(BIN / "forqctl"), "status"], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 7
    assert str(tmp_path / "none.sock") in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("max_queue = 3\n", "max_queues"),
        ("max_queues = 'many'\n", "max_queues"),
        ("[queues.a]\nhandler = 'x:y'\nconcurency = 2\n", "concurrency"),
        ("[queues.'b ad']\nhandler = 'x:y'\n", "b ad"),
        ("redis = 'http://x'\n", "redis://"),
        ("= broken", "line 1"),
    ],
)
def test_an_invalid_setting_exits_with_78(settings: str, message: str) -> None:
    forq = Forq(settings=settings)
    try:
        forq.start(ready=False)
        assert forq.process is not None
        assert forq.process.wait(20) == 78
        assert message in forq.log
        assert "Traceback" not in forq.log
    finally:
        forq.remove()


def test_a_server_with_an_eviction_policy_is_refused(server: Server, redis_url: str) -> None:
    with server.connect() as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")
        redis.config_set("maxmemory", "100mb")
    forq = Forq(redis=redis_url)
    try:
        forq.start(ready=False)
        assert forq.process is not None
        assert forq.process.wait(20) == 78
        assert "noeviction" in forq.log
    finally:
        forq.remove()
        with server.connect() as redis:
            redis.config_set("maxmemory-policy", "noeviction")


def test_require_redis_exits_with_75_when_there_is_none(tmp_path: Path) -> None:
    forq = Forq(redis=f"unix://{tmp_path}/none.sock", settings="require_redis = true\n")
    try:
        forq.start(ready=False)
        assert forq.process is not None
        assert forq.process.wait(20) == 75
    finally:
        forq.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_permission_denied(forq: Forq) -> None:
    import shutil

    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    os.chmod(forq.directory, 0o755)
    os.chmod(forq.state_dir, 0o711)
    script = (
        "import socket,sys\ns=socket.socket(socket.AF_UNIX)\n"
        f"try:\n s.connect({str(forq.state_dir / 'control.sock')!r})\nexcept PermissionError: print('refused')\n"
    )
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    os.chmod(forq.state_dir, 0o700)
    if "No such file" in done.stderr:
        pytest.skip("no system python that another user could run")
    assert done.stdout.strip() == "refused"
