"""`forqctl apply` with apps: added, removed and changed ones, and the options of the file for their queues."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_apply import effects, nothing_left, pids, table, wait_until_running
from tests.end_to_end.test_run_apps import result_of, running_in, wait_for_queue
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(180)

SHOP = """
import forq
app = forq.App("shop")
@app.task(queue="mails")
def send(to: str) -> str:
    if to == "nobody":
        raise ValueError("no address")
    return f"sent to {to}"
@app.task(queue="bills")
def bill() -> str:
    return "billed"
app.queue("mails", keep_done="1h", max_retries=4)
app.queue("bills", keep_done="1h")
"""
STORE = """
import forq
app = forq.App("store")
@app.task(queue="parcels")
def pack() -> str:
    return "packed"
app.queue("parcels", keep_done="1h")
"""


def app_table(directory: Path, name: str = "shop", module: str = "shop_tasks") -> str:
    return f'[apps.{name}]\napp = "{module}"\npath = [{json.dumps(str(directory))}]\n'


def write_shop(directory: Path) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "shop_tasks.py").write_text(SHOP)
    (directory / "store_tasks.py").write_text(STORE)
    return app_table(directory)


def apply(forq: Forq, text: str, code: int = 0) -> dict[str, Any]:
    forq.config.write_text(text)
    done = forq.run_ctl("apply", "--yes", "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def serving(forq: Forq) -> list[str]:
    return sorted(pids(forq))


def test_apps_are_added_and_removed(tmp_path: Path) -> None:
    shop, store = write_shop(tmp_path), app_table(tmp_path, "store", "store_tasks")
    with running_in(Path("/"), settings=shop + table("plain")) as forq:
        for name in ("mails", "bills", "plain"):
            wait_for_queue(forq, name)
        wait_until_running(forq, "mails", "bills", "plain")
        before = pids(forq)
        assert nothing_left(forq)
        result = apply(forq, shop + store + table("plain"))
        assert effects(result["applied"]) == {"app store": "read"}
        assert {name: pids(forq)[name] for name in before} == before
        wait_for_queue(forq, "parcels")
        assert result_of(forq, "parcels", "pack") == "packed"
        assert nothing_left(forq)
        forq.client().queue("mails").enqueue({"to": "me"}, type="send", run_in=3600)
        result = apply(forq, store + table("plain"))
        assert effects(result["applied"]) == {
            "app shop": "unserved",
            "queue mails": "unserved",
            "queue bills": "unserved",
        }
        assert serving(forq) == ["parcels", "plain"]
        assert pids(forq)["plain"] == before["plain"]
        assert [app["name"] for app in forq.status()["apps"]] == ["store"]
        assert len(forq.call("jobs", name="mails", state="scheduled")["jobs"]) == 1
        assert nothing_left(forq)
        # What the supervisor knows about the file is new, too.
        assert forq.run_ctl("restart", "--app", "shop").returncode == 4
        assert "restarted app store (restarted: parcels)" in forq.ctl("restart", "--app", "store")
        apply(forq, shop + store + table("plain"))
        assert serving(forq) == ["bills", "mails", "parcels", "plain"]


def test_options_of_the_file_for_queues_of_an_app(tmp_path: Path) -> None:
    shop = write_shop(tmp_path)
    with running_in(Path("/"), settings=shop) as forq:
        for name in ("mails", "bills"):
            wait_for_queue(forq, name)
        wait_until_running(forq, "mails", "bills")
        before = pids(forq)
        text = shop + "[queues.mails]\nmax_retries = 0\n[queues.mails.schedules.often]\nevery = '2h'\n"
        text += "type = 'send'\ndata = {to = 'all'}\n"
        result = apply(forq, text)
        assert effects(result["applied"]) == {"queue mails max_retries": "live", "schedule mails often": "live"}
        assert pids(forq) == before
        result = apply(forq, text.replace("max_retries = 0", "max_retries = 0\nconcurrency = 2"))
        assert effects(result["applied"]) == {"queue mails concurrency": "new_processes"}
        wait_until_running(forq, "mails")
        assert not pids(forq)["mails"] & before["mails"]
        assert pids(forq)["bills"] == before["bills"]
        assert nothing_left(forq)
        # Options of the code are back, with those that were changed by hand.
        forq.ctl("set", "bills", "priority=7")
        result = apply(forq, shop)
        assert {(c["name"], c["key"]): c["new"] for c in result["applied"] if c["kind"] == "queue"} == {
            ("mails", "max_retries"): "4",
            ("mails", "concurrency"): "1",
            ("bills", "priority"): "0",
        }
        assert forq.call("schedules")["schedules"] == []
        assert nothing_left(forq)
        assert result_of(forq, "mails", "send", to="you") == "sent to you"
        # A restart of the app uses the options of the applied file.
        apply(forq, shop + "[queues.mails]\ntimeout = '7s'\n")
        forq.ctl("restart", "--app", "shop")
        assert nothing_left(forq)


def test_options_of_a_task_replace_only_the_processes_of_its_queue(tmp_path: Path) -> None:
    shop = write_shop(tmp_path)
    with running_in(Path("/"), settings=shop) as forq:
        for name in ("mails", "bills"):
            wait_for_queue(forq, name)
        wait_until_running(forq, "mails", "bills")
        before = pids(forq)
        result = apply(forq, shop + "[apps.shop.tasks.send]\nmax_retries = 0\n")
        assert effects(result["applied"]) == {"task shop send": "new_processes"}
        wait_until_running(forq, "mails")
        assert not pids(forq)["mails"] & before["mails"]
        assert pids(forq)["bills"] == before["bills"]
        jobs = forq.client().queue("mails")
        jobs.enqueue({"to": "nobody"}, type="send")
        # Without a retry.
        wait_until(lambda: forq.queue_status("mails")["dead"] == 1, what="the job is dead")
        assert nothing_left(forq)
        result = apply(forq, shop + "[apps.shop.tasks.sned]\nmax_retries = 0\n", code=1)
        assert "the app has no task 'sned'; did you mean send?" in result["failed"][0]["message"]
        assert result["applied"] == []


def test_an_app_from_another_path_is_read_first(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shop = write_shop(old)
    write_shop(new)
    (new / "shop_tasks.py").write_text("raise RuntimeError('no database')\n")
    with running_in(Path("/"), settings=shop + table("gone")) as forq:
        for name in ("mails", "bills", "gone"):
            wait_for_queue(forq, name)
        wait_until_running(forq, "mails", "bills", "gone")
        before = pids(forq)
        result = apply(forq, app_table(new) + table("more"), code=1)
        by_step = {failure["step"]: failure for failure in result["failed"]}
        assert "RuntimeError: no database" in by_step["app shop"]["message"]
        assert "shop_tasks.py" in by_step["app shop"]["traceback"]
        # Its new code might need this queue.
        assert "queue gone is not removed: app shop could not be read" in by_step["queue gone"]["message"]
        assert effects(result["applied"]) == {"queue more": "created"}
        assert {name: pids(forq)[name] for name in before} == before
        (new / "shop_tasks.py").write_text(
            SHOP.replace('return "billed"', 'return "billed anew"').replace("bills", "gone")
        )
        result = apply(forq, app_table(new) + table("more"))
        assert effects(result["applied"]) == {"app shop path": "read", "queue gone": "unserved"}
        # The queue of the file belongs to the app now, and the app no longer has the queue `bills`.
        assert serving(forq) == ["gone", "mails", "more"]
        wait_for_queue(forq, "gone")
        assert result_of(forq, "gone", "bill") == "billed anew"
        assert nothing_left(forq)


def test_new_code_needs_a_restart_of_its_app(tmp_path: Path) -> None:
    shop = write_shop(tmp_path)
    with running_in(Path("/"), settings=shop) as forq:
        for name in ("mails", "bills"):
            wait_for_queue(forq, name)
        wait_until_running(forq, "mails", "bills")
        before = pids(forq)
        (tmp_path / "shop_tasks.py").write_text(SHOP.replace("to: str", "to: str, at: int = 0"))
        text = shop + "[queues.mails]\nconcurrency = 2\n[queues.bills]\npriority = 1\n"
        result = apply(forq, text, code=1)
        assert "run: forqctl restart --app shop" in result["failed"][0]["message"]
        assert effects(result["applied"]) == {"queue bills priority": "live"}
        assert pids(forq) == before
        forq.ctl("restart", "--app", "shop")
        assert nothing_left(forq)
        assert result_of(forq, "mails", "send", to="you", at=1) == "sent to you"


def test_a_handler_with_the_hooks_of_an_app_follows_its_path(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shop = write_shop(old)
    write_shop(new)
    for directory in (old, new):
        (directory / "legacy.py").write_text(f"def handle(data, job):\n    return {directory.name!r}\n")
    plain = '[queues.plain]\nhandler = "legacy:handle"\napp = "shop"\nkeep_done = "1h"\n'
    with running_in(Path("/"), settings=shop + plain) as forq:
        for name in ("mails", "bills", "plain"):
            wait_for_queue(forq, name)
        apply(forq, app_table(new) + plain)
        jobs = forq.client().queue("plain")
        assert jobs.wait(jobs.enqueue({}), 30) == "new"
        assert nothing_left(forq)


def test_a_file_that_is_applied_while_an_app_is_being_read_is_used(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    shop = write_shop(tmp_path)
    waiting = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    (tmp_path / "shop_tasks.py").write_text(waiting + SHOP)
    with running_in(Path("/"), settings=shop + table("plain")) as forq:
        text = shop + table("plain", priority=1) + "[queues.mails]\npriority = 2\n"
        assert effects(apply(forq, text)["applied"]) == {"queue plain priority": "live"}
        gate.touch()
        for name in ("mails", "bills"):
            wait_for_queue(forq, name)
        assert nothing_left(forq)


def test_a_queue_moves_from_a_removed_app_to_another_and_to_the_file(tmp_path: Path) -> None:
    shop = write_shop(tmp_path)
    (tmp_path / "store_tasks.py").write_text(STORE.replace("parcels", "mails"))
    store = app_table(tmp_path, "store", "store_tasks")
    with running_in(Path("/"), settings=shop) as forq:
        for name in ("mails", "bills"):
            wait_for_queue(forq, name)
        wait_until_running(forq, "mails", "bills")
        result = apply(forq, shop + table("bills"), code=1)
        assert "queue 'bills' is a queue of app 'shop', too: remove the handler" in result["failed"][0]["message"]
        apply(forq, store + table("bills"))
        assert {queue["name"]: queue["app"] for queue in forq.status()["queues"]} == {"mails": "store", "bills": None}
        wait_for_queue(forq, "mails")
        assert result_of(forq, "mails", "pack") == "packed"
        assert nothing_left(forq)


def test_a_new_app_that_cannot_be_read_is_not_kept(tmp_path: Path) -> None:
    shop = write_shop(tmp_path)
    (tmp_path / "store_tasks.py").write_text("raise RuntimeError('no database')\n")
    with running_in(tmp_path, "--app", "shop_tasks:app", settings="") as forq:
        wait_for_queue(forq, "mails")
        result = apply(forq, app_table(tmp_path, "store", "store_tasks"), code=1)
        assert "no database" in result["failed"][0]["message"]
        assert [app["name"] for app in forq.status()["apps"]] == ["shop"]
        assert effects(forq.call("config.plan")["changes"]) == {"app store": "read"}
        # The app of the command line is the same app with a table.
        assert apply(forq, shop)["applied"] == []
        wait_until_running(forq, "mails", "bills")
        before = pids(forq)
        apply(forq, shop + "[apps.shop.tasks.send]\nmax_retries = 0\n")
        assert pids(forq)["bills"] == before["bills"]
        assert nothing_left(forq)
