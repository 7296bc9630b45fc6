"""Apps that a supervisor reads itself: `forq run --app`, [apps.NAME], restart --app, and --reload."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.errors import CannotImport, JobDead
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(180)

SHOP = """
import forq
app = forq.App("shop")
@app.task(queue="mails", timeout="30s")
def send(to: str) -> str:
    if to == "nobody":
        raise ValueError("no address")
    return f"sent to {to}"
@app.task(every="1h")
def refresh() -> None: ...
app.queue("mails", concurrency=2, keep_done="1h")
"""
LIFESPAN = """
opened = jobs = 0
@app.lifespan
def resources():
    global opened
    opened += 1
    yield
@app.around
def count(job):
    global jobs
    jobs += 1
    yield
"""


@contextmanager
def running_in(directory: Path, *arguments: str, settings: str = "") -> Iterator[Forq]:
    forq = Forq(settings=settings)
    forq.cwd, forq.arguments = directory, list(arguments)
    try:
        forq.start()
        yield forq
    finally:
        forq.remove()


def apps(forq: Forq) -> dict[str, dict[str, Any]]:
    return {app["name"] or app["app"]: app for app in forq.status()["apps"]}


def wait_for_app(forq: Forq, name: str, state: str = "running") -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        app = apps(forq).get(name)
        return app if app is not None and app["state"] == state else None

    return wait_until(found, what=f"app {name} is {state}")  # type: ignore[no-any-return]


def wait_for_queue(forq: Forq, name: str) -> None:
    wait_until(
        lambda: any(queue["name"] == name and queue["state"] == "running" for queue in forq.status()["queues"]),
        what=f"queue {name} runs",
    )


def result_of(forq: Forq, queue: str, task: str, **data: object) -> object:
    jobs = forq.client().queue(queue)
    return jobs.wait(jobs.enqueue(data, type=task), 30)


def schedules(forq: Forq) -> dict[tuple[str, str], str]:
    return {(each["queue"], each["key"]): each["origin"] for each in forq.call("schedules")["schedules"]}


def test_an_app_is_imported_from_the_current_directory_and_its_tasks_run(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_queue(forq, "mails")
        wait_for_queue(forq, "shop")
        assert result_of(forq, "mails", "send", to="you") == "sent to you"
        assert {queue["name"]: queue["app"] for queue in forq.status()["queues"]} == {"mails": "shop", "shop": "shop"}
        assert list(schedules(forq).values()) == ["app"]
        assert "mails  shop  running" in forq.ctl("status")
        refused = forq.run_ctl("create", "mails", "--handler", "traced:noop")
        assert refused.returncode == 1
        assert "is defined by app 'shop': change its code" in refused.stderr
        assert "until the supervisor restarts" in forq.ctl("set", "mails", "max_retries=1")
        changed = forq.run_ctl("set", "mails", "timeout=5s", "max_backoff=5s")
        assert changed.stderr == "forqctl: warning: timeout has no effect on tasks that set their own: send\n"


def test_the_config_file_overrides_options_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(SHOP + LIFESPAN)
    (tmp_path / "legacy.py").write_text(
        "import shop_tasks\ndef handle(data, job):\n    return [shop_tasks.opened, shop_tasks.jobs]\n"
    )
    settings = f"""
[apps.shop]
app = "shop_tasks"
path = {json.dumps(str(tmp_path))}
[apps.shop.tasks.send]
max_retries = 0
[queues.mails]
concurrency = 3
[queues.mails.schedules.nightly]
cron = "30 2 * * *"
type = "refresh"
[queues.plain]
handler = "legacy:handle"
app = "shop"
keep_done = "1h"
"""
    with running_in(Path("/"), settings=settings) as forq:
        for name in ("mails", "plain"):
            wait_for_queue(forq, name)
        assert result_of(forq, "mails", "send", to="you") == "sent to you"
        # Of [apps.shop.tasks.send]: otherwise it would be retried.
        with pytest.raises(JobDead, match="no address"):
            result_of(forq, "mails", "send", to="nobody")
        threads = Path(f"/proc/{forq.child('mails')['pid']}/task")
        # Three workers, the main thread and the minder.
        wait_until(lambda: len(os.listdir(threads)) >= 5, what="three workers")
        assert set(schedules(forq).values()) == {"app", "config"}
        # The lifespan was entered once, and the hook runs around the handler.
        jobs = forq.client().queue("plain")
        assert [jobs.wait(jobs.enqueue({}), 30) for _ in range(2)] == [[1, 1], [1, 2]]
        old = forq.child("plain")["pid"]
        assert sorted(forq.call("app.restart", name="shop")["restarted"]) == ["mails", "plain", "shop"]
        assert forq.child("plain")["pid"] != old


def test_an_app_that_cannot_be_read_is_shown_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(SHOP)
    (tmp_path / "broken_tasks.py").write_text("import forq\nraise RuntimeError('no database')\n")
    arguments = ["--app", "shop_tasks:app", "--app", "broken_tasks:app"]
    with running_in(tmp_path, *arguments) as forq:
        wait_for_queue(forq, "mails")
        broken = wait_for_app(forq, "broken_tasks:app", "config_error")
        assert "RuntimeError: no database" in broken["error"]["message"]
        assert f'File "{tmp_path}/broken_tasks.py", line 2' in broken["error"]["traceback"]
        assert f'File "{tmp_path}/broken_tasks.py", line 2' in forq.log
        assert "app broken_tasks:app: could not be read at" in forq.ctl("status")
        unhealthy = forq.run_ctl("status", "--check")
        assert unhealthy.returncode == 3
        assert "app broken_tasks:app cannot be read" in unhealthy.stderr
        assert result_of(forq, "mails", "send", to="you") == "sent to you"
        # It is read again without a request.
        (tmp_path / "broken_tasks.py").write_text("import forq\napp = forq.App('fixed')\napp.queue('mended')\n")
        wait_for_queue(forq, "mended")
        assert apps(forq)["fixed"]["error"] is None


def test_an_unserved_queue_beside_an_app_names_the_restart_of_the_app(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_queue(forq, "mails")
        forq.client().create_queue("new")
        assert (
            "new: unserved: no supervisor serves it; if it is new in the code of an app: `forqctl restart --app shop`; "
            "else `forqctl create new --handler MODULE:FUNCTION --path DIR` makes this one serve it"
        ) in forq.ctl("status", "new").splitlines()


def test_a_queue_belongs_to_one_app(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(SHOP)
    (tmp_path / "twin_tasks.py").write_text("import forq\napp = forq.App('twin')\napp.queue('mails')\n")
    with running_in(tmp_path, "--app", "shop_tasks:app", "--app", "twin_tasks:app") as forq:
        wait_until(lambda: any(app["error"] for app in forq.status()["apps"]), what="one of them is refused")
        [error] = [app["error"]["message"] for app in forq.status()["apps"] if app["error"]]
        assert "queue 'mails' of app" in error
        assert "is also a queue of app" in error
        wait_for_queue(forq, "mails")


def test_a_restart_applies_new_definitions(tmp_path: Path) -> None:
    module = tmp_path / "shop_tasks.py"
    module.write_text(SHOP)
    # A queue is unserved once the supervisor's registration in it has expired.
    settings = 'heartbeat = "1s"\nexpiry = "4s"\n'
    with running_in(tmp_path, "--app", "shop_tasks:app", settings=settings) as forq:
        wait_for_queue(forq, "mails")
        wait_for_queue(forq, "shop")
        forq.ctl("set", "mails", "max_retries=7")
        old = forq.child("mails")["pid"]
        module.write_text(
            SHOP.replace("sent to", "posted to")
            .replace('@app.task(every="1h")', '@app.task(queue="feeds", cron="0 3 * * *")')
            .replace("concurrency=2", "concurrency=1, timeout='5s'")
        )
        done = forq.ctl("restart", "--app", "shop")
        assert done == "restarted app shop (new: feeds; restarted: mails; no longer served: shop)"
        assert forq.child("mails")["pid"] != old
        assert result_of(forq, "mails", "send", to="you") == "posted to you"
        wait_until(lambda: list(schedules(forq)) == [("feeds", "refresh")], what="the old schedule is removed")
        stored = redis.Redis.from_url(forq.url).hmget(
            f"{queue_base(DEFAULT_PREFIX, 'mails')}:options", ["max_retries", "timeout_ms"]
        )
        assert stored == [b"7", b"5000"], "options that a user has set stay, and new ones of the code apply"
        wait_until(
            lambda: any(q["name"] == "shop" and q["state"] == "unserved" for q in forq.status()["queues"]),
            60,
            what="the queue that is gone from the code is unserved",
        )
        # Without a change: the same queues, with new processes.
        old = forq.child("mails")["pid"]
        assert forq.call("app.restart", name="shop")["restarted"] == ["feeds", "mails"]
        assert forq.child("mails")["pid"] != old
        assert forq.run_ctl("restart", "--app", "nothing").returncode == 4


def test_only_a_restart_of_the_app_removes_schedules_that_its_code_no_longer_has(tmp_path: Path) -> None:
    module = tmp_path / "shop_tasks.py"
    module.write_text(SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_queue(forq, "shop")
        forq.ctl("schedule", "shop", "mine", "--every", "1h")
        assert forq.stop() == 0
        module.write_text(SHOP.replace('@app.task(every="1h")', "@app.task"))
        forq.start()
        wait_for_queue(forq, "shop")
        assert schedules(forq) == {("shop", "refresh"): "app", ("shop", "mine"): "user"}
        forq.ctl("restart", "--app", "shop")
        wait_until(lambda: schedules(forq) == {("shop", "mine"): "user"}, what="the schedule of the app is removed")


def test_an_app_may_change_its_name(tmp_path: Path) -> None:
    module = tmp_path / "shop_tasks.py"
    module.write_text(SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_queue(forq, "mails")
        module.write_text(SHOP.replace('App("shop")', 'App("store")'))
        answer = forq.call("app.restart", name="shop")
        assert answer == {"name": "store", "opened": ["store"], "restarted": ["mails"], "unserved": ["shop"]}
        assert forq.queue_status("mails")["app"] == "store"


def test_a_restart_that_cannot_read_the_app_stops_nothing(tmp_path: Path) -> None:
    module = tmp_path / "shop_tasks.py"
    module.write_text(SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_queue(forq, "mails")
        old = forq.child("mails")["pid"]
        module.write_text(SHOP + "\nx = (\n")
        failed = forq.run_ctl("restart", "--app", "shop")
        assert failed.returncode == CannotImport.exit_code
        assert "its queues keep running the old code" in failed.stderr
        assert f'File "{module}", line 13' in failed.stderr
        assert forq.child("mails")["pid"] == old
        assert apps(forq)["shop"]["error"] is not None
        assert result_of(forq, "mails", "send", to="you") == "sent to you"
        module.write_text(SHOP)
        forq.ctl("restart", "--app", "shop")
        assert apps(forq)["shop"]["error"] is None


def test_a_worker_that_starts_after_the_code_has_changed_waits_for_the_restart_of_its_app(tmp_path: Path) -> None:
    module = tmp_path / "shop_tasks.py"
    module.write_text(SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_queue(forq, "mails")
        module.write_text(SHOP.replace("sent to", "posted to").replace("concurrency=2", "concurrency=1"))
        refused = forq.run_ctl("restart", "mails")
        assert refused.returncode == CannotImport.exit_code
        assert "has changed since its definitions were read; run: forqctl restart --app shop" in refused.stderr
        os.kill(forq.child("mails")["pid"], signal.SIGKILL)
        wait_until(lambda: "cannot start child queue=mails child=main" in forq.log, what="the new process is refused")
        job = forq.client().queue("mails").enqueue({"to": "you"}, type="send")
        assert "forqctl restart --app shop" in forq.queue_status("mails")["restart_error"]["message"]
        assert "its queue has no process: the code of app 'shop' has changed" in forq.ctl("why", "mails", job)
        assert forq.child("mails", "retry")["state"] == "parked"
        forq.ctl("restart", "--app", "shop")
        assert forq.client().queue("mails").wait(job, 30) == "posted to you"
        assert forq.queue_status("mails")["restart_error"] is None


def test_a_refused_process_starts_when_the_old_code_is_back(tmp_path: Path) -> None:
    module = tmp_path / "shop_tasks.py"
    module.write_text(SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_queue(forq, "mails")
        # Of another size: Python finds its bytecode by size and seconds.
        module.write_text(SHOP.replace("concurrency=2", "concurrency=12"))
        os.kill(forq.child("mails")["pid"], signal.SIGKILL)
        wait_until(lambda: "cannot start child queue=mails child=main" in forq.log, what="the new process is refused")
        module.write_text(SHOP)
        assert result_of(forq, "mails", "send", to="you") == "sent to you"
        wait_until(lambda: forq.queue_status("mails")["restart_error"] is None, what="no error is left")


def test_code_that_changes_without_its_definitions_is_loaded_by_new_workers(tmp_path: Path) -> None:
    module = tmp_path / "shop_tasks.py"
    module.write_text(SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_queue(forq, "mails")
        module.write_text("\n\n" + SHOP.replace("sent to", "posted to"))
        forq.ctl("restart", "mails")
        assert result_of(forq, "mails", "send", to="you") == "posted to you"


def test_much_output_of_an_import_is_bounded_and_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text("print(('x' * 99 + chr(10)) * 1_000_000)\n" + SHOP)
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_app(forq, "shop")
        written = sum(path.stat().st_size for path in (forq.state_dir / "logs" / "shop_tasks").glob("*.jsonl"))
        assert 0 < written < 20 * 1024 * 1024


def test_changed_files_are_loaded_with_reload(tmp_path: Path) -> None:
    package = tmp_path / "store"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("GREETING = 'sent to'\n")
    module = package / "tasks.py"
    module.write_text(SHOP.replace('f"sent to {to}"', 'f"{GREETING} {to}"') + "from store.words import GREETING\n")
    with running_in(tmp_path, "--app", "store.tasks:app", "--reload") as forq:
        wait_for_queue(forq, "mails")
        assert result_of(forq, "mails", "send", to="you") == "sent to you"
        (package / "words.py").write_text("GREETING = 'syntax\n")
        wait_until(lambda: "SyntaxError" in forq.log, what="the traceback is shown")
        assert result_of(forq, "mails", "send", to="you") == "sent to you"
        old_pid = forq.child("mails")["pid"]
        # As editors save: a new file replaces the old one.
        (package / "words.new").write_text("GREETING = 'seen by'\n")
        (package / "words.new").rename(package / "words.py")
        wait_until(lambda: "restarted app app=shop" in forq.log, what="the app is restarted")
        # It may still claim a job before it reads the signal.
        wait_until(lambda: old_pid not in forq.child_states("mails"), what="the old process ended")
        assert result_of(forq, "mails", "send", to="you") == "seen by you"


def test_a_restart_does_not_wait_for_older_code_that_hangs(tmp_path: Path) -> None:
    module = tmp_path / "shop_tasks.py"
    module.write_text("import time\ntime.sleep(600)\n")
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        wait_for_app(forq, "shop_tasks:app", "reading")
        module.write_text(SHOP)
        assert forq.call("app.restart", name="shop_tasks:app")["opened"] == ["mails", "shop"]
        assert apps(forq)["shop"]["error"] is None


def test_a_queue_created_at_run_time_becomes_one_of_the_app(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(SHOP)
    forq = Forq()
    try:
        forq.start()
        forq.ctl("create", "mails", "--handler", "shop_tasks:app", "--path", str(tmp_path))
        job = forq.client().queue("mails").enqueue({"to": "you"}, type="send", run_in=5)
        assert forq.stop() == 0
        forq.cwd, forq.arguments = tmp_path, ["--app", "shop_tasks:app"]
        forq.start()
        wait_for_app(forq, "shop")
        wait_for_queue(forq, "mails")
        assert forq.queue_status("mails")["app"] == "shop"
        assert forq.client().queue("mails").wait(job, 30) == "sent to you"
    finally:
        forq.remove()


def test_systemd_is_notified_when_the_apps_are_read_or_have_failed(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text("import time\ntime.sleep(1)\n" + SHOP)
    (tmp_path / "broken_tasks.py").write_text("import nothing\n")
    forq = Forq(environment={"NOTIFY_SOCKET": str(tmp_path / "notify")})
    forq.cwd, forq.arguments = tmp_path, ["--app", "shop_tasks:app", "--app", "broken_tasks:app"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(60)
        try:
            forq.start(ready=False)
            while b"READY=1" not in notified.recv(65536).split(b"\n"):
                pass
            assert {app["state"] for app in forq.status()["apps"]} == {"running", "config_error"}
            assert forq.queue_status("mails")["app"] == "shop"
        finally:
            forq.remove()


def test_a_supervisor_stops_while_an_app_hangs_in_its_import(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text("import time\ntime.sleep(600)\n")
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        assert apps(forq)["shop_tasks:app"]["state"] == "reading"
        assert forq.stop(seconds=20) == 0


def test_a_hanging_import_ends_with_a_killed_supervisor(tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text("import time\ntime.sleep(600)\n")
    with running_in(tmp_path, "--app", "shop_tasks:app") as forq:
        [census] = [each for each in forq.processes() if "forq: app shop_tasks reading" in " ".join(each.cmdline())]
        os.kill(forq.pid, signal.SIGKILL)
        assert forq.process is not None
        forq.process.wait()
        psutil.wait_procs([census], timeout=20)
        assert not census.is_running() or census.status() == psutil.STATUS_ZOMBIE
        forq.start()


def test_wrong_arguments_are_refused_at_the_start(tmp_path: Path) -> None:
    forq = Forq()
    for arguments, reason in (
        (["--app", "shop-tasks"], "--app: app = 'shop-tasks' is not allowed"),
        (["--reload"], "--reload: there is no app to watch"),
    ):
        forq.arguments = arguments
        forq.start(ready=False)
        assert forq.process is not None
        assert forq.process.wait(30) == 78
        assert reason in forq.log
    forq.remove()
