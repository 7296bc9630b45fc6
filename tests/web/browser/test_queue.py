"""The page of a queue: figures, processes, running jobs, actions, options."""

import json

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser, row
from tests.web.browser.stage import WAITING, Stage

RUNNING = "section[aria-labelledby=running-title]"
PROCESSES = "section[aria-labelledby=processes-title]"


def test_the_page_shows_the_figures_of_forqctl(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/newsletter")
    assert browser.title == "newsletter"
    assert "paused" in browser.text(".facts")
    assert dict(zip(browser.texts(".tiles dt"), browser.texts(".tiles dd"), strict=True)) == {
        "Waiting": str(WAITING),
        **dict.fromkeys(("Active", "Scheduled", "Retry", "Blocked", "Held", "Dead", "Kept"), "0"),
    }
    browser.open("/queues/emails")
    shown = json.loads(stage.forq.ctl("--json", "status", "emails"))["queues"][0]
    assert f"Done {shown['done']:,} " in browser.text()


def test_the_processes_are_those_of_forqctl_status(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/emails")
    children = json.loads(stage.forq.ctl("--json", "status", "emails"))["queues"][0]["children"]
    shown = browser.texts(f"{PROCESSES} tbody td:nth-of-type(2)")
    assert shown == [str(child["pid"]) for child in children]
    memory = browser.texts(f"{PROCESSES} tbody td:nth-of-type(3)")
    assert all(each.endswith("MB") for each in memory), memory


def test_running_jobs_show_their_progress_and_process(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/reports")
    pid = stage.forq.child("reports")["pid"]
    cells = browser.cells("report-2026-10")
    assert "40 %, page 12 of 30" in cells[1]
    assert cells[3] == str(pid)
    browser.press_button("report-2026-10", row("report-2026-10"))
    assert browser.title == "report-2026-10"


def test_the_charts_are_there_and_say_what_they_show(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/emails")
    assert browser.texts(".charts h2") == ["Attempts per minute", "Wait until start"]
    assert len(browser.all(".charts svg")) >= 2


def test_a_queue_in_config_error_says_why_and_has_a_traceback(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/legacy")
    browser.run("document.querySelector('#pause').click()")
    assert "No module named 'no_such_module'" in browser.text(".problems")
    browser.click("Traceback")
    assert "ModuleNotFoundError" in browser.text("details[open] pre")


def test_pause_and_resume_change_the_queue(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench")
    browser.press_button("Pause")
    assert browser.note == "paused queue bench"
    assert stage.counts("bench")["paused"]
    assert browser.path.startswith("/queues/bench")
    browser.press_button("Resume")
    assert browser.note == "resumed queue bench"
    assert not stage.counts("bench")["paused"]


def test_restart_replaces_the_processes(browser: Browser, stage: Stage) -> None:
    before = stage.forq.child("bench")["pid"]
    browser.open("/queues/bench")
    browser.press_button("Restart")
    assert browser.note == "restarted the processes of queue bench"
    stage.forq.wait_for_child("bench", not_pid=before)


def test_drain_shows_until_the_last_job_has_ended(browser: Browser, stage: Stage) -> None:
    _, gate = stage.hang()
    browser.open("/queues/bench")
    browser.press_button("Drain")
    assert browser.note.startswith("draining queue bench")
    browser.wait_for_text("draining", ".facts")
    gate.touch()
    wait_until(lambda: stage.forq.queue_status("bench")["state"] == "running", what="drained")
    browser.wait_for_text("running", ".facts")


def test_an_option_is_edited_and_applies_at_once(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench/options")
    browser.fill("#option-max_retries", "7")
    browser.press_button("Save changed options")
    assert browser.note.startswith("set max_retries = 7 of queue bench")
    assert stage.forq.call("queue.options", name="bench")["options"]["max_retries"] == 7
    assert browser.find("#option-max_retries").get_attribute("value") == "7"
    browser.fill("#option-max_retries", "0")
    browser.press_button("Save changed options")
    assert stage.forq.call("queue.options", name="bench")["options"]["max_retries"] == 0


def test_a_wrong_value_of_an_option_is_refused_with_what_is_allowed(browser: Browser, stage: Stage) -> None:
    browser.expect("status of 400")
    browser.open("/queues/bench/options")
    browser.fill("#option-max_retries", "many<b>")
    browser.press_button("Save changed options")
    assert "many<b>" in browser.banner
    assert not browser.has(".banner b")
    assert stage.forq.call("queue.options", name="bench")["options"]["max_retries"] == 0


def test_options_which_need_new_processes_cannot_be_edited(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench/options")
    assert browser.find("#option-concurrency").tag_name == "output"
    assert browser.text("#option-concurrency") == "4"
