"""A supervisor that starts without standard streams or with few descriptors, or that loses its socket."""

import os
import resource
import socket
import subprocess
from contextlib import suppress

import psutil
import pytest

from tests.support.drive.supervisor import BIN, Forq, running
from tests.support.drive.wait import wait_until


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "<&-"])
def test_a_supervisor_without_standard_streams_runs_like_any_other(closed: str) -> None:
    forq = Forq()
    try:
        command = f"exec {BIN}/forq run --config {forq.config} --state-dir {forq.state_dir} {closed}"
        forq.process = subprocess.Popen(["/bin/sh", "-c", command], env=forq.environ(), stderr=subprocess.DEVNULL)
        wait_until(forq._is_up, 30.0, "the supervisor is up")
        forq.create("work", "record")
        forq.ctl("push", "work", "1")
        wait_until(lambda: len(forq.traces("end")) == 1)
        # Nothing else got the numbers of the standard streams.
        for fd, kept in ((0, "<&-" in closed), (1, ">&- 2" in closed), (2, "2>&-" in closed)):
            link = os.readlink(f"/proc/{forq.pid}/fd/{fd}")
            assert link == "/dev/null" if kept else "forq-" not in link, (fd, link)
        assert forq.stop() == 0
    finally:
        forq.remove()


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_forqctl_without_standard_streams_ends_normally(closed: str) -> None:
    done = subprocess.run(["/bin/sh", "-c", f"exec {BIN}/forqctl --version {closed}"], check=False)
    assert done.returncode == 0
    done = subprocess.run(["/bin/sh", "-c", f"exec {BIN}/forqctl no-such-command {closed}"], check=False)
    assert done.returncode == 2


def mains_of(forq: Forq, name: str) -> set[int]:
    """Main processes of a queue, by their titles: the supervisor cannot answer."""
    found = set()
    for process in forq.processes():
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"forq: {name} main idle"):
                found.add(process.pid)
    return found


class FewDescriptors(Forq):
    def program(self) -> list[str]:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return ["prlimit", f"--nofile=64:{hard}", *super().program()]


def test_idle_clients_leave_descriptors_for_new_processes() -> None:
    forq = FewDescriptors()
    clients = []
    try:
        forq.start()
        assert "ulimit -n is 64: with 0 queues the control socket has room for" in forq.log
        forq.create("work", "record")
        child = forq.wait_for_child("work")
        for _ in range(100):
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(forq.state_dir / "control.sock"))
            clients.append(client)
        # The last one was refused, so all have been handled.
        clients[-1].settimeout(20)
        assert b"the supervisor may open 64 files (ulimit -n, LimitNOFILE=)" in clients[-1].recv(4096)
        os.kill(child["pid"], 9)
        wait_until(lambda: mains_of(forq, "work") not in (set(), {child["pid"]}), what="a successor")
        for client in clients:
            client.close()
        forq.wait_for_child("work", not_pid=child["pid"])
        assert "failed to start child" not in forq.log
        assert "cannot accept clients; pausing" not in forq.log
        forq.create("another", "record")
        forq.ctl("push", "another", "1")
        wait_until(lambda: len(forq.traces("end")) == 1)
    finally:
        for client in clients:
            client.close()
        forq.remove()


def test_a_removed_control_socket_is_created_again() -> None:
    with running() as forq:
        os.unlink(forq.state_dir / "control.sock")
        wait_until(lambda: (forq.state_dir / "control.sock").exists(), what="a new socket")
        forq.ctl("ping")
        assert "control socket was removed; recreated it" in forq.log
