"""The page of a job: why it waits, attempts, data, result, log, stack, and its actions."""

import re

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser
from tests.web.browser.stage import LARGE_BYTES, Stage

LOG = "section[aria-labelledby=log-title]"


def open_job(browser: Browser, queue: str, job: str, **query: str) -> None:
    browser.open(f"/queues/{queue}/job", id=job, **query)
    assert browser.title == job


def test_a_waiting_job_says_why_it_does_not_run(browser: Browser, stage: Stage) -> None:
    job = stage.queue("newsletter").jobs("waiting").jobs[0]["id"]
    open_job(browser, "newsletter", job)
    assert "paused" in browser.text(".why")
    open_job(browser, "reminders", "reminder-5")
    assert "Why it is not running" in browser.text(".why")
    open_job(browser, "webhooks", "hook-1")
    assert browser.text(".state") == "retry"


def test_attempts_are_a_timeline_with_cause_and_stack(browser: Browser, stage: Stage) -> None:
    open_job(browser, "imports", "import-7")
    attempts = browser.texts(".timeline li")
    assert len(attempts) == 3
    assert all("SIGKILL" in attempt and attempt.startswith("stalled") for attempt in attempts)
    open_job(browser, "payments", "order-4000")
    attempts = browser.texts(".timeline li")
    assert len(attempts) == 2
    assert "ConnectionError: the payment provider did not answer within 30 s" in attempts[0]
    browser.click("Traceback")
    assert "in fail" in browser.text("#traceback pre")


def test_a_timeout_keeps_the_stack(browser: Browser, stage: Stage) -> None:
    queue = stage.queue("bench")
    job = queue.enqueue({"do": "hang", "gate": str(stage.gate())}, timeout=1)
    wait_until(lambda: stage.state("bench", job) == "dead", what="the job has timed out")
    open_job(browser, "bench", job)
    browser.click("Stack", ".timeline")
    assert "in hang" in browser.text(".timeline details pre")
    queue.discard_dead(job)


def test_data_and_result_are_shown_on_demand(browser: Browser, stage: Stage) -> None:
    open_job(browser, "emails", "welcome-42")
    assert "20261118.42" not in browser.text()
    browser.press_button("Show data")
    assert '"message_id": "20261118.42"' in browser.text("section[aria-labelledby=data-title]")
    browser.press_button("Show result")
    assert '"sent": true' in browser.text("section[aria-labelledby=data-title]")


def test_large_data_is_cut(browser: Browser, stage: Stage) -> None:
    open_job(browser, "uploads", "large")
    browser.press_button("Show data")
    assert "The rest of 10.0 MB is not shown" in browser.text()
    assert len(browser.text("main pre")) < LARGE_BYTES / 10


def test_log_lines_appear_while_the_job_runs(browser: Browser, stage: Stage) -> None:
    job, gate = stage.hang(lines=["first line"])
    open_job(browser, "bench", job)
    browser.wait_for_text("first line", LOG)
    gate.with_name(f"{gate.name}.lines").write_text("second line\n")
    browser.wait_for_text("second line", LOG)
    gate.touch()
    browser.wait_for_text("done in queue bench", ".facts")


def test_a_running_job_shows_for_how_long_and_in_which_process(browser: Browser, stage: Stage) -> None:
    open_job(browser, "reports", "report-2026-10")
    browser.wait_for_text(f"in process {stage.forq.child('reports')['pid']}", ".facts:nth-of-type(2)")
    assert re.search(r"Running for (less than )?[0-9]+ (s|min)", browser.text())
    open_job(browser, "emails", "welcome-42")
    assert "Running for" not in browser.text()


def test_the_stack_of_a_running_job_is_shown_on_demand(browser: Browser, stage: Stage) -> None:
    open_job(browser, "reports", "report-2026-10")
    assert not browser.has("section[aria-labelledby=stack-title]")
    browser.press_button("Stack")
    assert "hang" in browser.text("section[aria-labelledby=stack-title] pre")
    assert f"process {stage.forq.child('reports')['pid']}" in browser.text("section[aria-labelledby=stack-title]")


def test_kill_cancels_a_job_after_a_question(browser: Browser, stage: Stage) -> None:
    job, _ = stage.hang()
    open_job(browser, "bench", job)
    browser.press_button("Kill")
    assert browser.title == f"Kill job {job} of queue bench?"
    assert stage.state("bench", job) == "active"
    browser.press_button("Kill")
    assert browser.note == "killed 1 job"
    wait_until(lambda: stage.counts("bench")["active"] == 0, what="it has ended")


def test_kill_and_run_again_starts_it_once_more(browser: Browser, stage: Stage) -> None:
    job, gate = stage.hang(lines=["started"])
    fence = stage.queue("bench").job(job)["fence"]
    open_job(browser, "bench", job)
    browser.press_button("Kill and run again")
    assert "runs again" in browser.text()
    browser.press_button("Kill")
    assert browser.note == "killed, to run again, 1 job"
    wait_until(lambda: stage.queue("bench").job(job).get("fence", fence) != fence, what="it runs again")
    gate.touch()
    wait_until(lambda: stage.state("bench", job) == "done", what="it is done")


def test_a_dead_job_is_retried(browser: Browser, stage: Stage) -> None:
    job = stage.die(id="retried")
    failed = stage.counts("bench")["failed"]
    open_job(browser, "bench", job)
    browser.press_button("Retry")
    assert browser.note == "retried 1 job"
    wait_until(lambda: stage.counts("bench")["failed"] == failed + 1, what="it has failed again")
    stage.queue("bench").discard_dead(job)


def test_a_dead_job_is_discarded_after_a_question(browser: Browser, stage: Stage) -> None:
    job = stage.die(id="discarded")
    open_job(browser, "bench", job)
    browser.press_button("Discard")
    assert browser.title == "Discard 1 job of queue bench?"
    browser.press_button("Discard")
    assert browser.note == "discarded 1 job"
    assert job not in {each["id"] for each in stage.queue("bench").dead().jobs}


def test_a_scheduled_job_runs_now(browser: Browser, stage: Stage) -> None:
    job = stage.queue("bench").enqueue(None, run_in=3600)
    open_job(browser, "bench", job)
    browser.press_button("Run now")
    wait_until(lambda: stage.state("bench", job) == "done", what="it ran")
    browser.wait_for_text("done in queue bench", ".facts")


def test_a_scheduled_job_is_cancelled(browser: Browser, stage: Stage) -> None:
    job = stage.queue("bench").enqueue(None, run_in=3600)
    open_job(browser, "bench", job)
    browser.press_button("Cancel")
    assert browser.note == "cancelled 1 job"
    assert stage.counts("bench")["scheduled"] == 0


def test_a_job_is_found_by_its_id_in_all_queues(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.fill("#find-job", "order-4003")
    browser.leave(lambda: browser.press("\ue007"))
    assert browser.cells("payments") == ["order-4003", "payments", "dead"]
    browser.press_button("order-4003")
    assert browser.title == "order-4003"
    browser.open("/find", id="never-there")
    assert "No queue has a job never-there" in browser.text()


def test_a_job_which_is_gone_has_a_page_that_explains_it(browser: Browser, stage: Stage) -> None:
    open_job(browser, "bench", "never-there")
    assert "never-there" in browser.banner
    assert not browser.has(LOG)
    assert not browser.has("main form")
