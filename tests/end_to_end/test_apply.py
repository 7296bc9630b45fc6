"""`forqctl apply`: a running supervisor takes over a changed config file, and only what differs changes."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.errors import ConfigError, ForqError, PlanChanged
from tests.support.drive.supervisor import BIN, HANDLERS, Forq, running
from tests.support.drive.terminal import OnTerminal
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(180)


def table(name: str, handler: str = "traced:record", **options: object) -> str:
    lines = [f"{option} = {json.dumps(value)}" for option, value in options.items()]
    return "\n".join([f"[queues.{name}]", f'handler = "{handler}"', f'path = ["{HANDLERS}"]', *lines, ""])


def pids(forq: Forq) -> dict[str, set[int]]:
    return {queue["name"]: {child["pid"] for child in queue["children"]} for queue in forq.status()["queues"]}


def schedules(forq: Forq) -> dict[tuple[str, str], str]:
    return {(each["queue"], each["key"]): each["rule"] for each in forq.call("schedules")["schedules"]}


def wait_until_running(forq: Forq, *names: str) -> None:
    for name in names:
        wait_until(
            lambda name=name: (  # type: ignore[misc]
                all(child["state"] in ("idle", "parked") for child in forq.queue_status(name)["children"])
            ),
            what=f"the processes of {name} are ready",
        )


def apply(forq: Forq, text: str) -> dict[str, Any]:
    forq.config.write_text(text)
    done = forq.run_ctl("apply", "--yes", "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def effects(changes: list[dict[str, Any]]) -> dict[str, str]:
    return {" ".join(str(c[part]) for part in ("kind", "name", "key") if c[part]): c["effect"] for c in changes}


def nothing_left(forq: Forq) -> bool:
    done = forq.run_ctl("apply", "--dry-run")
    return done.returncode == 0 and "nothing to do" in done.stdout


BEFORE = (
    table("plain")
    + table("live", timeout="30s")
    + table("wide", "traced:sleep")
    + table("moved")
    + table("broken")
    + table("gone", "traced:sleep")
    + table("timed")
    + '[queues.timed.schedules.stays]\nevery = "1h"\n[queues.timed.schedules.leaves]\nevery = "2h"\n'
)
AFTER = (
    table("plain")
    + table("live", timeout="45s")
    + table("wide", "traced:sleep", concurrency=3)
    + table("moved", "traced:noop")
    + table("broken", "traced:no_such_function")
    + table("timed")
    + '[queues.timed.schedules.stays]\nevery = "1h"\n[queues.timed.schedules.comes]\ncron = "30 2 * * *"\n'
    + table("fresh")
)


@pytest.fixture(scope="module")
def applied() -> Iterator[tuple[Forq, dict[str, set[int]], dict[str, Any]]]:
    """A supervisor after one apply, its processes before it, and the answer."""
    with running(settings=BEFORE) as forq:
        names = ("plain", "live", "wide", "moved", "broken", "gone", "timed")
        wait_until_running(forq, *names)
        forq.client().queue("wide").enqueue_many([0.4] * 3)
        forq.ctl("pause", "gone")
        forq.client().queue("gone").enqueue(1)
        before = pids(forq)
        result = apply(forq, AFTER)
        wait_until_running(forq, "plain", "live", "moved", "broken", "timed", "fresh")
        yield forq, before, result


Applied = tuple[Forq, dict[str, set[int]], dict[str, Any]]


def test_exactly_the_processes_of_queues_that_need_it_are_replaced(applied: Applied) -> None:
    forq, before, _ = applied
    wait_until_running(forq, "wide")
    after = pids(forq)
    unchanged = [name for name in after if after[name] == before.get(name)]
    assert sorted(unchanged) == ["broken", "live", "plain", "timed"]
    for name in ("wide", "moved"):
        assert not before[name] & after[name]
    assert "fresh" in after
    assert not [pid for pid in before["gone"] if os.path.exists(f"/proc/{pid}")]


def test_the_answer_lists_each_change_with_its_effect(applied: Applied) -> None:
    _, _, result = applied
    assert effects(result["applied"]) == {
        "queue live timeout": "live",
        "queue wide concurrency": "new_processes",
        "queue moved handler": "new_processes",
        "queue fresh": "created",
        "queue gone": "unserved",
        "schedule timed leaves": "live",
        "schedule timed comes": "live",
    }
    [timeout] = [change for change in result["applied"] if change["key"] == "timeout"]
    assert (timeout["old"], timeout["new"]) == ("30s", "45s")
    [failed] = result["failed"]
    assert (failed["step"], failed["code"]) == ("queue broken", "cannot_import")
    assert "module traced has no function no_such_function" in failed["message"]
    assert "its old process keeps running" in failed["message"]


def test_jobs_continue_in_every_queue(applied: Applied) -> None:
    forq, _, _ = applied
    wait_until(lambda: forq.queue_status("wide")["done"] == 3, what="jobs from before the change are done")
    for name in ("plain", "live", "moved", "broken", "timed", "fresh"):
        # A schedule may have run a job, too.
        done = forq.queue_status(name)["done"]
        forq.client().queue(name).enqueue(1)
        wait_until(lambda name=name, done=done: forq.queue_status(name)["done"] > done, what=name)  # type: ignore[misc]
    threads = Path(f"/proc/{forq.child('wide')['pid']}/task")
    # Three workers, the main thread and the minder.
    wait_until(lambda: len(os.listdir(threads)) >= 5, what="three workers")


def test_options_and_schedules_are_in_redis(applied: Applied) -> None:
    forq, _, _ = applied
    assert schedules(forq) == {("timed", "stays"): "every 1h", ("timed", "comes"): "30 2 * * *"}
    stored = redis.Redis.from_url(forq.url).hget(f"{queue_base(DEFAULT_PREFIX, 'live')}:options", "timeout_ms")
    assert stored == b"45000"


def test_a_removed_queue_keeps_its_jobs(applied: Applied) -> None:
    forq, _, _ = applied
    assert "gone" not in pids(forq)
    assert forq.call("jobs", name="gone")["jobs"] != []
    # The name is free: the file no longer defines it.
    forq.create("gone", "record")
    forq.ctl("resume", "gone")
    wait_until(lambda: forq.queue_status("gone")["done"] == 1, what="its job runs when it is served again")
    assert not forq.call("config.plan")["changes"] or "queue gone" not in effects(forq.call("config.plan")["changes"])


def test_only_the_failed_change_is_left(applied: Applied) -> None:
    forq, _, _ = applied
    assert effects(forq.call("config.plan")["changes"]) == {"queue broken handler": "new_processes"}
    before = pids(forq)
    done = forq.run_ctl("apply", "--yes")
    assert done.returncode == 1
    assert "applied 0 of 1 change\n" in done.stdout
    assert "forqctl: fix it, then run again: forqctl apply" in done.stderr
    assert pids(forq) == before
    forq.config.write_text(AFTER.replace("no_such_function", "noop"))
    assert "applied 1 change" in forq.ctl("apply", "--yes")
    assert nothing_left(forq)
    assert "queue 'fresh' is defined in" in forq.run_ctl("create", "fresh", "--handler", "traced:noop").stderr


def test_an_import_error_is_shown_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "breaking.py").write_text("def handle(data, job): ...\n")
    settings = f'[queues.q]\nhandler = "breaking:handle"\npath = ["{tmp_path}"]\n'
    with running(settings=settings + table("other")) as forq:
        wait_until_running(forq, "q", "other")
        (tmp_path / "breaking.py").write_text("raise RuntimeError('no database')\n")
        forq.config.write_text(settings + "concurrency = 2\n" + table("other", priority=3))
        before = pids(forq)
        done = forq.run_ctl("apply", "--yes")
        assert done.returncode == 1
        assert "RuntimeError: no database" in done.stderr
        assert 'breaking.py", line 1' in done.stderr
        assert "applied 1 of 2 changes" in done.stdout
        assert pids(forq) == before


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings=table("q")) as forq:
        wait_until_running(forq, "q")
        yield forq


@pytest.fixture(autouse=True)
def _file_of_the_start(request: pytest.FixtureRequest) -> None:
    if "forq" in request.fixturenames:
        started: Forq = request.getfixturevalue("forq")
        started.config.write_text(table("q"))
        started.config.chmod(0o644)
        started.ctl("apply", "--yes")


def test_a_dry_run_shows_the_changes_and_changes_nothing(forq: Forq) -> None:
    forq.config.write_text(table("q", concurrency=2, timeout="5s") + table("r"))
    before = forq.status()["queues"][0]["children"], pids(forq)
    done = forq.run_ctl("apply", "--dry-run")
    assert done.returncode == 3
    assert [line.split()[:3] for line in done.stdout.splitlines()] == [
        ["CHANGE", "OLD", "NEW"],
        ["queue", "q", "concurrency"],
        ["queue", "q", "timeout"],
        ["queue", "r", "-"],
    ]
    assert json.loads(forq.run_ctl("apply", "--dry-run", "--json").stdout)["changes"][1]["new"] == "5s"
    assert pids(forq) == before[1]
    assert forq.run_ctl("apply", "--dry-run").stdout == done.stdout


def test_without_a_terminal_and_without_yes_nothing_is_applied(forq: Forq) -> None:
    forq.config.write_text(table("q", timeout="5s"))
    for arguments, reason in (([], "without a terminal"), (["--json"], "with --json")):
        done = forq.run_ctl("apply", *arguments)
        assert done.returncode == 2
        assert f"{reason} nothing is applied unless --yes is given" in done.stderr
    assert forq.run_ctl("apply", "--dry-run").returncode == 3


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 1), ("y", 0, 0)])
def test_on_a_terminal_it_asks(forq: Forq, answer: str, code: int, left: int) -> None:
    forq.config.write_text(table("q", timeout="7s"))
    terminal = OnTerminal([str(BIN / "forqctl"), "apply"], forq.environ())
    try:
        terminal.wait_for("apply these changes? [y/N]")
        terminal.press(f"{answer}\r")
        assert terminal.process.wait(30) == code
    finally:
        terminal.close()
    assert len(forq.call("config.plan")["changes"]) == left


def test_options_changed_with_set_go_back_to_those_of_the_file(forq: Forq) -> None:
    before = pids(forq)
    done = forq.ctl("set", "q", "max_retries=1")
    assert done.endswith("until the supervisor restarts or applies the config file that defines it")
    [change] = forq.call("config.plan")["changes"]
    assert (change["key"], change["old"], change["new"]) == ("max_retries", "1", "10")
    assert (change["effect"], change["note"]) == ("live", "was changed with forqctl set")
    forq.ctl("apply", "--yes")
    assert nothing_left(forq)
    assert pids(forq) == before


@pytest.mark.spec("N25")
def test_settings_of_the_service_are_named_and_the_rest_is_applied(forq: Forq) -> None:
    forq.config.write_text('capacity = 4711\nheartbeat = "3s"\n[metrics]\n' + table("q", timeout="9s"))
    done = forq.run_ctl("apply", "--yes")
    assert done.returncode == 0
    assert "capacity is read at start only: " in done.stderr
    assert " → 4711 needs a restart" in done.stderr
    assert "heartbeat is read at start only: 5s → 3s needs a restart" in done.stderr
    assert "[metrics] is read at start only: - → listen = 127.0.0.1:9464, health = 60.0 needs a restart" in done.stderr
    assert "applied 1 change" in done.stdout
    assert nothing_left(forq)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[queues.q]\nhandler = 1\n", "[queues.q]: handler = 1 is not allowed"),
        ("[queues.q\n", "not valid TOML"),
        ("[nonsense]\n", "there is no setting 'nonsense'"),
        (table("q", size=10**6), "size = 1000000 is not allowed: capacity is"),
    ],
)
def test_an_invalid_file_changes_nothing_and_has_the_sentence_of_a_start(forq: Forq, text: str, reason: str) -> None:
    forq.config.write_text(table("r") + text)
    before = pids(forq)
    done = forq.run_ctl("apply", "--yes")
    assert done.returncode == 1
    assert reason in done.stderr
    assert pids(forq) == before
    other = Forq(settings=table("r") + text)
    try:
        other.start(ready=False)
        assert other.process is not None
        assert other.process.wait(30) == 78
        start = other.log.strip().removeprefix("forq: ").replace(str(other.config), str(forq.config))
        assert done.stderr == f"forqctl: {start}\n"
    finally:
        other.remove()


def test_a_file_that_others_can_change_is_refused(forq: Forq) -> None:
    forq.config.chmod(0o666)
    done = forq.run_ctl("apply", "--yes")
    assert done.returncode == 1
    assert "can be changed by everybody" in done.stderr


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "large"])
def test_what_could_block_the_supervisor_is_refused(forq: Forq, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "large":
        path.write_text("#" * (512 << 10) + "#")
    with pytest.raises(ConfigError, match=f"^{path}: (cannot be read: No such file|not a file|larger than 524288)"):
        forq.call("config.plan", file=str(path))


def test_a_change_of_the_file_after_the_plan_is_refused(forq: Forq) -> None:
    forq.config.write_text(table("q", timeout="5s"))
    plan = forq.call("config.plan")
    forq.config.write_text(table("q", timeout="6s"))
    with pytest.raises(PlanChanged, match="nothing was applied; run again: forqctl apply"):
        forq.call("config.apply", hash=plan["hash"])
    with pytest.raises(PlanChanged):
        forq.call("config.apply")
    forq.call("config.apply", hash=forq.call("config.plan")["hash"])
    assert nothing_left(forq)


def test_a_change_of_the_state_after_the_plan_is_refused(forq: Forq) -> None:
    forq.config.write_text(table("q", timeout="5s"))
    plan = forq.call("config.plan")
    forq.call("queue.set", name="q", options={"timeout": "20s"})
    with pytest.raises(PlanChanged):
        forq.call("config.apply", hash=plan["hash"])


def test_a_second_apply_at_the_same_time_is_refused(forq: Forq, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "slow_import.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\ndef handle(data, job): ...\n"
    )
    forq.config.write_text(table("q") + f'[queues.slow]\nhandler = "slow_import:handle"\npath = ["{tmp_path}"]\n')
    plan = forq.call("config.plan")
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(forq.call("config.apply", hash=plan["hash"])))
    first.start()
    try:
        wait_until(lambda: "slow" in pids(forq), what="the first one is importing")
        with pytest.raises(ForqError, match="another request is applying the config file"):
            forq.call("config.apply", hash=plan["hash"])
    finally:
        gate.touch()
        first.join(30)
    assert effects(answers[0]["applied"]) == {"queue slow": "created"}


def test_another_file_is_read_from_its_path_and_the_warning_names_that_of_the_start(forq: Forq, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(table("q", timeout="8s"))
    done = forq.run_ctl("apply", str(other), "--yes")
    assert done.returncode == 0
    assert f"a restart of the supervisor reads {forq.config}, not {other}" in done.stderr
    refused = forq.run_ctl("create", "q", "--handler", "traced:noop")
    assert f"queue 'q' is defined in {other}: change it there, then run: forqctl apply" in refused.stderr
    with pytest.raises(ForqError, match="an absolute path"):
        forq.call("config.plan", file="other.toml")


def test_queues_made_with_create_stay_until_the_file_names_them(forq: Forq) -> None:
    forq.create("own", "record", timeout="3s")
    wait_until_running(forq, "own")
    before = pids(forq)
    assert nothing_left(forq)
    forq.config.write_text(table("q") + table("own", timeout="4s"))
    changes = forq.call("config.plan")["changes"]
    assert [(change["key"], change["effect"]) for change in changes] == [(None, "live"), ("timeout", "live")]
    assert changes[0]["note"] == "was created with forqctl create; now the file defines it"
    forq.ctl("apply", "--yes")
    assert pids(forq) == before
    assert nothing_left(forq)
    # Removed from the file again, it is what forqctl created, as after a restart.
    forq.config.write_text(table("q"))
    changes = forq.call("config.plan")["changes"]
    assert [(change["key"], change["old"], change["new"]) for change in changes] == [
        (None, None, None),
        ("timeout", "4s", "3s"),
    ]
    forq.ctl("apply", "--yes")
    assert nothing_left(forq)
    assert pids(forq) == before
    forq.ctl("delete", "own", "--force")


def test_a_deleted_queue_of_the_file_is_created_again(forq: Forq) -> None:
    forq.config.write_text(table("q") + table("again"))
    forq.ctl("apply", "--yes")
    forq.ctl("delete", "again", "--force")
    assert effects(forq.call("config.plan")["changes"]) == {"queue again": "created"}
    forq.ctl("apply", "--yes")
    assert "again" in pids(forq)
    assert nothing_left(forq)


def test_queues_of_release_modes(forq: Forq) -> None:
    release = '[queues.gate]\nmode = "on_request"\nmax_items = 5\n'
    forq.config.write_text(table("q") + release)
    forq.ctl("apply", "--yes")
    before = pids(forq)
    forq.config.write_text(table("q") + release.replace("5", "6") + 'lease = "20s"\n')
    result = json.loads(forq.run_ctl("apply", "--yes", "--json").stdout)
    assert "lease of queue 'gate' cannot be changed: it is fixed" in result["failed"][0]["message"]
    forq.config.write_text(table("q") + release.replace("5", "6"))
    assert effects(forq.call("config.plan")["changes"]) == {"queue gate max_items": "live"}
    forq.ctl("apply", "--yes")
    assert nothing_left(forq)
    forq.config.write_text(table("q") + table("gate"))
    result = json.loads(forq.run_ctl("apply", "--yes", "--json").stdout)
    assert "exists with mode 'on_request'; a queue's mode never changes" in result["failed"][0]["message"]
    forq.config.write_text(table("q"))
    assert "every supervisor serves queues of mode on_request" in forq.ctl("apply", "--yes")
    assert nothing_left(forq)
    assert pids(forq) == before


def test_a_changed_number_of_processes_is_live(forq: Forq) -> None:
    forq.config.write_text(table("q", processes=3))
    before = forq.child("q")["pid"]
    assert effects(forq.call("config.plan")["changes"]) == {"queue q processes": "live"}
    forq.ctl("apply", "--yes")
    mains = wait_until(
        lambda: len(found := [c for c in forq.queue_status("q")["children"] if c["role"] == "main"]) == 3 and found
    )
    assert mains[0]["pid"] == before
    assert nothing_left(forq)


def test_a_start_reads_the_applied_file(tmp_path: Path) -> None:
    with running(settings=table("q")) as forq:
        forq.config.write_text(table("q", timeout="5s") + table("r"))
        forq.ctl("apply", "--yes")
        assert forq.stop() == 0
        forq.start()
        wait_until_running(forq, "q", "r")
        assert nothing_left(forq)
