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

DEADLINE_SECONDS = 10.0


class Serving:
    """A ControlServer in a thread of its own, with the verbs the tests need."""

    def __init__(self, path: str, group: int | None = None) -> None:
        self.path = path
        self.held: list[Request] = []
        self.gone: list[str] = []
        self.loop = Loop()
        self.acts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.bell = socket.socketpair()
        self.loop.add_reader(self.bell[0].fileno(), self.act)
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
        self.bell[1].send(b"x")
        assert done.wait(DEADLINE_SECONDS)
        return box[0]

    def act(self) -> None:
        self.bell[0].recv(1)
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
        self.loop.remove_reader(self.bell[0].fileno())
        self.loop.close()
        for end in self.bell:
            end.close()


class Talk:
    """A client that says exactly what the test wants."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        # Before the timeout is set: connect then waits for a place in the backlog.
        self.sock.connect(path)
        self.sock.settimeout(DEADLINE_SECONDS)
        self.file = self.sock.makefile("rb")

    def say(self, method: str, id: object = 1, **params: object) -> None:
        self.raw(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def hear(self) -> Any:
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
def talk(serving: Serving) -> Iterator[Talk]:
    talk = Talk(serving.path)
    yield talk
    talk.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def test_the_socket_is_0600_and_is_removed_by_close(tmp_path: Path) -> None:
    serving = Serving(str(tmp_path / "c.sock"))
    mode = stat.S_IMODE(os.stat(serving.path).st_mode)
    serving.close()
    assert mode == 0o600
    assert not os.path.exists(serving.path)


def test_with_a_group_the_socket_is_0660_and_of_that_group(tmp_path: Path) -> None:
    gid = os.getgid()
    serving = Serving(str(tmp_path / "c.sock"), group=gid)
    found = os.stat(serving.path)
    serving.close()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, gid)


def test_the_umask_is_put_back(tmp_path: Path) -> None:
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
    talk = Talk(path)
    talk.say("echo")
    assert talk.hear()["result"] == {}
    talk.close()
    serving.close()


def test_a_live_socket_is_left_alone(serving: Serving, talk: Talk) -> None:
    with pytest.raises(ForqError, match="another process listens there"):
        ControlServer(serving.loop, serving.path, {})
    talk.say("echo", a=1)
    assert talk.hear()["result"] == {"a": 1}


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ForqError, match="not a socket"):
        ControlServer(cast(Any, None), str(path), {})
    assert path.read_text() == "data"


def test_close_does_not_remove_the_socket_of_a_successor(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    first = Serving(path)
    # At once: a path without a socket would get the first one's again.
    with socket.socket(socket.AF_UNIX) as second:
        second.bind(f"{path}.new")
        os.rename(f"{path}.new", path)
        first.close()
        assert os.path.exists(path)


def test_a_path_that_is_too_long_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ForqError, match="too long"):
        ControlServer(cast(Any, None), str(tmp_path / ("x" * 120)), {})


def test_the_peer_is_who_the_kernel_says(talk: Talk) -> None:
    talk.say("whoami")
    assert talk.hear()["result"] == {"pid": os.getpid(), "uid": os.getuid(), "gid": os.getgid()}


def forked_as(uid: int, gid: int, groups: list[int], path: str) -> dict[str, Any]:
    """What a process of that user hears as the first line after it asked whoami."""
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
def test_a_user_who_is_refused_again_and_again_gets_a_line_a_second_in_the_log(
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
        told = [each.getMessage() for each in caplog.records if "client refused" in each.getMessage()]
        serving.close()
    assert 1 <= len(told) <= 2 + seconds
    assert told[0] == f"client refused uid=65534 gid=1 pid={pid}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("gid", "groups", "admitted"), [(54321, [], True), (1, [2, 54321], True), (1, [], False), (1, [2], False)]
)
def test_other_users_enter_only_by_the_group(gid: int, groups: list[int], admitted: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="forq-") as directory:
        os.chmod(directory, 0o755)
        serving = Serving(os.path.join(directory, "c.sock"), group=54321)
        # The file lets everybody in here, so that only the check of the peer can refuse.
        os.chmod(serving.path, 0o666)
        answer = forked_as(65534, gid, groups, serving.path)
        serving.close()
    if admitted:
        assert answer["result"]["uid"] == 65534
    else:
        assert answer["error"]["data"]["code"] == "permission"


def test_a_verb_that_raises_a_forq_error_fails_with_its_code(talk: Talk) -> None:
    talk.say("refuse")
    assert talk.hear()["error"] == {
        "code": -32000,
        "message": "there is no queue x",
        "data": {"code": "unknown_queue"},
    }


@pytest.mark.parametrize("method", ["crash", "set"])
def test_a_broken_verb_is_an_internal_error_and_the_server_lives(talk: Talk, method: str) -> None:
    talk.say(method)
    assert talk.hear()["error"]["code"] == -32603
    talk.say("echo", a=1)
    assert talk.hear()["result"] == {"a": 1}


def test_a_second_answer_is_not_sent(talk: Talk) -> None:
    talk.say("twice", id=1)
    talk.say("echo", id=2)
    assert [talk.hear()["id"], talk.hear()["id"]] == [1, 2]


@pytest.mark.parametrize("method", ["nothing", "__class__", "echo.__class__", "", "verbs"])
def test_only_names_in_the_table_are_verbs(talk: Talk, method: str) -> None:
    talk.say(method)
    error = talk.hear()["error"]
    assert (error["code"], error["data"]) == (-32601, {"code": "unknown_verb"})


def test_notifications_get_no_answer(talk: Talk) -> None:
    talk.raw(b'{"jsonrpc":"2.0","method":"echo"}\n{"jsonrpc":"2.0","method":"nothing"}\n')
    talk.say("echo", id="after")
    assert talk.hear()["id"] == "after"


def test_answers_may_come_later_and_in_another_order(serving: Serving, talk: Talk) -> None:
    talk.say("hold", id=1)
    talk.say("echo", id=2)
    assert talk.hear()["id"] == 2
    serving.release()
    assert talk.hear() == {"jsonrpc": "2.0", "id": 1, "result": "released"}


def test_a_peer_that_vanishes_before_the_reply_is_told_to_the_verb(serving: Serving, talk: Talk) -> None:
    talk.say("hold", name="a")
    eventually(lambda: len(serving.held) == 1)
    talk.close()
    eventually(lambda: serving.gone == ["a"])
    serving.release()
    assert serving.connections() == 0


def test_a_client_that_only_ends_its_sending_still_gets_its_answers(serving: Serving, talk: Talk) -> None:
    talk.say("hold")
    talk.sock.shutdown(socket.SHUT_WR)
    eventually(lambda: len(serving.held) == 1)
    serving.release()
    assert talk.hear()["result"] == "released"
    assert talk.ended()
    assert serving.gone == []


def test_a_client_that_ended_its_sending_and_then_vanishes_is_noticed(serving: Serving, talk: Talk) -> None:
    talk.say("hold", name="b")
    talk.sock.shutdown(socket.SHUT_WR)
    eventually(lambda: len(serving.held) == 1)
    talk.close()
    eventually(lambda: serving.gone == ["b"])


def test_a_half_line_is_completed_by_later_bytes(talk: Talk) -> None:
    talk.raw(b'{"jsonrpc":"2.0","id":1,')
    talk.raw(b'"method":"echo"}\n')
    assert talk.hear()["result"] == {}


@pytest.mark.fault("control socket attacked")
def test_a_half_line_that_is_never_ended_closes_the_connection(
    serving: Serving, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HALF_LINE_SECONDS", 0.2)
    stop = threading.Event()

    def drip() -> None:
        # A byte now and then must not extend the time.
        while not stop.wait(0.02):
            try:
                talk.sock.send(b"x")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert talk.hear()["error"]["data"]["code"] == "timeout"
        assert talk.ended()
    finally:
        stop.set()
        thread.join()
    assert serving.connections() == 0


def test_an_idle_connection_without_a_half_line_stays(
    serving: Serving, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HALF_LINE_SECONDS", 0.05)
    talk.say("echo", id=1)
    talk.hear()
    waited = Talk(serving.path)
    waited.raw(b"half")
    assert waited.hear()["error"]["data"]["code"] == "timeout"
    waited.close()
    talk.say("echo", id=2)
    assert talk.hear()["id"] == 2


@pytest.mark.fault("control socket attacked")
def test_a_line_over_one_mebibyte_ends_the_connection_with_the_reason(serving: Serving, talk: Talk) -> None:
    sender = threading.Thread(target=lambda: _send_quietly(talk.sock, b"x" * (2 << 20)))
    sender.start()
    error = talk.hear()["error"]
    assert error["data"]["code"] == "invalid_data"
    assert "too long" in error["message"]
    sender.join()
    other = Talk(serving.path)
    other.say("echo")
    assert other.hear()["result"] == {}
    other.close()


def _send_quietly(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)


def test_no_more_than_64_unanswered_requests_are_read(serving: Serving, talk: Talk) -> None:
    for id in range(70):
        talk.say("hold", id=id)
    eventually(lambda: len(serving.held) == 64)
    other = Talk(serving.path)
    other.say("echo")
    assert other.hear()["result"] == {}
    other.close()
    assert len(serving.held) == 64
    serving.release()
    eventually(lambda: len(serving.held) == 6)
    serving.release()
    assert sorted(talk.hear()["id"] for _ in range(70)) == list(range(70))


@pytest.mark.fault("control socket attacked")
def test_a_client_that_does_not_read_is_dropped_and_others_are_served(serving: Serving, talk: Talk) -> None:
    for id in range(5):
        talk.say("big", id=id, size=3 << 20)
    eventually(lambda: serving.connections() == 0)
    other = Talk(serving.path)
    other.say("echo")
    assert other.hear()["result"] == {}
    other.close()


def test_a_slow_reader_gets_all_of_a_large_answer(talk: Talk) -> None:
    talk.say("big", size=5 << 20)
    assert len(talk.hear()["result"]) == 5 << 20


def test_an_answer_that_is_too_large_is_an_error_instead(talk: Talk) -> None:
    talk.say("big", size=9 << 20)
    assert talk.hear()["error"]["data"]["code"] == "invalid_data"


@pytest.mark.fault("control socket attacked")
def test_connections_over_the_limit_are_refused_with_a_line(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 5)
    inside = [Talk(serving.path) for _ in range(5)]
    eventually(lambda: serving.connections() == 5)
    outside = Talk(serving.path)
    assert "too many connections" in outside.hear()["error"]["message"]
    assert outside.ended()
    inside[0].close()
    eventually(lambda: serving.connections() == 4)
    again = Talk(serving.path)
    again.say("echo")
    assert again.hear()["result"] == {}
    for talk in [*inside[1:], outside, again]:
        talk.close()


@pytest.mark.fault("control socket attacked")
def test_clients_leave_descriptors_for_children(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end of a connection is in this process, so two numbers go with each client; ours may all come first."""
    first = Talk(serving.path)
    eventually(lambda: serving.connections() == 1)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    monkeypatch.setattr(control, "_descriptor_limit", lambda: lowest_free + 18 + control.RESERVED_DESCRIPTORS)
    talks = [Talk(serving.path) for _ in range(12)]

    def answered() -> list[Talk]:
        return [talk for talk in talks if select.select([talk.sock], [], [], 0)[0]]

    eventually(lambda: serving.connections() + len(answered()) == 13)
    refused = answered()
    assert 0 < len(refused) < 12
    assert all("the supervisor may open" in talk.hear()["error"]["message"] for talk in refused)
    for talk in [first, *talks]:
        talk.close()
    eventually(lambda: serving.connections() == 0)
    again = Talk(serving.path)
    again.say("echo")
    assert again.hear()["result"] == {}
    again.close()


def answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        return link.connect_ex(path) == 0


def test_a_socket_that_was_removed_is_made_again(serving: Serving) -> None:
    before = Talk(serving.path)
    eventually(lambda: serving.connections() == 1)
    for _ in range(3):
        os.unlink(serving.path)
        # The file is there before anybody listens.
        eventually(lambda: answers(serving.path))
        assert stat.S_IMODE(os.stat(serving.path).st_mode) == 0o600
        talk = Talk(serving.path)
        talk.say("echo", a=1)
        assert talk.hear()["result"] == {"a": 1}
        talk.close()
    before.say("echo", b=1)
    assert before.hear()["result"] == {"b": 1}
    before.close()


def test_what_somebody_put_in_the_place_of_the_socket_is_left_alone(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    os.rename(tmp_path / "mine", serving.path)
    (tmp_path / "other").touch()
    os.unlink(tmp_path / "other")
    serving.run(lambda: None)
    assert Path(serving.path).read_text() == "mine"
    os.unlink(serving.path)
    eventually(lambda: os.path.exists(serving.path) and stat.S_ISSOCK(os.stat(serving.path).st_mode))


def test_many_short_connections_leave_nothing_behind(serving: Serving) -> None:
    files = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        talk = Talk(serving.path)
        if number % 2:
            talk.raw(b'{"jsonrpc":"2.0"')
        talk.close()
    eventually(lambda: serving.connections() == 0)
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.fault("control socket attacked")
def test_accepting_goes_on_after_the_file_descriptors_ran_out(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    talk = Talk(serving.path)
    talk.say("echo")
    assert talk.hear()["result"] == {}
    assert not failures
    assert all(later - earlier >= 0.019 for earlier, later in itertools.pairwise(tried_at))
    talk.close()


@pytest.mark.fault("control socket attacked")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\n", b"{}", b"[]", b'{"jsonrpc":"2.0"}']), max_size=12))
def test_no_bytes_whatsoever_disturb_the_server(serving: Serving, parts: list[bytes]) -> None:
    noisy = Talk(serving.path)
    _send_quietly(noisy.sock, b"".join(parts))
    calm = Talk(serving.path)
    calm.say("echo", a=1)
    assert calm.hear()["result"] == {"a": 1}
    calm.close()
    noisy.close()


def test_close_tells_the_requests_that_are_open(tmp_path: Path) -> None:
    serving = Serving(str(tmp_path / "c.sock"))
    talk = Talk(serving.path)
    talk.say("hold", name="c")
    eventually(lambda: len(serving.held) == 1)
    serving.close()
    assert serving.gone == ["c"]
    assert talk.ended()
    talk.close()
