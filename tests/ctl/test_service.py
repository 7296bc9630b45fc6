"""forqctl status, ping, version, shutdown and completion."""

import subprocess
import sys
from typing import Any

import pytest

from forq.ctl.commands import MODULES
from forq.ctl.commands.service import health_problems
from tests.ctl.fake_supervisor import FakeSupervisor, busy_queue, environment, forqctl, queue_status, whole_status


def test_status_shows_an_aligned_table(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(), queue_status(name="b", state="paused", children=[]))
    assert forqctl(fake, "status") == (
        0,
        "QUEUE   STATE    WAITING  SCHEDULED  ACTIVE  DEAD   DONE  FAILED  OLDEST  CHILDREN\n"
        "emails  running       12          4       1     2  41207       3  1m15s   11 busy 01J, 12 parked\n"
        "b       paused        12          4       1     2  41207       3  1m15s   -\n",
        "",
    )
    assert fake.calls == [("status", {})]


def test_status_lists_only_the_first_of_many_processes(fake: FakeSupervisor) -> None:
    """A queue with suspects may have dozens."""
    helpers = [{"role": "suspect", "pid": pid, "state": "busy", "job": f"j{pid}"} for pid in range(13, 20)]
    queue = queue_status()
    fake.answers["status"] = whole_status(queue | {"children": queue["children"] + helpers})
    assert forqctl(fake, "status")[1].splitlines()[1].endswith("12 parked, 13 busy j13, 14 busy j14, 5 more")


def test_status_without_queues_prints_only_the_header(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status()
    code, out, _ = forqctl(fake, "status")
    assert (code, out) == (0, "QUEUE  STATE  WAITING  SCHEDULED  ACTIVE  DEAD  DONE  FAILED  OLDEST  CHILDREN\n")


def test_status_of_one_queue_shows_processes_and_items(fake: FakeSupervisor) -> None:
    items = [{"id": "1", "identifier": "first"}, {"id": "2", "identifier": None}]
    fake.answers["status"] = whole_status(queue_status(items=items))
    code, out, _ = forqctl(fake, "status", "emails")
    assert code == 0
    assert out.splitlines()[2:] == [
        "",
        "emails: processes",
        "ROLE   PID  STATE   JOB  UPTIME  RESTARTS",
        "main    11  busy    01J  1m39s          2",
        "retry   12  parked  -    1h06m          0",
        "",
        "emails: items",
        "ID  IDENTIFIER",
        "1   first",
        "2   -",
    ]
    assert fake.calls == [("status", {"names": ["emails"]})]


def test_status_of_one_queue_shows_its_first_items_and_the_command_for_the_rest(fake: FakeSupervisor) -> None:
    items = [{"id": str(number), "identifier": None} for number in range(100)]
    fake.answers["status"] = whole_status(queue_status(items=items))
    lines = forqctl(fake, "status", "emails")[1].splitlines()
    assert lines[-2:] == ["19  -", "more: forqctl jobs emails"]
    fake.answers["status"] = whole_status(queue_status(items=items[:20]))
    assert forqctl(fake, "status", "emails")[1].splitlines()[-1] == "19  -"


def test_status_shows_held_jobs_if_there_are_any(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(held=0))
    assert "HELD" not in forqctl(fake, "status")[1]
    fake.answers["status"] = whole_status(queue_status(held=7), queue_status(name="b", held=0))
    head, first, second, *_ = (line.split() for line in forqctl(fake, "status")[1].splitlines())
    at = head.index("HELD")
    assert (first[at], second[at]) == ("7", "0")


def test_status_names_apps_that_are_being_imported_or_could_not_be_read(fake: FakeSupervisor) -> None:
    error = {"at": 1_700_000_000.5, "message": "it has no app", "traceback": None}
    apps = [
        {"name": "fine", "app": "fine:app", "state": "running", "queues": [], "error": None},
        {"name": None, "app": "slow:app", "state": "reading", "queues": [], "error": None},
        {"name": None, "app": "bad:app", "state": "config_error", "queues": [], "error": error},
        {"name": "old", "app": "old:app", "state": "running", "queues": [], "error": error},
    ]
    fake.answers["status"] = {**whole_status(queue_status()), "apps": apps}
    assert forqctl(fake, "status")[1].splitlines()[2:] == [
        "app slow:app: is being imported; its queues start after that",
        "app bad:app: could not be read at 2023-11-14T22:13:20.500Z: it has no app",
        "app old: could not be read at 2023-11-14T22:13:20.500Z: its queues run the old code: it has no app",
    ]


def test_status_shows_holders_and_waiters_of_capacity_during_a_shortage(fake: FakeSupervisor) -> None:
    holds = {"worker": "a main", "units": 80, "priority": 1, "in_use": True, "seconds": 61.2}
    keeps = {"worker": "b main", "units": 10, "priority": 0, "in_use": False, "seconds": 5}
    waits = {"worker": "c main", "units": 40, "priority": 2, "seconds": 3.9}
    capacity = {"units": 100, "in_use": 80, "free": 10, "held": [holds, keeps], "waiting": [waits]}
    fake.answers["status"] = {**whole_status(queue_status(name="a")), "capacity": capacity}
    code, out, _ = forqctl(fake, "status")
    assert (code, out.splitlines()[2:]) == (
        0,
        [
            "",
            "capacity: 80 of 100 units in use, 10 free",
            "PROCESS         WORKERS  UNITS  PRIORITY  FOR",
            "a main   runs         1     80         1  1m01s",
            "b main   keeps        1     10         0  5s",
            "c main   waits        1     40         2  3s",
        ],
    )
    fake.answers["status"]["capacity"]["waiting"] = []
    assert "capacity" not in forqctl(fake, "status")[1], "shown only during a shortage"


def test_status_groups_workers_of_a_process_in_the_same_capacity_state(fake: FakeSupervisor) -> None:
    def worker(queue: str, seconds: float, **more: Any) -> dict[str, Any]:
        return {"worker": f"{queue} main", "units": 10, "priority": 0, "seconds": seconds, **more}

    others = [worker(f"q{number}", 1, in_use=True) for number in range(100)]
    mine = [worker("big", number, in_use=number < 150) for number in range(200)]
    waits = [worker("big", 7) for _ in range(13)]
    capacity = {"units": 4000, "in_use": 2500, "free": 0, "held": others + mine, "waiting": waits}
    fake.answers["status"] = {**whole_status(queue_status(name="big")), "capacity": capacity}
    lines = forqctl(fake, "status", "big")[1].splitlines()
    begin = lines.index("capacity: 2500 of 4000 units in use, 0 free")
    assert [line.split() for line in lines[begin + 2 : begin + 6]] == [
        ["big", "main", "runs", "150", "1500", "0", "2m29s"],
        ["big", "main", "keeps", "50", "500", "0", "3m19s"],
        ["big", "main", "waits", "13", "130", "0", "7s"],
        ["q0", "main", "runs", "1", "10", "0", "1s"],
    ]
    assert lines[-1] == "and 83 more rows; all workers: forqctl status --json"
    assert len(lines[begin:]) == 23


def test_status_while_redis_is_down_shows_dashes_and_the_reason(fake: FakeSupervisor) -> None:
    counts = ("waiting", "scheduled", "active", "dead", "done", "failed", "oldest_waiting_seconds")
    fake.answers["status"] = whole_status(queue_status(**dict.fromkeys(counts)), redis_error="refused")
    code, out, _ = forqctl(fake, "status")
    assert code == 0
    assert out.splitlines()[1].split()[2:9] == ["-"] * 7
    assert out.splitlines()[2] == "redis: down: refused"


def test_status_reports_an_unwritable_failed_log(fake: FakeSupervisor) -> None:
    status = whole_status(queue_status())
    status["supervisor"]["failed_log"] = {"ok": False, "errors": {"emails": "disk full"}}
    fake.answers["status"] = status
    code, out, err = forqctl(fake, "status", "--check")
    assert code == 3
    assert out.splitlines()[-1] == "emails: failed log: disk full"
    assert err == "forqctl: not healthy: failed log of queue emails: disk full\n"


def test_status_check_exits_with_0_when_healthy(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(), queue_status(state="paused", children=[]))
    code, _, err = forqctl(fake, "status", "--check")
    assert (code, err) == (0, "")


def test_status_check_exits_with_3_and_lists_every_reason_on_one_line(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(state="flapping"), redis_error="refused")
    code, _, err = forqctl(fake, "status", "--check", "--json")
    assert (code, err) == (3, "forqctl: not healthy: redis is down: refused; queue emails is flapping\n")


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, 0),
        ({"state": "draining", "children": []}, 0),
        ({"state": "config_error"}, 1),
        ({"state": "stopped"}, 1),
        ({"children": []}, 1),
        ({"children": [{"role": "main", "pid": None, "state": "starting"}]}, 1),
        ({"children": [{"role": "main", "pid": 5, "state": "backoff"}]}, 1),
        ({"children": [{"role": "retry", "pid": 5, "state": "parked"}]}, 1),
    ],
)
def test_a_running_queue_needs_a_live_main_child(changes: dict[str, Any], faults: int) -> None:
    assert len(health_problems(whole_status(queue_status(**changes)))) == faults


def test_status_imports_no_heavy_modules(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status())
    code = (
        "import sys; from forq.ctl.main import main; main(['status']); "
        "heavy = {'redis', 'psutil', 'logging', 'orjson', 'socket', 'selectors', 'dataclasses', 'inspect', 'shutil', "
        "'datetime', 'pathlib', 'asyncio', 'setproctitle'}; print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(fake))
    assert done.stderr == "[]\n"


def test_ping_version_and_shutdown(fake: FakeSupervisor) -> None:
    fake.answers = {"ping": {"pong": True, "pid": 10}, "version": {"version": "9.9", "protocol": 1}, "shutdown": {}}
    fake.answers["shutdown"] = {"stopping": True, "pid": 0, "grace_seconds": 0.0}
    assert forqctl(fake, "ping") == (0, "pong from pid 10\n", "")
    assert forqctl(fake, "version")[1].splitlines()[1] == "supervisor 9.9, protocol 1"
    assert forqctl(fake, "shutdown", "--now", "--no-wait") == (0, "the supervisor is stopping\n", "")
    assert fake.calls[-1] == ("shutdown", {"now": True})


@pytest.mark.parametrize(
    ("queue", "reason"),
    [
        (busy_queue(2), "running jobs, at most 10s: emails j1 (3s), emails j0 (0s)"),
        (queue_status(), "the processes of emails"),
        (queue_status(children=[]), "the supervisor's services"),
    ],
)
def test_shutdown_reports_what_the_supervisor_waits_for(
    fake: FakeSupervisor, queue: dict[str, Any], reason: str
) -> None:
    fake.answers["shutdown"] = {"stopping": True, "pid": 0, "grace_seconds": 10.0}
    fake.answers["status"] = whole_status(queue)
    code, out, err = forqctl(fake, "shutdown", "--timeout", "5s")
    lines = err.splitlines()
    assert (code, out, lines[-1]) == (6, "", "forqctl: the supervisor has not stopped yet; stopping continues")
    assert set(lines[:-1]) == {f"forqctl: waiting for {reason}"}
    assert len(lines) <= 4, "less and less often"
    assert fake.calls[1] == ("status", {"counts": False})


def test_completion_for_bash_offers_commands_and_flags() -> None:
    script = forqctl(None, "completion", "bash")[1]

    def offered(*words: str) -> list[str]:
        line = f"{script}\nCOMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}\n"
        shell = ["bash", "-c", line + '_forqctl; printf "%s\\n" "${COMPREPLY[@]}"']
        return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split()

    assert offered("forqctl", "re") == ["resume-schedule", "recover", "remove", "resume", "restart"]
    assert offered("forqctl", "dead", "s") == ["show"]
    assert offered("forqctl", "--socket", "x", "jobs", "q", "--state", "") == [
        "waiting",
        "scheduled",
        "active",
        "blocked",
        "held",
        "retry",
        "done",
        "dead",
    ]
    assert "--if-exists" in offered("forqctl", "push", "q", "--i")
    assert offered("forqctl", "set", "q", "max_re") == ["max_retries="]
    assert offered("forqctl", "create", "q", "--set", "concurr") == ["concurrency="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_includes_every_command(shell: str) -> None:
    code, out, _ = forqctl(None, "completion", shell)
    assert code == 0
    assert [name for name in MODULES if name not in out] == []
