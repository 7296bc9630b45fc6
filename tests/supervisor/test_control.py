"""The control server with real sockets, on the supervisor's own loop."""

import contextlib
import errno
import itertools
import json
import os
import queue
import select
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forq.errors import ForqError, UnknownQueue
from forq.procs.loop import Loop
from forq.supervisor import control
from forq.supervisor.control import ControlServer, Request
from tests.support.drive.wait import wait_until

DEADLINE_SECONDS = 10.0


class Serving:
    """A ControlServer in its own thread, with verbs for the tests."""

    def __init__(self, path: str, group: int | None = None) -> None:
        self.path = path
        self.held: list[Request] = []
        self.gone: list[str] = []
        self.loop = Loop()
        self.acts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.wakeup = socket.socketpair()
        self.loop.add_reader(self.wakeup[0].fileno(), self.act)
        self.verbs: dict[str, Callable[[Request], None]] = {
            "echo": lambda request: request.reply(request.params),
            "whoami": lambda request: request.reply(request.peer._asdict()),
            "hold": self.hold,
            "refuse": self.refuse,
            "crash": lambda request: cast(None, 1 / 0),
            "big": lambda request: request.reply("x" * request.params["size"]),
            "set": lambda request: request.reply({1, 2}),
            "twice": self.twice,
        }
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.server = ControlServer(self.loop, path, self.verbs, group=group)
        self.thread.start()

    def hold(self, request: Request) -> None:
        request.on_gone(lambda: self.gone.append(request.params.get("name", "")))
        self.held.append(request)

    def refuse(self, request: Request) -> None:
        raise UnknownQueue("there is no queue x")

    def twice(self, request: Request) -> None:
        request.reply(1)
        request.reply(2)

    def run(self, act: Callable[[], Any]) -> Any:
        """In the loop's thread."""
        done = threading.Event()
        box: list[Any] = []

        def call() -> None:
            try:
                box.append(act())
            finally:
                done.set()

        self.acts.put(call)
        self.wakeup[1].send(b"x")
        assert done.wait(DEADLINE_SECONDS)
        return box[0]

    def act(self) -> None:
        self.wakeup[0].recv(1)
        self.acts.get()()

    def release(self) -> None:
        def act() -> None:
            held, self.held[:] = list(self.held), []
            for request in held:
                request.reply("released")

        self.run(act)

    def connections(self) -> int:
        return cast(int, self.run(lambda: len(self.server._connections)))

    def close(self) -> None:
        self.run(self.server.close)
        self.run(self.loop.stop)
        self.thread.join(DEADLINE_SECONDS)
        self.loop.remove_reader(self.wakeup[0].fileno())
        self.loop.close()
        for end in self.wakeup:
            end.close()


class RawClient:
    """A client that sends any bytes."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        # Before the timeout is set, so that connect waits for room in the backlog.
        self.sock.connect(path)
        self.sock.settimeout(DEADLINE_SECONDS)
        self.file = self.sock.makefile("rb")

    def send(self, method: str, id: object = 1, **params: object) -> None:
        self.raw(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self) -> Any:
        return json.loads(self.file.readline())

    def ended(self) -> bool:
        try:
            return self.file.read() == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.file.close()
        self.sock.close()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(str(tmp_path / "c.sock"))
    yield serving
    serving.close()


@pytest.fixture
def client(serving: Serving) -> Iterator[RawClient]:
    client = RawClient(serving.path)
    yield client
    client.close()


def test_the_socket_is_0600_and_is_removed_by_close(tmp_path: Path) -> None:
    serving = Serving(str(tmp_path / "c.sock"))
    mode = stat.S_IMODE(os.stat(serving.path).st_mode)
    serving.close()
    assert mode == 0o600
    assert not os.path.exists(serving.path)


def test_with_a_group_the_socket_is_0660_and_belongs_to_that_group(tmp_path: Path) -> None:
    gid = os.getgid()
    serving = Serving(str(tmp_path / "c.sock"), group=gid)
    found = os.stat(serving.path)
    serving.close()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, gid)


def test_the_umask_is_restored(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        Serving(str(tmp_path / "c.sock")).close()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    serving = Serving(path)
    client = RawClient(path)
    client.send("echo")
    assert client.receive()["result"] == {}
    client.close()
    serving.close()


def test_a_live_socket_is_not_replaced(serving: Serving, client: RawClient) -> None:
    with pytest.raises(ForqError, match="another process listens there"):
        ControlServer(serving.loop, serving.path, {})
    client.send("echo", a=1)
    assert client.receive()["result"] == {"a": 1}


def test_a_file_that_is_not_a_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ForqError, match="not a socket"):
        ControlServer(cast(Any, None), str(path), {})
    assert path.read_text() == "data"


def test_close_does_not_remove_the_socket_of_a_successor(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    first = Serving(path)
    # At once: the first server would create a missing socket again.
    with socket.socket(socket.AF_UNIX) as second:
        second.bind(f"{path}.new")
        os.rename(f"{path}.new", path)
        first.close()
        assert os.path.exists(path)


def test_a_path_that_is_too_long_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ForqError, match="too long"):
        ControlServer(cast(Any, None), str(tmp_path / ("x" * 120)), {})


def test_the_identity_of_the_peer_comes_from_the_kernel(client: RawClient) -> None:
    client.send("whoami")
    assert client.receive()["result"] == {"pid": os.getpid(), "uid": os.getuid(), "gid": os.getgid()}


def forked_as(uid: int, gid: int, groups: list[int], path: str) -> dict[str, Any]:
    """The answer to `whoami` that a process of this user receives."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(path)
            with contextlib.suppress(BrokenPipeError):
                sock.sendall(b'{"jsonrpc":"2.0","id":1,"method":"whoami"}\n')
            os.write(writing, sock.recv(65536))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        line = answer.read()
    os.waitpid(pid, 0)
    return cast("dict[str, Any]", json.loads(line))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_repeated_refusals_of_a_user_are_logged_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tempfile.TemporaryDirectory(prefix="forq-") as directory:
        os.chmod(directory, 0o755)
        serving = Serving(os.path.join(directory, "c.sock"), group=54321)
        os.chmod(serving.path, 0o666)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setgid(1)
                os.setuid(65534)
                for _ in range(1000):
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.connect(serving.path)
                        sock.recv(1)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        seconds = time.monotonic() - began
        lines = [each.getMessage() for each in caplog.records if "client refused" in each.getMessage()]
        serving.close()
    assert 1 <= len(lines) <= 2 + seconds
    assert lines[0] == f"client refused uid=65534 gid=1 pid={pid}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("gid", "groups", "admitted"), [(54321, [], True), (1, [2, 54321], True), (1, [], False), (1, [2], False)]
)
def test_other_users_are_accepted_only_through_the_group(gid: int, groups: list[int], admitted: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="forq-") as directory:
        os.chmod(directory, 0o755)
        serving = Serving(os.path.join(directory, "c.sock"), group=54321)
        # The socket is world-writable here, so that only the peer check can refuse.
        os.chmod(serving.path, 0o666)
        answer = forked_as(65534, gid, groups, serving.path)
        serving.close()
    if admitted:
        assert answer["result"]["uid"] == 65534
    else:
        assert answer["error"]["data"]["code"] == "permission"


def test_a_verb_that_raises_a_forq_error_fails_with_its_code(client: RawClient) -> None:
    client.send("refuse")
    assert client.receive()["error"] == {
        "code": -32000,
        "message": "there is no queue x",
        "data": {"code": "unknown_queue"},
    }


@pytest.mark.parametrize("method", ["crash", "set"])
def test_a_verb_that_crashes_is_an_internal_error_and_the_server_continues(client: RawClient, method: str) -> None:
    client.send(method)
    assert client.receive()["error"]["code"] == -32603
    client.send("echo", a=1)
    assert client.receive()["result"] == {"a": 1}


def test_a_second_answer_is_not_sent(client: RawClient) -> None:
    client.send("twice", id=1)
    client.send("echo", id=2)
    assert [client.receive()["id"], client.receive()["id"]] == [1, 2]


@pytest.mark.parametrize("method", ["nothing", "__class__", "echo.__class__", "", "verbs"])
def test_only_names_in_the_table_are_verbs(client: RawClient, method: str) -> None:
    client.send(method)
    error = client.receive()["error"]
    assert (error["code"], error["data"]) == (-32601, {"code": "unknown_verb"})


def test_notifications_get_no_answer(client: RawClient) -> None:
    client.raw(b'{"jsonrpc":"2.0","method":"echo"}\n{"jsonrpc":"2.0","method":"nothing"}\n')
    client.send("echo", id="after")
    assert client.receive()["id"] == "after"


def test_answers_may_come_later_and_in_another_order(serving: Serving, client: RawClient) -> None:
    client.send("hold", id=1)
    client.send("echo", id=2)
    assert client.receive()["id"] == 2
    serving.release()
    assert client.receive() == {"jsonrpc": "2.0", "id": 1, "result": "released"}


def test_a_verb_is_notified_of_a_peer_that_disconnects_before_the_reply(serving: Serving, client: RawClient) -> None:
    client.send("hold", name="a")
    wait_until(lambda: len(serving.held) == 1)
    client.close()
    wait_until(lambda: serving.gone == ["a"])
    serving.release()
    assert serving.connections() == 0


def test_a_client_that_shuts_down_its_sending_side_still_gets_its_answers(serving: Serving, client: RawClient) -> None:
    client.send("hold")
    client.sock.shutdown(socket.SHUT_WR)
    wait_until(lambda: len(serving.held) == 1)
    serving.release()
    assert client.receive()["result"] == "released"
    assert client.ended()
    assert serving.gone == []


def test_a_half_closed_client_that_disconnects_is_noticed(serving: Serving, client: RawClient) -> None:
    client.send("hold", name="b")
    client.sock.shutdown(socket.SHUT_WR)
    wait_until(lambda: len(serving.held) == 1)
    client.close()
    wait_until(lambda: serving.gone == ["b"])


def test_a_partial_line_is_completed_by_later_bytes(client: RawClient) -> None:
    client.raw(b'{"jsonrpc":"2.0","id":1,')
    client.raw(b'"method":"echo"}\n')
    assert client.receive()["result"] == {}


@pytest.mark.fault("control socket attacked")
def test_a_partial_line_that_never_ends_closes_the_connection(
    serving: Serving, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HALF_LINE_SECONDS", 0.2)
    stop = threading.Event()

    def drip() -> None:
        # Single bytes must not extend the deadline.
        while not stop.wait(0.02):
            try:
                client.sock.send(b"x")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert client.receive()["error"]["data"]["code"] == "timeout"
        assert client.ended()
    finally:
        stop.set()
        thread.join()
    assert serving.connections() == 0


def test_an_idle_connection_without_a_partial_line_stays_open(
    serving: Serving, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HALF_LINE_SECONDS", 0.05)
    client.send("echo", id=1)
    client.receive()
    waited = RawClient(serving.path)
    waited.raw(b"half")
    assert waited.receive()["error"]["data"]["code"] == "timeout"
    waited.close()
    client.send("echo", id=2)
    assert client.receive()["id"] == 2


@pytest.mark.fault("control socket attacked")
def test_a_line_over_1_mib_closes_the_connection_with_the_reason(serving: Serving, client: RawClient) -> None:
    sender = threading.Thread(target=lambda: _send_quietly(client.sock, b"x" * (2 << 20)))
    sender.start()
    error = client.receive()["error"]
    assert error["data"]["code"] == "invalid_data"
    assert "too long" in error["message"]
    sender.join()
    other = RawClient(serving.path)
    other.send("echo")
    assert other.receive()["result"] == {}
    other.close()


def _send_quietly(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)


def test_no_more_than_64_unanswered_requests_are_read(serving: Serving, client: RawClient) -> None:
    for id in range(70):
        client.send("hold", id=id)
    wait_until(lambda: len(serving.held) == 64)
    other = RawClient(serving.path)
    other.send("echo")
    assert other.receive()["result"] == {}
    other.close()
    assert len(serving.held) == 64
    serving.release()
    wait_until(lambda: len(serving.held) == 6)
    serving.release()
    assert sorted(client.receive()["id"] for _ in range(70)) == list(range(70))


@pytest.mark.fault("control socket attacked")
def test_a_client_that_does_not_read_is_dropped_and_others_are_served(serving: Serving, client: RawClient) -> None:
    for id in range(5):
        client.send("big", id=id, size=3 << 20)
    wait_until(lambda: serving.connections() == 0)
    other = RawClient(serving.path)
    other.send("echo")
    assert other.receive()["result"] == {}
    other.close()


def test_a_slow_reader_gets_a_large_answer_completely(client: RawClient) -> None:
    client.send("big", size=5 << 20)
    assert len(client.receive()["result"]) == 5 << 20


def test_a_too_large_answer_is_replaced_by_an_error(client: RawClient) -> None:
    client.send("big", size=9 << 20)
    assert client.receive()["error"]["data"]["code"] == "invalid_data"


@pytest.mark.fault("control socket attacked")
def test_connections_over_the_limit_are_refused_with_an_error(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 5)
    inside = [RawClient(serving.path) for _ in range(5)]
    wait_until(lambda: serving.connections() == 5)
    outside = RawClient(serving.path)
    assert "too many connections" in outside.receive()["error"]["message"]
    assert outside.ended()
    inside[0].close()
    wait_until(lambda: serving.connections() == 4)
    again = RawClient(serving.path)
    again.send("echo")
    assert again.receive()["result"] == {}
    for client in [*inside[1:], outside, again]:
        client.close()


@pytest.mark.fault("control socket attacked")
def test_clients_leave_descriptors_for_children(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of a connection are in this process, so each client uses two descriptors."""
    first = RawClient(serving.path)
    wait_until(lambda: serving.connections() == 1)
    # Earlier tests may have left gaps between the numbers in use: fill them.
    highest, filling = max(map(int, os.listdir("/proc/self/fd"))), [os.dup(0)]
    while filling[-1] < highest:
        filling.append(os.dup(0))
    monkeypatch.setattr(control, "_descriptor_limit", lambda: filling[-1] + 18 + control.RESERVED_DESCRIPTORS)
    talks = [RawClient(serving.path) for _ in range(12)]

    def answered() -> list[RawClient]:
        return [client for client in talks if select.select([client.sock], [], [], 0)[0]]

    wait_until(lambda: serving.connections() + len(answered()) == 13)
    refused = answered()
    assert 0 < len(refused) < 12
    assert all("the supervisor may open" in client.receive()["error"]["message"] for client in refused)
    for client in [first, *talks]:
        client.close()
    for descriptor in filling:
        os.close(descriptor)
    wait_until(lambda: serving.connections() == 0)
    again = RawClient(serving.path)
    again.send("echo")
    assert again.receive()["result"] == {}
    again.close()


def answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        return link.connect_ex(path) == 0


def test_a_removed_socket_is_created_again(serving: Serving) -> None:
    before = RawClient(serving.path)
    wait_until(lambda: serving.connections() == 1)
    for _ in range(3):
        os.unlink(serving.path)
        # The file exists before the server listens.
        wait_until(lambda: answers(serving.path))
        assert stat.S_IMODE(os.stat(serving.path).st_mode) == 0o600
        client = RawClient(serving.path)
        client.send("echo", a=1)
        assert client.receive()["result"] == {"a": 1}
        client.close()
    before.send("echo", b=1)
    assert before.receive()["result"] == {"b": 1}
    before.close()


def test_a_file_in_place_of_the_socket_is_not_removed(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    os.rename(tmp_path / "mine", serving.path)
    (tmp_path / "other").touch()
    os.unlink(tmp_path / "other")
    serving.run(lambda: None)
    assert Path(serving.path).read_text() == "mine"
    os.unlink(serving.path)
    wait_until(lambda: os.path.exists(serving.path) and stat.S_ISSOCK(os.stat(serving.path).st_mode))


def test_many_short_connections_leave_nothing_behind(serving: Serving) -> None:
    files = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        client = RawClient(serving.path)
        if number % 2:
            client.raw(b'{"jsonrpc":"2.0"')
        client.close()
    wait_until(lambda: serving.connections() == 0)
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.fault("control socket attacked")
def test_accepting_continues_after_a_shortage_of_descriptors(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ACCEPT_PAUSE_SECONDS", 0.02)
    listener = serving.server._listener
    failures = [OSError(errno.EMFILE, "too many open files")] * 3
    tried_at: list[float] = []

    class Starved:
        def accept(self) -> Any:
            if failures:
                tried_at.append(time.monotonic())
                raise failures.pop()
            return listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    serving.run(lambda: setattr(serving.server, "_listener", Starved()))
    client = RawClient(serving.path)
    client.send("echo")
    assert client.receive()["result"] == {}
    assert not failures
    assert all(later - earlier >= 0.019 for earlier, later in itertools.pairwise(tried_at))
    client.close()


@pytest.mark.fault("control socket attacked")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\n", b"{}", b"[]", b'{"jsonrpc":"2.0"}']), max_size=12))
def test_no_input_breaks_the_server(serving: Serving, parts: list[bytes]) -> None:
    noisy = RawClient(serving.path)
    _send_quietly(noisy.sock, b"".join(parts))
    calm = RawClient(serving.path)
    calm.send("echo", a=1)
    assert calm.receive()["result"] == {"a": 1}
    calm.close()
    noisy.close()


def test_close_notifies_the_open_requests(tmp_path: Path) -> None:
    serving = Serving(str(tmp_path / "c.sock"))
    client = RawClient(serving.path)
    client.send("hold", name="c")
    wait_until(lambda: len(serving.held) == 1)
    serving.close()
    assert serving.gone == ["c"]
    assert client.ended()
    client.close()
