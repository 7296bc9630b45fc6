"""Notifications to systemd and sockets passed by it, with a socket in the role of systemd."""

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from forq.errors import ConfigError
from forq.procs.loop import Loop
from forq.supervisor import systemd
from forq.supervisor.child import reap, spawn
from forq.supervisor.control import ControlServer
from forq.supervisor.systemd import Notifier, SystemdInput, control_listener, take
from tests.support.drive.metrics import Scraper
from tests.support.drive.supervisor import BIN
from tests.support.drive.wait import wait_until

MINE = 4711


@dataclass
class FakeSupervisor:
    """The supervisor whose state is sent."""

    ready: bool = False
    stopping: bool = False
    text: str = "2 queues"

    def stop_seconds(self) -> float:
        return 30.0

    def summary(self) -> str:
        return self.text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Systemd:
    """The end of NOTIFY_SOCKET that systemd has."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def take_notifications(self) -> list[dict[str, str]]:
        """The notifications since the last call."""
        found: list[dict[str, str]] = []
        while True:
            try:
                lines = self._socket.recv(65536).decode().split("\n")
            except BlockingIOError:
                return found
            found.append(dict(line.split("=", 1) for line in lines))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    place = str(tmp_path / "notify") if request.param == "path" else f"@forq-test-{os.getpid()}-{time.monotonic_ns()}"
    with closing(Systemd(place)) as manager:
        yield manager


def listening(path: Path | str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def handed_with(*sockets: socket.socket, names: tuple[str, ...] = ()) -> SystemdInput:
    return SystemdInput(
        None, None, tuple((s.fileno(), n) for s, n in zip(sockets, names or [""] * len(sockets), strict=True))
    )


def test_only_the_variables_of_systemd_are_removed_from_the_environment() -> None:
    environ = {
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(MINE),
        "LISTEN_PID": str(MINE),
        "LISTEN_FDS": "0",
        "LISTEN_FDNAMES": "",
        "STATE_DIRECTORY": "/var/lib/forq",
    }
    assert take(environ, MINE) == SystemdInput("/run/systemd/notify", 30.0, ())
    assert environ == {"STATE_DIRECTORY": "/var/lib/forq"}


def test_descriptors_and_watchdog_of_another_process_are_ignored() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "WATCHDOG_PID": "1", "WATCHDOG_USEC": "1000000"}
    systemd_input = take(environ, MINE)
    assert systemd_input == SystemdInput(None, None, ())
    assert environ == {}
    assert control_listener(systemd_input) is None


def test_descriptors_without_a_pid_are_ignored() -> None:
    assert take({"LISTEN_FDS": "1"}, MINE).fds == ()


@pytest.mark.parametrize("name", ["WATCHDOG_USEC", "LISTEN_FDS"])
def test_a_variable_that_is_not_a_number_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        take({name: "many", "LISTEN_PID": str(MINE)}, MINE)


def test_ready_is_sent_once_when_the_supervisor_is_ready(manager: Systemd) -> None:
    supervisor = FakeSupervisor()
    notifier = Notifier(SystemdInput(manager.address, None, ()), supervisor)
    notifier.after_pass()
    assert manager.take_notifications() == [{"STATUS": "2 queues"}]
    supervisor.ready, supervisor.text = True, "3 queues"
    notifier.after_pass()
    notifier.after_pass()
    assert manager.take_notifications() == [{"READY": "1", "STATUS": "3 queues"}]


def test_stopping_is_sent_once_with_the_time_it_may_take(manager: Systemd) -> None:
    supervisor = FakeSupervisor(ready=True)
    notifier = Notifier(SystemdInput(manager.address, None, ()), supervisor)
    notifier.after_pass()
    manager.take_notifications()
    supervisor.stopping = True
    notifier.after_pass()
    notifier.after_pass()
    assert manager.take_notifications() == [{"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "30000000"}]


def test_a_supervisor_that_stops_before_it_was_ready_never_sends_ready(manager: Systemd) -> None:
    supervisor = FakeSupervisor(ready=False, stopping=True)
    notifier = Notifier(SystemdInput(manager.address, None, ()), supervisor)
    notifier.after_pass()
    supervisor.ready = True
    notifier.after_pass()
    assert not any("READY" in sent for sent in manager.take_notifications())


def test_status_is_sent_only_when_it_changes(manager: Systemd) -> None:
    clock, supervisor = Clock(), FakeSupervisor()
    notifier = Notifier(SystemdInput(manager.address, None, ()), supervisor, now=clock)
    notifier.after_pass()
    supervisor.text = "two\nlines"
    notifier.after_pass()
    assert manager.take_notifications() == [{"STATUS": "2 queues"}]
    clock.now += systemd.STATUS_SECONDS
    notifier.after_pass()
    clock.now += systemd.STATUS_SECONDS
    notifier.after_pass()
    assert manager.take_notifications() == [{"STATUS": "two lines"}]


def test_the_watchdog_is_fed_twice_per_interval_and_the_next_pass_is_scheduled_in_time(manager: Systemd) -> None:
    clock = Clock()
    notifier = Notifier(SystemdInput(manager.address, 4.0, ()), FakeSupervisor(), now=clock)
    assert notifier.after_pass() == pytest.approx(2.0)
    clock.now += 1.5
    assert notifier.after_pass() == pytest.approx(0.5)
    clock.now += 0.5
    assert notifier.after_pass() == pytest.approx(2.0)
    assert [sent.get("WATCHDOG") for sent in manager.take_notifications()] == ["1", "1"]


def test_an_idle_loop_feeds_the_watchdog(manager: Systemd) -> None:
    loop = Loop()
    notifier = Notifier(SystemdInput(manager.address, 0.2, ()), FakeSupervisor())
    fed: list[dict[str, str]] = []

    def look() -> None:
        """Nothing else wakes the loop as often as the watchdog needs it."""
        fed.extend(sent for sent in manager.take_notifications() if "WATCHDOG" in sent)
        if len(fed) >= 5:
            loop.stop()
        else:
            loop.call_later(1.0, look)

    loop.call_later(1.0, look)
    loop.run(notifier.after_pass)
    loop.close()
    assert len(fed) >= 5


def test_a_loop_blocked_in_a_callback_does_not_feed_the_watchdog(manager: Systemd) -> None:
    loop = Loop()
    notifier = Notifier(SystemdInput(manager.address, 0.1, ()), FakeSupervisor())
    sent_before: list[dict[str, str]] = []
    sent_meanwhile: list[dict[str, str]] = []

    def block() -> None:
        sent_before.extend(manager.take_notifications())
        time.sleep(0.5)
        sent_meanwhile.extend(manager.take_notifications())
        loop.stop()

    loop.call_later(0.2, block)
    loop.run(notifier.after_pass)
    loop.close()
    assert any("WATCHDOG" in sent for sent in sent_before)
    assert sent_meanwhile == []
    assert [sent["WATCHDOG"] for sent in manager.take_notifications()] == ["1"]


def test_a_failed_notification_is_sent_again_when_systemd_listens(tmp_path: Path) -> None:
    notifier = Notifier(SystemdInput(str(tmp_path / "notify"), 4.0, ()), FakeSupervisor(ready=True))
    assert notifier.after_pass() == systemd.RETRY_SECONDS
    with closing(Systemd(str(tmp_path / "notify"))) as manager:
        notifier.after_pass()
        assert manager.take_notifications() == [{"WATCHDOG": "1", "READY": "1", "STATUS": "2 queues"}]


def test_without_systemd_nothing_is_sent_and_the_loop_is_not_woken() -> None:
    assert Notifier(SystemdInput(None, 4.0, ()), FakeSupervisor(ready=True)).after_pass() is None


def test_an_error_after_a_pass_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    passes: list[None] = []

    def fail() -> float | None:
        passes.append(None)
        if len(passes) == 2:
            loop.stop()
        raise ValueError("no summary today")

    loop.call_later(0.0, lambda: None)
    loop.run(fail)
    loop.close()
    assert len(passes) == 2
    assert "no summary today" in caplog.text


def test_a_listening_socket_is_taken_over(tmp_path: Path) -> None:
    given = listening(tmp_path / "c.sock")
    listener = control_listener(handed_with(given))
    assert listener is not None
    assert listener.detach() == given.fileno()
    assert not os.get_blocking(given.fileno())
    assert not os.get_inheritable(given.fileno())
    given.close()


def test_the_socket_named_control_is_used_among_several(tmp_path: Path) -> None:
    other, ours = listening(tmp_path / "o.sock"), listening(tmp_path / "c.sock")
    with other, ours:
        listener = control_listener(handed_with(other, ours, names=("metrics", "control")))
        assert listener is not None
        assert listener.detach() == ours.fileno()
        with pytest.raises(ConfigError, match="FileDescriptorName=control"):
            control_listener(handed_with(other, ours))


def test_an_unsuitable_socket_is_refused(tmp_path: Path) -> None:
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "silent.sock"))
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(str(tmp_path / "datagrams.sock"))
    internet = socket.create_server(("127.0.0.1", 0))
    abstract = listening(f"\0forq-test-{os.getpid()}")
    for unusable in (silent, datagrams, internet, abstract):
        # Closed together with the refused object.
        fd = os.dup(unusable.fileno())
        with pytest.raises(ConfigError, match="ListenStream="):
            control_listener(SystemdInput(None, None, ((fd, ""),)))
        unusable.close()


def test_a_descriptor_that_is_closed_or_not_a_socket_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file, pytest.raises(ConfigError, match="not a socket"):
        control_listener(SystemdInput(None, None, ((file.fileno(), ""),)))
    with pytest.raises(ConfigError, match="not open"):
        take({"LISTEN_PID": str(MINE), "LISTEN_FDS": "1000000"}, MINE)


def test_the_server_does_not_remove_a_socket_it_did_not_create(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    given = listening(path)
    loop = Loop()
    server = ControlServer(
        loop, str(tmp_path / "unused.sock"), {}, listener=socket.socket(fileno=os.dup(given.fileno()))
    )
    assert server.path == str(path)
    server.close()
    loop.close()
    assert path.exists()
    assert not (tmp_path / "unused.sock").exists()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    given.close()


def test_a_child_can_enable_faulthandler_after_its_parent_did() -> None:
    was_enabled = faulthandler.is_enabled()
    faulthandler.enable(2)
    try:
        child = spawn(lambda: int(faulthandler.is_enabled()), loop=None, keep_fds=(), title="test")
        ended = wait_until(lambda: reap(child), what="the child ended")
        child.close()
        assert ended.code == 0
    finally:
        if not was_enabled:
            faulthandler.disable()


# Becomes `forq run` with the listening socket as descriptor 3, as systemd would start it.
START = """
import os, sys
fd, *command = sys.argv[1:]
os.dup2(int(fd), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="control")
os.execv(command[0], command)
"""


def test_a_supervisor_serves_at_a_passed_socket_and_does_not_remove_it(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    given = listening(path)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FORQ_")}
    sent: list[dict[str, str]] = []
    (tmp_path / "forq.toml").write_text('[metrics]\nlisten = "./m.sock"\n')
    with closing(Systemd(str(tmp_path / "notify"))) as manager, open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                START,
                str(given.fileno()),
                str(BIN / "forq"),
                "run",
                "--state-dir",
                str(tmp_path / "s"),
                "--config",
                str(tmp_path / "forq.toml"),
            ],
            env={**clean, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000"},
            pass_fds=(given.fileno(),),
            stdout=log,
            stderr=log,
        )

        def receives(name: str) -> bool:
            sent.extend(manager.take_notifications())
            return any(name in message for message in sent)

        try:
            wait_until(lambda: receives("READY"), what="READY")
            ping = subprocess.run([BIN / "forqctl", "--socket", str(path), "ping"], capture_output=True, text=True)
            assert ping.stdout == f"pong from pid {process.pid}\n"
            assert Scraper(tmp_path / "m.sock").health() == (200, [])
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
        assert receives("STOPPING")
        assert receives("WATCHDOG")
    (stopping,) = (message for message in sent if "STOPPING" in message)
    assert stopping["STATUS"] == "stopping, 0 queues, 0 jobs running, Redis ok"
    assert path.exists()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    given.close()
