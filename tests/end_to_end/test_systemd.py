"""forq under a real systemd, installed as docs/guide/systemd.md says. `make test-systemd` prints each step."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forq.errors import FINAL_EXIT_CODES, ExitCode
from tests.end_to_end.machine import Machine, booted, why_not
from tests.support.drive.wait import wait_until

CONFIG = """
[queues.work]
handler = "traced:sleep"
path = ["/srv/handlers"]

[queues.slow]
handler = "traced:sleep"
path = ["/srv/handlers"]

[queues.daemons]
handler = "traced:chain"
path = ["/srv/handlers"]
stop_grace = "1s"

[queues.environment]
handler = "exec-once:/usr/bin/env"
"""
RUNNING = {"ActiveState": "^active$", "StatusText": r"^4 queues, 0 jobs running, Redis ok$"}


@pytest.fixture(scope="module")
def possible() -> None:
    if reason := why_not():
        pytest.skip(f"no systemd can be booted: {reason}")


@pytest.fixture
def machine(possible: None) -> Iterator[Machine]:
    with booted(CONFIG) as machine:
        yield machine


def ended(machine: Machine) -> list[str]:
    """The ids of ended jobs, once per end."""
    lines = [line.split(" ") for line in machine.read("/var/lib/forq/trace").splitlines()]
    return [line[1] for line in lines if line[4] == "end"]


def begun(machine: Machine) -> list[str]:
    return [line.split(" ")[1] for line in machine.read("/var/lib/forq/trace").splitlines()]


def test_start_returns_when_the_queues_are_served_and_status_shows_what_runs(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    machine.wait_for(**RUNNING)
    machine.run("forqctl", "push", "slow", "30", "--id", "long")
    machine.wait_for(StatusText="^4 queues, 1 job running, Redis ok$")
    machine.run("systemctl", "status", "forq.service")
    assert any("forq: slow main" in line for line in machine.processes().values())


def test_reload_applies_the_config_file_and_fails_if_that_fails(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    machine.wait_for(**RUNNING)
    before = machine.main_pid()
    machine.write("/etc/forq/forq.toml", CONFIG.replace("[queues.slow]", "[queues.late]"))
    machine.run("systemctl", "reload", "forq.service")
    queues = {
        queue["name"]: queue["state"]
        for queue in json.loads(machine.run("forqctl", "status", "--json", show=False))["queues"]
    }
    assert queues["late"] == "running"
    assert queues.get("slow") in (None, "unserved")
    assert "applied 2 changes" in machine.log()
    machine.write("/etc/forq/forq.toml", "[queues.work")
    assert "Job for forq.service failed" in machine.run("systemctl", "reload", "forq.service", check=False)
    assert "not valid TOML" in machine.log()
    assert machine.main_pid() == before


@pytest.mark.slow
def test_the_service_starts_without_redis_and_reports_it(machine: Machine) -> None:
    machine.write("/etc/forq/forq.toml", f'redis = "unix:///run/forq/no.sock"\n{CONFIG}')
    machine.run("systemctl", "start", "forq.service")
    machine.wait_for(ActiveState="^active$", StatusText="^4 queues, 0 jobs running, Redis is down: .*no.sock")


@pytest.mark.slow
def test_each_queue_has_its_own_control_group_and_programs_see_nothing_of_systemd(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    groups = machine.run("find", "/sys/fs/cgroup/system.slice/forq.service", "-name", "work-main-*")
    assert groups
    machine.run("forqctl", "push", "environment", "null")
    wait_until(lambda: "FORQ_QUEUE=environment" in machine.log(), what="the program's environment in the log")
    wait_until(lambda: json.loads(machine.run("forqctl", "status", "--json", show=False))["queues"][1]["done"] == 1)
    assert not re.findall(r"NOTIFY_SOCKET|LISTEN_\w+|WATCHDOG_\w+", machine.log())


@pytest.mark.slow
def test_an_idle_supervisor_is_not_restarted_and_a_frozen_one_is(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    before = machine.main_pid()

    def fed() -> int:
        return int(machine.show("WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"])

    begin = fed()
    wait_until(lambda: fed() > begin + 2 * 3_000_000, what="the watchdog was fed for twice its time")
    assert machine.main_pid() == before
    machine.run("kill", "-STOP", str(before))
    machine.wait_for(NRestarts="^1$", **RUNNING)
    assert machine.main_pid() != before
    assert "Fatal Python error: Aborted" in machine.log()
    machine.run("forqctl", "push", "work", "0", "--id", "after")
    wait_until(lambda: ended(machine) == ["after"], what="a job after the restart")


@pytest.mark.slow
def test_stop_leaves_no_process_not_even_of_a_daemonising_handler(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    machine.run("forqctl", "push", "daemons", "null", "--id", "chain")
    wait_until(lambda: begun(machine) == ["chain"], what="the handler began")
    machine.run("systemctl", "stop", "forq.service")
    machine.wait_for(ActiveState="^inactive$", Result="^success$")
    assert machine.processes() == {}


@pytest.mark.slow
def test_stop_takes_the_longest_grace_even_beyond_the_timeout_of_the_unit(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    machine.write("/run/units/forq.service.d/short.conf", "[Service]\nTimeoutStopSec=1s\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("forqctl", "push", "slow", "4", "--id", "long")
    wait_until(lambda: begun(machine) == ["long"], what="the handler began")
    machine.run("systemctl", "stop", "forq.service")
    machine.wait_for(ActiveState="^inactive$", Result="^success$")
    assert ended(machine) == ["long"]


@pytest.mark.slow
def test_a_killed_supervisor_is_restarted_and_no_job_is_lost(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    jobs = {f"job-{number}" for number in range(300)}
    records = "\n".join(json.dumps({"id": job, "data": 0.01}) for job in sorted(jobs))
    machine.write("/run/jobs.jsonl", records, show=False)
    # Its data makes only the first run long.
    machine.run("forqctl", "push", "slow", "[60]", "--id", "interrupted")
    machine.run("forqctl", "push", "work", "--file", "/run/jobs.jsonl", "--records")
    wait_until(lambda: "interrupted" in begun(machine) and len(ended(machine)) > 10, what="jobs are under way")
    before = machine.main_pid()
    machine.run("kill", "-KILL", str(before))
    done_before = set(ended(machine))
    machine.wait_for(NRestarts="^1$", ActiveState="^active$")
    assert done_before < jobs
    assert machine.main_pid() != before
    wait_until(lambda: {*jobs, "interrupted"} == set(ended(machine)), what="every job has ended")
    queues = {
        queue["name"]: queue for queue in json.loads(machine.run("forqctl", "status", "--json", show=False))["queues"]
    }
    assert (queues["work"]["dead"], queues["slow"]["dead"]) == (0, 0)


@pytest.mark.slow
def test_the_first_forqctl_starts_the_service_and_a_stop_keeps_the_socket(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.socket")
    assert machine.main_pid() == 0
    assert machine.run("forqctl", "ping") == f"pong from pid {machine.main_pid()}"
    machine.wait_for(**RUNNING)
    before = machine.main_pid()
    machine.run("systemctl", "stop", "forq.service")
    machine.run("ls", "-l", "/run/forq/control.sock")
    assert machine.run("forqctl", "ping") == f"pong from pid {machine.main_pid()}"
    assert machine.main_pid() not in (0, before)


@pytest.mark.slow
def test_without_the_socket_unit_the_service_creates_and_removes_its_own(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    machine.run("forqctl", "ping")
    machine.run("systemctl", "stop", "forq.service")
    assert machine.run("ls", "-A", "/run/forq") == ""


@pytest.mark.slow
def test_invalid_settings_are_reported_to_the_client_and_not_retried(machine: Machine) -> None:
    machine.write("/etc/forq/forq.toml", "no_such_setting = 1\n")
    machine.run("systemctl", "start", "forq.socket")
    refused = machine.run("forqctl", "ping", check=False)
    assert "cannot reach the supervisor" in refused
    machine.wait_for(ActiveState="^failed$", ExecMainStatus="^78$", NRestarts="^0$")
    assert machine.log().count("no_such_setting") == 1
    machine.write("/etc/forq/forq.toml", CONFIG)
    machine.run("forqctl", "ping")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "again"),
    [
        *((code, False) for code in FINAL_EXIT_CODES),
        (ExitCode.FAILED, True),
        (ExitCode.EVICTED_TOO_OFTEN, True),
        (ExitCode.NO_REDIS, True),
    ],
)
def test_only_transient_failures_are_restarted(machine: Machine, code: int, again: bool) -> None:
    ends = f"[Service]\nType=exec\nExecStart=\nExecStart=/bin/sh -c 'exit {code}'\n"
    machine.write("/run/units/forq.service.d/ends.conf", ends)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "forq.service", check=False)
    if again:
        machine.wait_for(NRestarts="^[1-9]", ExecMainStatus=f"^{code}$")
    else:
        machine.wait_for(ActiveState="^failed$", ExecMainStatus=f"^{code}$", NRestarts="^0$")


@pytest.mark.slow
def test_handlers_go_first_when_memory_runs_out_and_nothing_dumps_core(machine: Machine) -> None:
    machine.run("systemctl", "start", "forq.service")
    machine.wait_for(**RUNNING)
    scores = {}
    for pid, line in machine.processes().items():
        scores[line] = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
        assert re.search(r"Max core file size +0 +0 ", Path(f"/proc/{pid}/limits").read_text()), line
    queues = {line for line in scores if re.match("forq: (work|slow|daemons|environment) ", line)}
    assert len(queues) == 8
    assert {scores[line] for line in queues} == {500}
    # In a container without the right to lower it, systemd leaves it unchanged.
    lowered = subprocess.run(
        ["sh", "-c", "echo -500 > /proc/self/oom_score_adj"], stderr=subprocess.DEVNULL, check=False
    )
    others = {scores[line] for line in scores.keys() - queues}
    assert others == {-500} if lowered.returncode == 0 else max(others) < 500
    assert machine.show("OOMScoreAdjust") == {"OOMScoreAdjust": "-500"}


@pytest.mark.slow
def test_another_location_is_one_variable_in_a_drop_in(machine: Machine) -> None:
    machine.run("mkdir", "-p", "/opt/elsewhere/bin")
    machine.write("/opt/elsewhere/bin/forq", '#!/bin/sh\nSTARTED_BY=elsewhere exec /opt/forq/bin/forq "$@"\n')
    machine.run("chmod", "755", "/opt/elsewhere/bin/forq")
    machine.write("/run/units/forq.service.d/place.conf", "[Service]\nEnvironment=FORQ_VENV=/opt/elsewhere\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "forq.service")
    machine.wait_for(**RUNNING)
    machine.run("forqctl", "push", "environment", "null")
    wait_until(lambda: "STARTED_BY=elsewhere" in machine.log(), what="the program's environment in the log")
